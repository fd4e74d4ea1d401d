"""Everything a plugin author imports.

A plugin is a light module named by an entry point in group `slime`. It declares `slime_api = 1` and
implements hooks that return lists of frozen specs; each spec names the class that does the work as
`"package.module:Class"`, imported only when a run uses it:

    import slime.plugin as sp

    slime_api = 1

    @sp.hookimpl
    def slime_register_rewards():
        return [sp.RewardSpec(name="length", factory="my_reward.impl:LengthReward", summary="1 - length/100")]

Components are built as `Class(options, context)` inside the process that uses them. This module
imports only pluggy and pydantic; torch appears in annotations alone.
"""

from slime.plugin.architecture import Architecture, Rule
from slime.plugin.protocols import (
    BufferFilter,
    DataSource,
    Estimator,
    Family,
    Generator,
    PolicyClient,
    RewardModel,
)
from slime.plugin.specs import (
    API_VERSION,
    BufferFilterSpec,
    ComponentSpec,
    Context,
    DataSourceSpec,
    EstimatorSpec,
    FamilySpec,
    GeneratorSpec,
    NoOptions,
    Options,
    PanelSpec,
    RewardSpec,
    TrackerSpec,
    hookimpl,
    hookspec,
)
from slime.plugin.values import (
    Advantages,
    EstimatorBatch,
    Generation,
    Reward,
    SamplingParams,
    Selection,
    TokenBatch,
)
from slime.plugin.watchers import BuildPanel, Curve, Curves, Note, Panel, RunView, Table, Tracker
from slime.types import Group, Sample, SpecInfo, Status

__all__ = [
    "API_VERSION",
    "Advantages",
    "Architecture",
    "BufferFilter",
    "BufferFilterSpec",
    "BuildPanel",
    "ComponentSpec",
    "Context",
    "Curve",
    "Curves",
    "DataSource",
    "DataSourceSpec",
    "Estimator",
    "EstimatorBatch",
    "EstimatorSpec",
    "Family",
    "FamilySpec",
    "Generation",
    "Generator",
    "GeneratorSpec",
    "Group",
    "NoOptions",
    "Note",
    "Options",
    "Panel",
    "PanelSpec",
    "PolicyClient",
    "Reward",
    "RewardModel",
    "RewardSpec",
    "Rule",
    "RunView",
    "Sample",
    "SamplingParams",
    "Selection",
    "SpecInfo",
    "Status",
    "Table",
    "TokenBatch",
    "Tracker",
    "TrackerSpec",
    "hookimpl",
    "hookspec",
]
