"""Rules for the usual layers of decoders, in the names of Megatron, of most Hugging Face models, and of SGLang.

Layers count from 0 over the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from slime.plugin.architecture import Experts, PredictingLayers, Rule, Rules


def norm_rule(megatron: str, hf: str, size: int) -> Rule:
    """A norm's weight, or any other vector of which every rank has the whole; the engine has the Hugging Face name."""
    return Rule(megatron, {hf: (size,)}, hf)


def embedding_rules(vocabulary: int, hidden: int, *, tied: bool) -> Iterator[Rule]:
    """Input embedding, final norm and, unless tied to the embedding, the output layer."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    yield Rule("embedding.word_embeddings.weight", {embedding: (vocabulary, hidden)}, embedding, "vocab", 0)
    yield norm_rule("decoder.final_layernorm.weight", "model.norm.weight", hidden)
    if not tied:
        yield Rule("output_layer.weight", {output: (vocabulary, hidden)}, output, "vocab", 0)


def attention_rules(
    layer: int, *, hidden: int, heads: int, groups: int, head_dim: int, bias: bool = False, qk_norm: bool = False
) -> Iterator[Rule]:
    """Grouped-query self-attention and the norm before it.

    Args:
        layer: Its number.
        hidden: Size of the hidden state.
        heads: Query heads.
        groups: Key and value heads.
        head_dim: Size of a head.
        bias: Whether queries, keys and values have biases.
        qk_norm: Whether the queries and keys of each head are normalised.
    """
    megatron, hf = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    rows = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
    yield norm_rule(
        f"decoder.layers.{layer}.input_layernorm.weight", f"model.layers.{layer}.input_layernorm.weight", hidden
    )
    weights = {f"{hf}.{part}_proj.weight": (count, hidden) for part, count in rows.items()}
    yield Rule(f"{megatron}.linear_qkv.weight", weights, f"{hf}.qkv_proj.weight", "qkv", 0, groups=groups)
    if bias:
        biases = {f"{hf}.{part}_proj.bias": (count,) for part, count in rows.items()}
        yield Rule(f"{megatron}.linear_qkv.bias", biases, f"{hf}.qkv_proj.bias", "qkv", 0, groups=groups)
    yield _same_name(f"{megatron}.linear_proj.weight", f"{hf}.o_proj.weight", (hidden, heads * head_dim), 1)
    if qk_norm:
        for part in "qk":
            yield norm_rule(f"{megatron}.{part}_layernorm.weight", f"{hf}.{part}_norm.weight", head_dim)


def latent_attention_rules(
    layer: int,
    *,
    hidden: int,
    heads: int,
    query_rank: int | None,
    rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
) -> Iterator[Rule]:
    """Multi-head latent attention (DeepSeek-V2, 2024) and the norm before it.

    Args:
        layer: Its number.
        hidden: Size of the hidden state.
        heads: Attention heads.
        query_rank: Size of the latent vector of queries; None if they are projected directly.
        rank: Size of the latent vector that keys and values share.
        nope_dim: Size of a head's part without positions.
        rope_dim: Size of its rotated part, which the key heads share.
        value_dim: Size of a value head.
    """
    megatron, hf = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    query_rows = heads * (nope_dim + rope_dim)
    yield norm_rule(
        f"decoder.layers.{layer}.input_layernorm.weight", f"model.layers.{layer}.input_layernorm.weight", hidden
    )
    down = f"{hf}.kv_a_proj_with_mqa.weight"
    if query_rank is None:
        yield _same_name(f"{megatron}.linear_q_proj.weight", f"{hf}.q_proj.weight", (query_rows, hidden), 0)
        yield _same_name(f"{megatron}.linear_kv_down_proj.weight", down, (rank + rope_dim, hidden), None)
    else:
        joined = f"{hf}.fused_qkv_a_proj_with_mqa.weight"
        yield Rule(f"{megatron}.linear_q_down_proj.weight", {f"{hf}.q_a_proj.weight": (query_rank, hidden)}, joined)
        yield Rule(f"{megatron}.linear_kv_down_proj.weight", {down: (rank + rope_dim, hidden)}, joined)
        yield norm_rule(f"{megatron}.q_layernorm.weight", f"{hf}.q_a_layernorm.weight", query_rank)
        yield _same_name(f"{megatron}.linear_q_up_proj.weight", f"{hf}.q_b_proj.weight", (query_rows, query_rank), 0)
    yield norm_rule(f"{megatron}.kv_layernorm.weight", f"{hf}.kv_a_layernorm.weight", rank)
    up_rows = heads * (nope_dim + value_dim)
    yield _same_name(f"{megatron}.linear_kv_up_proj.weight", f"{hf}.kv_b_proj.weight", (up_rows, rank), 0)
    yield _same_name(f"{megatron}.linear_proj.weight", f"{hf}.o_proj.weight", (hidden, heads * value_dim), 1)


def gated_mlp_rules(layer: int, *, hidden: int, ffn: int, joined: bool = False) -> Iterator[Rule]:
    """A gated feed-forward network without biases, and the norm before it.

    Args:
        layer: Its number.
        hidden: Size of the hidden state.
        ffn: Size of the inner state.
        joined: Whether the files have gate and up projection as one tensor.
    """
    yield _norm_before_mlp(layer, hidden)
    yield from _gated_mlp(f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", hidden, ffn, joined=joined)


def mixture_rules(
    layer: int, *, hidden: int, experts: int, ffn: int, shared_ffn: int = 0, expert_bias: bool = False
) -> Rules:
    """A mixture of gated experts with its router, and the norm before it.

    Args:
        layer: Its number.
        hidden: Size of the hidden state.
        experts: Number of routed experts.
        ffn: Size of a routed expert's inner state.
        shared_ffn: Size of the inner state of the shared experts together; 0 if there are none.
        expert_bias: Whether the router adds a bias to an expert's score when it chooses (DeepSeek-V3, 2024).
    """
    megatron, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    inwards, outwards = (ffn, hidden), (hidden, ffn)
    engine_up, engine_down = f"{hf}.experts.w13_weight", f"{hf}.experts.w2_weight"

    def of_expert(expert: int) -> tuple[Rule, ...]:
        theirs, ours = f"{hf}.experts.{expert}", f"{megatron}.experts.local_experts.{expert}"
        up = {f"{theirs}.gate_proj.weight": inwards, f"{theirs}.up_proj.weight": inwards}
        down = {f"{theirs}.down_proj.weight": outwards}
        return (
            Rule(f"{ours}.linear_fc1.weight", up, engine_up, parallel_dim=0, expert=expert),
            Rule(f"{ours}.linear_fc2.weight", down, engine_down, parallel_dim=1, expert=expert),
        )

    def parts() -> Iterator[Rule | Experts]:
        yield _norm_before_mlp(layer, hidden)
        yield _same_name(f"{megatron}.router.weight", f"{hf}.gate.weight", (experts, hidden), None)
        if expert_bias:
            yield norm_rule(f"{megatron}.router.expert_bias", f"{hf}.gate.e_score_correction_bias", experts)
        yield Experts(experts, of_expert)
        if shared_ffn:
            yield from _gated_mlp(
                f"{megatron}.shared_experts", f"{hf}.shared_experts", hidden, shared_ffn, joined=False
            )

    return Rules(parts())


def predicting_layers(
    first: int, count: int, decoder_layer: Callable[[int], Iterable[Rule]], *, hidden: int, tied: bool
) -> PredictingLayers | None:
    """Layers for multi-token prediction (DeepSeek-V3, 2024, section 2.2), or None if there are none.

    Each is a projection of a hidden state and the next token's embedding, both normalised, a decoder layer, and a norm
    before the output layer. Embedding and output layer are the model's; published files repeat them. An engine that
    speculates with such a layer has it as a model of its own.

    Args:
        first: Number of the first of them in Hugging Face names, which go on counting behind the model's layers.
        count: How many there are.
        decoder_layer: The rules of their decoder layers, for such a number as if it were one of the model's layers.
        hidden: Size of the hidden state.
        tied: Whether the output layer is the embedding.
    """
    rules: list[Rule] = []
    copies = {}
    for number in range(count):
        layer = first + number
        megatron, hf = f"mtp.layers.{number}", f"model.layers.{layer}"
        own = [norm_rule(f"{megatron}.{part}.weight", f"{hf}.{part}.weight", hidden) for part in ("enorm", "hnorm")]
        projection = _same_name(f"{megatron}.eh_proj.weight", f"{hf}.eh_proj.weight", (hidden, 2 * hidden), 0)
        own.append(replace(projection, engine_whole=True))
        own.append(norm_rule(f"{megatron}.final_layernorm.weight", f"{hf}.shared_head.norm.weight", hidden))
        rules += [replace(one, engine=one.engine.replace(hf, "draft.model", 1)) for one in own]
        for one in decoder_layer(layer):
            named = one.megatron.replace(f"decoder.layers.{layer}", f"{megatron}.transformer_layer", 1)
            rules.append(replace(one, megatron=named, engine=one.engine.replace(hf, "draft.model.decoder", 1)))
        copies[f"{hf}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"{hf}.shared_head.head.weight"] = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return PredictingLayers(count, tuple(rules), copies) if count else None


def _norm_before_mlp(layer: int, hidden: int) -> Rule:
    return norm_rule(
        f"decoder.layers.{layer}.pre_mlp_layernorm.weight",
        f"model.layers.{layer}.post_attention_layernorm.weight",
        hidden,
    )


def _gated_mlp(megatron: str, hf: str, hidden: int, ffn: int, *, joined: bool) -> Iterator[Rule]:
    engine = f"{hf}.gate_up_proj.weight"
    if joined:
        yield Rule(f"{megatron}.linear_fc1.weight", {engine: (2 * ffn, hidden)}, engine, parallel_dim=0, parts=2)
    else:
        projections = {f"{hf}.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
        yield Rule(f"{megatron}.linear_fc1.weight", projections, engine, parallel_dim=0)
    yield _same_name(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, ffn), 1)


def _same_name(megatron: str, hf: str, shape: tuple[int, ...], parallel_dim: int | None) -> Rule:
    """One Hugging Face tensor that the engine holds under the same name."""
    return Rule(megatron, {hf: shape}, hf, parallel_dim=parallel_dim)
