"""Comparisons of architectures and of tensor names. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from slime.plugin.architecture import Architecture

_LISTED = 8
#: name of the embedding of the vocabulary in the rules
EMBEDDING = "embedding.word_embeddings.weight"
#: name of the output layer over the vocabulary in the rules
OUTPUT_LAYER = "output_layer.weight"
#: some tools write it for a tied model too, as a copy of the embedding
HF_OUTPUT_LAYER = "lm_head.weight"
#: the one-number head of a Hugging Face sequence classification model
SCORE = "score.weight"
#: ends of tensor names that checkpoints may hold although they are not weights
_NOT_WEIGHTS = (".rotary_emb.inv_freq",)


def wrong_names(
    found: Collection[str], expected: set[str], optional: set[str], carried: tuple[str, ...] = ()
) -> list[str]:
    """What is wrong with the names of a folder's tensors: missing ones, and unexpected ones.

    Args:
        found: The names in the folder.
        expected: Names that must be there.
        optional: Names that may be there.
        carried: Beginnings of names that may be there.
    """
    missing = expected - set(found)
    unexpected = {
        name
        for name in set(found) - expected - optional
        if not name.endswith(_NOT_WEIGHTS) and not name.startswith(carried)
    }
    problems = [
        f"{len(names)} {what}: {first_names(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if missing and (hint := _prefixed(min(missing), unexpected)) is not None:
        problems.append(hint)
    elif missing and not unexpected:
        problems.append(f"there are: {first_names(found) or 'none'}")
    return problems


def _prefixed(missing: str, unexpected: Collection[str]) -> str | None:
    """A hint, if a missing tensor is there with another beginning of its name."""
    for name in sorted(unexpected):
        if name.endswith(f".{missing}"):
            return f"the names there begin with {name.removesuffix(missing)!r}, which expected ones do not"
        if missing.endswith(f".{name}"):
            return f"the names there lack {missing.removesuffix(name)!r} at their beginning"
    return None


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


def first_names(names: Iterable[str]) -> str:
    """The first names in order, and how many more there are; for messages."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more
