"""The critic: a value model beside the policy on the same ranks, with its own optimizer and part of the checkpoint.

It is the policy's transformer with one number for each position instead of logits.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from slime.errors import CheckpointError
from slime.observe.timing import timed
from slime.plugin.architecture import Architecture
from slime.train.checkpoint_io import Write, write_now
from slime.train.chunks import build_chunks
from slime.train.features import Feature
from slime.train.lora import merged_values
from slime.train.loss import LossColumns
from slime.train.model import TrainableModel
from slime.train.packing import PackedMicroBatch
from slime.train.settings import TrainSettings
from slime.weights.hf_load import load_hf_backbone
from slime.weights.models import Models
from slime.weights.shards import global_name

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.rollout.train_batch import TrainBatch


#: its folder inside the trainer's part of a checkpoint
CRITIC_PART = "critic"


class Critic(Feature):
    """The policy's transformer with a `ValueHead`, under the same parallel layout. Every method is collective.

    It starts from the policy's weights or from those of `--critic-load`. Optimizer and schedule have the policy's
    options except for the learning rate (`--critic-lr`).

    Attributes:
        model: The value model with its optimizer and schedule.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: TrainSettings,
        *,
        policy: list[Any],
        models: Models,
        architecture: Architecture | None,
        device: torch.device,
    ) -> None:
        """Build the critic.

        Args:
            config: The run's configuration.
            settings: The policy's settings.
            policy: The policy's bare chunks, with the weights that the run starts from.
            models: Reads the folder of `--critic-load`.
            architecture: The model of `--hf-checkpoint`, if the run has one.
            device: Where to put the model.

        Raises:
            ConfigError: `--critic-load` is of another architecture.
            CheckpointError: `--critic-load` cannot be read.
        """
        lr, folder = config.algorithm.critic_lr, config.algorithm.critic_load
        self._options, self._policy = config.algorithm, policy
        settings = _with_learning_rate(settings, lr)
        chunks = build_chunks(settings, device, value_model)
        if folder is None:
            copy_backbone(policy, chunks)
        else:
            _load_hf(chunks, Path(folder), models, architecture)
        lr_flag = "--lr" if lr is None else "--critic-lr"
        self.model = TrainableModel(config, settings, chunks, value_head, device, lr_flag=lr_flag)

    def values(self, batch: TrainBatch) -> Tensor:
        """[sum of T_i] float32 on the CPU, the same on every rank, masked tokens included.

        V_t is the value of the state before token t: of the prompt and the response's tokens up to t - 1.
        """
        return self.model.forward(batch.without_routes())

    def train(
        self, batch: TrainBatch, steps: Sequence[int], columns: LossColumns, seconds: dict[str, float]
    ) -> dict[str, float]:
        """One optimizer step for each of `steps`, with the samples of its number; metrics, the same on every rank.

        Raises:
            TrainerError: The loss or the gradient is not finite.
        """
        loss = partial(micro_batch_value_loss, self._options.value_clip, columns)
        with timed(seconds, "time/critic"):
            sums, grad_norm, lr = self.model.train(batch.without_routes(), steps, loss, {}, "critic, ")
        return value_metrics(columns) | {
            "value_loss": sums["loss"] / len(steps),
            "value_clip_fraction": sums["clipped"] / max(sums["tokens"], 1.0),
            "critic_grad_norm": grad_norm,
            "critic_lr": lr,
        }

    def save(self, folder: Path, write: Write = write_now) -> None:
        """Write weights, optimizer and schedule into the trainer's part of a checkpoint, beside the policy's."""
        self.model.save(folder / CRITIC_PART, write)

    def models(self) -> Sequence[TrainableModel]:
        """The value model."""
        return (self.model,)

    def check(self, folder: Path, *, weights_only: bool) -> None:
        """Refuse a trainer's part of a checkpoint that has no critic, before anything of it is read.

        Raises:
            CheckpointError: It has none.
        """
        if not weights_only and not (folder / CRITIC_PART / "metadata.json").is_file():
            raise CheckpointError(
                f"{folder} was saved by a run without a critic (it has no {CRITIC_PART}/), and this run's estimator"
                " needs one: resuming would continue with an untrained critic. Load a checkpoint of a run with a"
                " critic, or start a new run from these weights with --initial-megatron-checkpoint."
            )

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Read what `save` wrote, under any parallel layout.

        Args:
            folder: The trainer's part of a checkpoint.
            weights_only: For a new run, once the policy has its weights: take the saved critic's weights or, if the
                checkpoint has no critic, the policy's. `--critic-load` goes before both.
        """
        part = folder / CRITIC_PART
        if weights_only and self._options.critic_load is not None:
            return
        if weights_only and not part.is_dir():
            self.model.finish_param_gather()
            copy_backbone(self._policy, self.model.chunks)
            self.model.optimizer.reload_model_params()
            return
        self.model.load(part, weights_only=weights_only)


def _load_hf(chunks: list[Any], folder: Path, models: Models, architecture: Architecture | None) -> None:
    """Read a Hugging Face folder; a reward model's `score.weight` [1, H] becomes the value head."""
    found = models.read_same(folder, architecture, "--critic-load", output_layer=False)
    score = load_hf_backbone(chunks, folder, found)
    for module in (module for chunk in chunks for module in chunk.modules()):
        if score is not None and isinstance(module, ValueHead):
            with torch.no_grad():
                module.weight.copy_(score)


