"""A model with everything that training it takes: modules, optimizer, learning-rate schedule and pipeline.

The policy is one such model, the critic another.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from slime.data import plan_micro_batches
from slime.train.checkpoint_io import load_state, save_state
from slime.train.forward import (
    LossFunction,
    MicroBatch,
    PackingRule,
    Pipeline,
    TokenHead,
    add_sums,
    counts_tokens,
    sum_over_ranks,
)
from slime.train.linears import ReplicatedLinear
from slime.train.modules import Norm, PackedAttention
from slime.train.optimizing import build_scheduler, install_adam, take_step
from slime.train.router import TrainingRouter, router_metrics, routers_of
from slime.train.settings import TrainSettings

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.data import TrainBatch


#: Megatron's modules -> those that training needs instead
_OURS: dict[type, type] = {TopKRouter: TrainingRouter}
#: the same, where TransformerEngine has none of its own
_WITHOUT_TE: dict[type, type] = {DotProductAttention: PackedAttention, WrappedTorchNorm: Norm}


def build_chunks(settings: TrainSettings, device: torch.device, model: Callable[..., Any] = GPTModel) -> list[Any]:
    """The bare models of this rank, in order; more than one under virtual pipeline stages.

    Args:
        settings: What to build.
        device: Where to put it.
        model: Called with GPTModel's arguments to build one of them.
    """
    transformer = settings.transformer
    virtual = transformer.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in [None] if virtual is None else range(virtual):
        spec = get_gpt_decoder_block_spec(
            transformer,
            use_transformer_engine=settings.use_transformer_engine,
            normalization=transformer.normalization,
            vp_stage=stage,
        )
        spec = replace_modules(copy.deepcopy(spec), _OURS)
        if not settings.use_transformer_engine:
            replace_modules(spec, _WITHOUT_TE)
            _replicate_down_projections(spec)
        if settings.layer_specs is not None:
            spec = settings.layer_specs(spec, transformer, transformer_engine=settings.use_transformer_engine)
        stage_of = {"ignore_virtual": stage is None, "vp_stage": stage}
        chunk = model(
            transformer,
            spec,
            pre_process=parallel_state.is_pipeline_first_stage(**stage_of),
            post_process=parallel_state.is_pipeline_last_stage(**stage_of),
            vp_stage=stage,
            **settings.gpt,
        )
        _keep_experts_apart(chunk)
        chunks.append(chunk.to(device))
    return chunks


def _replicate_down_projections(spec: Any) -> None:
    """See `ReplicatedLinear`."""
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if isinstance(attention, MLASelfAttentionSubmodules):
            attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear


def _keep_experts_apart(chunk: torch.nn.Module) -> None:
    """Give the experts' weights gradient buffers and an optimizer of their own under every layout.

    Megatron does so only with expert parallelism. With expert tensor parallelism below tensor parallelism, it would
    then not add the gradients of all copies of an expert; and checkpoints with and without expert parallelism would
    have different parts.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron reads it


