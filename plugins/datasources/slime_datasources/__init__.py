"""slime's own data sources, registered as a third party registers its own."""

from __future__ import annotations

from slime.plugin import DataSourceSpec, hookimpl

slime_api = 1


@hookimpl
def slime_register_datasources() -> list[DataSourceSpec]:
    """The data sources of this package."""
    return [
        DataSourceSpec(
            name="prompts",
            factory="slime_datasources.prompts:Prompts",
            summary="prompts of a JSONL file (--prompt-data), in file order or shuffled per epoch",
        ),
    ]
