"""The configuration of a run: from a TOML file and flags to one frozen, checked `RunConfig`.

    command_line, run_file  →  settings  →  assemble  →  RunConfig  →  resolve  →  checks

slime's own options are the fields of `options`; Megatron's and SGLang's are read from the source of the
installed packages, so this room imports neither them nor torch.
"""

from slime.config.batch import BatchShape
from slime.config.checks import config_notes, config_problems
from slime.config.load import config_from_toml, load_config, read_config
from slime.config.plugin_options import PluginOptions
from slime.config.resolve import resolve
from slime.config.run_config import RunConfig

__all__ = [
    "BatchShape",
    "PluginOptions",
    "RunConfig",
    "config_from_toml",
    "config_notes",
    "config_problems",
    "load_config",
    "read_config",
    "resolve",
]
