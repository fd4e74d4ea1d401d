"""The table of kinds: everything slime knows about a kind of component, one row each.

Configuration, command line, listing, contract kit and scaffold are derived from it. A new kind is a row here, a spec
and a protocol in `slime.plugin`, its hook in `slime.hookspecs`, the option that its slot names, contract rules in
`slime.testing`, and a folder of templates in `slime.testing.scaffold`. Hook, rules and templates are found by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime.plugin import (
    BufferFilter,
    BufferFilterSpec,
    ComponentSpec,
    DataSource,
    DataSourceSpec,
    Estimator,
    EstimatorSpec,
    Generator,
    GeneratorSpec,
    RewardModel,
    RewardSpec,
    Tracker,
    TrackerSpec,
)


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
    #: as messages call it
    title: str
    #: field with several components, in order, for slots that more than one may fill: choices with `name` and `options`
    list_key: str | None = None
    #: field that names a function or class of the user's own instead
    path_key: str | None = None
    #: of a repeated slot, whose option is made from this row: help text, and the components that fill it by default
    help: str = ""
    default: tuple[str, ...] = ()

    @property
    def repeated(self) -> bool:
        """Whether it takes any number of components: `Slot(NAME, "components", NAME, TITLE, list_key=NAME)`."""
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
        """What may stand before the dot in flags of the component's options: `estimator`, `advantage-estimator`."""
        return tuple(dict.fromkeys(name.replace("_", "-") for name in (self.name, self.key)))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of component."""

    name: str
    #: as people call it
    title: str
    spec: type[ComponentSpec]
    #: what the built object must be; its methods are required
    protocol: type
    #: where a run uses components of this kind
    slots: tuple[Slot, ...]
    #: whether the kernel calls it once a sample, under a deadline and an error budget that a run may set
    limited: bool = False

    @property
    def hook(self) -> str:
        """The hook that returns a list of such specs."""
        return f"slime_register_{self.name}s"

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that the built object must have: those of the protocol."""
        return tuple(name for name, member in vars(self.protocol).items() if callable(member) and name[0] != "_")

    @property
    def packages(self) -> str:
        """Naming pattern of the distributions that provide it."""
        return f"slime-{self.name.replace('_', '-')}-*"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "estimator",
            "estimator",
            EstimatorSpec,
            Estimator,
            (Slot("estimator", "algorithm", "advantage_estimator", "estimator"),),
        ),
        Kind(
            "reward",
            "reward",
            RewardSpec,
            RewardModel,
            (Slot("reward", "reward", "reward", "reward", list_key="terms", path_key="custom_rm_path"),),
            limited=True,
        ),
        Kind(
            "datasource",
            "data source",
            DataSourceSpec,
            DataSource,
            (Slot("datasource", "data", "data_source", "data source", path_key="data_source_path"),),
        ),
        Kind(
            "buffer_filter",
            "buffer filter",
            BufferFilterSpec,
            BufferFilter,
            (
                Slot(
                    "sampling_filter",
                    "rollout",
                    "sampling_filter",
                    "sampling filter",
                    path_key="dynamic_sampling_filter_path",
                ),
                Slot("buffer_filter", "rollout", "buffer_filter", "buffer filter", path_key="buffer_filter_path"),
            ),
        ),
        Kind(
            "generator",
            "generator",
            GeneratorSpec,
            Generator,
            (Slot("generator", "rollout", "generator", "generator", path_key="custom_generate_function_path"),),
            limited=True,
        ),
        Kind(
            "tracker",
            "tracker",
            TrackerSpec,
            Tracker,
            (
                Slot(
                    "tracker",
                    "components",
                    "tracker",
                    "tracker",
                    list_key="tracker",
                    help="where the run's numbers go besides metrics.jsonl, one or several; none: nowhere",
                    default=("tensorboard",),
                ),
            ),
        ),
    )
}

#: every slot by name
SLOTS: dict[str, Slot] = {slot.name: slot for kind in KINDS.values() for slot in kind.slots}


def kind_of(slot: str) -> Kind:
    """The kind of component that fills a slot."""
    return next(kind for kind in KINDS.values() if any(one.name == slot for one in kind.slots))


def slot_prefixes() -> Iterator[tuple[str, str]]:
    """(prefix of option flags, slot) of every slot."""
    return ((prefix, slot.name) for slot in SLOTS.values() for prefix in slot.prefixes)