def wrap_chunks(settings: TrainSettings, chunks: list[Any]) -> list[Any]:
    """Each chunk inside Megatron's DDP, and converted to half precision if the settings say so."""
    transformer = settings.transformer
    if transformer.bf16 or transformer.fp16:
        # Half precision would round the bias by which routers choose experts, and then the choice differs.
        biases = [(router, router.expert_bias) for chunk in chunks for router in routers_of(chunk)]
        exact = [None if bias is None else bias.clone() for _, bias in biases]
        chunks = [Float16Module(transformer, chunk) for chunk in chunks]
        for (router, _), bias in zip(biases, exact, strict=True):
            if bias is not None:
                router.expert_bias.data = bias
    return [
        DistributedDataParallel(transformer, settings.ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def connect_schedule(settings: TrainSettings, wrapped: list[Any], scale_loss: Callable[..., Any]) -> None:
    """Tell Megatron's pipeline schedule how to scale losses, when to reduce gradients and how to finish them."""
    transformer, ddp = settings.transformer, settings.ddp
    transformer.grad_scale_func = scale_loss
    # Loss weights already divide by the whole step's totals, so Megatron must not divide by its token count.
    transformer.finalize_model_grads_func = lambda model, _num_tokens, **rest: finalize_model_grads(model, None, **rest)
    first_or_all: Callable[[list[Any]], Any] = lambda each: each[0] if len(each) == 1 else each  # noqa: E731
    if ddp.overlap_grad_reduce:
        transformer.no_sync_func = first_or_all([chunk.no_sync for chunk in wrapped])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        transformer.param_sync_func = first_or_all([chunk.start_param_sync for chunk in wrapped])


def replace_modules(spec: Any, replacements: dict[type, type]) -> Any:
    """Replace module classes anywhere in a tree of ModuleSpecs and submodule dataclasses, in place; returns it."""
    if isinstance(spec, list):
        for item in spec:
            replace_modules(item, replacements)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if isinstance(value, type):
                setattr(spec, field.name, replacements.get(value, value))
            else:
                replace_modules(value, replacements)
    return spec


class TrainableModel:
    """This rank's chunks of a model, with optimizer, learning-rate schedule and pipeline.

    Every method is collective: all ranks call it, with the same arguments.

    Attributes:
        chunks: The bare models; more than one under virtual pipeline stages.
        optimizer: Megatron's optimizer over them.
        scheduler: The optimizer's learning-rate schedule.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: TrainSettings,
        chunks: list[Any],
        head: TokenHead,
        device: torch.device,
        *,
        lr_flag: str = "--lr",
        idle_rollouts: int = 0,
        replays_routes: bool = True,
    ) -> None:
        """Wrap the chunks, which must have the weights that training starts from.

        Args:
            config: The run's configuration.
            settings: Of this model; Megatron writes to its `transformer`, so two models must not share it.
            chunks: The bare models of this rank.
            head: What is read from the last stage's output.
            device: Where the chunks are.
            lr_flag: The flag that set the learning rate, for messages.
            idle_rollouts: Rollouts of the run in which this model takes no step.
            replays_routes: Whether its routers take the experts that the engine chose, where a batch has them.
        """
        self._config, self._settings, self._device = config, settings, device
        self.chunks = chunks
        self._wrapped = wrap_chunks(settings, chunks)
        install_adam()
        self.optimizer = get_megatron_optimizer(settings.optimizer, self._wrapped, use_gloo_process_groups=False)
        self.scheduler = build_scheduler(config, settings, self.optimizer, lr_flag, idle_rollouts=idle_rollouts)
        connect_schedule(settings, self._wrapped, self.optimizer.scale_loss)
        self._pipeline = Pipeline(settings, self._wrapped, head)
        self._packing = PackingRule(
            tensor_parallel_size=settings.transformer.tensor_model_parallel_size,
            sequence_parallel=settings.transformer.sequence_parallel,
            cp_size=settings.transformer.context_parallel_size,
            cp_rank=parallel_state.get_context_parallel_rank(),
            device=device,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        )
        self._routers = [router for chunk in chunks for router in routers_of(chunk)]
        self._replays = replays_routes
        self._last_lr = 0.0

    def score(self, batch: TrainBatch, *, replay: bool = True) -> list[Tensor]:
        """The head's first vector for every response token: N x [T_i] float32 on the CPU, the same on every rank.

        Args:
            batch: The samples.
            replay: Take the experts that the engine chose, if the batch has them; False for weights that are not the
                engine's.
        """
        self.finish_param_gather()
        micro_batches = self._micro_batches(batch, list(range(len(batch.tokens))), replay=replay)
        scored = self._pipeline.score(micro_batches)
        flat = torch.zeros(int(batch.response_lengths.sum()), device=self._device)
        if counts_tokens():
            for micro_batch, values in zip(micro_batches, scored, strict=True):
                if micro_batch.counts:
                    flat[micro_batch.token_ids] = values
        # One rank has each entry and the others have 0, so the sum is a copy.
        dist.all_reduce(flat)
        return list(torch.split(flat.cpu(), batch.response_lengths.tolist()))

    def train(
        self, batch: TrainBatch, steps: Sequence[int], loss: LossFunction, seconds: dict[str, float], name: str = ""
    ) -> tuple[dict[str, float], float, float]:
        """One optimizer step for each of `steps`, with the samples whose `step_ids` is its number.

        Args:
            batch: The rollout's samples.
            steps: Numbers of the steps to take.
            loss: The loss of one micro-batch and its sums; `loss` among them.
            seconds: Times of the phases are added to it.
            name: Prefix that names the model in errors.

        Returns:
            Sums over the tokens of all steps, the mean gradient norm and the last step's learning rate.

        Raises:
            TrainerError: The loss or the gradient is not finite.
        """
        total = {"tokens": 0.0, "loss": 0.0, "micro_batches": 0.0}
        norms = []
        for step in steps:
            with timed(seconds, "time/forward_backward"):
                # Without the distributed optimizer, the last step's gradients are still in the parameters and would be
                # counted a second time.
                self.optimizer.zero_grad()
                samples = np.flatnonzero(batch.step_ids == step).tolist()
                tokens = sum(len(batch.tokens[i]) - 1 for i in samples)
                micro_batches = self._micro_batches(batch, samples, step_tokens=tokens)
                sums = sum_over_ranks(self._pipeline.train(micro_batches, loss))
                sums["micro_batches"] = len(micro_batches)
            add_sums(total, sums)
            with timed(seconds, "time/optimizer"):
                norm, self._last_lr = take_step(
                    self.optimizer,
                    self.scheduler,
                    step_name=f"{name}rollout {batch.rollout}, step {step}",
                    sums=sums,
                    scaled=self._settings.transformer.fp16,
                )
            norms.append(norm)
        return total, sum(norms) / max(1, len(norms)), self._last_lr

    def skip(self, steps: int) -> None:
        """Count steps without a trained token in the schedule; they change nothing else."""
        self.scheduler.step(increment=steps)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random states to `folder`, which must be new or empty."""
        self.finish_param_gather()
        save_state(folder, self.chunks, self.optimizer, self.scheduler)

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Read what `save` wrote, under any parallel layout; `weights_only` keeps optimizer and schedule fresh."""
        self.finish_param_gather()
        load_state(folder, self.chunks, self.optimizer, self.scheduler, weights_only=weights_only)

    def finish_param_gather(self) -> None:
        """Bring in parameters that an overlapped all-gather would otherwise bring only with the next forward pass.

        Call it before reading or exchanging weights.
        """
        if self._settings.ddp.overlap_param_gather:
            for chunk in self._wrapped:
                chunk.start_param_sync(force_sync=True)

    def routing_metrics(self, *, steps: int) -> dict[str, float]:
        """What the routers counted in the last `steps` optimizer steps (collective); empty for a dense model."""
        if self._settings.transformer.num_moe_experts is None or not steps:
            return {}
        return router_metrics(self._routers, steps=steps)

    def _micro_batches(
        self, batch: TrainBatch, samples: list[int], *, step_tokens: int | None = None, replay: bool = True
    ) -> list[MicroBatch]:
        """This data-parallel rank's share of some samples; every rank gets the same number of micro-batches."""
        algorithm, transformer = self._config.algorithm, self._settings.transformer
        plan = plan_micro_batches(
            [len(batch.tokens[i]) for i in samples],
            num_ranks=parallel_state.get_data_parallel_world_size(),
            max_tokens=algorithm.max_tokens_per_gpu * self._packing.cp_size,
            micro_batch_size=algorithm.micro_batch_size,
        )
        mine = [[samples[k] for k in group] for group in plan[parallel_state.get_data_parallel_rank()]]
        # The interleaved schedule needs a multiple of the number of pipeline stages.
        interleaved = transformer.virtual_pipeline_model_parallel_size is not None
        multiple = transformer.pipeline_model_parallel_size if interleaved else 1
        count = -(-max(1, *(len(one) for one in plan)) // multiple) * multiple
        routes = getattr(batch, "routed_experts", None) if replay and self._replays else None
        pack = partial(self._packing.pack, batch, step_tokens=step_tokens, routes=routes)
        packed = [pack(group) for group in mine if group]
        while len(packed) < count:
            shortest = min(samples, key=lambda i: len(batch.tokens[i]))
            packed.append(pack([shortest], counts=False))
        return packed


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of the body to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
