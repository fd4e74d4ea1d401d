"""slime's own data sources and buffer filters, registered like those of any other plugin."""

from __future__ import annotations

from slime.plugin import BufferFilterSpec, DataSourceSpec, hookimpl
from slime_datasources.options import (
    BoundedStalenessOptions,
    CurriculumOptions,
    KeepWithFallbackOptions,
    NonzeroVarianceOptions,
    ReplayOptions,
    StratifiedOptions,
)

slime_api = 1


@hookimpl
def slime_register_datasources() -> list[DataSourceSpec]:
    """The data sources of this package."""
    return [
        DataSourceSpec(
            name="curriculum",
            factory="slime_datasources.curriculum:Curriculum",
            options=CurriculumOptions,
            summary="prompts whose difficulty follows the pass rate",
        ),
        DataSourceSpec(
            name="prompts",
            factory="slime_datasources.prompts:Prompts",
            summary="prompts from files or data sets (--prompt-data): in file order, shuffled, mixed or streamed",
        ),
    ]


@hookimpl
def slime_register_buffer_filters() -> list[BufferFilterSpec]:
    """The buffer filters of this package."""
    return [
        BufferFilterSpec(
            name="nonzero_variance",
            factory="slime_datasources.buffer_filters:NonzeroVariance",
            options=NonzeroVarianceOptions,
            summary="drops groups whose rewards are all equal (dynamic sampling)",
        ),
        BufferFilterSpec(
            name="newest_first",
            factory="slime_datasources.buffer_filters:NewestFirst",
            summary="keeps the groups that were generated last",
        ),
        BufferFilterSpec(
            name="highest_reward",
            factory="slime_datasources.buffer_filters:HighestReward",
            summary="keeps the groups with the highest mean reward",
        ),
        BufferFilterSpec(
            name="bounded_staleness",
            factory="slime_datasources.buffer_filters:BoundedStaleness",
            options=BoundedStalenessOptions,
            summary="drops groups that have waited for more than max_age rollouts",
        ),
        BufferFilterSpec(
            name="keep_with_fallback",
            factory="slime_datasources.buffer_filters:KeepWithFallback",
            options=KeepWithFallbackOptions,
            summary="keeps groups whose rewards differ, and others if these do not fill a batch",
        ),
        BufferFilterSpec(
            name="stratified",
            factory="slime_datasources.buffer_filters:Stratified",
            options=StratifiedOptions,
            summary="keeps equal numbers of groups from all levels of mean reward",
        ),
        BufferFilterSpec(
            name="replay",
            factory="slime_datasources.buffer_filters:Replay",
            options=ReplayOptions,
            summary="keeps new groups and, up to a share, groups that were trained on before (--max-reuse)",
        ),
    ]
