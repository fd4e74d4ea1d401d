"""What is wrong with a function path is told from its source, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugins.local_runs import write

from slime.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError, SlimeError
from slime.plugins.local import find_local

RAN = "raise SystemExit('the file was run')\n"

#: (kind, what follows the file's path, source, error, message)
REFUSED = [
    (
        "reward",
        "",
        "def reward_func(args, sample)\n    return 1",
        PluginLoadError,
        r"rm.py:2: syntax error: expected ':'",
    ),
    ("reward", "", "x = '\0'", PluginLoadError, r"rm.py(:1)?.*null bytes"),
    (
        "reward",
        ":reward_fun",
        "def reward_func(args, sample): ...",
        PluginNotFoundError,
        r"has no reward_fun. Did you mean reward_func\? It defines reward_func",
    ),
    ("reward", ":f", "", PluginNotFoundError, "has no f. It defines nothing public"),
    (
        "reward",
        "",
        "import json",
        PluginNotFoundError,
        "nothing that fits a reward. Got nothing public. Expected, best called reward_func",
    ),
    (
        "reward",
        "",
        "def grade(args, answer): ...",
        PluginNotFoundError,
        r"line 2: grade\(args, answer\) \(no parameter is called sample\)",
    ),
    (
        "reward",
        "",
        "def reward_func(args, answer): ...",
        PluginLoadError,
        r"rm.py:2: got reward_func\(args, answer\), .* called sample. Expected, .* \(args, sample, .*\) -> float",
    ),
    (
        "reward",
        "",
        "def reward_func(args, sample, tokenizer): ...",
        PluginLoadError,
        "nothing fills the parameter tokenizer",
    ),
    (
        "reward",
        "",
        "def one(sample): ...\ndef two(samples): ...",
        PluginConflictError,
        r"write rm.py:one \(line 2\) or rm.py:two \(line 3\)",
    ),
    (
        "reward",
        "",
        "def reward_func(sample): ...\nclass CustomRewardModel:\n    def compute_reward(self, prompts, responses): ...",
        PluginConflictError,
        "reward_func .* or rm.py:CustomRewardModel",
    ),
    ("reward", ":M", "class M:\n    def score(self, samples): ...", PluginLoadError, "it has no method compute_reward"),
    (
        "reward",
        ":M",
        "class M:\n    def __init__(self, path): ...\n    def compute_reward(self, prompts, responses): ...",
        PluginLoadError,
        "its constructor asks for path",
    ),
    ("reward", ":f", "f = print", PluginLoadError, r"got f = ..., .* its parameters cannot be read"),
    ("reward", ":f", "from json import no_such_thing as f", PluginLoadError, "its parameters cannot be read"),
    (
        "reward",
        "",
        "import no_such_package\ndef f(sample): ...",
        PluginLoadError,
        r"rm.py:2 needs no_such_package, which is not installed. Install the package that provides it",
    ),
    (
        "reward",
        "",
        "from . import helpers\ndef f(sample): ...",
        PluginLoadError,
        "a relative import, in a file that is no part of a package",
    ),
    ("reward", "", "def f(sample):\n    import beside", PluginLoadError, "imports beside.py inside a function"),
    ("generator", "", "def custom_generate(args, samples): ...", PluginLoadError, "it is no `async def`"),
    (
        "generator",
        "",
        "async def custom_generate(args, prompts): ...",
        PluginLoadError,
        "no parameter is called samples",
    ),
    ("datasource", "", "class Mine:\n    def take(self, n): ...", PluginNotFoundError, "it has no method get_samples"),
    (
        "datasource",
        "",
        "class Mine:\n    def get_samples(self, n, epoch): ...",
        PluginNotFoundError,
        "it asks for 2 values and gets 1",
    ),
    (
        "buffer_filter",
        "",
        "async def buffer_filter(args, buffer, num_samples): ...",
        PluginLoadError,
        "it is an `async def`",
    ),
    ("estimator", "", "def f(): ...", PluginNotFoundError, "no function path for components of kind estimator"),
]


@pytest.mark.parametrize(("kind", "name", "source", "error", "message"), REFUSED)
def test_it_is_refused_with_place_and_signatures(
    tmp_path: Path, kind: str, name: str, source: str, error: type[SlimeError], message: str
) -> None:
    write(tmp_path, "beside.py", RAN)
    path = tmp_path / "rm.py"
    path.write_text(f"# {RAN}{source}\n")
    with pytest.raises(SlimeError, match=message) as told:
        find_local(kind, f"local:{path}{name}")
    assert type(told.value) is error
    assert str(told.value).startswith(f"{kind.replace('_', ' ')} local:{path}{name}: ")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("{folder}/custom_rn.py", PluginNotFoundError, r"there is no file .*custom_rn.py. Did you mean custom_rm.py\?"),
        ("{folder}/no/custom_rm.py", PluginNotFoundError, "there is no folder"),
        ("{folder}/a_folder.py", PluginNotFoundError, "is a folder, expected a Python file"),
        ("{folder}/custom_rm", ConfigError, r"expected FILE.py, FILE.py:NAME or package.module.NAME. Did you mean"),
        ("custom_rm", ConfigError, "expected FILE.py"),
        ("no_such_package.rewards.score", PluginNotFoundError, "there is no module no_such_package.rewards"),
        ("json.decoder.scor", PluginNotFoundError, "decoder.py has no scor"),
    ],
)
def test_a_reference_to_nothing_is_refused(
    tmp_path: Path, reference: str, error: type[SlimeError], message: str
) -> None:
    write(tmp_path, "custom_rm.py", "def reward_func(sample): ...")
    (tmp_path / "a_folder.py").mkdir()
    with pytest.raises(SlimeError, match=message) as told:
        find_local("reward", "local:" + reference.format(folder=tmp_path))
    assert type(told.value) is error


def test_a_dotted_path_to_a_file_is_offered_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine/rewards.py", "def score(sample): ...")
    with pytest.raises(PluginNotFoundError, match=r"Did you mean mine/rewards.py:score\?"):
        find_local("reward", "local:mine.rewards.score")


def test_what_works_is_not_run_either(tmp_path: Path) -> None:
    path = write(tmp_path, "rm.py", f"def reward_func(sample): ...\n{RAN}")
    component = find_local("reward", str(path))
    assert component.origin == f"{path}:1"
