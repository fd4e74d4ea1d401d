"""The kinds of component: the hook that registers each, its spec, and what its objects must be able to do."""

from __future__ import annotations

from dataclasses import dataclass

from slime.plugin import (
    BufferFilterSpec,
    ComponentSpec,
    DataSourceSpec,
    EstimatorSpec,
    GeneratorSpec,
    RewardSpec,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of component."""

    name: str
    #: as people call it
    title: str
    spec: type[ComponentSpec]
    #: the hook that returns a list of such specs
    hook: str
    #: methods that the built object must have
    methods: tuple[str, ...]

    @property
    def packages(self) -> str:
        """How distributions that provide it are named."""
        return f"slime-{self.name.replace('_', '-')}-*"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("estimator", "estimator", EstimatorSpec, "slime_register_estimators", ("advantages",)),
        Kind("reward", "reward", RewardSpec, "slime_register_rewards", ("score",)),
        Kind(
            "datasource",
            "data source",
            DataSourceSpec,
            "slime_register_datasources",
            ("take", "state_dict", "load_state_dict"),
        ),
        Kind("buffer_filter", "buffer filter", BufferFilterSpec, "slime_register_buffer_filters", ("select",)),
        Kind("generator", "generator", GeneratorSpec, "slime_register_generators", ("generate",)),
    )
}
