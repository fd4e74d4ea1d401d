"""What a rank does with batches, weights and checkpoints, without a model, engines or other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.harness import Centred, make_batch, make_config

from slime.engine.control import EngineControl
from slime.errors import ConfigError
from slime.plugin import Advantages, EstimatorBatch
from slime.plugin.architecture import Architecture
from slime.rollout.train_batch import Ragged, TrainBatch
from slime.train import parallel
from slime.train.rank import MegatronRank
from slime.train.schedule import PipelineSchedule
from slime.train.step import Learner
from slime.weights import transports
from slime.weights.transports import WeightSender


class Transport:
    """Records what is sent to it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.connected: list[list[str]] = []
        self.closed = 0

    def send(self, named: Iterator[tuple[str, torch.Tensor]], *, version: str) -> dict[str, float]:
        tensors = dict(named)
        self.sent.append((version, list(tensors)))
        return {"synced_bytes": float(sum(tensor.nbytes for tensor in tensors.values()))}

    def connect(self, engines: Sequence[EngineControl]) -> None:
        self.connected.append([engine.url for engine in engines])

    def close(self) -> None:
        self.closed += 1


class Part:
    """Policy, critic or reference: records what happens to it."""

    def __init__(self, name: str, calls: list[tuple[str, ...]]) -> None:
        self.name, self.calls = name, calls

    def finish_param_gather(self) -> None:
        """Nothing is being gathered."""

    def check(self, folder: Path, *, weights_only: bool = False) -> None:  # noqa: ARG002
        self.calls.append((self.name, "checked", folder.name))

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self.calls.append((self.name, "weights" if weights_only else "everything", folder.name))

    def renew(self) -> None:
        self.calls.append((self.name, "renewed"))


