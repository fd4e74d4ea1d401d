"""How references are resolved to files, and how files are loaded."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest
from tests.registry.local_runs import answered, scores, write

from slime.compat.functions import find_function
from slime.errors import PluginLoadError
from slime.plugin import Context

pytestmark = pytest.mark.slow


def score(reference: Path | str, context: Context) -> float:
    component = find_function("reward", f"{reference}")
    [value] = scores(component.build(component.spec.options(), context), answered("x"))
    return value


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`mine.rewards.numbers` in a folder on the path; its folders are no packages by `__init__.py`."""
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    before = set(sys.modules)
    yield write(
        tmp_path, "lib/mine/rewards/numbers.py", "from mine.rewards.base import seven\ndef two(sample): return 2"
    )
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "mine":  # whatever else was imported for the first time stays as it is
            del sys.modules[name]


def test_a_file_is_named_relative_to_the_working_directory(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "reward.py", "def mine(sample): return 4")
    assert score("reward.py:mine", context) == score("./reward.py:mine", context) == 4.0


def test_files_with_equal_names_do_not_collide(tmp_path: Path, context: Context) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        write(tmp_path, f"{folder}/reward.py", "from helpers import VALUE\ndef reward_func(sample): return VALUE")
        write(tmp_path, f"{folder}/helpers.py", f"VALUE = {value}")
    path = list(sys.path)
    assert [score(tmp_path / folder / "reward.py", context) for folder in "aba"] == [1.0, 2.0, 1.0]
    assert sys.path[: len(path)] == path


def test_a_file_in_the_same_folder_does_not_replace_an_imported_module(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = type(sys)("helpers")
    monkeypatch.setitem(sys.modules, "helpers", theirs)
    write(tmp_path, "helpers.py", "VALUE = 3")
    path = write(tmp_path, "reward.py", "import helpers\ndef reward_func(sample): return helpers.VALUE")
    assert score(path, context) == 3.0
    assert sys.modules["helpers"] is theirs


def test_files_named_like_the_standard_library_do_not_shadow_it(tmp_path: Path, context: Context) -> None:
    write(tmp_path, "json.py", "raise AssertionError('a neighbour')")
    path = write(tmp_path, "reward.py", "import json\ndef reward_func(sample): return json.loads('1')")
    assert score(path, context) == 1.0


def test_an_edited_file_is_a_new_module(tmp_path: Path, context: Context) -> None:
    path = write(tmp_path, "reward.py", "def reward_func(sample): return 1")
    before = find_function("reward", str(path))
    first = score(path, context)
    write(tmp_path, "reward.py", "def reward_func(sample): return 2")
    assert (first, score(path, context)) == (1.0, 2.0)
    assert before.found.version != find_function("reward", str(path)).found.version


def test_a_redefined_name_is_refused(tmp_path: Path, context: Context) -> None:
    path = write(tmp_path, "reward.py", "def reward_func(sample): ...\nglobals()['reward_func'] = 3")
    with pytest.raises(PluginLoadError, match="its parameters cannot be read"):
        score(path, context)


def test_a_file_that_differs_between_processes_is_named(tmp_path: Path, context: Context) -> None:
    source = """
        import os
        if os.getpid() != PID:
            def reward_func(sample): ...
        else:
            open('/no/such/file')
    """
    path = write(tmp_path, "reward.py", source.replace("PID", str(os.getpid())))
    with pytest.raises(PluginLoadError, match=r"reward.py cannot be loaded: .*/reward.py:6: FileNot.*/no/such/file"):
        score(path, context)


def test_objects_of_a_files_classes_can_be_pickled(tmp_path: Path, context: Context) -> None:
    path = write(
        tmp_path,
        "reward.py",
        """
        import pickle
        from dataclasses import dataclass

        @dataclass
        class Point:
            x: int

        def reward_func(sample):
            return pickle.loads(pickle.dumps(Point(4))).x
        """,
    )
    assert score(path, context) == 4.0


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from helpers import score as reward_func", ""),
        ("def score(sample): return 5\nreward_func = score", ""),
        ("try:\n    from no_such_package import score\nexcept ImportError:\n    def score(sample): return 5", ":score"),
        (
            "import functools\n"
            "def twice(f): return functools.wraps(f)(lambda *a, **k: f(*a, **k))\n"
            "@twice\ndef score(sample): return 5",
            ":score",
        ),
        ("def score(sample):\n    import only_here\n    return only_here.score(None, sample)", ":score"),
    ],
)
def test_imported_names_are_resolved(tmp_path: Path, context: Context, source: str, name: str) -> None:
    for neighbour in ("helpers", "only_here"):
        write(tmp_path, f"{neighbour}.py", "def score(args, sample): return 5")
    path = write(tmp_path, "reward.py", source)
    assert score(f"{path}{name}", context) == 5.0


def test_a_dotted_path_is_imported_as_a_module(package: Path, context: Context) -> None:
    write(package.parent, "base.py", "def seven(sample): return 7")
    assert score("mine.rewards.numbers:two", context) == 2.0
    assert score("mine.rewards.numbers:seven", context) == 7.0
    component = find_function("reward", "mine.rewards.numbers:two")
    assert (component.id, component.found.entry) == ("mine.rewards.numbers:two", str(package))


def test_a_class_may_inherit_the_required_method(package: Path) -> None:
    write(
        package.parent,
        "base.py",
        "class Base:\n    def compute_reward(self, prompts, responses): ...\ndef seven(): ...",
    )
    write(package.parent, "numbers.py", "from .base import Base\nclass Model(Base):\n    pass")
    assert find_function("reward", "mine.rewards.numbers:Model").name == "mine.rewards.numbers.Model"


@pytest.mark.parametrize("name", ["RolloutDataSource", "RolloutDataSourceWithBuffer"])
def test_a_class_may_extend_its_namesake(tmp_path: Path, name: str) -> None:
    source = f"from slime.data import {name}\nclass {name}({name}):\n    more = 1\n"
    found = find_function("datasource", str(write(tmp_path, "source.py", source)))
    assert found.function.reference.name == name


#: every name is defined, if in unusual ways: set later, generated, in a class inside a function, an expected NameError
KNOWN = """
    import functools
    from dataclasses import dataclass, field
    from typing import NamedTuple

    @dataclass
    class Kept:
        count: int = 1
        parts: list = field(default_factory=list)

    class Pair(NamedTuple):
        one: int = 1

    def load():
        global model
        model = 3

    @functools.lru_cache
    def helper(n):
        return model + Kept(n).count + Pair().one

    def reward_func(args, sample):
        class Inner:
            base = 1
            more = base + 1
        try:
            return display
        except NameError:
            return sum(helper(n) for n in range(3)) + len(__name__) + Inner.more
"""


def test_a_name_that_is_known_by_the_time_it_is_used_is_none_of_the_unknown(tmp_path: Path) -> None:
    assert find_function("reward", str(write(tmp_path, "rm.py", KNOWN))).function.reference.name == "reward_func"


def test_a_component_can_be_pickled(tmp_path: Path) -> None:
    path = write(tmp_path, "reward.py", "def reward_func(sample): return 1")
    component = find_function("reward", str(path))
    assert pickle.loads(pickle.dumps(component)) == component
    assert component.id == f"{path}:reward_func"
