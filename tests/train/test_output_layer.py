"""Logits of trained tokens alone, a chunk at a time: the same log-probs and gradients, in memory that does not grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime.rollout.train_batch import TrainBatch
from slime.train import output_layer
from slime.train.output_layer import chunked_log_probs, log_probs_and_entropy

VOCABULARY, HIDDEN = 48, 8


class Layer:
    """An output layer without parallelism; records how many rows each call has."""

    gradient_accumulation_fusion = False

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        self.calls.append(len(hidden))
        return F.linear(hidden, weight), None


def numbers(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [R, 1, H], weight [V, H], targets [R], and weights of both results in a scalar [2, R]."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, 1, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(0, VOCABULARY - 3, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, torch.randn(2, rows, generator=generator)


def results(
    monkeypatch: pytest.MonkeyPatch, chunk: int, *, rows: int, dtype: torch.dtype = torch.float32, entropy: bool = True
) -> tuple[list[int], list[Tensor]]:
    """Rows of each call of the layer; log-probs, entropy, and gradients of hidden states and weight."""
    monkeypatch.setattr(output_layer, "CHUNK_ELEMENTS", chunk)
    hidden, weight, targets, factors = numbers(rows, dtype)
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]  # as Megatron's DDP does
    layer = Layer()
    found = chunked_log_probs(hidden, weight, layer, targets, temperature=0.7, vocab_size=VOCABULARY - 3, group=None)
    ((found[0] * factors[0]).sum() + (found[1] * factors[1]).sum() * int(entropy)).backward()
    assert hidden.grad is not None and weight.grad is not None
    total = weight.main_grad + weight.grad  # type: ignore[attr-defined]  # one of them is 0
    return layer.calls, [found[0].detach(), found[1].detach(), hidden.grad, total]


def test_chunks_give_the_numbers_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected = results(monkeypatch, 1 << 20, rows=11)
    calls, found = results(monkeypatch, 4 * VOCABULARY + 7, rows=11)
    assert (whole, calls) == ([11], [4, 4, 3] * 2), "each chunk in the forward pass, and again in the backward pass"
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0.1
        # A matrix product may add in another order if it has other rows, and so does the sum over chunks.
        assert (one - other).abs().max() < 2e-5


def test_one_chunk_is_log_softmax_of_all_logits_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = results(monkeypatch, 1 << 20, rows=11)
    hidden, weight, targets, factors = numbers(11)
    log_probs, entropy = log_probs_and_entropy(
        F.linear(hidden, weight)[:, 0], targets, temperature=0.7, vocab_size=VOCABULARY - 3
    )
    ((log_probs * factors[0]).sum() + (entropy * factors[1]).sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    for one, other in zip(found, (log_probs.detach(), entropy.detach(), hidden.grad, weight.grad), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_half_precision_weights_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 500 terms in bfloat16 would be off by more than they are."""
    _, expected = results(monkeypatch, 1, rows=500)
    _, found = results(monkeypatch, 1, rows=500, dtype=torch.bfloat16)
    _, whole = results(monkeypatch, 1 << 20, rows=500, dtype=torch.bfloat16)

    def error(gradient: Tensor) -> Tensor:
        return (gradient.float() - expected[3]).norm() / expected[3].norm()

    assert error(found[3]) < 1.2 * error(whole[3]) < 0.02


class Largest(TorchDispatchMode):
    """The most numbers that any tensor had which an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for one in answer if isinstance(answer, tuple | list) else [answer]:
            if isinstance(one, Tensor):
                self.numbers = max(self.numbers, one.numel())
        return answer


def test_no_tensor_grows_with_rows_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 10 * VOCABULARY
    sizes = []
    for rows in (40, 80):
        with Largest() as largest:
            results(monkeypatch, chunk, rows=rows)
        sizes.append(largest.numbers)
    assert sizes == [chunk, max(chunk, 80 * HIDDEN)]


# --- inside a rank --------------------------------------------------------------------------------------


def step(launcher: RankLauncher, config: Any, batch: TrainBatch, chunk: int) -> SimpleNamespace:
    """One step: metrics, weights, log-probs of the trained tokens before, and the rows of the output layer's calls."""
    output_layer.CHUNK_ELEMENTS = chunk
    rank, calls = launcher.start(config, Centred(kl_coef=0.2)), []
    log_probs = rank.policy.forward(batch)
    last = rank.policy.chunks[-1]
    if last.post_process:
        last.output_layer.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    metrics = {name: value for name, value in rank.train(batch).items() if not name.startswith("time/")}
    weights = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return SimpleNamespace(metrics=metrics, weights=weights, log_probs=log_probs, calls=calls)


TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.1, "kl_coef": 0.1, "max_tokens_per_gpu": 40}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "alone, no sums in products": (1, {"gradient_accumulation_fusion": False}),
    "tensor 2, sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline 2, virtual 2": (
        2,
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    ),
    "data 2, overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}),
}


@pytest.mark.engine
@pytest.mark.parametrize(("layout", "tied"), [(name, name != "alone, no sums in products") for name in LAYOUTS])
def test_a_step_in_chunks_is_one_with_all_logits_at_once(layout: str, tied: bool, model_folder: Folders) -> None:
    """Also where a micro-batch has no trained token at all, or only one chunk, whose gradient is added by Megatron."""
    folder = model_folder("qwen3", tied=tied, num_hidden_layers=4)
    size, flags = LAYOUTS[layout]
    config = make_config(folder, world_size=size, megatron=flags, **TERMS)
    batch = make_batch(samples=9, prompt=(20, 30), rollout_log_probs=True)
    whole = run_ranks(step, size, config, batch, 1 << 26)
    rows = 3
    found = run_ranks(step, size, config, batch, rows * 128 // (2 if "tensor" in layout else 1))
    for one, other in zip(found, whole, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=2e-5, abs=2e-5)
        assert (one.log_probs - other.log_probs).abs().max() < 2e-5
    calls = [call for one in found for call in one.calls]
    sizes = {call for one in whole for call in one.calls}
    assert 0 in sizes and any(0 < size <= rows for size in sizes)
    assert max(calls) == rows < max(sizes)
    assert whole[0].weights.keys() == found[0].weights.keys()
    for name, weight in whole[0].weights.items():
        assert (found[0].weights[name] - weight).abs().max() < 2e-4, name


@pytest.mark.engine
def test_tokens_without_loss_cost_nothing_and_have_log_prob_zero(model_folder: Folders) -> None:
    batch = make_batch(samples=6, response=(8, 24))
    config = make_config(model_folder("qwen3"), **TERMS)
    [found] = run_ranks(step, 1, config, batch, 1 << 26)
    mask = torch.cat([torch.from_numpy(part) for part in batch.loss_masks]) > 0
    assert (found.log_probs[~mask] == 0).all() and (found.log_probs[mask] < 0).all()
    # The passes of a step: log-probs of policy and reference for the KL of the reward, and training.
    assert sum(found.calls) == 3 * int(mask.sum()) < 3 * mask.numel()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen3", {"lora_rank": 4}, id="a frozen output layer"),
        pytest.param("glm4_moe", {"enable_mtp_training": True}, id="multi-token prediction"),
    ],
)
def test_adapters_and_further_layers_train_the_same_in_chunks(
    family: str, options: dict[str, Any], model_folder: Folders
) -> None:
    config = make_config(model_folder(family), entropy_coef=0.1, max_tokens_per_gpu=60, **options)
    batch = make_batch(samples=6, prompt=(1, 5), response=(2, 24))
    [whole], [found] = (run_ranks(step, 1, config, batch, rows * 128) for rows in (1 << 19, 3))
    assert ("mtp_loss" in whole.metrics) is ("enable_mtp_training" in options)
    assert found.metrics == pytest.approx(whole.metrics, rel=2e-5, abs=2e-5)
    assert max(found.calls) == 3 < max(whole.calls)
    for name, weight in whole.weights.items():
        assert (found.weights[name] - weight).abs().max() < 2e-4, name
