"""One row of a family's name table: a Megatron tensor, the Hugging Face tensors it holds, and how.

The same rows serve loading (Hugging Face to Megatron), exporting (the way back) and checking (what an engine
must hold), so a name or a layout is written down once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["copy", "vocab", "gate_up", "qkv"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one Megatron tensor corresponds to Hugging Face tensors.

    megatron: global parameter name, layers counted over the whole model, local (not TransformerEngine)
        spelling.
    hf: the Hugging Face names, in the order the kind expects.
    kind:
        copy: the same tensor.
        vocab: rows are the vocabulary; Megatron appends rows of padding.
        gate_up: [gate; up], each [intermediate, hidden]; a tensor-parallel rank holds its rows of both.
        qkv: per query group, its query heads, then its key head, then its value head.
    engine: the parameter's name inside SGLang, which stores q, k, v and gate, up joined.
    parallel_dim: dimension that tensor parallelism divides, in Megatron and in the engine; None: every rank has
        the whole tensor.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    engine: str
    parallel_dim: int | None


def copied(megatron: str, hf: str, *, parallel_dim: int | None = None) -> Rule:
    """A tensor that is the same everywhere, the engine's name included."""
    return Rule(megatron, (hf,), "copy", hf, parallel_dim)


def embedding_rules(*, tied: bool) -> Iterator[Rule]:
    """Input embedding, final norm and, unless tied to the embedding, the output layer."""
    embed = "model.embed_tokens.weight"
    yield Rule("embedding.word_embeddings.weight", (embed,), "vocab", embed, 0)
    yield copied("decoder.final_layernorm.weight", "model.norm.weight")
    if not tied:
        yield Rule("output_layer.weight", ("lm_head.weight",), "vocab", "lm_head.weight", 0)


def layer_norm_rules(layer: int) -> Iterator[Rule]:
    """The two norms of a pre-norm decoder layer."""
    megatron, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    yield copied(f"{megatron}.input_layernorm.weight", f"{hf}.input_layernorm.weight")
    yield copied(f"{megatron}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight")


def attention_rules(layer: int, *, qk_norm: bool) -> Iterator[Rule]:
    """Grouped-query self-attention without biases, with or without norms on queries and keys."""
    megatron, hf = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    yield Rule(
        f"{megatron}.linear_qkv.weight",
        tuple(f"{hf}.{part}_proj.weight" for part in "qkv"),
        "qkv",
        f"{hf}.qkv_proj.weight",
        0,
    )
    yield copied(f"{megatron}.linear_proj.weight", f"{hf}.o_proj.weight", parallel_dim=1)
    if qk_norm:
        for part in "qk":
            yield copied(f"{megatron}.{part}_layernorm.weight", f"{hf}.{part}_norm.weight")


def gated_mlp_rules(layer: int) -> Iterator[Rule]:
    """A dense gated feed-forward without biases."""
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    yield Rule(
        f"{megatron}.linear_fc1.weight",
        (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"),
        "gate_up",
        f"{hf}.gate_up_proj.weight",
        0,
    )
    yield copied(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", parallel_dim=1)