class OneRank(MegatronRank):
    """Rank `number` of a run, without a model: its weights have two names."""

    def __init__(self, number: int, run_dir: Path) -> None:
        self.config = make_config(run_dir / "model")
        self._rank = number
        self._architecture = self._trained = self._synced = Architecture("none", {}, {}, (), predicts=True)
        self._device = torch.device("cpu")
        self._sender = WeightSender(self.config, self._architecture, run_dir)
        self.adapters = None
        self.gathered: list[str] = []
        self.policy: Any = Part("policy", calls := list[tuple[str, ...]]())
        self.critic: Any = Part("critic", calls)
        self.reference: Any = Part("reference", calls)
        self.features: Any = [Part("layers", calls), self.critic]
        self.calls = calls

    def _weights_of(self, _: Architecture, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            self.gathered.append(name)
            yield name, torch.zeros(1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Transport]:
    """The transports that ranks make."""
    made: list[Transport] = []

    def create(*_: Any, **__: Any) -> Transport:
        made.append(Transport())
        return made[-1]

    monkeypatch.setattr(transports, "create_transport", create)
    monkeypatch.setattr("slime.train.rank.is_first_of_stage", lambda: True)
    return made


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The calls that leave the process groups: whether after an error."""
    calls: list[bool] = []
    monkeypatch.setattr(parallel, "stop", lambda *, failed: calls.append(failed))
    return calls


@pytest.mark.parametrize("number", [0, 1])
def test_every_rank_gathers_and_the_first_of_a_stage_sends(
    number: int, made: list[Transport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = OneRank(number, tmp_path)
    monkeypatch.setattr("slime.train.rank.is_first_of_stage", lambda: number == 0)
    for version in ("1", "2"):
        rank.sync_weights(["http://127.0.0.1:1"], None, 1, version)
    assert rank.gathered == ["a", "b"] * 2
    sent = [[("1", ["a", "b"]), ("2", ["a", "b"])]] if number == 0 else []  # over one connection
    assert [transport.sent for transport in made] == sent


def test_what_is_gathered_is_gathered_to_the_end_whatever_fails(
    made: list[Transport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks take part in it, and would wait for the timeout of their process group."""

    class FaultyFormat:
        """A quantisation that fails at the first tensor."""

        def tensors(self, named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for _ in named:
                raise ConfigError("no such format on these GPUs")
            yield from ()

    def unreachable(*_: Any, **__: Any) -> Transport:
        raise OSError("no route to host")

    rank = OneRank(0, tmp_path)
    sender: Any = rank._sender
    sender._quantised = FaultyFormat()
    with pytest.raises(ConfigError, match="no such format"):
        rank.sync_weights(["http://127.0.0.1:1"], None, 1, "1")
    assert rank.gathered == ["a", "b"] and len(made) == 1
    monkeypatch.setattr(transports, "create_transport", unreachable)
    rank = OneRank(0, tmp_path)
    with pytest.raises(OSError, match="no route"):
        rank.sync_weights(["http://127.0.0.1:1"], None, 1, "1")
    assert rank.gathered == ["a", "b"]


def test_a_rank_connects_anew_when_engines_were_lost_or_restarted(made: list[Transport], tmp_path: Path) -> None:
    rank, a, b = OneRank(0, tmp_path), "http://127.0.0.1:1", "http://127.0.0.1:2"
    for urls, restarts in (([a, b], 0), ([a, b], 0), ([a], 1), ([a, b], 1), ([a, b], 1), ([a, b], 2)):
        rank.sync_weights(urls, None, 1, "1", restarts)
    [transport] = made
    assert transport.connected == [[a], [a, b], [a, b]]
    assert len(transport.sent) == 6


def test_a_rank_disconnects_from_the_engines_when_it_ends(
    made: list[Transport], stopped: list[bool], tmp_path: Path
) -> None:
    rank = OneRank(0, tmp_path)
    rank.sync_weights(["http://127.0.0.1:1"], None, 1, "1")
    rank.close()
    assert made[0].closed == 1
    assert stopped == [False]


def test_a_rank_leaves_the_process_groups_even_if_the_engines_are_gone(
    made: list[Transport], stopped: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Transport) -> None:
        raise ConnectionError

    monkeypatch.setattr(Transport, "close", gone)
    rank = OneRank(0, tmp_path)
    rank.sync_weights(["http://127.0.0.1:1"], None, 1, "1")
    with pytest.raises(ConnectionError):
        rank.close(failed=True)
    assert len(made) == 1
    assert stopped == [True]


def test_a_resumed_rank_takes_everything_back_after_the_critic_was_found(tmp_path: Path) -> None:
    rank = OneRank(0, tmp_path)
    rank.load(tmp_path / "state")
    assert rank.calls == [
        ("layers", "checked", "state"),
        ("critic", "checked", "state"),
        ("reference", "everything", "reference"),
        ("policy", "everything", "state"),
        ("layers", "everything", "state"),
        ("critic", "everything", "state"),
    ]


@pytest.mark.parametrize("own_reference", [False, True])
def test_a_new_run_from_a_checkpoint_takes_only_weights(own_reference: bool, tmp_path: Path) -> None:
    rank = OneRank(0, tmp_path)
    if own_reference:
        rank.config = make_config(tmp_path / "model", ref_load=str(tmp_path / "reference"), use_kl_loss=True)
    rank.load(tmp_path / "state", weights_only=True)
    renewed = [] if own_reference else [("reference", "renewed")]  # after the policy has its weights
    checked = [("layers", "checked", "state"), ("critic", "checked", "state")]
    beside = [("layers", "weights", "state"), ("critic", "weights", "state")]
    assert rank.calls == [*checked, ("policy", "weights", "state"), *renewed, *beside]


# --- training ---------------------------------------------------------------------------------------


class Policy(Part):
    """A policy whose losses add up to 6."""

    columns: Any = None

    def train(self, _: TrainBatch, steps: list[int], loss: Any, __: dict[str, float]) -> Any:
        self.calls.append((self.name, "steps", *map(str, steps)))
        self.columns = loss.args[1]
        return {"tokens": 10.0, "loss": 6.0, "micro_batches": 2.0}, 0.5, 0.1

    def skip(self, steps: int) -> None:
        self.calls.append((self.name, "skipped", str(steps)))

    def routing_metrics(self, steps: int) -> dict[str, float]:
        assert steps >= 0
        return {}

    def forward(self, batch: TrainBatch) -> torch.Tensor:
        return torch.full((len(batch.loss_masks.flat),), -1.0)


class Values(Part):
    """A critic whose values are zeros."""

    @property
    def model(self) -> Values:
        return self

    def train(self, _: TrainBatch, steps: list[int], *__: Any) -> dict[str, float]:
        self.calls.append((self.name, "steps", *map(str, steps)))
        return {"value_loss": 0.25}

    def skip(self, steps: int) -> None:
        self.calls.append((self.name, "skipped", str(steps)))

    def values(self, batch: TrainBatch) -> torch.Tensor:
        return torch.zeros(len(batch.loss_masks.flat))


class Returning(Centred):
    """Returns that equal the advantages."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        centred = super().advantages(batch).advantages
        return Advantages(centred, returns=centred)


def trainer(folder: Path, **options: Any) -> tuple[Learner, list[tuple[str, ...]]]:
    """What trains policy and critic two steps a rollout, and what they were told."""
    # Logging tokens asks every rank of a model, and there is none here.
    config = make_config(folder / "model", steps=2, log_token_columns="none", **options)
    calls: list[tuple[str, ...]] = []
    policy: Any = Policy("policy", calls)
    critic: Any = Values("critic", calls)
    learner = Learner(config, Returning(), None, policy, None, critic, (), vocab_size=128, device=torch.device("cpu"))
    return learner, calls


def test_the_loss_is_the_mean_over_the_steps_of_a_rollout(tmp_path: Path) -> None:
    learner, calls = trainer(tmp_path)
    metrics = learner.train(make_batch(samples=8, steps=2))
    assert ("policy", "steps", "0", "1") in calls
    assert (metrics["loss"], metrics["grad_norm"], metrics["lr"]) == (3.0, 0.5, 0.1)
    assert metrics["value_loss"] == 0.25
    assert "skipped_steps" not in metrics


def test_a_step_without_trained_tokens_is_skipped_by_policy_and_critic(tmp_path: Path) -> None:
    batch = make_batch(samples=8, steps=2)
    masks = [mask * int(step == 0) for mask, step in zip(batch.loss_masks, batch.step_ids, strict=True)]
    learner, calls = trainer(tmp_path)
    metrics = learner.train(dataclasses.replace(batch, loss_masks=Ragged.of(masks, np.float32)))
    assert calls == [
        ("critic", "steps", "0"), ("critic", "skipped", "1"), ("policy", "steps", "0"), ("policy", "skipped", "1"),
    ]  # fmt: skip
    assert (metrics["skipped_steps"], metrics["loss"]) == (1, 6.0)


@pytest.mark.parametrize("normalized", [False, True])
def test_advantages_are_whitened_if_the_run_says_so(normalized: bool, tmp_path: Path) -> None:
    (learner, _), batch = trainer(tmp_path, normalize_advantages=normalized), make_batch(samples=8, steps=2)
    learner.train(batch)
    policy: Any = learner.policy
    used = policy.columns.advantages[torch.from_numpy(np.concatenate(batch.loss_masks)) > 0]
    assert (abs(float(used.mean())) < 1e-5 and float(used.std()) == pytest.approx(1.0, abs=1e-4)) is normalized


class Whole(PipelineSchedule):
    """A pipeline of one stage whose model returns its tokens, and whose head two vectors of them."""

    def __init__(self) -> None:
        self._chunks = [torch.nn.Identity()]
        self._head = lambda last, _: (last * 2, last * 3)

    def _run(self, model: Any, micro_batch: Any) -> Any:
        return model(micro_batch.tokens)

    def _schedule(self, forward: Any, micro_batches: list[Any], **options: Any) -> list[Any]:
        assert options == {"forward_only": True, "collect_non_loss_data": True}
        batches = iter(micro_batches)
        results = (forward(batches, self._chunks[0]) for _ in micro_batches)
        return [collect(output, non_loss_data=True) for output, collect in results]


def test_a_forward_pass_gives_the_heads_first_vector_for_each_micro_batch() -> None:
    micro_batches: list[Any] = [SimpleNamespace(tokens=torch.tensor([n]), slots=None) for n in (1, 10)]
    assert [part.tolist() for part in Whole().forward(micro_batches)] == [[2], [20]]


PARALLEL = "slime.train.schedule.parallel_state"


@pytest.mark.parametrize(("stages", "chunks", "kept"), [(1, 1, 1), (2, 1, 4), (2, 2, 8)])
def test_attention_plans_are_kept_while_a_backward_pass_may_need_them(
    stages: int, chunks: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PARALLEL}.get_pipeline_model_parallel_world_size", lambda: stages)
    monkeypatch.setattr(f"{PARALLEL}.get_context_parallel_group", lambda: None)

    class Chunk(torch.nn.Module):
        def forward(self, tokens: Any, *_: Any, packed_seq_params: Any) -> Any:
            packed_seq_params.plan = packed_seq_params.plan or "masks"
            return tokens

    settings: Any = SimpleNamespace(transformer=SimpleNamespace(params_dtype=torch.float32))
    schedule = PipelineSchedule(settings, [Chunk() for _ in range(chunks)], lambda *_: ())
    micro_batches: list[Any] = [
        SimpleNamespace(tokens=n, positions=n, routed=None, packed=SimpleNamespace(plan=None)) for n in range(10)
    ]
    for micro_batch in micro_batches:
        for chunk in schedule._chunks:
            schedule._run(chunk, micro_batch)
    assert [one.packed.plan for one in micro_batches] == [None] * (10 - kept) + ["masks"] * kept
