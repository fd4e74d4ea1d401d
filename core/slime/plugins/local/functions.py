"""Functions given by path that are no components: they look at a whole finished batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.plugins.local.loading import LocalFunction, load
from slime.plugins.local.reference import Reference
from slime.plugins.local.roles import ROLES
from slime.plugins.local.target import find_target
from slime.types import Sample


def load_sample_filter(path: str, args: Any) -> Callable[[list[list[Sample]]], object]:
    """The function of `--rollout-sample-filter-path`, to be called with the samples of each group of a batch.

    It sets `Sample.remove_sample`.  `args` is an `ArgsView`.  Raises as `find_target` does, and `PluginLoadError` where
    the file cannot be loaded.
    """
    function = _load("rollout_sample_filter", path)
    return lambda groups: function(args=args, groups=groups)


def load_reward_post_process(path: str, args: Any) -> Callable[[list[Sample]], object]:
    """The function of `--custom-reward-post-process-path`: N samples to (raw rewards [N], rewards [N]).

    Raw rewards are for the metrics, rewards for the estimator; whoever calls it checks them.  Raises as
    `load_sample_filter` does.
    """
    function = _load("reward_post_process", path)
    return lambda samples: function(args=args, samples=samples)


def _load(role: str, path: str) -> LocalFunction:
    return load(find_target(ROLES[role], Reference.parse(path)))
