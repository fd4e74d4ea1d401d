"""The contract of model families. It needs no torch: whether a model computes the right thing is for its own tests."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slime.errors import ConfigError
from slime.plugin import Family, FamilySpec
from slime.plugin.architecture import Architecture, Rule
from slime.testing.contract_rules import (
    Contract,
    ContractOutcome,
    RefusedError,
    Subject,
    assert_contract,
    attributed,
    check,
    rule,
)

#: what no model computes
_UNKNOWN = "slime-testing-unknown"
#: the keys by which files name the activation function
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")


def assert_family_contract(family: Family, configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise `AssertionError` with every rule of its kind that a model family breaks.

    Args:
        family: The family.
        configs: Contents of `config.json` that it describes; small ones, because every rule describes all of them.
    """
    if not configs:
        raise ValueError("configs is empty; expected at least one config.json that the family describes")
    types = tuple(str(config.get("model_type")) for config in configs)
    spec = FamilySpec(name="it", factory="module:Class", model_types=types, causal_lm="", example=configs[0])
    assert_contract(lambda subject: FamilyContract(subject, configs), lambda **_: family, spec)


class FamilyContract(Contract):
    """Tries a model family."""

    method = "describe"

    def __init__(self, subject: Subject, configs: Sequence[Mapping[str, Any]] = (), **context: Any) -> None:
        """Build the family; without `configs`, it is tried on the example of its spec."""
        super().__init__(subject, **context)
        self.configs = tuple(configs) or ((self.spec.example,) if self.spec.example else ())

    def try_rules(self) -> ContractOutcome:
        """Try every rule, if there is a `config.json` to try them on."""
        if not self.configs:
            return ContractOutcome(notes=["not checked, because its FamilySpec has no `example`, a small config.json"])
        return super().try_rules()

    @rule("describes a model of its own", basic=True)
    def describes(self) -> None:
        for config, _ in self._described():
            check(
                config.get("model_type") in self.spec.model_types,
                f"model_type of the example is {config.get('model_type')!r}; expected one of model_types of its"
                f" FamilySpec, {self.spec.model_types}",
            )

    @rule("describes a model the same way every time")
    def deterministic(self) -> None:
        for config, found in self._described():
            check(self._describe(config) == found, f"{self.call} described one model in two ways")

    @rule("does not change its argument")
    def untouched(self) -> None:
        for config in self.configs:
            shown = copy.deepcopy(dict(config))
            self._describe(shown)
            check(shown == config, f"{self.call} changed its argument from {dict(config)} to {shown}; expected a copy")

    @rule("gives Megatron's keywords in a form that JSON can hold")
    def as_json(self) -> None:
        for _, found in self._described():
            for part, keywords in (("transformer", found.transformer), ("gpt", found.gpt)):
                with attributed(f"{self.call}(...).{part}", "to json.dumps"):
                    again = json.loads(json.dumps(keywords, allow_nan=False))
                check(again == keywords, f"{part} is {keywords}; as JSON it becomes {again}")

    @rule("states the sizes of the model", basic=True)
    def sizes(self) -> None:
        for _, found in self._described():
            stated = {name: found.transformer.get(name) for name in _SIZES}
            stated["vocab_size"] = found.gpt.get("vocab_size")
            wrong = {name: value for name, value in stated.items() if not _positive(value)}
            check(not wrong, f"{self.call} gave {wrong}; expected whole numbers above 0")

    @rule("has one rule for each tensor")
    def unique(self) -> None:
        for _, found in self._described():
            rules = _all_rules(found)
            for whose, names in (
                ("Megatron", [one.megatron for one in rules]),
                ("Hugging Face", [name for one in rules for name in one.hf]),
            ):
                repeated = [name for name, count in Counter(names).items() if count > 1]
                check(not repeated, f"rules name {whose} tensors more than once: {_first(repeated)}")
            carried = [name for name in found.shapes if found.carried and name.startswith(found.carried)]
            check(not carried, f"tensors are in a rule, and `carried` says they are not trained: {_first(carried)}")

    @rule("carries the layers for multi-token prediction, which are trained only on request")
    def predicting(self) -> None:
        for _, found in self._described():
            check(
                not found.predicts, "predicts is True; expected False: the user decides whether to train these layers"
            )
            if (layers := found.predicting) is None:
                continue
            names = [*(name for one in layers.rules for name in one.hf), *layers.copies]
            lost = [name for name in names if not (found.carried and name.startswith(found.carried))]
            check(not lost, f"tensors of `predicting` that are not among those `carried`: {_first(lost)}")
            unknown = [name for name in layers.copies.values() if name not in found.shapes]
            check(not unknown, f"copies of tensors that no rule names: {_first(unknown)}")

    @rule("has rules for the embedding, every layer and the output")
    def complete(self) -> None:
        for _, found in self._described():
            names = [one.megatron for one in found.rules]
            tied = bool(found.gpt.get("share_embeddings_and_output_weights"))
            expected = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
            missing = [name for name in (*expected, *([] if tied else ["output_layer.weight"])) if name not in names]
            layers = {int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")}
            count = found.transformer["num_layers"]
            missing += [f"decoder.layers.{layer}." for layer in range(count) if layer not in layers]
            check(not missing, f"no rule for {_first(missing)}")
            check(not tied or "output_layer.weight" not in names, "a tied output layer has a rule; expected none")
            extra = sorted(layers - set(range(count)))
            check(not extra, f"rules for layers {extra}; the model has {count}, counted from 0")

    @rule("has rules that fit the shapes")
    def shapes(self) -> None:
        for _, found in self._described():
            problems = [f"{one.megatron}: {problem}" for one in _all_rules(found) for problem in _misfits(one, found)]
            check(not problems, _first(problems, "; "))

    @rule("refuses an activation function that it does not have")
    def activation(self) -> None:
        for config in self.configs:
            keys = [key for key in _ACTIVATIONS if key in config] or [_ACTIVATIONS[0]]
            self._refuses(dict(config) | dict.fromkeys(keys, _UNKNOWN), f"{keys[0]} {_UNKNOWN!r}")

    @rule("refuses a scaling of positions that it does not have")
    def scaling(self) -> None:
        for config, found in self._described():
            if found.gpt.get("position_embedding_type") in ("rope", "yarn"):
                table = {"rope_type": _UNKNOWN, "type": _UNKNOWN, "factor": 2.0}
                # Recent files have rope_parameters instead.
                recent = (
                    {"rope_parameters": {**config["rope_parameters"], **table}} if "rope_parameters" in config else {}
                )
                self._refuses({**config, "rope_scaling": table, **recent}, f"rope_type {_UNKNOWN!r}")

    @rule("refuses a file without sizes")
    def empty(self) -> None:
        for config in self.configs:
            self._refuses({"model_type": config.get("model_type")}, "nothing but model_type")

    def _described(self) -> Iterator[tuple[Mapping[str, Any], Architecture]]:
        return ((config, self._describe(config)) for config in self.configs)

    def _describe(self, config: Mapping[str, Any]) -> Architecture:
        try:
            with attributed(self.call, f"model_type {config.get('model_type')!r}"):
                found = self.component.describe(config)
        except RefusedError as error:
            # Its author says that it can describe this one.
            raise AssertionError(str(error)) from error
        if not isinstance(found, Architecture):
            raise AssertionError(f"{self.call} returned {type(found).__name__}; expected Architecture")
        return found

    def _refuses(self, config: Mapping[str, Any], case: str) -> None:
        try:
            self.component.describe(config)
        except ConfigError:
            return
        except Exception as error:
            raise AssertionError(
                f"{self.call}, given {case}, raised {type(error).__name__}: {error}; expected ConfigError"
            ) from error
        raise AssertionError(
            f"{self.call}, given {case}, described a model; expected ConfigError, because the trainer would compute"
            " something else than the engines"
        )


def _all_rules(found: Architecture) -> Sequence[Rule]:
    """Including layers for multi-token prediction."""
    return found.rules if found.predicting is None else found.with_predicting_layers().rules


def _misfits(one: Rule, found: Architecture) -> Iterator[str]:
    """What is wrong with a rule."""
    shapes = one.shapes
    if not shapes or not all(shape and all(map(_positive, shape)) for shape in shapes):
        yield f"Hugging Face shapes are {dict(one.hf)}; expected at least one, of whole numbers above 0"
        return
    dimensions = {len(shape) for shape in shapes}
    dim = one.parallel_dim
    if len(dimensions) > 1 or (dim is not None and not 0 <= dim < min(dimensions)):
        yield f"parallel_dim is {dim}, for shapes {shapes}; expected None or a dimension of all of them"
        return
    along = [shape[dim or 0] for shape in shapes]
    if len({shape[: dim or 0] + shape[(dim or 0) + 1 :] for shape in shapes}) > 1:
        yield f"shapes {shapes} differ in more than dimension {dim or 0}"
    if one.layout != "concat" and dim != 0:
        yield f"layout {one.layout!r} with parallel_dim {dim}; expected 0"
    if one.layout == "vocab" and along != [found.gpt["vocab_size"]]:
        yield f"layout 'vocab' with {along} rows; expected one tensor with vocab_size {found.gpt['vocab_size']}"
    if one.layout == "qkv" and (len(along) != 3 or not one.groups or any(rows % one.groups for rows in along)):
        yield f"layout 'qkv' with {along} rows and groups {one.groups}; expected q, k and v, divisible by the groups"
    if one.parts < 1 or any(size % one.parts for size in along) or (one.parts > 1 and one.layout != "concat"):
        yield f"parts {one.parts} with layout {one.layout!r} and sizes {along}; expected 'concat' and equal parts"
    experts = found.transformer.get("num_moe_experts") or 0
    if one.expert is not None and not 0 <= one.expert < experts:
        yield f"expert {one.expert}; the model has {experts}, counted from 0"


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _first(problems: Iterable[str], between: str = ", ") -> str:
    """A few problems, and how many more there are."""
    found = list(problems)
    return between.join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
