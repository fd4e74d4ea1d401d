"""A model as Megatron builds it, and how each of its tensors maps to Hugging Face and to the engine.

A model family turns a `config.json` into an `Architecture`. Its rules are used for loading, gathering, exporting and
checking, so that a name, a shape or a layout is written once. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, overload

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one Megatron tensor corresponds to Hugging Face tensors.

    Attributes:
        megatron: Name in Megatron's own (not TransformerEngine's) spelling, with layers and experts counted over the
            whole model.
        hf: Hugging Face name -> shape, in the order of the layout.
        engine: Parameter name inside SGLang, which joins q, k, v and gate, up, and stacks experts. Those of its draft
            model begin with "draft.".
        layout: How the Hugging Face tensors form the Megatron tensor.
            concat: A rank holds its part of each tensor, one after another along `parallel_dim`.
            vocab: Rows are the vocabulary, to which Megatron and SGLang append padding.
            qkv: For each query group: its query heads, its key head, its value head.
        parallel_dim: Dimension divided by tensor parallelism, in Megatron and in SGLang. None: every rank has the whole
            tensor.
        parts: With "concat": equal parts that each Hugging Face tensor itself consists of along `parallel_dim`, such
            as a gate and an up projection. A rank holds its share of each part.
        groups: With "qkv": query groups of the whole model.
        expert: Number of the expert that the tensor belongs to; None for all other tensors. Experts are divided among
            expert-parallel ranks, and their tensors by expert tensor parallelism. The engine stacks them.
        engine_whole: Whether every rank of an engine has the whole tensor, although Megatron's ranks divide it.
    """

    megatron: str
    hf: Mapping[str, Shape]
    engine: str
    layout: Literal["concat", "vocab", "qkv"] = "concat"
    parallel_dim: int | None = None
    parts: int = 1
    groups: int = 0
    expert: int | None = None
    engine_whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The Hugging Face names, in order."""
        return tuple(self.hf)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the Hugging Face tensors, in order."""
        return tuple(self.hf.values())


@dataclass(frozen=True, slots=True)
class Experts:
    """The rules of the routed experts of one layer, which differ in nothing but the number of the expert.

    Attributes:
        count: Experts of the layer.
        rules: Number of an expert -> its rules.
    """

    count: int
    rules: Callable[[int], tuple[Rule, ...]]

    def __iter__(self) -> Iterator[Rule]:
        return (rule for expert in range(self.count) for rule in self.rules(expert))


class Rules(Sequence[Rule]):
    """Rules in order, of which those of experts are made when they are first read.

    A large model has tens of thousands of them. Code that needs only their sizes reads `parts`.
    """

    def __init__(self, parts: Iterable[Rule | Experts]) -> None:
        #: what it was made of
        self.parts = tuple(parts)

    @cached_property
    def _all(self) -> tuple[Rule, ...]:
        return tuple(rule for part in self.parts for rule in ((part,) if isinstance(part, Rule) else part))

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, index: int) -> Rule: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Rule, ...]: ...
    def __getitem__(self, index: int | slice) -> Rule | tuple[Rule, ...]:
        return self._all[index]

    def __add__(self, further: Iterable[Rule]) -> tuple[Rule, ...]:
        return (*self, *further)

    def __radd__(self, earlier: Iterable[Rule]) -> tuple[Rule, ...]:
        return (*earlier, *self)

    def __eq__(self, other: object) -> bool:
        return self._all == tuple(other) if isinstance(other, (tuple, list, Rules)) else NotImplemented

    def __repr__(self) -> str:
        return f"<Rules of {len(self.parts)} parts>"

    def __reduce__(self) -> tuple[type[Rules], tuple[tuple[Rule, ...]]]:
        return Rules, (self._all,)  # what makes rules cannot be pickled


@dataclass(frozen=True)
class PredictingLayers:
    """Layers for multi-token prediction, which follow the model's own and share its vocabulary.

    Attributes:
        count: How many there are.
        rules: One rule for each of their tensors.
        copies: Tensors that a folder may hold for them although they are the model's: name -> name of the model's.
    """

    count: int
    rules: tuple[Rule, ...]
    copies: Mapping[str, str]


@dataclass(frozen=True)
class Architecture:
    """A model in Megatron-core's terms.

    Attributes:
        family: Name of the model family.
        transformer: Keywords of `TransformerConfig`, or of `MLATransformerConfig` if `multi_latent_attention` is one of
            them. All can be written as JSON: `activation_func` is a name such as "silu".
        gpt: Keywords of `GPTModel`: vocab_size (unpadded), max_sequence_length, position_embedding_type, rotary_base,
            rotary_percent, rope_scaling, rope_scaling_factor, share_embeddings_and_output_weights.
        rules: One rule for each Megatron tensor: a tuple, or `Rules`.
        post_norms: Whether what attention and feed-forward network add to the hidden state is normalised: the weights
            are `self_attention.linear_proj.post_norm.weight` and `mlp.linear_fc2.post_norm.weight` of each layer.
        carried: Beginnings of the names of tensors that a folder may hold and that are not trained: an export copies
            them from the folder that the run started with.
        predicting: The layers for multi-token prediction, if slime can train them. Their tensors are among those
            carried, and are trained only if the user asks for it.
        predicts: Whether they are trained: `rules` then holds theirs too.
        engine_config: What engines need in `config.json`, although the class of transformers does not have it: key ->
            the value that the model is computed with. Engines and exports get the keys that the folder lacks.
        fp8: Ends of the Hugging Face names of the weights that published fp8 folders of the family hold in fp8
            (`--rollout-quantization`); all others stay as they are. Empty if there are no such folders.
    """

    family: str
    transformer: dict[str, Any]
    gpt: dict[str, Any]
    rules: Sequence[Rule]
    post_norms: bool = False
    carried: tuple[str, ...] = ()
    predicting: PredictingLayers | None = None
    predicts: bool = False
    engine_config: Mapping[str, Any] = field(default_factory=dict)
    fp8: tuple[str, ...] = ()

    def missing_from(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """What engines need and this `config.json` lacks."""
        return {key: value for key, value in self.engine_config.items() if hf_config.get(key) is None}

    def with_predicting_layers(self) -> Architecture:
        """The same model with its layers for multi-token prediction trained. It must have some."""
        assert self.predicting is not None
        return replace(self, rules=(*self.rules, *self.predicting.rules), predicts=True)

    @cached_property
    def by_megatron(self) -> Mapping[str, Rule]:
        """The rules by the names of Megatron's parameters."""
        return {rule.megatron: rule for rule in self.rules}

    @property
    def copies(self) -> Mapping[str, str]:
        """Tensors that an export repeats if the folder that the run started with has them: name -> trained tensor."""
        return self.predicting.copies if self.predicts and self.predicting is not None else {}

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every Hugging Face tensor of the model, by name."""
        return {name: shape for rule in self.rules for name, shape in rule.hf.items()}
