"""`slime plugins check`: the contract kit on installed components."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from slime.cli.plugins.selected import selected
from slime.plugins import Component, survey_plugins


def check(ids: Sequence[str], kind: str | None) -> int:
    """Print one line for each component, and its problems; 1 when there are any.

    ids     of components or of whole plugins; none: every installed component

    Raises `PluginLoadError` for an id that names nothing, or something broken.
    """
    # The kit is not needed for anything else.
    from slime.testing.check import check_component

    plugins = survey_plugins()
    components: list[Component] = []
    for name in ids:
        components += [component for component in selected(plugins, name, kind) if component not in components]
    if not ids:
        components = plugins.components(kind)
    failed = 0
    for component in components:
        # What a component prints while it is tried is not the answer.
        with contextlib.redirect_stdout(sys.stderr):
            checked = check_component(component)
        failed += bool(checked.problems)
        word = "broken" if checked.problems else "ok" if checked.kept else "-"
        print(f"{word:<8}{component.title}: {len(checked.kept)} rules kept", flush=True)
        for line in (*checked.problems, *checked.notes):
            print(f"        {line}", flush=True)
    broken = [] if ids else list(plugins.failures)
    for failure in broken:
        print(f"broken  {failure}")
    count = f"{len(components)} component{'s' if len(components) != 1 else ''} checked"
    print(f"{count}, {failed} with problems" if failed else count)
    return int(bool(failed or broken))
