"""Functions and classes of a user's own files as components: found, read, checked and loaded by reference.

A reference is `local:FILE.py`, `local:FILE.py:NAME` or `local:package.module.NAME`, and stands wherever a component's
name does.  Everything but the last step is done on the source text, so that nothing of the user's runs before a run
starts.  `slime.adapters` holds the classes that make components of what is loaded.
"""

from slime.plugins.local.component import LOCAL_DISTRIBUTION, LocalComponent, find_local
from slime.plugins.local.functions import load_reward_post_process, load_sample_filter
from slime.plugins.local.loading import LocalFunction
from slime.plugins.local.reference import PREFIX, Reference, is_local
from slime.plugins.local.roles import ROLES
from slime.plugins.local.shapes import Role
from slime.plugins.local.target import Target, find_target

__all__ = [
    "LOCAL_DISTRIBUTION",
    "PREFIX",
    "ROLES",
    "LocalComponent",
    "LocalFunction",
    "Reference",
    "Role",
    "Target",
    "find_local",
    "find_target",
    "is_local",
    "load_reward_post_process",
    "load_sample_filter",
]
