"""Sessions record the tokens and log-probs of all that an agent asks the policy; its conversations become samples.

`SessionServer` serves them as an OpenAI-compatible endpoint. It is the package `slime_endpoint`, imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.kit.sessions.inline import ContextFull, Inline, build_loss_mask, generate_single
from slime.kit.sessions.session import Session, SessionLimits, parser_factory

if TYPE_CHECKING:
    from slime_endpoint import SessionServer
else:

    def __getattr__(name: str) -> Any:
        if name != "SessionServer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from slime.shops import import_shop

        return import_shop("slime_endpoint", "slime.kit.sessions.SessionServer").SessionServer


__all__ = [
    "ContextFull",
    "Inline",
    "Session",
    "SessionLimits",
    "SessionServer",
    "build_loss_mask",
    "generate_single",
    "parser_factory",
]
