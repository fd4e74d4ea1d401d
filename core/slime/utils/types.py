"""`from slime.utils.types import Sample`: the data types of `slime.types` under their familiar path."""

from slime.types import Group, Sample, SpecInfo, Status

__all__ = ["Group", "Sample", "SpecInfo", "Status"]
