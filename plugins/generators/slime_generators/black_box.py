"""An agent as it is: it talks to an OpenAI-compatible endpoint, and what the policy said there is trained on."""

from __future__ import annotations

from slime.plugin import Context
from slime_generators.agents.function import FunctionAgent
from slime_generators.agents.program import ProgramAgent
from slime_generators.endpoint import EndpointGenerator
from slime_generators.options import BlackBoxOptions


class BlackBox(EndpointGenerator):
    """Runs the user's agent, a Python function or a program; see `EndpointGenerator`."""

    def __init__(self, options: BlackBoxOptions, context: Context) -> None:
        """Raises `ValueError` where the agent that `options` name cannot be called."""
        agent = FunctionAgent(options.agent) if options.agent else ProgramAgent(options.command)
        super().__init__(options, context, agent)
