"""Further model folders of a run: the reference's, the critic's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.errors import ConfigError
from slime.weights import architecture, read_hf_config

_OUTPUT_LAYER = "share_embeddings_and_output_weights"


def read_same_model(
    folder: Path, hf_config: Mapping[str, Any] | None, option: str, *, output_layer: bool = True
) -> dict[str, Any]:
    """config.json of a folder that `option` names and whose model must be the one of `hf_config`.

    output_layer   whether the output layer counts: a critic has none over the vocabulary

    Raises `ConfigError` that names every difference.
    """
    found = read_hf_config(folder)
    if hf_config is None:
        return found
    ours, theirs = architecture(dict(hf_config)), architecture(found)
    different = [
        f"{name} {mine.get(name)!r} / {other.get(name)!r}"
        for mine, other in ((ours.transformer, theirs.transformer), (ours.gpt, theirs.gpt))
        for name in sorted({*mine, *other})
        if mine.get(name) != other.get(name) and (output_layer or name != _OUTPUT_LAYER)
    ]
    if different:
        raise ConfigError(f"{option} {folder} has another architecture than --hf-checkpoint: {', '.join(different)}.")
    return found
