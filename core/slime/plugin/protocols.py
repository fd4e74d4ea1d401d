"""The contract of each kind of component, as a protocol; trackers and panels are in `slime.plugin.watchers`."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from slime.plugin.architecture import Architecture
from slime.plugin.values import Advantages, EstimatorBatch, Generation, Reward, SamplingParams, Selection
from slime.types import Group, Sample


class PolicyClient(Protocol):
    """The engines, seen from a generator: token ids in, token ids and log-probs out.

    In a run it is a `slime.rollout.policy_session.PolicySession`, a new one for each sample.
    """

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """Generate one response.

        Args:
            tokens: Token ids of the prompt, and of the response so far when one is continued.
            sampling: How to sample.
            session: Requests with the same session go to the same engine, which then has their prefix cached.
        """
        ...


class Estimator(Protocol):
    """Contract of kind `estimator`; slime's own are in `plugins/estimators`. An optional method

        objective(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]

    returns per-token loss [M] and per-token metrics [M]; without it the clipped surrogate is used.
    """

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """Compute one advantage per response token.

        Args:
            batch: All samples of one rollout. It must not be changed.

        Returns:
            Tensors of the shapes of `batch.loss_masks`, zero where the mask is zero.
        """
        ...


class Family(Protocol):
    """Contract of kind `family`. It is imported before a run starts, so its module must not import torch. A family
    may also have the method

        layer_specs(spec, transformer, *, transformer_engine: bool) -> Any

    which returns Megatron's layer specs with modules of its own in them. It is called in the trainer.
    """

    def describe(self, config: Mapping[str, Any]) -> Architecture:
        """Describe the model of a `config.json`.

        Args:
            config: The file's content.

        Raises:
            ConfigError: A setting would change the computation, and the family does not have it.
        """
        ...


class RewardModel(Protocol):
    """Contract of kind `reward`; slime's own are in `plugins/rewards`."""

    def score(self, samples: Sequence[Sample]) -> list[Reward] | Awaitable[list[Reward]]:
        """Score samples.

        With `async def`, calls overlap, and one that exceeds its deadline is cancelled. With plain `def`, each worker
        process makes one call at a time, and is killed if the call exceeds its deadline.

        Args:
            samples: Finished samples; with `scope="group"`, all samples of one prompt. They must not be changed.

        Returns:
            One finite reward per sample, at most 1e18 in size, in the same order.
        """
        ...


class DataSource(Protocol):
    """Contract of kind `datasource`; slime's own are in `plugins/datasources`.

    slime tracks the groups it has taken: finished ones wait in its own buffer, and it generates again what was cut
    short or in flight when a checkpoint was saved. Nothing is returned to the source.

    A source may also have these methods:

    generated(groups)   called once per batch with copies of the generated and scored groups, including those that a
                        filter dropped, so that a curriculum can learn which prompts are hard.
    metrics()           numbers by name, logged with every rollout.
    close()             called once, when the run ends.
    """

    def take(self, n: int) -> list[Group]:
        """Take the next prompts.

        Args:
            n: Number of prompts.

        Returns:
            `n` groups of `n_samples_per_prompt` pending samples. No `Group.index` and no `Sample.index` is used twice
            in a run.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state: a source that loads it yields the same next groups."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        ...


class BufferFilter(Protocol):
    """Contract of kind `buffer_filter`.

    A filter that keeps state between calls may also have `state_dict()`, which returns JSON-ready state, and
    `load_state_dict(state)`, as data sources do. Checkpoints save the state; a filter that loads it makes the same
    choices as the one that was saved.
    """

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Choose groups to train on.

        Args:
            buffer: The finished groups. `Group.age` and `Group.uses` tell how old a group is and how often it was used.
            want: The most groups that may be kept.

        Returns:
            Valid indices into `buffer`; none is both kept and dropped. All other groups stay in the buffer.
        """
        ...


class Generator(Protocol):
    """Contract of kind `generator`; slime's own are in `plugins/generators`.

    A generator may also have `close()`, plain or `async`, to stop what it started, such as servers and processes. It is
    called when the run ends, in the event loop that called `generate`. It may be called twice, and without an earlier
    call of `generate`.
    """

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """Generate the response to one prompt.

        Args:
            sample: A pending sample with the prompt and its tokens. It may be changed and returned.
            sampling: How to sample.
            policy: The engines that serve the policy.

        Returns:
            One or several finished samples. slime gives all of them the same `rollout_id`.
        """
        ...
