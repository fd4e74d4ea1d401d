"""The table of kinds: everything slime knows about a kind of component, one row each.

Configuration, command line, listing, contract kit and scaffold are derived from it. A new kind is a row here, a spec
and a protocol in `slime.plugin`, its hook in `slime.plugin.hooks`, the option that its slot names, contract rules in
`slime.testing`, and a folder of templates in `slime.testing.scaffold`. Hook, rules and templates are found by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.plugin import (
    BufferFilter,
    BufferFilterSpec,
    ComponentSpec,
    DataSource,
    DataSourceSpec,
    Estimator,
    EstimatorSpec,
    Family,
    FamilySpec,
    Generator,
    GeneratorSpec,
    Panel,
    PanelSpec,
    RewardModel,
    RewardSpec,
    Tracker,
    TrackerSpec,
)


def _title(name: str) -> str:
    """The name of a slot or kind in messages."""
    return {"datasource": "data source", "family": "model family"}.get(name, name.replace("_", " "))


@dataclass(frozen=True, slots=True)
class Slot:
    """A role in a run that a component of some kind fills.

    The slot's name is also the table of the run file that holds the component's options, and the prefix of its flags
    (`--reward.timeout-s`).
    """

    name: str
    #: section of the configuration that the fields below belong to
    section: str
    #: field with the name of the component
    key: str
    #: field with several components, in order, if more than one may fill the slot: choices with `name` and `options`
    list_key: str | None = None
    #: field that names a function or class of the user's own instead
    path_key: str | None = None

    @property
    def title(self) -> str:
        """Its name in messages."""
        return _title(self.name)

    @property
    def repeated(self) -> bool:
        """Whether it takes any number of components: `Slot(NAME, "components", NAME, list_key=NAME)`."""
        return self.key == self.list_key

    @property
    def flag(self) -> str:
        """The flag that chooses the component."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def path_flag(self) -> str:
        """The flag that names a function or class of the user's own; empty if there is none."""
        return f"--{self.path_key.replace('_', '-')}" if self.path_key else ""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The parts before the dot in flags of the component's options: `estimator`, `advantage-estimator`."""
        return tuple(dict.fromkeys(name.replace("_", "-") for name in (self.name, self.key)))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of component."""

    name: str
    spec: type[ComponentSpec]
    #: the built object must have its methods
    protocol: type
    #: the slots that components of this kind fill
    slots: tuple[Slot, ...]
    #: whether the kernel calls it once per sample, under a deadline and an error budget that a run may set
    limited: bool = False

    @property
    def title(self) -> str:
        """Its name in messages."""
        return _title(self.name)

    @property
    def plural(self) -> str:
        """Its name in hooks and folders."""
        return f"{self.name.removesuffix('y')}ies" if self.name.endswith("y") else f"{self.name}s"

    @property
    def hook(self) -> str:
        """The hook that returns a list of such specs."""
        return f"slime_register_{self.plural}"

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that the built object must have: the protocol's."""
        return tuple(name for name, member in vars(self.protocol).items() if callable(member) and name[0] != "_")

    @property
    def packages(self) -> str:
        """Naming pattern of the distributions that provide it."""
        return f"slime-{self.name.replace('_', '-')}-*"


_ESTIMATOR = Slot("estimator", "algorithm", "advantage_estimator")
_REWARD = Slot("reward", "reward", "reward", list_key="terms", path_key="custom_rm_path")
_DATA_SOURCE = Slot("datasource", "data", "data_source", path_key="data_source_path")
_FILTERS = (
    Slot("sampling_filter", "rollout", "sampling_filter", path_key="dynamic_sampling_filter_path"),
    Slot("buffer_filter", "rollout", "buffer_filter", path_key="buffer_filter_path"),
)
_GENERATOR = Slot("generator", "rollout", "generator", path_key="custom_generate_function_path")
#: without a stated name, the family that config.json of --hf-checkpoint names
_FAMILY = Slot("family", "checkpoint", "model_family")
_TRACKER = Slot("tracker", "components", "tracker", list_key="tracker")
_PANEL = Slot("panel", "components", "panel", list_key="panel")

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("estimator", EstimatorSpec, Estimator, (_ESTIMATOR,)),
        Kind("reward", RewardSpec, RewardModel, (_REWARD,), limited=True),
        Kind("datasource", DataSourceSpec, DataSource, (_DATA_SOURCE,)),
        Kind("buffer_filter", BufferFilterSpec, BufferFilter, _FILTERS),
        Kind("generator", GeneratorSpec, Generator, (_GENERATOR,), limited=True),
        Kind("family", FamilySpec, Family, (_FAMILY,)),
        Kind("tracker", TrackerSpec, Tracker, (_TRACKER,)),
        Kind("panel", PanelSpec, Panel, (_PANEL,)),
    )
}

#: every slot by name
SLOTS: dict[str, Slot] = {slot.name: slot for kind in KINDS.values() for slot in kind.slots}

#: functions over a finished batch, which have no component, only a path: name -> section and field of the path
BATCH_FUNCTIONS = {
    "rollout_sample_filter": ("rollout", "rollout_sample_filter_path"),
    "reward_post_process": ("reward", "custom_reward_post_process_path"),
}


def kind_of(slot: str) -> Kind:
    """The kind of component that fills a slot."""
    return next(kind for kind in KINDS.values() if any(one.name == slot for one in kind.slots))
