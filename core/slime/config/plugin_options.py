"""The `[plugins]` section: which installed plugins a run loads."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PluginOptions(BaseModel):
    """Which plugins may load, and how strict to be about them.

    Plugins are named by their id (the entry point's name) or by their distribution.  slime's own always
    load unless they are denied.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow: list[str] | None = Field(
        default=None, description="load only these third-party plugins; default: all installed"
    )
    deny: list[str] = Field(default=[], description="never load these plugins")
    autoload: bool = Field(default=True, description="false: third-party plugins load only when `allow` names them")
    strict: bool = Field(
        default=False, description="stop when any plugin is broken, used or not, or of another version on resume"
    )
    require: list[str] = Field(default=[], description='distributions that must be installed, as "name>=1.2,<2"')
