"""What a checkpoint says of the run that wrote it: its model, and what the order of the prompts depends on."""

from __future__ import annotations

import json
from typing import Any

from typing_extensions import TypedDict

from slime.config import RunConfig
from slime.errors.redaction import redacted
from slime.kit.readers.prompt_source import content_digest, parse_sources
from slime.plugin.architecture import Architecture
from slime.run.checkpoint.files import digest_of_json

#: options of [data] that the order of the prompts depends on
_DATA_ORDER = (
    "data_source",
    "input_key",
    "label_key",
    "tool_key",
    "apply_chat_template",
    "apply_chat_template_kwargs",
    "bad_rows",
    "streaming_data",
    "rollout_shuffle",
    "rollout_seed",
)

PROMPT_FILES = "prompt_data"


class PromptFile(TypedDict):
    path: str
    weight: str
    sha256: str


class Model(TypedDict):
    """The model whose weights a checkpoint holds."""

    tensors: str  #: sha256 of the names and shapes of its Hugging Face tensors
    sizes: dict[str, Any]  #: Megatron's terms


def describe_model(model: Architecture) -> Model:
    """What a checkpoint says of its model, whether or not its layers for multi-token prediction are trained."""
    further = model.predicting.rules if model.predicts and model.predicting is not None else ()
    own = model.rules[: len(model.rules) - len(further)]
    shapes = {name: list(shape) for rule in own for name, shape in rule.hf.items()}
    sizes = {"family": model.family, **model.transformer, **model.gpt}
    return {"tensors": digest_of_json(shapes), "sizes": json.loads(json.dumps(sizes))}


def data_order(config: RunConfig) -> dict[str, Any]:
    """Everything that determines the order of the prompts, as JSON values.

    These are settings, the content of the prompt files (see `slime.kit.readers.prompt_source`) and the data source's
    options.

    Raises:
        DataError: A prompt file cannot be read.
    """
    order = {name: getattr(config.data, name) for name in _DATA_ORDER}
    order["n_samples_per_prompt"] = config.rollout.n_samples_per_prompt
    order[PROMPT_FILES] = [
        {"path": str(source), "weight": str(source.weight), "sha256": content_digest(source)}
        for source in parse_sources(config.data.prompt_data)
    ]
    # As text, because `5` in a run file and the word "5" after a flag set the same value.
    options = config.component_options.get("datasource", {})
    order |= {f"datasource.{k}": v if isinstance(v, str) else json.dumps(v) for k, v in redacted(options).items()}
    return order
