"""What every section of options is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of the sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
