"""Which pipeline stage holds a layer: evenly, with other counts at the ends, interleaved, or given by hand."""

from __future__ import annotations

import re

from slime.config import RunConfig
from slime.errors import ConfigError

_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEAT = re.compile(r"([EtmL|])\*(\d+)")
_FLAG = "--pipeline-model-parallel-layout"


def virtual_stages(config: RunConfig, layers: int) -> int:
    """How many chunks of the model each stage holds."""
    stated = config.megatron
    pipeline = int(stated.get("pipeline_model_parallel_size", 1))
    if (layout := stated.get("pipeline_model_parallel_layout")) and pipeline > 1:
        return max(1, len(_chunks_by_hand(layout)) // pipeline)
    if (per_chunk := stated.get("num_layers_per_virtual_pipeline_stage")) is not None:
        return max(1, layers // (pipeline * max(1, int(per_chunk))))
    return int(stated.get("virtual_pipeline_model_parallel_size") or 1)


def stage_of_layers(config: RunConfig, layers: int) -> list[int]:
    """The pipeline stage of each layer.

    Raises:
        ConfigError: A layout given by hand that is not one of this model with so many stages.
    """
    stated = config.megatron
    pipeline = int(stated.get("pipeline_model_parallel_size", 1))
    if pipeline == 1:
        return [0] * layers
    if layout := stated.get("pipeline_model_parallel_layout"):
        return _by_hand(layout, layers, pipeline)
    virtual = virtual_stages(config, layers)
    first, last = (stated.get(f"num_layers_in_{place}_pipeline_stage") for place in ("first", "last"))
    # The embedding or the loss may count as a layer of its stage.
    before, after = (bool(stated.get(f"account_for_{what}_in_pipeline_split")) for what in ("embedding", "loss"))
    middle = pipeline - (first is not None) - (last is not None)
    each = (layers + before + after - int(first or 0) - int(last or 0)) // max(1, middle)
    counts = [each] * pipeline
    counts[0] = each if first is None else int(first)
    counts[-1] = each if last is None else int(last)
    chunks = [(stage, counts[stage] // virtual) for _ in range(virtual) for stage in range(pipeline)]
    chunks[0] = (0, chunks[0][1] - before)
    chunks[-1] = (pipeline - 1, chunks[-1][1] - after)
    found = [stage for stage, count in chunks for _ in range(count)]
    # What does not divide is refused by the checks of a run; a prediction of it has every layer somewhere.
    return (found + [pipeline - 1] * layers)[:layers]


def _by_hand(layout: object, layers: int, pipeline: int) -> list[int]:
    chunks = _chunks_by_hand(layout)
    if len(chunks) % pipeline:
        raise ConfigError(
            f"{_FLAG} {layout}: {len(chunks)} chunks, which --pipeline-model-parallel-size {pipeline} does not divide"
        )
    found = [number % pipeline for number, chunk in enumerate(chunks) for word in chunk if word in ("t", "decoder")]
    if len(found) != layers:
        raise ConfigError(f"{_FLAG} {layout}: {len(found)} layers (t), and the model has {layers}")
    return found


def _chunks_by_hand(layout: object) -> list[list[str]]:
    """The chunks of `Et*3|(tt|)*29|L`, or of a list of lists of words."""
    if isinstance(layout, list):
        return [list(chunk) for chunk in layout]
    text = str(layout).replace(",", "").replace(" ", "")
    while _GROUP.search(text) or _REPEAT.search(text):
        text = _GROUP.sub(lambda found: found[1] * int(found[2]), text)
        text = _REPEAT.sub(lambda found: found[1] * int(found[2]), text)
    if wrong := sorted(set(text) - set("EtmL|")):
        raise ConfigError(
            f"{_FLAG} {layout}: {wrong[0]!r} is none of E (embedding), t (layer), m (multi-token prediction), L (loss),"
            " | (next chunk), (...)*N and x*N"
        )
    return [list(chunk) for chunk in text.split("|")]
