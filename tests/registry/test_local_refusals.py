"""A faulty function path is reported before a run starts, and its file never runs in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.registry.local_runs import write

from slime.compat.functions import find_function
from slime.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError, SlimeError

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
        "nothing that can be a reward. Got nothing public. Expected, preferably called reward_func",
    ),
    (
        "reward",
        "",
        "def grade(args, answer): ...",
        PluginNotFoundError,
        r"line 2: grade\(args, answer\) \(it has no parameter called sample\)",
    ),
    (
        "reward",
        "",
        "def reward_func(args, answer): ...",
        PluginNotFoundError,
        r"rm.py:2: got reward_func\(args, answer\), .* called sample. Expected .* \(args, sample, .*\) -> float",
    ),
    (
        "reward",
        "",
        "def reward_func(args, sample, tokenizer): ...",
        PluginNotFoundError,
        "slime has no value for the parameter tokenizer",
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
    (
        "reward",
        ":M",
        "class M:\n    def score(self, samples): ...",
        PluginNotFoundError,
        "it has no method compute_reward",
    ),
    (
        "reward",
        ":M",
        "class M:\n    def __init__(self, path): ...\n    def compute_reward(self, prompts, responses): ...",
        PluginNotFoundError,
        "slime has no value for its constructor's parameter path",
    ),
    ("reward", ":f", "f = 3", PluginNotFoundError, r"got f, .* its parameters cannot be read"),
    ("reward", ":f", "f = print", PluginNotFoundError, r"got f\(\*args, .* it has no parameter called sample"),
    (
        "reward",
        ":f",
        "from json import no_such_thing as f",
        PluginLoadError,
        r"rm.py:2 cannot be loaded: ImportError: cannot import name 'no_such_thing'",
    ),
    (
        "reward",
        "",
        "def f(sample): ...\nopen('/no/such')",
        PluginLoadError,
        r"rm.py:3 cannot be loaded: FileNotFoundError",
    ),
    (
        "reward",
        "",
        "import sys\nsys.exit(3)",
        PluginLoadError,
        r"rm.py:3 ends the process when it is imported: SystemExit: 3",
    ),
    (
        "reward",
        "",
        "import os\nprint('now', flush=True)\nos._exit(7)",
        PluginLoadError,
        r"rm.py ended the process that imported it, with exit status 7; its last output was: now",
    ),
    ("reward", "", "import raises", PluginLoadError, r"rm.py:2 \(at \S+raises.py:2\) cannot be loaded: KeyError: 'x'"),
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
        "rm.py:2: a relative import in a file that is not part of a package",
    ),
    (
        "reward",
        "",
        "def reward_func(sample):\n    return grade(sample)\ndef grade(sample):\n    return [check(sample), limit]",
        PluginLoadError,
        r"rm.py:5: reward_func uses check, limit, which its file neither defines nor imports",
    ),
    (
        "reward",
        "",
        "class CustomRewardModel:\n    def __init__(self, model_path):\n        self.model = load_model(model_path)\n"
        "    def compute_reward(self, prompts, responses): ...",
        PluginLoadError,
        r"rm.py:4: CustomRewardModel uses load_model, which its file neither defines nor imports",
    ),
    ("generator", "", "def custom_generate(args, samples): ...", PluginNotFoundError, "it must be an `async def`"),
    (
        "generator",
        "",
        "async def custom_generate(args, prompts): ...",
        PluginNotFoundError,
        "it has no parameter called samples",
    ),
    ("datasource", "", "class Mine:\n    def take(self, n): ...", PluginNotFoundError, "it has no method get_samples"),
    (
        "datasource",
        "",
        "class Mine:\n    def get_samples(self, n, epoch): ...",
        PluginNotFoundError,
        "it takes 2 arguments, and slime passes 1",
    ),
    (
        "buffer_filter",
        "",
        "async def buffer_filter(args, buffer, num_samples): ...",
        PluginNotFoundError,
        "it must be a plain `def`",
    ),
    ("estimator", "", "def f(): ...", PluginNotFoundError, "a component of kind estimator cannot be given by path"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "source", "error", "message"), REFUSED)
def test_a_bad_function_is_refused_with_line_and_signatures(
    tmp_path: Path, kind: str, name: str, source: str, error: type[SlimeError], message: str
) -> None:
    write(tmp_path, "raises.py", "\n{}['x']")
    path = tmp_path / "rm.py"
    path.write_text(f"# a comment\n{source}\n")
    with pytest.raises(SlimeError, match=message) as caught:
        find_function(kind, f"{path}{name}")
    assert type(caught.value) is error
    assert kind == "estimator" or str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        (
            "{folder}/custom_rn.py",
            PluginNotFoundError,
            r"custom_rn.py cannot be read: No such file or directory. Did you mean custom_rm.py\?",
        ),
        ("{folder}/no/custom_rm.py", PluginNotFoundError, "no/custom_rm.py cannot be read: No such file"),
        ("{folder}/a_folder.py", PluginNotFoundError, "a_folder.py cannot be read: Is a directory"),
        ("{folder}/custom_rm", ConfigError, r"expected FILE.py, FILE.py:NAME or package.module:NAME. Did you mean"),
        ("custom_rm", ConfigError, "expected FILE.py"),
        ("no_such_package.rewards:score", PluginNotFoundError, "there is no module no_such_package.rewards"),
        ("json.decoder.scor", ConfigError, r"Did you mean json.decoder:scor\?"),
        ("json.decoder:scor", PluginNotFoundError, "decoder.py has no scor"),
    ],
)
def test_an_unusable_reference_is_refused(
    tmp_path: Path, reference: str, error: type[SlimeError], message: str
) -> None:
    write(tmp_path, "custom_rm.py", "def reward_func(sample): ...")
    (tmp_path / "a_folder.py").mkdir()
    with pytest.raises(SlimeError, match=message) as caught:
        find_function("reward", reference.format(folder=tmp_path))
    assert type(caught.value) is error


def test_the_error_suggests_the_form_with_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine/rewards.py", "def score(sample): ...")
    with pytest.raises(PluginNotFoundError, match=r"Did you mean mine/rewards.py:NAME\?"):
        find_function("reward", "mine.rewards:score")


@pytest.mark.slow
def test_a_file_that_hangs_is_named_with_the_line_it_hangs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.compat.probe.TIMEOUT_S", 3.0)
    path = write(tmp_path, "rm.py", "import time\ndef reward_func(sample): ...\ntime.sleep(1000)")
    with pytest.raises(PluginLoadError, match=rf"{path}:3 was still being imported after 3 s"):
        find_function("reward", str(path))


def test_output_and_threads_of_a_file_do_not_matter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
        import subprocess, sys, threading, time
        print("hello")
        print("world", file=sys.stderr)
        subprocess.Popen(["sleep", "1000"])
        threading.Thread(target=time.sleep, args=(1000,)).start()
        def reward_func(sample): ...
    """
    path = write(tmp_path, "rm.py", source)
    component = find_function("reward", str(path))
    assert component.origin == f"{path}:7"
    assert capfd.readouterr() == ("", "")


def test_a_file_is_probed_once(tmp_path: Path) -> None:
    path = write(tmp_path, "rm.py", "open('ran', 'a').write('x')\ndef reward_func(sample): ...")
    path.write_text(path.read_text().replace("'ran'", repr(str(tmp_path / "ran"))))
    assert [find_function("reward", str(path)).name for _ in range(3)] == ["rm.reward_func"] * 3
    assert (tmp_path / "ran").read_text() == "x"
