"""Every kind of component can be registered, found and built; every hook is exercised by a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.errors import PluginContractError
from slime.plugin import Context
from slime.plugin import hooks as hookspecs
from slime.registry.kinds import KINDS
from slime.registry.plugin_set import survey_plugins

#: fields that a spec must have
NEEDED = {"family": ', model_types=("mine",), causal_lm="MineForCausalLM"'}
HOOKS = {
    "estimator": "slime_register_estimators",
    "reward": "slime_register_rewards",
    "datasource": "slime_register_datasources",
    "buffer_filter": "slime_register_buffer_filters",
    "generator": "slime_register_generators",
    "family": "slime_register_families",
    "tracker": "slime_register_trackers",
    "panel": "slime_register_panels",
}


def install_kind(install: Any, kind: str, methods: tuple[str, ...]) -> None:
    source = f"""
        import slime.plugin as sp
        slime_api = 1

        @sp.hookimpl
        def {HOOKS[kind]}():
            return [sp.{KINDS[kind].spec.__name__}(name="mine", factory="kind_impl:Impl"{NEEDED.get(kind, "")})]
    """
    body = "".join(f"    def {method}(self, *arguments): pass\n" for method in methods)
    impl = f"class Impl:\n    def __init__(self, options, context): pass\n{body}"
    install("slime-any", "1", {"any": "kind_light"}, {"kind_light": source, "kind_impl": impl})


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.row("K1")
def test_a_component_of_every_kind_is_found_and_built(install: Any, context: Context, kind: str) -> None:
    install_kind(install, kind, KINDS[kind].methods)
    plugins = survey_plugins()
    assert plugins.failures == ()
    assert isinstance(plugins.find(kind, "mine").spec, KINDS[kind].spec)
    assert type(plugins.build(kind, "any/mine", {}, context)).__name__ == "Impl"


@pytest.mark.parametrize(("kind", "method"), [(kind.name, m) for kind in KINDS.values() for m in kind.methods])
def test_every_method_of_a_protocol_is_required(install: Any, context: Context, kind: str, method: str) -> None:
    install_kind(install, kind, tuple(m for m in KINDS[kind].methods if m != method))
    with pytest.raises(
        PluginContractError, match=rf"built a Impl without {method}\(\), which every {KINDS[kind].title} must have"
    ):
        survey_plugins().build(kind, "mine", {}, context)


@pytest.mark.row("P1")
def test_every_hook_has_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    hooks = [name for name in vars(hookspecs) if name.startswith("slime_")]
    assert len(hooks) == 16
    assert [name for name in hooks if f"def {name}" not in tests and f'"{name}"' not in tests] == []
