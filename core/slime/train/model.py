"""A model with everything that training it takes: modules, optimizer, learning-rate schedule and pipeline.

The policy is one such model, the critic another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from slime.config.learning_rate import continued_at
from slime.errors import TrainerError
from slime.observe.timing import timed
from slime.train.checkpoint_io import Write, load_state, load_weights, save_state, save_weights, write_now
from slime.train.chunks import wrap_chunks
from slime.train.features import Feature
from slime.train.micro_batches import Flops, PrefixGroup, can_share_prompts, plan_step
from slime.train.offload import ModelMemory, Part
from slime.train.optimizer import build_scheduler, install_adam, take_step
from slime.train.packing import PackedMicroBatch, PackingRule
from slime.train.parallel import counts_tokens, of_all_ranks
from slime.train.routing import check_routes, router_metrics, routers_of
from slime.train.schedule import LossFunction, PipelineSchedule, TokenHead, connect_schedule
from slime.train.settings import TrainSettings

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.rollout.train_batch import TrainBatch


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
        waits: bool = False,
        features: Sequence[Feature] = (),
    ) -> None:
        """Wrap the chunks, which must have the weights that training starts from.

        Args:
            config: The run's configuration.
            settings: Of this model; Megatron writes to its `transformer`, so two models must not share it.
            chunks: The bare models of this rank.
            head: What is read from the last stage's output.
            device: Where the chunks are.
            lr_flag: The flag that set the learning rate, for messages.
            waits: Whether this model takes no step in the first --num-critic-only-steps rollouts.
            features: What the model does beside, in the order of the hooks.
        """
        self._config, self._settings, self._device = config, settings, device
        self.chunks = chunks
        self._wrapped = wrap_chunks(settings, chunks)
        install_adam()
        self.optimizer = get_megatron_optimizer(settings.optimizer, self._wrapped, use_gloo_process_groups=False)
        self.memory = ModelMemory(chunks, self._wrapped, self.optimizer)
        self.scheduler = build_scheduler(config, settings, self.optimizer, lr_flag, waits=waits)
        self._waits = waits
        connect_schedule(settings, self._wrapped, self.optimizer.scale_loss)
        self._features = features
        for feature in features:
            head = feature.head(head, chunks[-1])
        self._schedule = PipelineSchedule(settings, self._wrapped, head)
        self._packing = PackingRule(
            tensor_parallel_size=settings.transformer.tensor_model_parallel_size,
            sequence_parallel=settings.transformer.sequence_parallel,
            cp_size=settings.transformer.context_parallel_size,
            cp_rank=parallel_state.get_context_parallel_rank(),
            device=device,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            equal_totals=settings.transformer.moe_token_dispatcher_type == "flex"
            and settings.transformer.moe_flex_dispatcher_backend == "hybridep",
        )
        self._routers = [router for chunk in chunks for router in routers_of(chunk.decoder)]
        for place, router in enumerate(self._routers):
            router.place = place
        #: layers of which this rank replays the engines' choice of experts
        self.routed_layers = tuple(router.layer_number - 1 for router in self._routers)
        self._shares_prompts = (
            config.algorithm.share_prompts is not False
            and config.algorithm.micro_batch_size is None
            and can_share_prompts(settings, chunks, device.type)
        )
        self._flops = Flops.of(settings.transformer, vocab_size=settings.vocab_size)
        self._last_lr = 0.0

    def forward(self, batch: TrainBatch) -> Tensor:
        """The head's first vector for every response token, [sum of T_i] float32 on the CPU, the same on every rank.

        Log-probs are 0 where a token is not trained on; a critic has a value for every token. Routers take the
        experts that the batch brings along.
        """
        self.finish_param_gather()
        micro_batches = self._micro_batches(batch, list(range(len(batch.tokens))))
        vectors = self._schedule.forward(micro_batches)
        flat = torch.zeros(len(batch.loss_masks.flat), device=self._device)
        if counts_tokens():
            for micro_batch, values in zip(micro_batches, vectors, strict=True):
                if micro_batch.counts:
                    flat[micro_batch.places] = values
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
                for feature in self._features:
                    feature.before_step(self)
                samples = np.flatnonzero(batch.step_ids == step).tolist()
                tokens = int((batch.tokens.lengths[samples] - 1).sum())
                micro_batches = self._micro_batches(batch, samples, step_tokens=tokens)
                sums = sum_over_ranks(self._schedule.train(micro_batches, loss))
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

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Read what `save` wrote, under any parallel layout; `weights_only` keeps optimizer and schedule fresh."""
        self.finish_param_gather()
        if weights_only:
            load_weights(folder, self.chunks)
            self.optimizer.reload_model_params()
        else:
            load_state(folder, self.chunks, self.optimizer, self.scheduler)

    def continue_schedule(self, saved: RunConfig, rollouts_done: int) -> None:
        """Go on at the right place of the schedule if the loaded run took another number of steps per rollout."""
        count = continued_at(self._config, saved, rollouts_done, self.scheduler.num_steps, waits=self._waits)
        if count != self.scheduler.num_steps:
            self.scheduler.step(increment=count - self.scheduler.num_steps)

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
        self, batch: TrainBatch, samples: list[int], *, step_tokens: int | None = None
    ) -> list[PackedMicroBatch]:
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
        # The interleaved schedule needs a multiple of the number of pipeline stages.
        interleaved = transformer.virtual_pipeline_model_parallel_size is not None
        multiple = transformer.pipeline_model_parallel_size if interleaved else 1
        count = -(-max(1, *(len(one) for one in plan)) // multiple) * multiple
        # A rank with fewer micro-batches runs these in place of the missing ones, to keep in step.
        filler = [PrefixGroup((min(samples, key=lambda i: len(batch.tokens[i])),))]
        packed = []
        for number in range(count):
            of_ranks = [one[number] if number < len(one) else [] for one in plan]
            own, least = of_ranks[parallel_state.get_data_parallel_rank()], 0
            if self._packing.equal_totals:
                least = max(self._packing.length(batch, groups or filler) for groups in of_ranks)
            routes = self._routes(batch, [i for group in own or filler for i in group.samples])
            packed.append(
                self._packing.pack(
                    batch, own or filler, counts=bool(own), step_tokens=step_tokens, least=least, routes=routes
                )
            )
        return packed

    def _routes(self, batch: TrainBatch, samples: list[int]) -> list[np.ndarray[Any, Any]] | None:
        """The experts that the engine chose in this rank's layers, if they are replayed and it has such layers."""
        column, transformer = batch.routed_experts, self._settings.transformer
        if column is not None and transformer.num_moe_experts is None:
            raise TrainerError("the samples have routed experts to replay, but the model is not a mixture of experts.")
        if column is None or not self.routed_layers:
            return None
        found = column.take(samples, self.routed_layers)
        for i, routes in zip(samples, found, strict=True):
            check_routes(int(batch.sample_ids[i]), column.shapes[i], routes, self.routed_layers, transformer)
        return found


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
    total: dict[str, float] = {}
    for one in of_all_ranks(mine):
        add_sums(total, one)
    return total


def add_sums(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add `more` to `total` in place, name by name; names that end in `_max` keep the maximum."""
    for name, value in more.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value
