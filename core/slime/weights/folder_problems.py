"""What is wrong with the weights of a model folder, from the headers of its files. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slime.plugin.architecture import Architecture, Shape
from slime.weights.fp8 import Block, fp8_names, type_problems, weight_names
from slime.weights.mapping import EMBEDDING, HF_OUTPUT_LAYER, OUTPUT_LAYER, SCORE, first_names, wrong_names
from slime.weights.stored import StoredTensor, tied_problem


def folder_problems(
    where: str,
    stored: Mapping[str, StoredTensor],
    model: Architecture,
    block: Block | None,
    *,
    backbone: bool = False,
    everything: bool = False,
) -> Iterator[str]:
    """Weights that are missing, unexpected, misshapen, or of a type that cannot be trained.

    Args:
        where: What messages call the folder.
        stored: The tensors of the folder.
        model: The model that it should hold.
        block: The block for which its fp8 weights have one scale; None if the folder is not quantised.
        backbone: Whether only the layers are used, as by a critic: the folder may lack the output layer or have the
            head of a reward model instead.
        everything: Compare an output layer that should be the embedding completely, instead of a sample.

    Raises:
        CheckpointError: A file cannot be read.
    """
    expected, optional = expected_shapes(model, backbone=backbone), set[str]()
    tied = OUTPUT_LAYER not in model.by_megatron
    if backbone:
        optional = {HF_OUTPUT_LAYER, SCORE}
    elif tied:
        optional = {HF_OUTPUT_LAYER}
    if names := wrong_names(weight_names(stored, block), set(expected), optional, model.carried):
        yield (
            f"{where} does not hold the tensors that its config.json describes ({len(expected)} tensors):"
            f" {'; '.join(names)}"
        )
    if tied and not backbone:
        [embedding] = model.by_megatron[EMBEDDING].hf
        if (problem := tied_problem(stored, embedding, HF_OUTPUT_LAYER, everything=everything)) is not None:
            yield f"{where}: {problem}"
    if shapes := wrong_shapes(stored, expected):
        yield f"{where} has {len(shapes)} tensors of the wrong shape: {first_names(shapes)}"
    head = {SCORE: (1, model.transformer["hidden_size"])} if backbone and SCORE in stored else {}
    for wrong in wrong_shapes(stored, head):
        yield f"{where}: {wrong}: one number for each token"
    used = {*expected, *head} & stored.keys() | fp8_names(stored, model.carried)
    for problem in type_problems(stored, sorted(used), block):
        yield f"{where} has {problem}"


def expected_shapes(model: Architecture, *, backbone: bool) -> dict[str, Shape]:
    """The shapes of the tensors that a folder must have; `backbone` as of `folder_problems`."""
    left_out = OUTPUT_LAYER if backbone else None
    return {name: shape for rule in model.rules if rule.megatron != left_out for name, shape in rule.hf.items()}


def wrong_shapes(stored: Mapping[str, StoredTensor], expected: Mapping[str, Shape]) -> list[str]:
    """The expected tensors that are there with other shapes."""
    return [
        f"{name} has shape {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
