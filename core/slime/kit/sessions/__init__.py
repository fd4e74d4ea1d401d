"""An OpenAI-compatible endpoint in front of the policy that records the tokens and log-probs of every session.

An agent that knows nothing about slime uses it with any OpenAI client; its conversations become samples.
"""

from __future__ import annotations

from slime.kit.sessions.endpoint import SessionServer
from slime.kit.sessions.inline import ContextFull, Inline, build_loss_mask, generate_single
from slime.kit.sessions.session import Session, SessionLimits, parser_factory

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
