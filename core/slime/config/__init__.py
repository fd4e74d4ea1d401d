"""The configuration of a run: from a TOML file and flags to one frozen, checked `RunConfig`.

    command_line, run_file  →  assemble  →  RunConfig  →  defaults  →  checks

slime's own options are the fields of `options` and `eval_options`; their flags are derived from them. Megatron's and
SGLang's options are read from the source of the installed packages, so this folder imports neither them nor torch.
"""

from slime.config.assemble import config_from_toml, load_config, read_config
from slime.config.checks import config_notes, config_problems
from slime.config.defaults import resolve
from slime.config.options import PluginOptions
from slime.config.run_config import RunConfig

__all__ = [
    "PluginOptions",
    "RunConfig",
    "config_from_toml",
    "config_notes",
    "config_problems",
    "load_config",
    "read_config",
    "resolve",
]
