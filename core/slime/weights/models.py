"""Reads model folders through the model families of the installed plugins. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import ConfigError
from slime.errors.raised import naming
from slime.plugin import Context, Family, FamilySpec
from slime.plugin.architecture import Architecture
from slime.registry.plugin_set import PluginSet, load_plugins
from slime.registry.resolve import Use
from slime.weights.fp8 import block_of
from slime.weights.hf_config import read_hf_config
from slime.weights.hf_settings import ReadSettings, fields_of
from slime.weights.mapping import differences
from slime.weights.stated_model import predicting_layers

if TYPE_CHECKING:
    from slime.config import RunConfig


class Models:
    """The model families of a run. --model-family names a folder's, or `model_type` in its config.json."""

    def __init__(self, plugins: PluginSet, config: RunConfig, run_dir: Path) -> None:
        self._plugins = plugins
        self._stated = config.checkpoint.model_family
        self._options = config.component_options.get("family", {})
        self._predicts = config.algorithm.enable_mtp_training
        logger = logging.getLogger("slime.family")
        self._context = Context(seed=config.run.seed, run_dir=run_dir, logger=logger, config=config)
        self._built: dict[str, tuple[FamilySpec, Family, str]] = {}

    @classmethod
    def installed(cls, config: RunConfig) -> Models:
        """Those of the installed plugins, for scripts that use parts of slime without a run."""
        return cls(load_plugins(config.plugins), config, Path.cwd())

    def read(self, folder: Path) -> Architecture:
        """The model in a folder. Raises as `describe` does."""
        return self.describe(read_hf_config(folder))

    def describe(self, hf_config: Mapping[str, Any]) -> Architecture:
        """The model that the content of a `config.json` describes.

        Raises:
            ConfigError: No `model_type`, a model that is not the family's causal language model, weights
                quantised in a way that cannot be read, or a setting that would change the computation and that the
                family does not have or does not read.
            PluginLoadError: No family for this model type is installed, or it is broken.
        """
        spec, family, title = self._family_of(hf_config)
        architectures = hf_config.get("architectures") or [spec.causal_lm]
        if not isinstance(architectures, list) or spec.causal_lm not in architectures:
            raise ConfigError(
                f"config.json: architectures is {architectures!r}; for model_type {hf_config['model_type']!r} slime"
                f" trains {spec.causal_lm}."
            )
        block_of(hf_config)
        settings = ReadSettings(hf_config, fields_of(spec.causal_lm))
        with naming(title, ".describe"):
            found = family.describe(settings)
        if unknown := settings.not_read(spec.causal_lm):
            raise ConfigError(
                f"config.json: {', '.join(unknown)}: slime does not compute this for model_type"
                f" {hf_config['model_type']!r}, and the engines may. If it has no effect on this model, remove it from"
                " config.json."
            )
        return replace(found, engine_config={"architectures": [spec.causal_lm], **found.engine_config})

    def engine_config(self, folder: Path) -> dict[str, Any]:
        """What engines need in `config.json` and this folder's lacks. Raises as `describe` does."""
        stated = read_hf_config(folder)
        return self.describe(stated).missing_from(stated)

    def read_same(
        self, folder: Path, ours: Architecture | None, option: str, *, output_layer: bool = True
    ) -> Architecture:
        """The model in a further folder of the run (the reference's or the critic's), compared with the policy's.

        Args:
            folder: The folder.
            ours: The model of `--hf-checkpoint`; None skips the comparison.
            option: The flag that names `folder`, for messages.
            output_layer: Whether the output layers must agree too; a critic has none over the vocabulary.

        Raises:
            ConfigError: The architectures differ; the message lists every difference.
        """
        found = self.read(folder)
        different = [] if ours is None else differences(ours, found, output_layer=output_layer)
        if different:
            raise ConfigError(
                f"{option} {folder} has another architecture than --hf-checkpoint: {', '.join(different)}."
            )
        return found

    def as_trained(self, model: Architecture) -> Architecture:
        """A model that was read as this run trains it: with its layers for multi-token prediction or without.

        Raises:
            ConfigError: The run trains such layers, and the model has none that its family can train.
        """
        if not self._predicts:
            return model
        if model.predicting is None:
            reason = (
                "has layers for multi-token prediction, but its family does not describe them"
                if predicting_layers(model.carried)
                else "has no layers for multi-token prediction"
            )
            raise ConfigError(f"--enable-mtp-training: the model ({model.family}) {reason}. Drop the flag.")
        return model.with_predicting_layers()

    def layer_specs(self, folder: Path) -> Callable[..., Any] | None:
        """The method with which the family of a folder changes Megatron's layer specs, if it has one."""
        return getattr(self._family_of(read_hf_config(folder))[1], "layer_specs", None)

    def _family_of(self, hf_config: Mapping[str, Any]) -> tuple[FamilySpec, Family, str]:
        model_type = hf_config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise ConfigError(f"config.json: model_type is {model_type!r}; expected the name of a model family.")
        name = self._stated or model_type
        if name not in self._built:
            resolved = self._plugins.look_up(Use("family", "family", name, self._options))
            assert isinstance(resolved.component.spec, FamilySpec)
            built = resolved.build(self._context)
            self._built[name] = (resolved.component.spec, built, resolved.component.title)
        return self._built[name]
