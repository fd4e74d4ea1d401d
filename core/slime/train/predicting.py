"""Multi-token prediction (MTP): layers behind the model that predict the tokens after the next one.

Layer k combines the hidden state of position i that the layer before it computed (of the first layer: the model) with
the embedding of token i + k, and predicts token i + k + 1 through the model's output layer (arXiv 2412.19437,
equations 21 to 25). Its loss is the cross-entropy of the response tokens that the policy is trained on.

It trains these layers and nothing else: hidden states, embedding and output layer are constants for it. So the policy's
gradients are, to the last bit, those of a run without it, and so is its step: the layers' gradients are not part of the
norm by which gradients are clipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from slime.errors import CheckpointError
from slime.train.checkpoint_reader import METADATA, read_metadata, require_complete
from slime.train.features import Feature
from slime.train.loss import LossColumns
from slime.train.output_layer import PolicyModel, spread
from slime.train.packing import PackedMicroBatch
from slime.train.schedule import LossFunction, TokenHead
from slime.weights.shards import PREDICTING

if TYPE_CHECKING:
    from slime.train.model import TrainableModel

#: weight of the loss relative to the policy's, unless --mtp-loss-scaling-factor says otherwise
LOSS_SCALE = 0.2


class PredictingModel(PolicyModel):
    """A PolicyModel with layers for multi-token prediction on its last pipeline stage. They run in training only."""

    looks_ahead = True  #: see `can_share_prompts`

    def __init__(self, config: Any, spec: Any, *, predicting: int, **keywords: Any) -> None:
        """Build the model.

        Args:
            config: Its TransformerConfig.
            spec: The specs of its decoder. The further layers are like its last layer.
            predicting: How many further layers there are.
            keywords: Further ones of GPTModel.
        """
        super().__init__(config, spec, **keywords)
        self._recompute = config.recompute_granularity == "full"
        self._states: tuple[Tensor, ...] = ()
        #: in a list, so that it is no part of the model
        self._copied_embedding: list[LanguageModelEmbedding] = []
        if not self.post_process:
            return
        layer = ModuleSpec(
            MultiTokenPredictionLayer,
            submodules=MultiTokenPredictionLayerSubmodules(
                enorm=spec.layer_norm,
                hnorm=spec.layer_norm,
                eh_proj=ColumnParallelLinear,
                transformer_layer=copy.deepcopy(spec.layer_specs[-1]),
                layer_norm=spec.layer_norm,
            ),
        )
        block = MultiTokenPredictionBlockSubmodules([layer] * predicting)
        self.mtp = MultiTokenPredictionBlock(_own_config(config), block, vp_stage=self.vp_stage)
        for parameter in self.mtp.parameters():
            parameter.shared = True  # Megatron leaves such parameters out of the gradients' norm
        if not self.pre_process:
            copied = LanguageModelEmbedding(
                config,
                self.vocab_size,
                self.max_sequence_length,
                self.position_embedding_type,
                tp_group=self.pg_collection.tp,
            )
            self._copied_embedding.append(copied)

    def take_states(self) -> tuple[Tensor, ...]:
        """[L, 1, H] of each further layer in the last forward pass, if that was one of training; only once."""
        states, self._states = self._states, ()
        return states

    def _postprocess(self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor, **rest: Any) -> Tensor:
        """Called by GPTModel with the decoder's output [L, 1, H], after the final norm."""
        if self.post_process and self.training and torch.is_grad_enabled():
            names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
            own = {name: rest[name] for name in names}
            self._states = self._further_states(hidden_states.detach(), input_ids, position_ids, own)
        return super()._postprocess(hidden_states, input_ids, position_ids, **rest)

    def _further_states(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, rest: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        # Megatron's recomputation gives no gradients to what is inside it if no input of it has one.
        hidden = hidden.requires_grad_(self._recompute)
        found = []
        for layer in self.mtp.layers:

            def run(state: Tensor, layer: Any = layer, ids: Tensor = tokens, at: Tensor = positions) -> Any:
                return layer(ids, at, state, embedding=self._constant_embedding, **rest)

            # Megatron's own recomputation of these layers cannot pass on how sequences are packed.
            hidden, tokens, positions = (
                tensor_parallel.checkpoint(run, False, hidden) if self._recompute else run(hidden)
            )
            found.append(hidden)
        return tuple(found)

    def _constant_embedding(self, **inputs: Tensor) -> Tensor:
        with torch.no_grad():
            embedded: Tensor = (self.embedding if self.pre_process else self._copied_embedding[0])(**inputs)
        return embedded

    def embedding_to_share(self) -> LanguageModelEmbedding | None:
        """The embedding of the first pipeline stage, or the copy of it on the last one."""
        if self.pre_process:
            embedding: LanguageModelEmbedding = self.embedding
            return embedding
        if not self._copied_embedding:
            return None
        [copied] = self._copied_embedding
        return copied.to(next(self.mtp.parameters()).device)


def _own_config(config: Any) -> Any:
    """The settings of the further layers: Megatron neither recomputes them whole nor balances their experts.

    Its records of balancing losses have no place for layers that the model itself does not have.
    """
    own = copy.copy(config)
    own.moe_router_load_balancing_type, own.moe_aux_loss_coeff, own.moe_z_loss_coeff = "none", 0.0, None
    if own.recompute_granularity == "full":
        own.recompute_granularity = own.recompute_method = own.recompute_num_layers = None
    return own


class FurtherLayers(Feature):
    """Trains the layers for multi-token prediction."""

    def __init__(self, count: int, *, scale: float, vocab_size: int) -> None:
        """
        Args:
            count: How many further layers are trained.
            scale: Weight of their loss, relative to the policy's.
            vocab_size: The vocabulary without padding.
        """
        self._count, self._scale, self._vocab_size = count, scale, vocab_size

    @property
    def model(self) -> Callable[..., PolicyModel]:
        """What a chunk of the policy is."""
        return partial(PredictingModel, predicting=self._count)

    def head(self, head: TokenHead, chunk: Any) -> TokenHead:
        """The policy's vectors, and in training for each further layer the log-probs [M_l] of the response tokens.

        They come from the model's own distribution, at temperature 1. The output layer gets no gradients from them.
        A response token that is not trained on has log-prob 0, and one so early that the layer has no position to
        predict it from.
        """
        vocab_size = self._vocab_size

        def whole(hidden: Tensor, micro_batch: PackedMicroBatch) -> tuple[Tensor, ...]:
            vectors = head(hidden, micro_batch)
            rows, trained = micro_batch.rows, micro_batch.trained_indices
            for number, states in enumerate(chunk.take_states(), start=1):
                within = micro_batch.positions[0, rows] >= number
                if trained is not None:
                    within &= spread(torch.ones_like(trained, dtype=torch.bool), trained, rows.numel())
                places = within.nonzero().squeeze(1)
                log_probs, _ = chunk.log_probs(
                    states,
                    rows[places] - number,
                    micro_batch.targets[places],
                    temperature=1.0,
                    vocab_size=vocab_size,
                    constant=True,
                )
                vectors = (*vectors, spread(log_probs, places, rows.numel()))
            return vectors

        return whole

    def before_step(self, model: TrainableModel) -> None:
        """Copy the embedding to the last pipeline stage, whose further layers need it."""
        model.finish_param_gather()  # its weights must be complete
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        for chunk in model.chunks:
            if (embedding := chunk.embedding_to_share()) is not None:
                weight = embedding.word_embeddings.weight.data
                dist.broadcast(weight, group=parallel_state.get_embedding_group(), group_src=0)

    def loss(self, loss: LossFunction, columns: LossColumns) -> LossFunction:
        """The policy's loss plus `scale` times the mean of the further layers' losses, with the same weights of tokens.

        It is one of the vectors of `head`, and its sums have the unscaled cross-entropy as `mtp_loss`.
        """

        def whole(
            micro_batch: PackedMicroBatch, log_probs: Tensor, entropy: Tensor, *further: Tensor
        ) -> tuple[Tensor, Any]:
            total, sums = loss(micro_batch, log_probs, entropy)
            table = torch.stack(further)
            if not micro_batch.counts:
                return total + table.sum() * 0.0, sums
            here = micro_batch.places
            cross_entropy = torch.where(columns.mask[here] > 0, -table, 0.0).mean(0)
            sums = sums | {"mtp_loss": cross_entropy.detach().sum()}
            return total + self._scale * (columns.weights[here] * cross_entropy).sum(), sums

        return whole

    def check(self, folder: Path, *, weights_only: bool) -> None:  # noqa: ARG002 - in both cases
        """Refuse a checkpoint of a run that did not train them, before anything of it is read (`CheckpointError`)."""
        if not _has_layers(folder):
            raise CheckpointError(
                f"{folder} was saved by a run that did not train layers for multi-token prediction. Resume without"
                " --enable-mtp-training, or write the checkpoint as a model folder (slime convert CHECKPOINT DIR) and"
                " start from that."
            )


def refuse_layers(folder: Path, *, weights_only: bool) -> None:
    """Refuse to resume a checkpoint that holds such layers without training them; a new run may leave them out.

    Raises:
        CheckpointError: It holds some, or is incomplete or damaged.
    """
    if not weights_only and _has_layers(folder):
        raise CheckpointError(
            f"{folder} holds layers for multi-token prediction that its run trained, and this run would lose what"
            " they have learned. Add --enable-mtp-training."
        )


def _has_layers(folder: Path) -> bool:
    """Whether a checkpoint holds such layers. It may be incomplete or damaged (`CheckpointError`)."""
    require_complete(folder)
    return any(name.startswith(f"{PREDICTING}.") for name in read_metadata(folder / METADATA).state_dict_metadata)
