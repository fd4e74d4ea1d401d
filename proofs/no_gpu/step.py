"""One rank's training step on the stand-in: what it computes in which precision, where it waits, what it holds.

The other ranks are torch's fake process group, whose collectives leave tensors as they are. Weights are not read, since
nothing is computed from them. As no kernel runs, routers choose no experts: what they would have chosen is put in where
it is read, each expert equally often.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.train.harness import Centred, make_batch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from proofs.no_gpu.cases import CASES, Case, config_of
from slime.train import parallel, rank
from slime.weights.models import Models
from slime_fused import attention as fused_attention
from slime_planner.predicted_activations import activation_memory, largest_micro_batch
from slime_planner.predicted_memory import logits_memory, rank_memory, stage_of_layers

_START, _GROUP = dist.init_process_group, dist.new_group
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten._scaled_dot_product_flash_attention}
#: samples of a full micro-batch, and tokens of their responses
SAMPLES_AT_ONCE, RESPONSE = 4, 201
#: frames of these are named
_OURS = ("/slime/", "/slime_fused/", "/megatron/")


def alone(case: Case, hidden: int) -> None:
    """Have this process be a rank of many, none of which answers."""
    # Not above: slime.train prepares Megatron for the device.
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def fake_start(_: str, **options: Any) -> None:
        _START("fake", **{**options, "store": FakeStore()})

    def fake_group(ranks: Any = None, **options: Any) -> Any:
        return _GROUP(ranks, **{**options, "backend": "fake"})

    def everybody(found: list[Any], mine: Any, **_: Any) -> None:
        found[:] = [mine] * len(found)

    changed: dict[str, Any] = {
        "init_process_group": fake_start,
        "new_group": fake_group,
        "all_gather_object": everybody,
    }
    for name, function in changed.items():
        setattr(dist, name, function)
    parallel._store = lambda *_: FakeStore()  # type: ignore[assignment]  # of no address
    # What a stage would be told of its neighbours' tensors: all micro-batches are full.
    shape = [SAMPLES_AT_ONCE * (case.tokens // SAMPLES_AT_ONCE - 1), 1, hidden]
    P2PCommunicator._communicate_shapes = lambda *_: (shape, shape)
    rank.load_hf = lambda *_, **__: None  # type: ignore[assignment]  # no kernel reads weights


def caller() -> str:
    """The innermost line of slime or Megatron that is being run."""
    for frame in reversed(traceback.extract_stack()):
        for part in _OURS:
            if part in frame.filename and "/proofs/" not in frame.filename:
                return f"{part.strip('/')}/{frame.filename.rpartition(part)[2]}:{frame.lineno} {frame.name}"
    return "elsewhere"


class Watch(TorchDispatchMode):
    """Notes matrix products in another precision than the model's, and puts in what routers would have chosen.

    Args:
        experts: Of a mixture; 0 of a dense model.
        choices: Of the tokens of a micro-batch, each of which chooses some experts.
    """

    def __init__(self, experts: int, choices: int) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()
        self._experts, self._choices = experts, choices

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, first = function.overloadpacket, args[0] if args else None
        if packet is _aten.special_entr:  # compiled by NVRTC, which has no stand-in
            return torch.empty_like(first)
        if self._experts and packet is _aten.masked_select:
            return first.new_empty(self._choices)
        result = function(*args, **kwargs)
        counts = self._experts and packet is _aten._to_copy and first.is_cuda and first.dtype is torch.int64
        if counts and not result.is_cuda and result.numel() > 1:
            even, rest = divmod(self._choices, result.numel())
            result.fill_(even).view(-1)[-1] += rest
        if packet in _PRODUCTS and first.dtype in (torch.float32, torch.float64):
            self.products[f"{packet.__name__} in {str(first.dtype)[6:]} at {caller()}"] += 1
        return result


def step(name: str, folder: Path) -> dict[str, Any]:
    """Build the rank, train twice, and tell of the second time."""
    case = CASES[name]
    config, model_folder = config_of(case, folder)
    architecture = Models.installed(config).read(model_folder)
    transformer = architecture.transformer
    alone(case, int(transformer["hidden_size"]))
    before = torch.cuda.memory_allocated()  # what Megatron's globals keep of the case before
    if config.layer_backend == "fused":
        # flash-attn-4 loads what it compiles by a runtime of its own, which wants a driver: PyTorch's kernel serves.
        fused_attention._flash_attention = lambda: None
    one = rank.MegatronRank(
        config, rank=case.rank, world_size=case.ranks, meeting=folder / "meeting", estimator=Centred()
    )
    prompt = case.tokens // SAMPLES_AT_ONCE - RESPONSE
    batch = make_batch(
        samples=2 * SAMPLES_AT_ONCE * case.copies,
        vocab=1000,
        prompt=(prompt, prompt),
        response=(RESPONSE, RESPONSE),
        masked=False,
        rollout_log_probs=True,
    )
    tokens = SAMPLES_AT_ONCE * (case.tokens // SAMPLES_AT_ONCE - 1)
    watch = Watch(transformer.get("num_moe_experts") or 0, tokens * (transformer.get("moe_router_topk") or 0))
    # What torch.compile makes does not run under such a mode.
    with watch if config.layer_backend != "fused" else nullcontext():
        one.train(batch)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() - before
        with waiting() as waits:
            watch.products.clear()
            one.train(batch)
    peak = torch.cuda.max_memory_allocated() - before
    layers = stage_of_layers(config, int(transformer["num_layers"]))
    stage = max(layers) if case.rank else 0
    micro_batch = largest_micro_batch(config.with_options("rollout", rollout_max_prompt_len=prompt))
    activations = activation_memory(config, architecture, layers, micro_batch)[stage]
    logits = logits_memory(config, architecture) if stage == max(layers) else 0.0
    expected = rank_memory(config, architecture)[stage].total
    return {
        "held": held,
        "expected_held": expected,
        "peak": peak,
        "expected_peak": expected + activations.peak(logits),
        "waits": dict(waits.most_common()),
        "products": dict(watch.products.most_common()),
    }


@contextmanager
def waiting() -> Iterator[Counter[str]]:
    """Counts the lines at which the host waits for the device, as torch reports them."""
    found: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            found[caller()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
