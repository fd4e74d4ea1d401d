"""A reward with a bug, to be found with `slime view`: see docs/reading-a-run.md."""

from __future__ import annotations

import re
from typing import Any


async def reward_func(sample: Any, **_: Any) -> float:
    """1.0 for the right sum, else 0.0."""
    found = re.fullmatch(r"\d\d", sample.response.strip())
    return float(found is not None and found[0] == sample.label)
