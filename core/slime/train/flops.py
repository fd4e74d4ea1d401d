"""What a sequence costs: the operations of its forward pass, by which the work of ranks is balanced."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slime.train.routing import is_mixture


@dataclass(frozen=True)
class Flops:
    """Operations of one sequence's forward pass; a multiplication and an addition count as two.

    Norms, activations and rotary embeddings are left out: their share is well below a hundredth. A training step costs
    three times as much, four times with full activation recomputation.

    Attributes:
        per_token: In the matrix products with weights. Of a mixture of experts, those that a token is sent to.
        per_prediction: In the output layer, which runs only for tokens that are trained on.
        per_pair: In attention, for a query and a key that it sees, over all layers.
    """

    per_token: float
    per_prediction: float
    per_pair: float

    @classmethod
    def of(cls, transformer: TransformerConfig, *, vocab_size: int) -> Flops:
        """Of a language model. A critic, whose last layer has one row, costs a little less."""
        hidden, heads = transformer.hidden_size, transformer.num_attention_heads
        if isinstance(transformer, MLATransformerConfig):
            query_dim, value_dim = transformer.qk_head_dim + transformer.qk_pos_emb_head_dim, transformer.v_head_dim
            attention = _latent_attention_weights(transformer)
        else:
            query_dim = value_dim = transformer.kv_channels
            attention = hidden * query_dim * 2 * (heads + transformer.num_query_groups)
        mixtures = sum(is_mixture(transformer))
        weights = transformer.num_layers * attention
        weights += (transformer.num_layers - mixtures) * _feed_forward_weights(transformer, transformer.ffn_hidden_size)
        if mixtures:
            chosen = transformer.moe_router_topk * transformer.moe_ffn_hidden_size
            shared = transformer.moe_shared_expert_intermediate_size or 0
            router = hidden * transformer.num_moe_experts
            weights += mixtures * (router + _feed_forward_weights(transformer, chosen + shared))
        pairs = transformer.num_layers * heads * (query_dim + value_dim)
        return cls(per_token=2.0 * weights, per_prediction=2.0 * hidden * vocab_size, per_pair=2.0 * pairs)

    def __call__(self, tokens: int, trained: int) -> float:
        """Operations of a sequence of so many tokens, each of which sees itself and all before it.

        Args:
            tokens: Of the whole sequence.
            trained: Those of them that are trained on.
        """
        return self.per_token * tokens + self.per_prediction * trained + self.per_pair * tokens * (tokens + 1) / 2


def _latent_attention_weights(transformer: MLATransformerConfig) -> int:
    hidden, heads = transformer.hidden_size, transformer.num_attention_heads
    queries = heads * (transformer.qk_head_dim + transformer.qk_pos_emb_head_dim)
    rank, kv_rank = transformer.q_lora_rank, transformer.kv_lora_rank
    weights: int = (
        (hidden * queries if rank is None else rank * (hidden + queries))
        + hidden * (kv_rank + transformer.qk_pos_emb_head_dim)
        + kv_rank * heads * (transformer.qk_head_dim + transformer.v_head_dim)
        + heads * transformer.v_head_dim * hidden
    )
    return weights


def _feed_forward_weights(transformer: TransformerConfig, width: int) -> int:
    hidden: int = transformer.hidden_size
    return hidden * width * (3 if transformer.gated_linear_unit else 2)
