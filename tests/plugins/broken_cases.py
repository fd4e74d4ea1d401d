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
    _one("the entry point names a module that is not there", HEAD, entry="slime_reward_bed"),
    _one("the entry point names a class", HEAD + "class Plugin: pass\n", entry="slime_reward_bad:Plugin"),
    _one("a syntax error", "def (:\n"),
    _one("an exception when it is imported", "raise RuntimeError('no licence')\n"),
    _one("it ends the process when it is imported", "import sys\nsys.exit(3)\n"),
    _one("a package it imports is not installed", "import sympie\n"),
    # its declaration
    _one("no `slime_api`", "import slime.plugin as sp\n"),
    _one("written for a newer plugin API", "slime_api = 3\n"),
    _one("written for an older plugin API", "slime_api = 0\n"),
    _one("`slime_api` is no number", "slime_api = '1'\n"),
    _one("its id is not a name", HEAD, plugin="Bad.Id", used_as="Bad.Id/r"),
    # hooks
    _one("a misspelt hook", HEAD + "@sp.hookimpl\ndef slime_register_reward(): return []\n"),
    _one("a hook without `@hookimpl`", HEAD + "def slime_register_rewards(): return []\n"),
    _one("a hook asks for what is not passed", HEAD + "@sp.hookimpl\ndef slime_step_finished(stp): pass\n"),
    _one("a hook's argument has a default", HEAD + "@sp.hookimpl\ndef slime_check_config(config=None): pass\n"),
    _one("a hook's argument is keyword-only", HEAD + "@sp.hookimpl\ndef slime_step_finished(*, step): pass\n"),
    _one("a hook is `async`", HEAD + "@sp.hookimpl\nasync def slime_register_rewards(): return []\n"),
    _one(
        "a hook is a wrapper",
        HEAD + "@sp.hookimpl(wrapper=True)\ndef slime_register_rewards():\n    return (yield)\n",
    ),
    # its specs
    _registers("the hook raises", "1 / 0"),
    _registers("the hook returns no list", "None"),
    _registers("the list holds something else", "['r']"),
    _registers("the spec is of another kind", "[sp.GeneratorSpec(name='r', factory='slime_reward_bad_impl:Impl')]"),
    _registers("the spec has a field that does not exist", f"[{_spec(timeout='5')}]"),
    _registers("the component's name is not a name", f"[{_spec(name=repr('Big Name'))}]"),
    _registers("one name twice", f"[{_spec()}] * 2"),
    _registers("the factory is malformed", f"[{_spec(factory=repr('Impl'))}]"),
    _registers("the factory's module is not there", f"[{_spec(factory=repr('slime_reward_bad.core:Impl'))}]"),
    _registers("the options are no `Options`", f"[{_spec(options='dict')}]"),
    _one(
        "an option has a name that slime uses itself",
        _OPTIONS.format(field="timeout_s: float = 1.0") + _WITH_OPTIONS,
    ),
    _registers("a field of the spec has a value it cannot have", f"[{_spec(scope=repr('batch'))}]"),
    _registers("a requirement is malformed", f"[{_spec(requires='(' + repr('sympie >> 1') + ',)')}]"),
    # names
    _two("two packages have one plugin id", ("slime-reward-bad", "bad"), ("slime-reward-worse", "bad")),
    _two(
        "two plugins have a component of one name",
        ("slime-reward-bad", "bad"),
        ("slime-reward-worse", "worse"),
        used_as="r",
    ),
    _registers("a package takes the id of a plugin of slime", f"[{_spec()}]", plugin="rewards", used_as="rewards/r"),
    _registers(
        "a component has the name of one of slime's own",
        f"[{_spec(name=repr('exact_match'))}]",
        used_as="exact_match",
        usable=True,
    ),
    # detected only by a run
    _registers("its class is not there", f"[{_spec(factory=repr('slime_reward_bad_impl:Imple'))}]"),
    _registers("its class's module has a syntax error", f"[{_spec()}]", impl="class Impl\n"),
    _registers("its class's module needs a package that is not installed", f"[{_spec()}]", impl="import sympie\n"),
    _registers("what it requires is not installed", f"[{_spec(requires='(' + repr('sympie>=1.12') + ',)')}]"),
    _registers(
        "what it requires is installed in another version", f"[{_spec(requires='(' + repr('pluggy<1') + ',)')}]"
    ),
    _one(
        "the run states an option it does not have",
        _OPTIONS.format(field="limit: int = Field(default=1, gt=0)") + _WITH_OPTIONS,
        options={"limt": 2},
    ),
    _one(
        "the run states an option with a wrong value",
        _OPTIONS.format(field="limit: int = Field(default=1, gt=0)") + _WITH_OPTIONS,
        options={"limit": 0},
    ),
    _one(
        "the run does not state an option that it must",
        _OPTIONS.format(field="limit: int") + _WITH_OPTIONS,
    ),
    _registers(
        "its class's module raises when it is imported",
        f"[{_spec()}]",
        impl="raise OSError('no such device')\nclass Impl: pass\n",
        shows="when it is built",
    ),
    _registers(
        "its class raises when it is made",
        f"[{_spec()}]",
        impl="class Impl:\n    def __init__(self, options, context):\n        raise KeyError('MODEL')\n",
        shows="when it is built",
    ),
)
