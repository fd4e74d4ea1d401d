"""An OpenAI-compatible endpoint in front of the policy, which keeps the tokens and log-probs of every session.

An agent that knows nothing of slime talks to it with any OpenAI client; what it said becomes samples.
"""

from __future__ import annotations

from slime.sessions.inline import ContextFull, Inline, TextsOnly, answering, build_loss_mask, generate_single
from slime.sessions.parsers import parser_factory
from slime.sessions.server import SessionServer
from slime.sessions.session import Session, SessionLimits

__all__ = [
    "ContextFull",
    "Inline",
    "Session",
    "SessionLimits",
    "SessionServer",
    "TextsOnly",
    "answering",
    "build_loss_mask",
    "generate_single",
    "parser_factory",
]
