"""What every function given by path may ask for."""

from __future__ import annotations

from typing import Any

from slime.config.args_view import ArgsView
from slime.plugin import Context


def args_of(context: Context) -> ArgsView | None:
    """The run's options as attributes; None where a component is built without a run."""
    config: Any = context.config
    return None if config is None else ArgsView(config)
