"""A model with everything that training it takes: modules, optimizer, learning-rate schedule and pipeline.

The policy is one such model, the critic another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.optim.adam import adam

from slime.errors import ConfigError, TrainerError
from slime.train.checkpoint_io import Write, load_state, save_state, save_weights, write_now
from slime.train.chunks import connect_schedule, wrap_chunks
from slime.train.forward import Flops, LossFunction, MicroBatch, PackingRule, Pipeline, TokenHead
from slime.train.micro_batches import plan_step
from slime.train.offload import ModelMemory, Part
from slime.train.parallel import counts_tokens
from slime.train.predicting import PredictingModel, check_predicting_layers, share_embedding
from slime.train.routing import check_routes, router_metrics, routers_of
from slime.train.settings import TrainSettings
from slime.train.shared_prompts import PrefixGroup

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.rollout.train_batch import TrainBatch


def build_scheduler(
    config: RunConfig, settings: TrainSettings, optimizer: Any, lr_flag: str = "--lr", *, idle_rollouts: int = 0
) -> Any:
    """The learning rate by --lr-decay-style, --lr-warmup-iters or -fraction, --lr-decay-iters and --min-lr.

    An iteration is one optimizer step. The default decays over the whole run. A resumed run keeps only its count of
    steps; the schedule's length and the learning rate are those that the resumed run states.

    Args:
        config: The run's configuration.
        settings: The model's settings, with the learning rate.
        optimizer: What the schedule drives.
        lr_flag: The flag that set the learning rate, for messages.
        idle_rollouts: Rollouts of the run in which this model takes no step.

    Raises:
        ConfigError: The options contradict each other.
    """
    stated = config.megatron
    run = ((config.rollout.num_rollout or 1) - idle_rollouts) * config.batch.steps
    decay = stated.get("lr_decay_iters") or max(1, run)
    warmup = stated.get("lr_warmup_iters") or 0
    if stated.get("lr_warmup_fraction") is not None:
        if warmup:
            raise ConfigError("--lr-warmup-iters and --lr-warmup-fraction exclude each other.")
        warmup = round(stated["lr_warmup_fraction"] * decay)
    if warmup >= decay:
        raise ConfigError(
            f"the learning rate would warm up for {warmup} steps of {decay} (--lr-decay-iters, by default rollouts x"
            " steps per rollout). Shorten the warm-up."
        )
    lr, least = settings.optimizer.lr, settings.optimizer.min_lr
    if not 0 <= least <= lr:
        raise ConfigError(f"--min-lr {least} is not between 0 and {lr_flag} {lr}.")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=least,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=stated.get("lr_decay_style", "constant"),
        start_wd=settings.optimizer.weight_decay,
        end_wd=settings.optimizer.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def take_step(
    optimizer: Any, scheduler: Any, *, step_name: str, sums: Mapping[str, float], scaled: bool
) -> tuple[float, float]:
    """Update the weights with the accumulated gradients.

    Args:
        optimizer: Megatron's optimizer.
        scheduler: Its learning-rate schedule, advanced by one step.
        step_name: Rollout and step, for messages.
        sums: Sums over the step's tokens, `loss` among them.
        scaled: Whether float16 loss scaling is on, with which an overflow is expected now and then: Megatron skips
            that update.

    Returns:
        The gradient norm and the learning rate of this step.

    Raises:
        TrainerError: The loss or the gradient is not finite.
    """
    seen = ", ".join(f"{name} {value:g}" for name, value in sums.items())
    losses = {name: sums[name] for name in ("loss", "mtp_loss") if name in sums}
    if wrong := {name: value for name, value in losses.items() if not math.isfinite(value)}:
        hint = " A large logprob_gap points at the engine's weights or log-probs." if "logprob_gap" in sums else ""
        [name, *_] = wrong
        raise TrainerError(
            f"{step_name}: the {name} is {wrong[name]}. Sums over the step's tokens: {seen}."
            f" The weights were not changed.{hint}"
        )
    lr = float(optimizer.param_groups[0]["lr"])
    updated, norm, _ = optimizer.step()
    scheduler.step(increment=1)
    # Megatron has no norm for gradients that overflowed in float16.
    norm = math.nan if norm is None else float(norm)
    if not math.isfinite(norm) and (updated or not scaled):
        raise TrainerError(
            f"{step_name}: the gradient norm is {norm} at loss {sums['loss']:g} and learning rate {lr:g}."
            f" Sums over the step's tokens: {seen}. Resume from the last checkpoint."
        )
    return norm, lr


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015), or AdamW (Loshchilov and Hutter, 2019) with `adam_w_mode`.

    Its step count is in the parameter group, as in TransformerEngine's and Apex's FusedAdam, which Megatron's
    distributed optimizer can save and reload. torch's own counts per parameter, and Megatron cannot load what it saved.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("GroupStepAdam takes no closure")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            if not params:
                continue
            adam(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                foreach=True,
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )


def install_adam() -> None:
    """Make Megatron use `GroupStepAdam` if neither TransformerEngine nor Apex is installed."""
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        megatron_optimizer.Adam = distributed_optimizer.Adam = GroupStepAdam
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed_optimizer.HAVE_APEX_OR_TE = distributed_optimizer.USING_APEX_OPTIMIZER = True


class TrainableModel:
    """This rank's chunks of a model, with optimizer, learning-rate schedule and pipeline.

    Every method is collective: all ranks call it, with the same arguments.

    Attributes:
        chunks: The bare models; more than one under virtual pipeline stages.
        optimizer: Megatron's optimizer over them.
        scheduler: The optimizer's learning-rate schedule.
        memory: Restores what `release_memory` released.
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
        self.memory = ModelMemory(chunks, self._wrapped, self.optimizer)
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
        self._routers = [router for chunk in chunks for router in routers_of(chunk.decoder)]
        self._replays = replays_routes
        self._shares_prompts = (
            config.algorithm.share_prompts is not False
            and config.algorithm.micro_batch_size is None
            and can_share_prompts(settings, chunks, device.type)
        )
        self._flops = Flops.of(settings.transformer, vocab_size=settings.vocab_size)
        self._last_lr = 0.0

    def score(self, batch: TrainBatch, *, replay: bool = True) -> Tensor:
        """The head's first vector for every response token, [sum of T_i] float32 on the CPU, the same on every rank.

        Log-probs are 0 where a token is not trained on; a critic's values are those of all tokens.

        Args:
            batch: The samples.
            replay: Take the experts that the engine chose, if the batch has them; False for weights that are not the
                engine's.
        """
        self.finish_param_gather()
        micro_batches = self._micro_batches(batch, list(range(len(batch.tokens))), replay=replay)
        scored = self._pipeline.score(micro_batches)
        flat = torch.zeros(len(batch.loss_masks.flat), device=self._device)
        if counts_tokens():
            for micro_batch, values in zip(micro_batches, scored, strict=True):
                if micro_batch.counts:
                    flat[micro_batch.token_ids] = values
        # One rank has each entry and the others have 0, so the sum is a copy.
        dist.all_reduce(flat)
        return flat.cpu()

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
                if any(isinstance(chunk, PredictingModel) for chunk in self.chunks):
                    self.finish_param_gather()
                    share_embedding(self.chunks)
                samples = np.flatnonzero(batch.step_ids == step).tolist()
                tokens = int((batch.tokens.lengths[samples] - 1).sum())
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

    def save(self, folder: Path, write: Write = write_now) -> None:
        """Write weights, optimizer, schedule and random states to `folder`, which must be new or empty."""
        self.finish_param_gather()
        save_state(folder, self.chunks, self.optimizer, self.scheduler, write)

    def save_weights(self, folder: Path) -> None:
        """Write only the weights, otherwise as `save` does."""
        self.finish_param_gather()
        save_weights(folder, self.chunks, write_now)

    def check(self, folder: Path, *, weights_only: bool) -> None:
        """Refuse a checkpoint that does not have the layers of this model, before anything of it is read.

        Args:
            folder: As of `load`.
            weights_only: As of `load`.

        Raises:
            CheckpointError: Only one of the run and the checkpoint has layers for multi-token prediction.
        """
        predicts = any(isinstance(chunk, PredictingModel) for chunk in self.chunks)
        check_predicting_layers(folder, predicts=predicts, weights_only=weights_only)

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

    def release_memory(self, part: Part) -> None:
        """Release one part of the memory, "training" first."""
        self.finish_param_gather()
        self.memory.release(part)

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
        plan = plan_step(
            batch,
            samples,
            self._flops,
            share_prompts=self._shares_prompts,
            num_ranks=parallel_state.get_data_parallel_world_size(),
            max_tokens=algorithm.max_tokens_per_gpu * self._packing.cp_size,
            micro_batch_size=algorithm.micro_batch_size,
        )
        mine = plan[parallel_state.get_data_parallel_rank()]
        # The interleaved schedule needs a multiple of the number of pipeline stages.
        interleaved = transformer.virtual_pipeline_model_parallel_size is not None
        multiple = transformer.pipeline_model_parallel_size if interleaved else 1
        count = -(-max(1, *(len(one) for one in plan)) // multiple) * multiple
        routes = batch.routed_experts if replay and self._replays else None
        if routes is not None:
            check_routes({int(batch.sample_ids[i]): routes[i] for i in samples}, transformer)
        pack = partial(self._packing.pack, batch, step_tokens=step_tokens, routes=routes)
        packed = [pack(group) for group in mine if group]
        while len(packed) < count:
            shortest = min(samples, key=lambda i: len(batch.tokens[i]))
            packed.append(pack([PrefixGroup((shortest,))], counts=False))
        return packed


def can_share_prompts(settings: TrainSettings, chunks: Sequence[Any], device_type: str) -> bool:
    """Whether attention, and whatever else looks at several tokens, knows of contexts (`slime.train.modules`).

    TransformerEngine and layers of a model family's own do not, nor does context parallelism. Routers of experts count
    tokens for their losses, and multi-token prediction looks at the next ones. On GPUs it has not been measured. The
    answer is the same on every rank, as pipeline stages must run the same micro-batches.
    """
    transformer = settings.transformer
    return (
        device_type == "cpu"
        and not settings.use_transformer_engine
        and settings.layer_specs is None
        and transformer.context_parallel_size == 1
        and transformer.num_moe_experts is None
        and not any(isinstance(chunk, PredictingModel) for chunk in chunks)
    )


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of the body to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def sum_over_ranks(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Add scalars over micro-batches and ranks, name by name; names that end in `_max` take the maximum.

    One rank counts the tokens of each micro-batch, so tensor- and context-parallel copies count once. The result is the
    same on every rank, including pipeline stages that saw no logits. Computed in float64, in rank order.
    """
    mine: dict[str, float] = {}
    if counts_tokens():
        for part in parts:
            values = torch.stack([value.detach().double() for value in part.values()]).tolist() if part else []
            add_sums(mine, dict(zip(part, values, strict=True)))
    if dist.get_world_size() == 1:
        return mine
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    total: dict[str, float] = {}
    for one in everyone:
        add_sums(total, one)
    return total


def add_sums(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add `more` to `total` in place, name by name; names that end in `_max` keep the maximum."""
    for name, value in more.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value
