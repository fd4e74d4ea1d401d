"""`slime plugins`: what is installed, from where and whether it works; and how a new plugin begins."""

from slime.cli.plugins.command import run

__all__ = ["run"]
