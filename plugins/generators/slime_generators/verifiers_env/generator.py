"""A verifiers environment as a generator: its harness talks to the policy, and its rewards score the result."""

from __future__ import annotations

from slime.plugin import Context, PolicyClient, Sample, SamplingParams
from slime_generators.endpoint import EndpointGenerator
from slime_generators.options import VerifiersOptions
from slime_generators.verifiers_env.agent import VerifiersAgent


class VerifiersEnv(EndpointGenerator):
    """Runs an episode of the task that a sample's metadata names; see `EndpointGenerator`.

    The environment's reward becomes the sample's (`--reward given`), and its metrics are `verifiers/NAME`. If an
    episode has several agents, the conversations of all of them are trained on, with the mean reward of the trainable
    agents.
    """

    def __init__(self, options: VerifiersOptions, context: Context) -> None:
        self._environment = VerifiersAgent(options)
        super().__init__(options, context, self._environment)

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """Run an episode and return its conversations. Raises the error of the environment or the policy."""
        await self._environment.start()  # first, so that loading does not count towards the agent's deadline
        return await super().generate(sample, sampling, policy)

    async def close(self) -> None:
        """End the environment's process and the endpoint."""
        await self._environment.close()
        await super().close()
