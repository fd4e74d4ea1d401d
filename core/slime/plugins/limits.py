"""What a run allows a component, whatever the component: options of the kernel's, stated beside the component's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from slime.plugin import Options

#: kinds whose components are called once per sample while a rollout waits
LIMITED_KINDS = frozenset({"reward", "generator"})


class Limits(Options):
    """`--reward.timeout-s 5`, `--generator.error-budget 0.1`: of every reward and every generator."""

    timeout_s: float | None = Field(
        default=None, gt=0, description="seconds one call may take without an answer; default: the component's"
    )
    error_budget: float = Field(
        default=0.25, ge=0, le=1, description="share of its latest samples that it may fail before the run stops"
    )


def split_limits(kind: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the kernel's options, the component's own) of what is stated for a component of `kind`."""
    names = Limits.model_fields if kind in LIMITED_KINDS else {}
    return (
        {name: value for name, value in options.items() if name in names},
        {name: value for name, value in options.items() if name not in names},
    )