def _with_learning_rate(settings: TrainSettings, lr: float | None) -> TrainSettings:
    """The policy's settings for another model: its own copies of what Megatron writes to, and its learning rate."""
    optimizer = copy.copy(settings.optimizer)
    if lr is not None:
        optimizer.lr = lr
    return dataclasses.replace(settings, transformer=copy.copy(settings.transformer), optimizer=optimizer)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), and 1 where the clipped error is larger, [M].

    Within the range both errors are the same number, which rounding must not call different.

    The clipped value loss of Schulman et al.'s own implementation (see Engstrom et al., 2020, arXiv 2005.12729,
    section 3): a token whose value has moved more than `clip` towards the return has no gradient any more.
    """
    plain = (values - returns).square()
    moved = values - old_values
    clipped = (old_values + moved.clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), ((clipped > plain) & (moved.abs() > clip)).float()


def micro_batch_value_loss(
    clip: float, columns: LossColumns, micro_batch: PackedMicroBatch, values: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to differentiate, and sums over trained tokens for the metrics.

    Tokens outside the mask are taken out before anything is computed from them. A micro-batch that does not count
    gives a zero that still carries gradients, so that all ranks go through the same steps.

    Args:
        clip: `--value-clip`.
        columns: Data of the whole batch.
        micro_batch: Which of its M response tokens are here.
        values: [M] the critic's current values, with gradient.
    """
    if not micro_batch.counts:
        return values.sum() * 0.0, {}
    assert columns.values is not None and columns.returns is not None
    here = micro_batch.places
    mask = columns.mask[here]
    values, old, returns = (
        torch.where(mask > 0, part, 0.0) for part in (values, columns.values[here], columns.returns[here])
    )
    per_token, clipped = value_loss(values, old, returns, clip)
    loss = (columns.weights[here] * per_token).sum()
    return loss, {"tokens": mask.sum(), "clipped": (clipped * mask).sum(), "loss": loss.detach()}


def value_metrics(columns: LossColumns) -> dict[str, float]:
    """Statistics of the trained tokens: mean of values and returns, standard deviation of the returns, and
    `explained_variance`, 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one; absent if all
    returns are equal.
    """
    assert columns.values is not None and columns.returns is not None
    trained = columns.mask > 0
    values, returns = columns.values[trained].double(), columns.returns[trained].double()
    if not returns.numel():
        return {}
    spread = returns.var(correction=0)
    metrics = {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "return_std": float(spread.sqrt()),
    }
    if spread > 0:
        metrics["explained_variance"] = float(1 - (returns - values).var(correction=0) / spread)
    return metrics


def value_head(values: Tensor, micro_batch: PackedMicroBatch) -> tuple[Tensor, ...]:
    """The value before each response token [M_l], read from values [1, L, 1] at the rows that predict the tokens."""
    return (values[0, :, 0][micro_batch.rows].float(),)


class ValueHead(torch.nn.Module):
    """hidden [L, 1, H] -> values [L, 1, 1] float32: a product with one vector, without bias, initially zero.

    Zero, so that the first values are 0 under every layout and the first advantages are the returns themselves; the
    vector gets a gradient from the first step on. No bias: after the final norm a constant direction of the hidden
    state does the same, and a single weight would move by no more than the learning rate in a step. The product is
    float32 even if the transformer is not; the vector has the transformer's precision, as the hidden state does (the
    optimizer keeps it in float32), since Megatron's optimizers cannot save parameters of two precisions.
    Tensor-parallel ranks hold copies; under sequence parallelism each computes the values of its part of the tokens,
    and gradients are summed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Called in place of Megatron's output layer, which returns (output, bias)."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the same loss from all values, so the gradient is cut to its part, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def value_model(
    config: Any,
    spec: Any,
    *,
    pre_process: bool,
    post_process: bool,
    vocab_size: int,
    share_embeddings_and_output_weights: bool,  # noqa: ARG001 - there is no output layer to share with
    **rest: Any,
) -> GPTModel:
    """A GPTModel that ends in a `ValueHead` and never holds an output layer over the vocabulary."""
    model = GPTModel(
        config,
        spec,
        pre_process=pre_process,
        post_process=post_process,
        # Megatron always builds an output layer. On a stage with an embedding it allocates no weight if they are
        # shared; on others the vocabulary serves nothing else, so the smallest size that ranks can divide is enough.
        vocab_size=vocab_size if pre_process else config.tensor_model_parallel_size,
        share_embeddings_and_output_weights=pre_process and post_process,
        **rest,
    )
    model.share_embeddings_and_output_weights = False
    if post_process:
        model.output_layer = ValueHead(config)
    return model


def copy_backbone(policy: Sequence[Any], critic: Sequence[Any]) -> None:
    """Copy the policy's weights into the critic's bare chunks, except for the output layer; adapters are merged."""
    values_of = merged_values(policy)
    for policy_chunk, critic_chunk in zip(policy, critic, strict=True):
        source = dict(_backbone(policy_chunk))
        with torch.no_grad():
            for name, tensor in _backbone(critic_chunk):
                tensor.copy_(values_of(global_name(name, policy_chunk), source[name]))


def _backbone(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
        if not name.startswith("output_layer."):
            yield name, tensor
