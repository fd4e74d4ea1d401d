"""The hooks a plugin may implement, documented in place.

A hookimpl may take fewer arguments than its spec. `slime_register_*` return lists of specs and run
once, before anything starts; their order means nothing. Observers are read-only: what they raise is
reported once and never ends a run.
"""

# The bodies are the documentation; pluggy reads names and arguments only.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.plugin import (
    Architecture,
    BufferFilterSpec,
    BuildPanel,
    DataSourceSpec,
    EstimatorSpec,
    FamilySpec,
    GeneratorSpec,
    PanelSpec,
    RewardSpec,
    TrackerSpec,
    hookspec,
)

if TYPE_CHECKING:
    from slime.config import RunConfig


@hookspec
def slime_register_estimators() -> list[EstimatorSpec]:
    """Advantage estimators this plugin provides."""
    raise AssertionError("hook specification, never called")


@hookspec
def slime_register_rewards() -> list[RewardSpec]:
    """Rewards this plugin provides."""
    raise AssertionError("hook specification, never called")


@hookspec
def slime_register_datasources() -> list[DataSourceSpec]:
    """Data sources this plugin provides."""
    raise AssertionError("hook specification, never called")


@hookspec
def slime_register_buffer_filters() -> list[BufferFilterSpec]:
    """Buffer filters this plugin provides."""
    raise AssertionError("hook specification, never called")


@hookspec
def slime_register_families() -> list[FamilySpec]:
    """Model families this plugin provides."""
    raise AssertionError("hook specification, never called")


@hookspec
def slime_register_generators() -> list[GeneratorSpec]:
    """Generators this plugin provides."""
    raise AssertionError("hook specification, never called")


@hookspec
def slime_register_trackers() -> list[TrackerSpec]:
    """Trackers this plugin provides."""
    raise AssertionError("hook specification, never called")


@hookspec
def slime_register_panels() -> list[PanelSpec]:
    """Panels of the viewer this plugin provides."""
    raise AssertionError("hook specification, never called")


@hookspec
def slime_check_config(config: RunConfig) -> None:
    """Refuse a configuration before anything starts, by raising `slime.errors.ConfigError`."""


@hookspec
def slime_plan_lines(
    config: RunConfig, model: Architecture, with_critic: bool, with_engines: bool, longest_prompt: int | None
) -> Mapping[str, Sequence[str]]:
    """Lines for the plan that `slime train --dry-run` prints, by their label; the run has passed all checks.

    Lines labelled `notes` are for the user's attention: a run prints them too, before it starts.

    Args:
        config: The run.
        model: Its model, as it is trained.
        with_critic: Whether a critic is trained.
        with_engines: Whether the run starts engines.
        longest_prompt: Tokens of the longest prompt in the training data, if known.
    """
    raise NotImplementedError("hook specification, never called")


@hookspec
def slime_ray_joined(config: RunConfig, run_dir: Path) -> None:
    """Ray runs, or the cluster is joined, and no process of the run has started. Refuse the run, or this attempt at it,
    by raising a `slime.errors.SlimeError`."""


@hookspec
def slime_run_started(run_dir: Path, config: RunConfig) -> None:
    """The run folder exists and the processes are up."""


@hookspec
def slime_step_finished(step: int, metrics: Mapping[str, float]) -> None:
    """One rollout was generated and trained on."""


@hookspec
def slime_checkpoint_saved(step: int, path: Path) -> None:
    """A checkpoint is complete on disk."""


@hookspec
def slime_run_finished(run_dir: Path, outcome: str) -> None:
    """The run ended: "finished", "interrupted" or "failed"."""


@hookspec
def slime_run_closed(run_dir: Path, outcome: str, build_panel: BuildPanel) -> Mapping[str, str]:
    """Everything of the run is closed and its summary printed: time for a report of the whole.

    Not called if the run was preempted, and has no time left.

    Args:
        run_dir: The run folder.
        outcome: "finished", "interrupted" or "failed".
        build_panel: Builds the panels that the run's configuration names.

    Returns:
        The files written to the run folder, each with what is in it; they are printed below the summary.
    """
    raise NotImplementedError("hook specification, never called")
