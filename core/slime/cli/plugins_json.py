"""The output of `slime plugins --json`. The schema is part of the interface: see docs/plugins/listing.md.

A change that breaks a reader needs a new `FORMAT`; a new key does not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT: Literal[1] = 1


class _JsonObject(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Provided(_JsonObject):
    """One component."""

    kind: Annotated[str, Field(description="a kind that `slime plugins new` knows, such as buffer_filter")]
    name: Annotated[
        str, Field(description="the bare name, which selects it while no other component of its kind has it")
    ]
    id: Annotated[str, Field(description="PLUGIN/NAME, which always selects it")]
    summary: Annotated[str, Field(description="the author's summary, one line")]
    factory: Annotated[str, Field(description='the class that does the work, as "package.module:Class"')]
    origin: Annotated[str, Field(description='"FILE:LINE" of the hook that registered it')]
    docs: Annotated[str, Field(description="address of its documentation; may be empty")]
    requires: Annotated[list[str], Field(description="PEP 508 requirements beyond the package's own")]
    clash: Annotated[
        bool, Field(description="whether its bare name also belongs to other components and does not select it")
    ]


class Row(_JsonObject):
    """One plugin: an entry point in group `slime`."""

    plugin: Annotated[str, Field(description="the plugin's id: the name of its entry point")]
    distribution: Annotated[str, Field(description="the package that pip installed")]
    version: Annotated[str, Field(description="the package's version")]
    entry: Annotated[str, Field(description="the module that the entry point names")]
    built_in: Annotated[bool, Field(description="whether it comes with slime itself")]
    status: Annotated[
        Literal["ok", "clash", "broken", "not loaded"],
        Field(
            description="clash: it works, but one of its bare names clashes; not loaded: --no-load read metadata only"
        ),
    ]
    api: Annotated[int | None, Field(description="plugin API it was written for; null if unknown")] = None
    provides: Annotated[list[Provided], Field(description="its components, of the requested kind")] = []
    hooks: Annotated[list[str], Field(description="the hooks it implements besides registering components")] = []
    problem: Annotated[str | None, Field(description="broken: what is wrong, in one line; otherwise null")] = None
    remedy: Annotated[str | None, Field(description="broken: what to do about it; otherwise null")] = None


class Listing(_JsonObject):
    """`slime plugins --json`."""

    format: Annotated[Literal[1], Field(description="number of this schema")] = FORMAT
    slime: Annotated[str, Field(description="slime's version")]
    api: Annotated[int, Field(description="plugin API that this slime supports")]
    plugins: Annotated[
        list[Row], Field(description="working plugins, slime's own first, then by package and id; then broken ones")
    ]
    notes: Annotated[list[str], Field(description="descriptions of name clashes")] = []


class UseRow(_JsonObject):
    """One component that a run uses."""

    slot: Annotated[str, Field(description='where the run names it: "estimator", "reward", "reward[0]", ...')]
    kind: Annotated[str, Field(description="kind of component")]
    name: Annotated[str, Field(description="as the run names it")]
    weight: Annotated[float, Field(description="of a reward: its factor in the sum")]
    status: Annotated[
        Literal["ok", "missing", "clash", "broken", "refused"],
        Field(description="broken: its plugin is at fault; refused: the run's configuration is at fault"),
    ]
    id: Annotated[str | None, Field(description="PLUGIN/NAME; null if it was not found")] = None
    distribution: Annotated[str | None, Field(description="its package")] = None
    version: Annotated[str | None, Field(description="the package's version")] = None
    options: Annotated[dict[str, object], Field(description="its options, defaults filled in")] = {}
    problem: Annotated[str | None, Field(description="why the run cannot use it; null if it can")] = None


class RunListing(_JsonObject):
    """`slime plugins --json --for RUN.toml`."""

    format: Annotated[Literal[1], Field(description="number of this schema")] = FORMAT
    slime: Annotated[str, Field(description="slime's version")]
    api: Annotated[int, Field(description="plugin API that this slime supports")]
    uses: Annotated[list[UseRow], Field(description="every component that the run names, in its order")]
    problems: Annotated[
        list[str], Field(description="other problems: the [plugins] section, or a plugin that refuses the run")
    ] = []
