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
            problems = check_component(component)
        failed += bool(problems)
        print(f"{'broken' if problems else 'ok':<8}{component.title}")
        for problem in problems:
            print(f"        {problem}")
    broken = [] if ids else list(plugins.failures)
    for failure in broken:
        print(f"broken  {failure}")
    print(f"{len(components)} component{'s' if len(components) != 1 else ''} checked, {failed} with problems")
    return int(bool(failed or broken))
