"""The memory of a training rank's activations: what its layers keep for the backward pass.

A layer is a list of the tensors that it keeps (`_attention`, `_latent_attention`, `_dense`, `_mixture`), each with its
bytes for one token of the micro-batch. The lists follow `slime.train.attention`, `slime.train.experts` and
Megatron-core's modules. All else is how many tokens, layers and micro-batches there are at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config import RunConfig
from slime.kit.context_length import context_tokens
from slime.plugin.architecture import Architecture
from slime.weights.operations import mixtures
from slime_planner.pipeline_stages import virtual_stages


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch of a rank."""

    tokens: int  #: on this rank, which context parallelism gives a part of each sequence
    longest: int  #: tokens of its longest sequence, on all ranks
    text: str  #: which that is, for users


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of the activations of one rank."""

    kept: float  #: of all micro-batches in flight, from the forward pass
    again: float  #: of the layers or modules that the backward pass computes again at a time
    gradients: float  #: of activations and of experts' matrices, of a layer in its backward pass

    @property
    def backward(self) -> float:
        """What the backward pass of a layer needs in addition to what was kept."""
        return self.again + self.gradients

    def peak(self, logits: float) -> float:
        """Bytes at most; logits are gone when the first layer begins its backward pass."""
        return self.kept + max(self.backward, logits)


def largest_micro_batch(config: RunConfig) -> MicroBatch:
    """The largest micro-batch, and whether that is a bound or a guess."""
    rollout, algorithm = config.rollout, config.algorithm
    ranks = int(config.megatron.get("context_parallel_size", 1))
    context = context_tokens(config)
    prompt = rollout.rollout_max_prompt_len
    turn = (prompt or 0) + rollout.rollout_max_response_len
    longest = min(turn, context or turn)
    # Turns, tools and supervised answers may fill the context. How far they do, no option says.
    rest = "" if context is None or context <= longest else f"; a guess: the context has {context:,}"
    if prompt is None and not rest:
        rest = "; a guess: prompts are not counted"
    if (samples := algorithm.micro_batch_size) is not None:
        kind = rest or ", at most"
        return MicroBatch(-(-samples * longest // ranks), longest, f"{samples} x {longest:,} tokens{kind}")
    # A sequence that does not fit is a micro-batch by itself.
    filled, alone = algorithm.max_tokens_per_gpu, -(-longest // ranks)
    most = -(-(context or longest) // ranks)
    if alone > filled:
        return MicroBatch(alone, longest, f"{alone:,} tokens, the longest sequence alone{rest}")
    kind = ", at most" if most <= filled and (context or prompt) else f" of shorter sequences{rest}"
    return MicroBatch(filled, min(context or longest, filled * ranks), f"{filled:,} tokens{kind}")


def activation_memory(
    config: RunConfig, model: Architecture, stages: Sequence[int], micro_batch: MicroBatch
) -> list[Activations]:
    """What a rank of each pipeline stage keeps.

    Args:
        config: The run.
        model: Its model.
        stages: The pipeline stage of each layer.
        micro_batch: The largest micro-batch.
    """
    stated = config.megatron
    rank = _Rank.of(config, model, micro_batch)
    mixed = mixtures(model.transformer)
    kinds = {kind: list(rank.layer(mixture=kind)) for kind in set(mixed)}
    pipeline = int(stated.get("pipeline_model_parallel_size", 1))
    virtual = virtual_stages(config, len(stages))
    found = []
    gradients = max(
        rank.gradients(mixture) * micro_batch.tokens + (rank.of_experts() if mixture else 0) for mixture in kinds
    )
    for stage in range(pipeline):
        layers = [kinds[mixture] for mixture, here in zip(mixed, stages, strict=True) if here == stage]
        if stage == pipeline - 1 and model.predicts and model.predicting is not None:
            layers += [[*kinds[mixed[-1]], *rank.joined()]] * model.predicting.count
        kept, again = _recomputed(config, rank, layers, virtual)
        # What the schedule itself holds: the token ids, what came from the stage before and what went to the next.
        kept += virtual * (8 + rank.hidden * ((stage > 0) + (stage < pipeline - 1)))
        # The first of 1F1B's micro-batches returns when it has been through all later stages, and an interleaved
        # schedule runs ahead by more. A step is assumed to have so many.
        flying: float = pipeline - stage
        if virtual > 1:
            flying = (2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1) / virtual
        kept *= flying
        if stage == pipeline - 1:  # the final norm, and the rows that the output layer reads
            kept += sum(one.size for one in rank.norm(rank.width)) + rank.width * rank.bytes
        found.append(Activations(kept * micro_batch.tokens, again * micro_batch.tokens, gradients))
    return found


def layer_bytes(config: RunConfig, model: Architecture, micro_batch: MicroBatch, *, mixture: bool) -> float:
    """Bytes for one token of what a layer's modules hand to each other, all of which a forward pass writes."""
    return sum(one.size for one in _Rank.of(config, model, micro_batch).layer(mixture=mixture))


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that a layer keeps."""

    size: float  #: bytes for a token of the micro-batch
    modules: tuple[str, ...] = ()  #: the modules that compute it: if one of them is computed again, it is not kept


def _recomputed(config: RunConfig, rank: _Rank, layers: Sequence[Sequence[_Kept]], virtual: int) -> tuple[float, float]:
    """Bytes a token that these layers keep, and that the backward pass computes again at a time."""
    stated = config.megatron
    if not layers:
        return 0.0, 0.0
    # Layers of one kind are one list: each is added up once.
    kinds = {id(layer): layer for layer in layers}
    sums = {kind: sum(one.size for one in layer) for kind, layer in kinds.items()}
    whole = [sums[id(layer)] for layer in layers]
    if stated.get("recompute_granularity") == "full":
        each, count = int(stated.get("recompute_num_layers") or 1), len(layers)
        if stated.get("recompute_method") == "block":
            first = min(count, virtual * each)  # the first of each chunk; only they are computed again
            return first * rank.hidden + sum(whole[first:]), max(whole[:first]) if first == count else 0.0
        inputs = virtual * -(-count // (virtual * each))
        return inputs * rank.hidden, max(sum(whole[at : at + each]) for at in range(0, count, each))
    modules = set(rank.modules)
    left = {
        kind: sum(one.size for one in layer if not modules.intersection(one.modules)) for kind, layer in kinds.items()
    }
    kept = [left[id(layer)] for layer in layers]
    # The input of a norm is kept in place of its result.
    inputs_of_norms = 2 * rank.hidden * ("layernorm" in modules)
    again = max(all_of - some for all_of, some in zip(whole, kept, strict=True))
    return sum(kept) + inputs_of_norms * len(layers), again


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's share of a layer, for one token of its micro-batch.

    Attributes:
        model: Keywords of Megatron's configuration.
        post_norms: See `Architecture`.
        modules: What is computed again by itself.
        bytes: Of a number of weights and activations.
        cpu: Whether it is a process of a CPU.
        tensor: Tensor-parallel ranks, which divide heads and feed-forward networks.
        rows: The part of the tokens that this rank has outside of those: 1 / tensor with sequence parallelism.
        experts: Tensor-parallel ranks of an expert.
        expert_parallel: Ranks that divide the experts of a layer.
        context: Context-parallel ranks.
        longest: Tokens of the longest sequence.
        stock: Whether TransformerEngine's modules are used.
        fused: Whether a gated activation is one operation, which keeps only its input.
        stacks: Whether one product computes all experts (`slime_fused.experts`), from a copy of their matrices.
        linear: Bytes of a number that only a linear layer's backward pass reads: 1 in fp8.
        adapter_rank: Of LoRA; 0 without.
    """

    model: dict[str, Any]
    post_norms: bool
    modules: tuple[str, ...]
    bytes: int
    cpu: bool
    tensor: int
    rows: float
    experts: int
    expert_parallel: int
    context: int
    longest: int
    stock: bool
    fused: bool
    stacks: bool
    linear: int
    adapter_rank: int

    @classmethod
    def of(cls, config: RunConfig, model: Architecture, micro_batch: MicroBatch) -> _Rank:
        """Of a run."""
        stated, sizes = config.megatron, model.transformer
        half = bool(stated.get("bf16") or stated.get("fp16"))
        tensor = int(stated.get("tensor_model_parallel_size", 1))
        latent_or_experts = bool(sizes.get("multi_latent_attention") or sizes.get("num_moe_experts"))
        sequence = tensor > 1 and bool(stated.get("sequence_parallel", latent_or_experts))
        selective = stated.get("recompute_granularity") == "selective" or stated.get("recompute_activations")
        silu = sizes.get("activation_func") == "silu" and bool(sizes.get("gated_linear_unit"))
        return cls(
            model=sizes,
            post_norms=model.post_norms,
            modules=tuple(stated.get("recompute_modules") or ("core_attn",)) if selective else (),
            bytes=2 if half else 4,
            cpu=not config.on_gpu,
            tensor=tensor,
            rows=1 / tensor if sequence else 1,
            experts=int(stated.get("expert_tensor_parallel_size") or tensor),
            expert_parallel=int(stated.get("expert_model_parallel_size", 1)),
            context=int(stated.get("context_parallel_size", 1)),
            longest=micro_batch.longest,
            stock=config.layer_backend == "te",
            fused=silu
            and (not config.on_gpu or config.layer_backend == "fused" or bool(stated.get("bias_activation_fusion"))),
            stacks=config.layer_backend == "fused" and (bool(stated.get("bf16")) or not (half or config.on_gpu)),
            linear=1 if stated.get("fp8") else 2 if half else 4,
            adapter_rank=(config.lora.lora_rank or 0),
        )

    def number(self, name: str, default: int = 0) -> int:
        """A keyword of Megatron's configuration."""
        return int(self.model.get(name) or default)

    @property
    def width(self) -> float:
        """Numbers of a token's hidden state on this rank."""
        return self.number("hidden_size") * self.rows

    @property
    def hidden(self) -> float:
        """Bytes of it."""
        return self.width * self.bytes

    def layer(self, *, mixture: bool) -> Iterator[_Kept]:
        """All that a layer keeps."""
        yield from self.norm(self.width, "layernorm")
        yield _Kept(self.width * self.linear, ("layernorm",))  # the input of the first projections
        yield from self._latent_attention() if self.model.get("multi_latent_attention") else self._attention()
        yield from self.norm(self.width, "layernorm")
        # The input of the feed-forward network, which a router reads too.
        yield _Kept(self.width * (self.bytes if mixture else self.linear), ("layernorm",))
        yield from self._mixture() if mixture else self._gated(self.number("ffn_hidden_size") / self.tensor, "mlp")
        if self.post_norms:
            yield from self.norm(self.width)
            yield from self.norm(self.width)
        yield from self._adapters(mixture)

    def joined(self) -> Iterator[_Kept]:
        """What a layer for multi-token prediction keeps besides: hidden state and embedding, normed and joined."""
        yield from self.norm(self.width)
        yield from self.norm(self.width)
        yield _Kept(2 * self.hidden)

    def _adapters(self, mixture: bool) -> Iterator[_Kept]:
        """What adapters keep besides the inputs of their modules: the result of each first product, in every linear."""
        if self.adapter_rank:
            modules = 4 if mixture else 7  # q, k, v, o; gate, up, down
            yield _Kept(modules * self.adapter_rank * self.bytes)

    def norm(self, width: float, *modules: str, groups: float | None = None) -> Iterator[_Kept]:
        """A norm of `width` numbers in `groups` that are normed apart: the normed numbers, and a scale of each."""
        groups = self.rows if groups is None else groups
        # `slime.train.layers.rms_norm` keeps them in float32; kernels of a GPU keep what they were given.
        yield _Kept(width * (4 if self.cpu else self.bytes) + groups * 4, modules)

    def _attention(self) -> Iterator[_Kept]:
        heads = self.number("num_attention_heads") / self.tensor
        groups = self.number("num_query_groups", self.number("num_attention_heads")) / self.tensor
        head = self.number("kv_channels", self.number("hidden_size") // self.number("num_attention_heads"))
        query, key = heads * head, groups * head
        if self.model.get("qk_layernorm"):
            yield from self.norm(query + key, groups=heads + groups)
        yield _Kept(query * self.bytes)  # rotated
        if self.context > 1 and not self.stock:
            yield _Kept(2 * key * self.context * self.bytes)  # keys and values of the whole sequences
        else:
            # The values are a part of what the projection returned, and all of it stays.
            yield _Kept((key + query + 2 * key) * self.bytes)
        yield _Kept(query * self.bytes)  # the result, which is the input of the output projection
        yield from self._scores(heads, quadratic=False)

    def _latent_attention(self) -> Iterator[_Kept]:
        heads = self.number("num_attention_heads") / self.tensor
        rotated, value = self.number("qk_pos_emb_head_dim"), self.number("v_head_dim")
        head = self.number("qk_head_dim") + rotated
        for rank in (self.number("q_lora_rank"), self.number("kv_lora_rank")):
            if rank:
                yield from self.norm(rank * self.rows)
                yield _Kept(rank * self.rows * self.bytes)  # the input of the up projection
        yield _Kept(2 * rotated * self.bytes)  # this layer's tables of angles
        gathered = 1 if self.stock else self.context
        yield _Kept(heads * head * self.bytes, ("mla_up_proj",))
        yield _Kept(heads * (head + value) * gathered * self.bytes, ("mla_up_proj",))
        yield _Kept(heads * value * self.bytes)
        yield from self._scores(heads, quadratic=self._quadratic)

    @property
    def _quadratic(self) -> bool:
        """Whether attention keeps its scores: torch's fast attention of a CPU wants values as wide as keys."""
        keys = self.number("qk_head_dim") + self.number("qk_pos_emb_head_dim")
        latent = bool(self.model.get("multi_latent_attention"))
        return latent and self.cpu and keys != self.number("v_head_dim")

    def _scores(self, heads: float, *, quadratic: bool) -> Iterator[_Kept]:
        if quadratic:
            yield _Kept(heads * self.longest * 4, ("core_attn",))
        else:
            yield _Kept(heads * 4, ("core_attn",))  # the sum of each row of scores
            if self.context > 1 and not self.stock:
                yield _Kept(self.longest * 4, ("core_attn",))  # the mask, as numbers

    def _gated(self, width: float, *modules: str) -> Iterator[_Kept]:
        """A feed-forward network after its input: what the activation gets, and the input of the last product."""
        gates = 2 if self.model.get("gated_linear_unit") else 1
        unfused = 1 if gates == 2 and not self.fused else 0
        yield _Kept(((gates + unfused) * self.bytes + self.linear) * width, modules)

    def _mixture(self) -> Iterator[_Kept]:
        experts, chosen = self.number("num_moe_experts"), self.number("moe_router_topk")
        # The router: scores, weights and choice of every expert; scores, weight, number and row of the chosen ones.
        yield _Kept((experts * 9 + chosen * 24) * self.rows, ("moe",))
        # Rows of even load. Ranks that divide an expert have the rows of all of them.
        rows = chosen * self.rows * self.experts
        hidden, inner = self.number("hidden_size"), self.number("moe_ffn_hidden_size") / self.experts
        yield _Kept(rows * (hidden * self.linear + 2 * inner * self.bytes), ("moe",))
        if self.stock:  # the input of the second product, which `slime.train.experts` always computes again
            yield _Kept(rows * inner * self.linear, ("moe", "moe_act"))
        if shared := self.number("moe_shared_expert_intermediate_size"):
            yield from self._gated(shared / self.tensor, "moe", "shared_experts")

    def gradients(self, mixture: bool) -> float:
        """Bytes for a token of the gradients that a layer's backward pass has at a time."""
        if mixture:
            rows = self.number("moe_router_topk") * self.rows * self.experts
            inner = self.number("moe_ffn_hidden_size") / self.experts
            wide = rows * (2 * self.number("hidden_size") + (5 if self.stock else 6) * inner)
        else:
            wide = 5 * self.number("ffn_hidden_size") / self.tensor
        scores = 2 * self.number("num_attention_heads") / self.tensor * self.longest if self._quadratic else 0
        return 2 * self.hidden + max(wide * self.bytes, scores * 4)

    def of_experts(self) -> float:
        """Bytes of matrices at the end of the backward pass of a layer's experts.

        Autograd gets the gradients of all of them together; a product that computes all experts copies those of gate
        and up.
        """
        if self.stock:
            return 0
        one = self.number("hidden_size") * self.number("moe_ffn_hidden_size") / self.experts
        copies = (0 if self.adapter_rank else 3) + 2 * self.stacks
        return copies * one * self.number("num_moe_experts") / self.expert_parallel * self.bytes
