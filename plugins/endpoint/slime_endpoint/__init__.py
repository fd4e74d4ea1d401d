"""An OpenAI-compatible endpoint in front of the policy: the HTTP server of `slime.kit.sessions`.

An agent that knows nothing about slime uses it with any OpenAI client; its conversations become samples.
"""

from slime_endpoint.server import SessionServer

__all__ = ["SessionServer"]
