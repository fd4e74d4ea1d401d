"""slime's own data sources and buffer filters, registered as a third party registers its own."""

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
            summary="prompts by difficulty, at a level that follows the pass rate",
        ),
        DataSourceSpec(
            name="prompts",
            factory="slime_datasources.prompts:Prompts",
            summary="prompts of files or data sets (--prompt-data), in their order, shuffled, mixed or streamed",
        ),
    ]


@hookimpl
def slime_register_buffer_filters() -> list[BufferFilterSpec]:
    """The buffer filters of this package."""
    return [
        BufferFilterSpec(
            name="nonzero_variance",
            factory="slime_datasources.nonzero_variance:NonzeroVariance",
            options=NonzeroVarianceOptions,
            summary="drops groups whose rewards are all equal (dynamic sampling)",
        ),
        BufferFilterSpec(
            name="newest_first",
            factory="slime_datasources.newest_first:NewestFirst",
            summary="keeps the groups that were generated last",
        ),
        BufferFilterSpec(
            name="highest_reward",
            factory="slime_datasources.highest_reward:HighestReward",
            summary="keeps the groups of the highest mean reward",
        ),
        BufferFilterSpec(
            name="bounded_staleness",
            factory="slime_datasources.bounded_staleness:BoundedStaleness",
            options=BoundedStalenessOptions,
            summary="drops groups that waited for more than max_age rollouts",
        ),
        BufferFilterSpec(
            name="keep_with_fallback",
            factory="slime_datasources.keep_with_fallback:KeepWithFallback",
            options=KeepWithFallbackOptions,
            summary="keeps groups whose rewards differ, and others where those are too few",
        ),
        BufferFilterSpec(
            name="stratified",
            factory="slime_datasources.stratified:Stratified",
            options=StratifiedOptions,
            summary="keeps groups of all levels of mean reward in equal numbers",
        ),
        BufferFilterSpec(
            name="replay",
            factory="slime_datasources.replay:Replay",
            options=ReplayOptions,
            summary="keeps new groups and, up to a share, such as were trained on before (--max-reuse)",
        ),
    ]
