"""A model as Megatron builds it, and how each of its tensors maps to Hugging Face and to the engine.

A model family turns a `config.json` into an `Architecture`. Its rules are used for loading, gathering and checking, so
that a name or a layout is written once. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

_LISTED = 8
#: some tools write it for a tied model too, as a copy of the embedding
HF_OUTPUT_LAYER = "lm_head.weight"
#: the one-number head of a Hugging Face sequence classification model
SCORE = "score.weight"
#: ends of tensor names that checkpoints may hold although they are not weights
_NOT_WEIGHTS = (".rotary_emb.inv_freq",)


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


def tensor_shapes(model: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every Hugging Face tensor of the model, by name."""
    hidden, ffn, sizes = model.transformer["hidden_size"], model.transformer["ffn_hidden_size"], model.sizes
    #: end of the Megatron name -> shape; all other tensors are norms over the hidden dimension
    ends = {
        "linear_proj.weight": (hidden, sizes.heads * sizes.head_dim),
        "linear_fc1.weight": (ffn, hidden),
        "linear_fc2.weight": (hidden, ffn),
        "q_layernorm.weight": (sizes.head_dim,),
        "k_layernorm.weight": (sizes.head_dim,),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in model.rules:
        if rule.layout == "qkv":
            shapes |= {name: (rows, hidden) for name, rows in zip(rule.hf, sizes.qkv_rows, strict=True)}
        elif rule.layout == "vocab":
            shapes |= dict.fromkeys(rule.hf, (sizes.vocab, hidden))
        else:
            end = next((shape for name, shape in ends.items() if rule.megatron.endswith(name)), (hidden,))
            shapes |= dict.fromkeys(rule.hf, end)
    return shapes


def wrong_names(found: Collection[str], expected: set[str], optional: set[str]) -> list[str]:
    """What is wrong with the names of a folder's tensors: missing ones, and unexpected ones."""
    missing = expected - set(found)
    unexpected = {name for name in set(found) - expected - optional if not name.endswith(_NOT_WEIGHTS)}
    return [
        f"{len(names)} {what}: {first_names(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]


def differences(ours: Architecture, theirs: Architecture, *, output_layer: bool = True) -> list[str]:
    """How two architectures differ, as "NAME OURS / THEIRS".

    Args:
        ours: One architecture.
        theirs: The other.
        output_layer: Whether the output layers must agree too.
    """
    return [
        f"{name} {mine.get(name)!r} / {other.get(name)!r}"
        for mine, other in ((ours.transformer, theirs.transformer), (ours.gpt, theirs.gpt))
        for name in sorted({*mine, *other})
        if mine.get(name) != other.get(name) and (output_layer or name != "share_embeddings_and_output_weights")
    ]


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
