"""Every known way to break a plugin, as packages on disk. See `broken_table.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any

HEAD = "import slime.plugin as sp\nslime_api = 1\n"
HOOK = HEAD + "@sp.hookimpl\ndef slime_register_rewards():\n    return "
IMPL = """
    import slime.plugin as sp

    class Impl:
        def __init__(self, options, context):
            pass

        def score(self, samples):
            return [sp.Reward(0.0) for _ in samples]
"""


@dataclass(frozen=True)
class Package:
    """One distribution with one plugin."""

    source: str
    impl: str = IMPL
    distribution: str = "slime-reward-bad"
    plugin: str = "bad"
    #: value of its entry point; default: its module
    entry: str = ""

    @property
    def module(self) -> str:
        """Name of its light module."""
        return self.distribution.replace("-", "_")


@dataclass(frozen=True)
class Case:
    """One mistake, and a run that uses the plugin."""

    mistake: str
    packages: tuple[Package, ...]
    #: the reward of a run that uses it
    used_as: str = "bad/r"
    options: Mapping[str, Any] = field(default_factory=dict)
    #: when it is detected: before anything starts, or when the component is built
    shows: str = "before a run"
    #: whether a run may use it anyway
    usable: bool = False


def _spec(**fields: str) -> str:
    values = {"name": "'r'", "factory": "'slime_reward_bad_impl:Impl'", **fields}
    return f"sp.RewardSpec({', '.join(f'{name}={value}' for name, value in values.items())})"


def _one(mistake: str, source: str, *, impl: str = IMPL, entry: str = "", plugin: str = "bad", **more: Any) -> Case:
    return Case(mistake, (Package(dedent(source), impl, plugin=plugin, entry=entry),), **more)


def _registers(mistake: str, registered: str, **more: Any) -> Case:
    return _one(mistake, f"{HOOK}{registered}\n", **more)


def _two(mistake: str, first: tuple[str, str], second: tuple[str, str], **more: Any) -> Case:
    """Two packages, each (distribution, plugin id), that register the reward `r`."""
    packages = tuple(
        Package(
            f"{HOOK}[sp.RewardSpec(name='r', factory='{distribution.replace('-', '_')}_impl:Impl')]\n",
            distribution=distribution,
            plugin=plugin,
        )
        for distribution, plugin in (first, second)
    )
    return Case(mistake, packages, **more)


_OPTIONS = "from pydantic import Field\n" + HEAD + "class Opts(sp.Options):\n    {field}\n\n"
_WITH_OPTIONS = f"@sp.hookimpl\ndef slime_register_rewards():\n    return [{_spec(options='Opts')}]\n"

CASES: tuple[Case, ...] = (
    # importing it
    _one("the entry point names a missing module", HEAD, entry="slime_reward_bed"),
    _one("the entry point names a class", HEAD + "class Plugin: pass\n", entry="slime_reward_bad:Plugin"),
    _one("a syntax error", "def (:\n"),
    _one("an exception during import", "raise RuntimeError('no licence')\n"),
    _one("the import exits the process", "import sys\nsys.exit(3)\n"),
    _one("an imported package is not installed", "import sympie\n"),
    # its declaration
    _one("no `slime_api`", "import slime.plugin as sp\n"),
    _one("written for a newer plugin API", "slime_api = 3\n"),
    _one("written for an older plugin API", "slime_api = 0\n"),
    _one("`slime_api` is not a number", "slime_api = '1'\n"),
    _one("an invalid plugin id", HEAD, plugin="Bad.Id", used_as="Bad.Id/r"),
    # hooks
    _one("a misspelt hook", HEAD + "@sp.hookimpl\ndef slime_register_reward(): return []\n"),
    _one("a hook without `@hookimpl`", HEAD + "def slime_register_rewards(): return []\n"),
    _one("a hook has an unknown argument", HEAD + "@sp.hookimpl\ndef slime_step_finished(stp): pass\n"),
    _one("a hook's argument has a default", HEAD + "@sp.hookimpl\ndef slime_check_config(config=None): pass\n"),
    _one("a hook's argument is keyword-only", HEAD + "@sp.hookimpl\ndef slime_step_finished(*, step): pass\n"),
    _one("a hook is `async`", HEAD + "@sp.hookimpl\nasync def slime_register_rewards(): return []\n"),
    _one(
        "a hook is a wrapper",
        HEAD + "@sp.hookimpl(wrapper=True)\ndef slime_register_rewards():\n    return (yield)\n",
    ),
    # its specs
    _registers("a hook raises", "1 / 0"),
    _registers("a hook does not return a list", "None"),
    _registers("the list contains something else than a spec", "['r']"),
    _registers("a spec of another kind", "[sp.GeneratorSpec(name='r', factory='slime_reward_bad_impl:Impl')]"),
    _registers("a spec with an unknown field", f"[{_spec(timeout='5')}]"),
    _registers("an invalid component name", f"[{_spec(name=repr('Big Name'))}]"),
    _registers("two components with the same name", f"[{_spec()}] * 2"),
    _registers("a malformed factory", f"[{_spec(factory=repr('Impl'))}]"),
    _registers("a factory in a missing module", f"[{_spec(factory=repr('slime_reward_bad.core:Impl'))}]"),
    _registers("options that are not a subclass of `Options`", f"[{_spec(options='dict')}]"),
    _one(
        "an option with a name that slime uses itself",
        _OPTIONS.format(field="timeout_s: float = 1.0") + _WITH_OPTIONS,
    ),
    _registers("a spec with an invalid value", f"[{_spec(scope=repr('batch'))}]"),
    _registers("a malformed requirement", f"[{_spec(requires='(' + repr('sympie >> 1') + ',)')}]"),
    # names
    _two("two packages with the same plugin id", ("slime-reward-bad", "bad"), ("slime-reward-worse", "bad")),
    _two(
        "two plugins with a component of the same name",
        ("slime-reward-bad", "bad"),
        ("slime-reward-worse", "worse"),
        used_as="r",
    ),
    _registers("the id of one of slime's plugins", f"[{_spec()}]", plugin="rewards", used_as="rewards/r"),
    _registers(
        "the name of one of slime's components",
        f"[{_spec(name=repr('exact_match'))}]",
        used_as="exact_match",
        usable=True,
    ),
    # detected only by a run
    _registers("a missing class", f"[{_spec(factory=repr('slime_reward_bad_impl:Imple'))}]"),
    _registers("a syntax error in the class's module", f"[{_spec()}]", impl="class Impl\n"),
    _registers("the class's module imports a package that is not installed", f"[{_spec()}]", impl="import sympie\n"),
    _registers("a requirement that is not installed", f"[{_spec(requires='(' + repr('sympie>=1.12') + ',)')}]"),
    _registers(
        "a requirement that is installed in another version", f"[{_spec(requires='(' + repr('pluggy<1') + ',)')}]"
    ),
    _one(
        "the run sets an unknown option",
        _OPTIONS.format(field="limit: int = Field(default=1, gt=0)") + _WITH_OPTIONS,
        options={"limt": 2},
    ),
    _one(
        "the run sets an option to an invalid value",
        _OPTIONS.format(field="limit: int = Field(default=1, gt=0)") + _WITH_OPTIONS,
        options={"limit": 0},
    ),
    _one(
        "the run does not set a required option",
        _OPTIONS.format(field="limit: int") + _WITH_OPTIONS,
    ),
    _registers(
        "an exception in the import of the class's module",
        f"[{_spec()}]",
        impl="raise OSError('no such device')\nclass Impl: pass\n",
        shows="when it is built",
    ),
    _registers(
        "an exception in the class's constructor",
        f"[{_spec()}]",
        impl="class Impl:\n    def __init__(self, options, context):\n        raise KeyError('MODEL')\n",
        shows="when it is built",
    ),
)
