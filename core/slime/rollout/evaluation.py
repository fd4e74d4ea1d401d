"""Held-out prompts, generated and scored with the current policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.eval_sets import EvalSetSettings
from slime.errors import SlimeError
from slime.kit.context_length import longest_prompt
from slime.kit.readers.feed.feed import FeedOptions, PromptDataset
from slime.kit.readers.rows import Columns
from slime.kit.readers.tokenize import PromptFormat
from slime.observe.samples import write_eval
from slime.rollout.eval_statistics import passes, statistics
from slime.rollout.failures import all_or_first_error, common_reasons, count_status
from slime.rollout.pipeline import Pipeline, SampleGenerator
from slime.rollout.policy_session import evaluation_sampling
from slime.rollout.record import reported_metrics, response_metrics, reward_parts
from slime.rollout.scoring import Scorer
from slime.types import Group, Sample, Status

if TYPE_CHECKING:
    from slime.config import RunConfig

#: endings of the metrics that count samples lost by a component
_FAULTS = ("/failed", "/timeouts", "/died")


@dataclass(frozen=True)
class EvalSet:
    """A held-out set, with what generates and scores its responses."""

    settings: EvalSetSettings
    #: one tokenized sample per prompt, never changed
    prompts: list[Sample]
    #: may share its generator and scorer with other sets
    pipeline: Pipeline


def pending_groups(prompts: Sequence[Sample], attempts: int) -> list[Group]:
    """New samples for `attempts` responses to each prompt; their indices, and so their seeds, are always the same."""
    return [
        Group(
            number,
            [
                Sample(
                    group_index=number,
                    index=number * attempts + attempt,
                    prompt=deepcopy(prompt.prompt),
                    tokens=list(prompt.tokens),
                    label=prompt.label,
                    metadata=deepcopy(prompt.metadata),
                )
                for attempt in range(attempts)
            ],
        )
        for number, prompt in enumerate(prompts)
    ]


def load_prompts(
    settings: EvalSetSettings, config: RunConfig, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()
) -> list[Sample]:
    """The tokenized prompts of a set, with the `tools` of its generator. Raises `DataError` with file and line."""
    options = FeedOptions(
        Columns(settings.input_key, settings.label_key, settings.metadata_key, config.data.tool_key),
        PromptFormat(settings.apply_chat_template, config.data.apply_chat_template_kwargs).showing(tools),
        max_tokens=longest_prompt(config, settings.max_prompt_len, settings.max_response_len),
    )
    with closing(PromptDataset(settings.path, options=options, tokenizer=tokenizer)) as dataset:
        rows = dataset.rows(len(dataset))
    return [Sample(prompt=row.prompt, tokens=row.tokens or [], label=row.label, metadata=row.metadata) for row in rows]


@dataclass(frozen=True)
class EvalReport:
    """The results of one evaluation of all sets."""

    #: number of rollouts trained on before
    rollout: int
    #: `eval/NAME`: mean reward, counting lost samples as 0; `eval/NAME/...`: pass@k, intervals, counts and lengths;
    #: `eval/plugin/KIND/PLUGIN/NAME/...`: samples lost by components
    metrics: dict[str, float]
    #: why samples were lost, most frequent reason first
    failures: list[str] = field(default_factory=list)
    #: see `Rollout.tracebacks`
    tracebacks: list[str] = field(default_factory=list)
    seconds: float = 0.0
    #: versions of the weights that produced the tokens: one, unless the engines differed
    weight_versions: list[str] = field(default_factory=list)
    #: name of the set -> file of its samples
    files: dict[str, Path] = field(default_factory=dict)


class Evaluation:
    """Generates and scores `n_samples` responses to every prompt of every set."""

    def __init__(self, sets: Sequence[EvalSet], run_dir: Path, seed: int, *, one_at_a_time: bool = False) -> None:
        """
        Args:
            sets: The evaluation sets.
            run_dir: Folder of the run, for the files of samples.
            seed: Seeds the resampling of the intervals.
            one_at_a_time: One set after the other; otherwise all concurrently.
        """
        self._one_at_a_time = one_at_a_time
        self._sets = list(sets)
        self._run_dir = run_dir
        self._seed = seed

    async def evaluate(self, rollout: int) -> EvalReport:
        """Score all sets and write every sample to `rollouts/eval_NAME_ROLLOUT.jsonl`.

        Args:
            rollout: Number of rollouts that the engines' weights have been trained on.

        Raises:
            SlimeError: If no sample of a set could be scored.
            EngineError: If the engines are gone.
        """
        started = time.monotonic()
        if self._one_at_a_time:  # sets may differ in how they sample: see `RolloutProcess.evaluate`
            results = [await self._evaluate(one, rollout) for one in self._sets]
        else:
            results = await all_or_first_error(self._evaluate(one, rollout) for one in self._sets)
        samples = [sample for of_set, _, _ in results for sample in of_set]
        metrics = {name: value for _, of_set, _ in results for name, value in of_set.items()}
        return EvalReport(
            rollout,
            metrics | self._faults(),
            common_reasons(samples),
            [text for component in self._components() for text in component.tracebacks()],
            time.monotonic() - started,
            sorted({version for sample in samples for version in sample.weight_versions}),
            {one.settings.name: path for one, (_, _, path) in zip(self._sets, results, strict=True)},
        )

    def _faults(self) -> dict[str, float]:
        """`eval/plugin/...`: samples lost by components in this evaluation."""
        faults: dict[str, float] = {}
        for component in self._components():
            for name, value in component.metrics().items():
                if name.endswith(_FAULTS):
                    faults[f"eval/{name}"] = faults.get(f"eval/{name}", 0.0) + value
        return faults

    def _components(self) -> list[SampleGenerator | Scorer]:
        """The generators and scorers of the sets, each once."""
        return list(dict.fromkeys(part for one in self._sets for part in one.pipeline.components))

    async def _evaluate(self, one: EvalSet, rollout: int) -> tuple[list[Sample], dict[str, float], Path]:
        """The samples and metrics of one set, and the file of the samples."""
        async with one.pipeline.batch(evaluation_sampling(one.settings)) as batch:
            batch.add(pending_groups(one.prompts, one.settings.n_samples))
            await batch.wait()
            groups = batch.finished()
        # In a thread, because training samples are generated and scored in the meantime.
        return await asyncio.to_thread(self._conclude, one.settings, rollout, groups)

    def _conclude(
        self, settings: EvalSetSettings, rollout: int, groups: Sequence[Group]
    ) -> tuple[list[Sample], dict[str, float], Path]:
        samples = [sample for group in groups for sample in group.samples]
        attempts = [attempts_of(group.samples, settings.pass_threshold) for group in groups]
        rows = (
            (sample, _evaluation_columns(sample, of_prompt))
            for group, of_prompt in zip(groups, attempts, strict=True)
            for sample in group.samples
        )
        path = write_eval(self._run_dir, rollout, settings.name, rows)
        metrics = set_metrics(settings, [list(of_prompt.values()) for of_prompt in attempts], samples, self._seed)
        return samples, metrics, path


@dataclass(frozen=True)
class Attempt:
    """One answer to a prompt: all samples with the same `rollout_id`, which count once."""

    #: mean over its samples, counting lost ones as 0; 0 if none has a reward
    reward: float
    passed: bool


def attempts_of(samples: Sequence[Sample], threshold: float) -> dict[int | None, Attempt]:
    """The attempts at one prompt, in order, by their `rollout_id`."""
    together: dict[int | None, list[Sample]] = {}
    for sample in samples:
        together.setdefault(_attempt_key(sample), []).append(sample)
    return {key: _attempt(siblings, threshold) for key, siblings in together.items()}


def _attempt_key(sample: Sample) -> int | None:
    return sample.index if sample.rollout_id is None else sample.rollout_id


def _attempt(samples: Sequence[Sample], threshold: float) -> Attempt:
    finished = [sample for sample in samples if sample.trainable]
    scores = [value for sample in finished if (value := sample.reward_value) is not None]
    lost = len(samples) - len(finished)
    if not scores:
        return Attempt(0.0, passed=False)
    reward = sum(scores) / (len(scores) + lost)
    return Attempt(reward, passed=not lost and passes(reward, threshold))


def _evaluation_columns(sample: Sample, attempts: Mapping[int | None, Attempt]) -> dict[str, Any]:
    """What the file of an evaluation has for each sample in addition to that of a rollout."""
    key = _attempt_key(sample)
    return {
        "attempt": list(attempts).index(key),
        "passed": attempts[key].passed,
        "metrics": sample.metrics,
        "metadata": sample.metadata,
    }


def set_metrics(
    settings: EvalSetSettings, attempts: Sequence[Sequence[Attempt]], samples: Sequence[Sample], seed: int
) -> dict[str, float]:
    """The metrics of one set.

    The mean reward is over all attempts. An attempt that failed, was aborted or has no reward counts as reward 0 and as
    not passed, so that losing the hard prompts never looks like progress. Such samples are also counted separately.
    Lengths are of finished samples only.

    Args:
        settings: Settings of the set.
        attempts: The attempts at each prompt.
        samples: The samples of all attempts.
        seed: Seeds the resampling of the intervals.

    Raises:
        SlimeError: If no sample has a reward.
    """
    tag = f"eval/{settings.name}"
    finished = [sample for sample in samples if sample.trainable]
    unscored = sum(1 for sample in finished if sample.reward is None)
    if unscored == len(finished):
        reasons = "; ".join(common_reasons(samples)) or "no reward scored them"
        raise SlimeError(f"evaluation set {settings.name}: none of its {len(samples)} samples has a reward: {reasons}")
    return {
        **statistics(
            [[attempt.reward for attempt in one] for one in attempts],
            [sum(attempt.passed for attempt in one) for one in attempts],
            settings.pass_k,
            seed=seed,
            name=settings.name,
        ),
        f"{tag}/prompts": float(len(attempts)),
        f"{tag}/attempts": float(settings.n_samples),
        f"{tag}/samples": float(len(samples)),
        f"{tag}/failed": float(count_status(samples, Status.FAILED)),
        f"{tag}/aborted": float(count_status(samples, Status.ABORTED)),
        **({f"{tag}/unscored": float(unscored)} if unscored else {}),
        **_weights(tag, samples),
        **reward_parts(f"{tag}/reward", finished),
        **reported_metrics(tag, samples),
        **response_metrics(tag, finished),
    }


def _weights(tag: str, samples: Sequence[Sample]) -> dict[str, float]:
    """`weight_version` if all samples have the same numeric version, else the number of `weight_versions`."""
    versions = {version for sample in samples for version in sample.weight_versions}
    if len(versions) > 1:
        return {f"{tag}/weight_versions": float(len(versions))}
    return {f"{tag}/weight_version": float(version) for version in versions if version.isdecimal()}
