"""A verifiers environment as a generator: its harness talks to the policy, its rewards score what comes of it."""

from __future__ import annotations

from slime.plugin import Context, PolicyClient, Sample, SamplingParams
from slime_generators.endpoint import EndpointGenerator
from slime_generators.options import VerifiersOptions
from slime_generators.verifiers_env.worker_handle import VerifiersAgent


class VerifiersEnv(EndpointGenerator):
    """Plays the task that a sample's metadata names; see `EndpointGenerator`.

    The environment's reward is the sample's (`--reward given`), its metrics are `verifiers/NAME`.  Where several
    agents play, all that talk to the policy are trained, on the mean of the trainable ones' rewards.
    """

    def __init__(self, options: VerifiersOptions, context: Context) -> None:
        self._environment = VerifiersAgent(options)
        super().__init__(options, context, self._environment)

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """The conversations that the environment had.  Raises what failed it."""
        await self._environment.start()  # does not count as the agent's time
        return await super().generate(sample, sampling, policy)

    async def close(self) -> None:
        """End the environment's process, and stop listening."""
        await self._environment.close()
        await super().close()
