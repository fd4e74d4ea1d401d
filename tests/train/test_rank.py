"""One rank's training: reference, supervised loss, several steps, metrics, and errors with their numbers."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.errors import ConfigError, SlimeError
from slime.plugin import Advantages, EstimatorBatch, TokenBatch
from slime.rollout.train_batch import Ragged, TrainBatch

pytestmark = pytest.mark.engine


def reference_log_probs(launcher: RankLauncher, config: Any, batch: TrainBatch) -> Any:
    rank = launcher.start(config, Centred())
    initial = rank.log_probs(batch)
    metrics = [rank.train(batch) for _ in range(3)]
    after = rank.log_probs(batch)
    with rank.reference.in_model():
        reference = rank.log_probs(batch)
    again = rank.log_probs(batch)
    rank.close()
    return initial, after, reference, again, metrics


def test_the_reference_stays_the_initial_policy(model_folder: Folders) -> None:
    config = make_config(model_folder("qwen3", tied=True), use_kl_loss=True, kl_loss_coef=0.0)
    ((initial, after, reference, again, metrics),) = run_ranks(reference_log_probs, 1, config, make_batch())
    assert max(np.abs(a - b).max() for a, b in zip(initial, after, strict=True)) > 1e-2
    for a, b in zip(initial, reference, strict=True):
        assert np.array_equal(a, b)
    for a, b in zip(after, again, strict=True):
        assert np.array_equal(a, b)
    assert metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["kl"] > metrics[1]["kl"] > 1e-5


def several_steps(launcher: RankLauncher, config: Any, batch: TrainBatch) -> Any:
    rank = launcher.start(config, Centred())
    old = rank.log_probs(batch)
    metrics = rank.train(batch)
    rank.close()
    return old, metrics


def rows_of_logits(launcher: RankLauncher, config: Any, batch: TrainBatch) -> tuple[int, ...]:
    """Of one step: positions that went through the layers, and rows of logits."""
    rank, rows = launcher.start(config), []
    rank.policy.chunks[0].output_layer.register_forward_hook(lambda _layer, _inputs, out: rows.append(len(out[0])))
    rank.train(batch)
    rank.close()
    return sum(len(whole) - 1 for whole in batch.tokens), sum(rows)


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}])
def test_logits_are_computed_only_where_a_trained_token_is_predicted(
    model_folder: Folders, layout: dict[str, Any]
) -> None:
    batch, size = make_batch(prompt=(6, 20)), max(1, len(layout))
    config = make_config(model_folder("qwen3"), world_size=size, loss_type="sft_loss", megatron=layout)
    for positions, rows in run_ranks(rows_of_logits, size, config, batch):
        assert rows == sum(mask.sum() for mask in batch.loss_masks) < batch.response_lengths.sum() < positions


def test_fewer_samples_than_data_parallel_ranks(model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True)
    batch = make_batch(samples=1, masked=False, response=(5, 5))
    (_, alone), *_ = run_ranks(several_steps, 1, make_config(folder, entropy_coef=0.1), batch)
    answers = run_ranks(several_steps, 2, make_config(folder, world_size=2, entropy_coef=0.1), batch)
    for _, metrics in answers:
        for name in ("loss", "grad_norm", "entropy", "tokens"):
            assert metrics[name] == pytest.approx(alone[name], rel=1e-5), name


def vocabulary_padding(launcher: RankLauncher, config: Any, batch: TrainBatch) -> Any:
    rank = launcher.start(config, Centred())
    log_probs = rank.log_probs(batch)
    rank.train(batch)
    shapes = {name: tuple(tensor.shape) for name, tensor in rank.named_hf_weights()}
    rank.close()
    return log_probs, shapes


def test_a_vocabulary_that_ranks_cannot_share_is_padded_without_effect(model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, vocab_size=131)
    batch = make_batch()
    ((expected, shapes),) = run_ranks(vocabulary_padding, 1, make_config(folder), batch)
    padded = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 128}
    answers = run_ranks(vocabulary_padding, 2, make_config(folder, world_size=2, megatron=padded), batch)
    for log_probs, _ in answers:
        assert max(np.abs(a - b).max() for a, b in zip(log_probs, expected, strict=True)) < 1e-5
    assert answers[0][1] == shapes
    assert shapes["model.embed_tokens.weight"][0] == 131


class Overflow(Centred):
    """An infinite objective."""

    def objective(self, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return batch.log_probs * float("inf"), {}


class Steep:
    """Advantages that are finite, give a finite loss, and overflow the gradient's norm."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        return Advantages([mask * 3e38 for mask in batch.loss_masks])


