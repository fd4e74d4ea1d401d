"""The seam for engines with quantised weights (`--rollout-quantization`): tensors in, other tensors out.

A format belongs to the package `slime_quantised`, which is imported if a run asks for one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime.config.sglang_options import sglang_argv
from slime.plugin.architecture import Architecture
from slime.shops import import_shop

if TYPE_CHECKING:
    from slime.config.weight_options import SyncOptions
    from slime.rollout.train_batch import TrainBatch
    from slime.train.model import TrainableModel
    from slime.weights.models import Models
    from slime.weights.shards import NamedTensors
    from slime.weights.verify import WeightCheck


class Quantisation(Protocol):
    """How engines hold a model.

    Attributes:
        model: The model in the engines: its rules name what is sent, and `engine_config` says that it is quantised.
    """

    model: Architecture

    @property
    def engine_options(self) -> dict[str, Any]:
        """What it needs of SGLang's options."""

    def tensors(self, named: NamedTensors) -> NamedTensors:
        """The trainer's tensors as engines get them."""

    def check(self, tp_sizes: Iterable[int], *, ep_size: int, dp_size: int = 1) -> WeightCheck:
        """What compares the engines' weights with the tensors that they get; arguments as of `WeightCheck`."""

    def gap(self, policy: TrainableModel, batch: TrainBatch) -> dict[str, float]:
        """Metrics of how far the engines' log-probs of a batch are from those of what their weights stand for."""

    def problems(self, options: Mapping[str, Any], *, tp_size: int, compared: bool) -> Iterator[str]:
        """Why engines of `tp_size` ranks with these options of SGLang cannot hold the model, or not be compared."""


def quantisation_of(options: SyncOptions, model: Architecture) -> Quantisation | None:
    """How engines hold a trained model, unless they hold it as it is.

    Raises:
        ConfigError: The model's family does not allow it.
    """
    if options.rollout_quantization is None:
        return None
    found: Quantisation = import_shop("slime_quantised.fp8", "--rollout-quantization").Fp8(model)
    return found


def model_arguments(options: SyncOptions, models: Models, folder: Path) -> list[str]:
    """SGLang's words for how engines hold the model in a folder, and for what its `config.json` lacks."""
    described, starts = models.engine_config(folder), dict[str, Any]()
    if (quantised := quantisation_of(options, models.read(folder))) is not None:
        described, starts = {**described, **quantised.model.engine_config}, quantised.engine_options
    words = ["--json-model-override-args", json.dumps(described)] if described else []
    return [*sglang_argv(starts), *words]
