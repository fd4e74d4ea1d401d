"""A model as Megatron builds it, and how each of its tensors maps to Hugging Face and to the engine.

A model family turns a `config.json` into an `Architecture`. Its rules are used for loading, gathering and checking, so
that a name or a layout is written once. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

_LISTED = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """How one Megatron tensor corresponds to Hugging Face tensors.

    Attributes:
        megatron: Parameter name in Megatron's own (not TransformerEngine's) spelling, with layers counted over the
            whole model.
        hf: Hugging Face names, in the order of the layout.
        engine: Parameter name inside SGLang, which joins q, k, v and gate, up.
        layout: How the Hugging Face tensors form the Megatron tensor.
            concat: A rank holds its part of each tensor, one after another along `parallel_dim`.
            vocab: Rows are the vocabulary, to which Megatron and SGLang append padding.
            qkv: For each query group: its query heads, its key head, its value head.
        parallel_dim: Dimension divided by tensor parallelism, in Megatron and in SGLang. None: every rank has the whole
            tensor.
    """

    megatron: str
    hf: tuple[str, ...]
    engine: str
    layout: Literal["concat", "vocab", "qkv"] = "concat"
    parallel_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that layouts depend on. Heads and groups are counted over the whole model."""

    vocab: int
    heads: int
    groups: int
    head_dim: int

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the query, key and value matrices."""
        return self.heads * self.head_dim, self.groups * self.head_dim, self.groups * self.head_dim


@dataclass(frozen=True)
class Architecture:
    """A model in Megatron-core's terms.

    Attributes:
        family: `model_type` of the configuration.
        transformer: Keywords of `TransformerConfig`, all JSON-able: `activation_func` is a name such as "silu".
        gpt: Keywords of `GPTModel`: vocab_size (unpadded), max_sequence_length, position_embedding_type, rotary_base,
            rotary_percent, rope_scaling, rope_scaling_factor, share_embeddings_and_output_weights.
        rules: One rule for each Megatron tensor.
    """

    family: str
    transformer: dict[str, Any]
    gpt: dict[str, Any]
    rules: tuple[Rule, ...]

    @property
    def sizes(self) -> Sizes:
        """The sizes that layouts depend on."""
        return Sizes(
            vocab=self.gpt["vocab_size"],
            heads=self.transformer["num_attention_heads"],
            groups=self.transformer["num_query_groups"],
            head_dim=self.transformer["kv_channels"],
        )


def embedding_rules(*, tied: bool) -> Iterator[Rule]:
    """Input embedding, final norm and, unless tied to the embedding, the output layer."""
    embedding = "model.embed_tokens.weight"
    yield Rule("embedding.word_embeddings.weight", (embedding,), embedding, "vocab", 0)
    yield _same_name("decoder.final_layernorm.weight", "model.norm.weight")
    if not tied:
        yield Rule("output_layer.weight", ("lm_head.weight",), "lm_head.weight", "vocab", 0)


def layer_norm_rules(layer: int) -> Iterator[Rule]:
    """The two norms of a pre-norm decoder layer."""
    megatron, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    yield _same_name(f"{megatron}.input_layernorm.weight", f"{hf}.input_layernorm.weight")
    yield _same_name(f"{megatron}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight")


def attention_rules(layer: int, *, qk_norm: bool) -> Iterator[Rule]:
    """Grouped-query self-attention without biases, with or without norms on queries and keys."""
    megatron, hf = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    projections = tuple(f"{hf}.{part}_proj.weight" for part in "qkv")
    yield Rule(f"{megatron}.linear_qkv.weight", projections, f"{hf}.qkv_proj.weight", "qkv", 0)
    yield _same_name(f"{megatron}.linear_proj.weight", f"{hf}.o_proj.weight", parallel_dim=1)
    if qk_norm:
        for part in "qk":
            yield _same_name(f"{megatron}.{part}_layernorm.weight", f"{hf}.{part}_norm.weight")


def gated_mlp_rules(layer: int) -> Iterator[Rule]:
    """A dense gated feed-forward network without biases."""
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    projections = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
    yield Rule(f"{megatron}.linear_fc1.weight", projections, f"{hf}.gate_up_proj.weight", parallel_dim=0)
    yield _same_name(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", parallel_dim=1)


def _same_name(megatron: str, hf: str, *, parallel_dim: int | None = None) -> Rule:
    """One Hugging Face tensor that the engine holds under the same name."""
    return Rule(megatron, (hf,), hf, parallel_dim=parallel_dim)


def first_names(names: Iterable[str]) -> str:
    """The first names in order, and how many more there are; for messages."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more