class Wrong:
    """An estimator that leaves a sample out."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        return Advantages(batch.loss_masks[:-1])


def errors(launcher: RankLauncher, config: Any, batch: TrainBatch, estimator: Any) -> tuple[str, str, bool]:
    rank = launcher.start(config, estimator)
    before = rank.log_probs(batch)
    try:
        rank.train(batch)
    except SlimeError as error:
        same = all(np.array_equal(a, b) for a, b in zip(before, rank.log_probs(batch), strict=True))
        return type(error).__name__, str(error), same
    finally:
        rank.close()
    return "", "trained", False


@pytest.mark.parametrize(
    ("estimator", "kind", "message", "untouched"),
    [
        (Overflow(), "TrainerError", "rollout 0, step 0: the loss is", True),
        (Steep(), "TrainerError", "rollout 0, step 0: the gradient norm is inf at loss -3e+38", False),
        (Wrong(), "PluginContractError", "Wrong.advantages", True),
    ],
    ids=["loss", "gradient", "contract"],
)
def test_errors_reach_every_rank_with_their_numbers(
    estimator: Any, kind: str, message: str, untouched: bool, model_folder: Folders
) -> None:
    stages = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}
    config = make_config(model_folder("qwen3", tied=True), world_size=2, megatron=stages)
    for name, text, same in run_ranks(errors, 2, config, make_batch(masked=False), estimator):
        assert name == kind
        assert message in text
        assert same or not untouched


def start_only(launcher: RankLauncher, config: Any) -> str:
    try:
        launcher.start(config, Centred()).close()
    except ConfigError as error:
        return str(error)
    return "started"


def test_a_reference_of_another_architecture_is_refused(model_folder: Folders) -> None:
    config = make_config(
        model_folder("qwen3", tied=True), use_kl_loss=True, ref_load=str(model_folder("llama", tied=True))
    )
    (message,) = run_ranks(start_only, 1, config)
    assert "another architecture" in message and "qk_layernorm" in message


def restart(launcher: RankLauncher, config: Any) -> str:
    """An error while building must leave the process groups, so that the process can end or start again."""
    import torch.distributed as dist

    try:
        launcher.start(config, Centred())
    except ConfigError:
        return f"groups left: {dist.is_initialized()}"
    return "started"


def test_process_groups_end_when_building_fails(model_folder: Folders) -> None:
    config = make_config(model_folder("qwen3", tied=True), use_kl_loss=True, ref_load="/nowhere")
    assert run_ranks(restart, 1, config) == ["groups left: False"]


def empty(launcher: RankLauncher, config: Any) -> str:
    rank = launcher.start(config, Centred())
    batch = make_batch(samples=1)
    nothing = dataclasses.replace(batch, tokens=Ragged.of([], np.int32), loss_masks=Ragged.of([], np.float32))
    try:
        rank.train(nothing)
    except SlimeError as error:
        return str(error)
    finally:
        rank.close()
    return "trained"


def test_a_batch_without_samples_is_refused(model_folder: Folders) -> None:
    (message,) = run_ranks(empty, 1, make_config(model_folder("qwen3", tied=True)))
    assert "no trainable sample" in message


def waits_s(launcher: RankLauncher, config: Any) -> float:
    from megatron.core import parallel_state

    rank = launcher.start(config, Centred())
    group: Any = parallel_state.get_tensor_model_parallel_group()
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    rank.close()
    return timeout.total_seconds()


@pytest.mark.parametrize(("sync_s", "minutes", "at_least_s"), [(600.0, 10.0, 640), (100.0, 30.0, 1800)])
def test_ranks_that_gather_weights_wait_longer_than_the_one_that_sends_them(
    model_folder: Folders, sync_s: float, minutes: float, at_least_s: int
) -> None:
    config = make_config(
        model_folder("qwen3", tied=True), weight_sync_timeout_s=sync_s, distributed_timeout_minutes=minutes
    )
    (seconds,) = run_ranks(waits_s, 1, config)
    assert at_least_s <= seconds <= at_least_s + 60


def alone(launcher: RankLauncher, config: Any) -> str:
    try:
        dataclasses.replace(launcher, world_size=2).start(config, Centred())
    except SlimeError as error:
        return str(error)
    return "started"


def test_a_rank_without_its_partner_times_out(model_folder: Folders) -> None:
    config = make_config(model_folder("qwen3", tied=True), world_size=2, distributed_timeout_minutes=0.03)
    (message,) = run_ranks(alone, 1, config, timeout_s=120)
    assert "rank 0 of 2 could not join the others at 127.0.0.1:" in message
    assert "within 0.03 minutes" in message
