"""`slime show` and `slime compare`: the numbers of a run in the terminal."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from plugins.viewer.tests.making import GROUPS, SAMPLES, make_run, rising, sample_of

from slime.cli.main import main
from slime.config import read_config
from slime.observe.samples import write_rollout
from slime.types import Group, Status
from slime_viewer.curves import Change, noise, sparkline
from slime_viewer.differences import Difference, identical_until, metric_ends, seed_sets, told_apart
from slime_viewer.run_files import Metrics
from slime_viewer.words import words


def slime(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([str(word) for word in words]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def test_a_run_is_shown_with_its_curves_alerts_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=12, metrics=lambda _: {"rollout/truncated_ratio": 0.5})
    out = slime(capsys, "show", folder)
    assert out.startswith(f"finished, 12 steps  {folder}\nWorth a look: 1\n")
    assert "reward      rewards/exact_match  (slime-rl 0.1.0)" in out
    # Of twelve steps, the means of the first and the last four.
    first = [rising(step, group, n) for step in range(4) for group in range(GROUPS) for n in range(SAMPLES)]
    reward = next(line.split() for line in out.splitlines() if line.startswith("  reward  "))
    assert reward[1:4] == [f"{sum(first) / len(first):.3g}", "->", "1"] and len(reward[4]) == 12
    assert "50% of the responses were cut off" in out
    assert f"slime show {folder} --where 'kind:train status:truncated step>=0'" in out
    assert "warning: the reward is slow" in out
    assert f"again: slime train {folder}/config.toml --run-name run-again" in out


def test_a_metric_that_was_never_finite_has_no_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", metrics=lambda _: {"train/loss": math.nan})
    out = slime(capsys, "show", folder)
    assert "  loss" in next(line for line in out.splitlines() if line.endswith("no finite value"))
    assert "train/loss had no finite value, first in step 0" in out


def test_the_commands_that_are_shown_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "it's mine", 12, metrics=lambda _: {"rollout/truncated_ratio": 0.5}, config="")
    out = slime(capsys, "show", folder)
    shown = [line.strip() for line in out.splitlines()]
    [evidence] = [line for line in shown if line.startswith("slime show ") and "truncated" in line]
    assert "0 samples" in slime(capsys, *shlex.split(evidence)[1:])
    [again] = [shlex.split(line.removeprefix("again: ")) for line in shown if line.startswith("again: ")]
    config = read_config(again[2:])
    assert config.run.run_name == "it's mine-again"


def test_the_worst_and_best_samples_of_a_step_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    worst = slime(capsys, "show", folder, "--step", 1, "--worst", 2)
    assert "12 samples, the 2 worst" in worst and worst.count("reward 0, completed, 5 tokens") == 2
    assert "000001:" in worst and "what is 2+2?" in worst and "label │ 4" in worst
    best = slime(capsys, "show", folder, "--step", 1, "--best", 1)
    assert best.count("reward 1, completed") == 1
    assert "has samples of rollouts 0 to 5" in slime(capsys, "show", folder, "--step", 77)


def test_samples_are_found_by_a_filter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert "6 samples, the 3 worst" in slime(capsys, "show", folder, "--where", '"what is 1+1" "carry the 2"')
    assert "3 samples" in slime(capsys, "show", folder, "--where", "kind:eval")
    assert "3 samples" in slime(capsys, "show", folder, "--where", "-kind:train")
    assert "3 samples" in slime(capsys, "show", folder, "--where=-kind:train")
    assert "there is no field 'rewrd'" in slime(capsys, "show", folder, "--where", "rewrd<1", code=2)


def test_hostile_texts_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    sample = sample_of(1, 0, 0, 0.0, response="\x1b[2J\x07ring\u202e" + "long " * 1000, status=Status.TRUNCATED)
    write_rollout(folder, 1, [Group(3, [sample])])
    out = slime(capsys, "show", folder, "--step", 1)
    assert "\x1b" not in out and "\x07" not in out and "\u202e" not in out and "ring" in out
    assert "(5,010 characters; --full)" in out
    assert "characters; --full" not in slime(capsys, "show", folder, "--step", 1, "--full")


def test_one_metric_is_shown_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    out = slime(capsys, "show", folder, "--metric", "train/kl")
    assert [line.split() for line in out.splitlines()[2:]] == [[str(step), f"{0.01 * step:.4g}"] for step in range(6)]
    told = slime(capsys, "show", folder, "--metric", "train/kll", code=2)
    assert "has no metric 'train/kll'. Did you mean train/kl?" in told


def test_a_metric_is_found_by_its_words_and_the_nearest_is_one_that_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", metrics=lambda _: {"time/reward": 0.1, "rollout/reward_seconds_mean": 0.1})
    assert slime(capsys, "show", folder, "--metric", "reward").startswith("rollout/reward_mean  ")
    assert slime(capsys, "show", folder, "--metric", "KL to the reference").startswith("train/kl  ")
    for word in ("rewards", "reward_meen", "rollout/reward_meen"):
        told = slime(capsys, "show", folder, "--metric", word, code=2)
        assert "Did you mean rollout/reward_mean?" in told
    assert "Did you mean time/reward?" in slime(capsys, "show", folder, "--metric", "time/rewrd", code=2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--wrost", "1"], "unknown option '--wrost'. Did you mean --worst?"),
        (["--worst", "1", "--best", "1"], "takes one of --worst and --best"),
        (["--metric", "train/kl", "--step", "1"], "--metric shows no samples"),
        (["--step", "x"], "invalid int value"),
        (["--step", str(10**25)], "a number has more than 63 bits"),
        (["--worst", "-2"], "--worst -2: expected 1 or more"),
        (["--where"], "expected one argument"),
        (["--where", "--full"], "expected one argument"),
    ],
)
def test_wrong_words_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert told in slime(capsys, "show", make_run(tmp_path / "run"), *words, code=2)
    assert "nothing' does not exist; expected a run folder" in slime(capsys, "show", tmp_path / "nothing", code=2)


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first_run = make_run(tmp_path / "first", steps=12)
    second = make_run(
        tmp_path / "second", steps=14, reward=lambda *_: 0.0, config="[run]\nseed = 2\n\n[megatron]\nlr = 0.001\n"
    )
    used = json.loads((second / "plugins.json").read_text())
    used["used"]["reward"]["options"] = {"strict": True, "id": "mine", "url": "http://judge"}
    other = {"id": "mine/curriculum", "distribution": "mine", "options": {"key": "level", "note": None}}
    used["used"]["datasource"] = other
    (second / "plugins.json").write_text(json.dumps(used))
    known = json.loads((first_run / "plugins.json").read_text())
    known["used"]["datasource"] = {**other, "id": "datasources/prompts", "options": {"shuffle": True}}
    (first_run / "plugins.json").write_text(json.dumps(known))
    out = slime(capsys, "compare", first_run, second)
    rows = {words[0]: words[1:] for line in out.splitlines() if (words := line.split())}
    assert rows["run.seed"] == ["1", "->", "2"] and "megatron.lr" not in rows
    assert rows["reward.options.strict"] == ["·", "->", "True"]
    assert rows["reward.options.id"][2] == "mine" and "reward.options.url" in rows, "options like any other"
    replaced = [name for name in rows if name.startswith("datasource.")]
    assert replaced == ["datasource.id"], "options of different components are not compared"
    # The means of the last ten steps that both have, 2 to 11.
    right = [rising(step, group, n) for step in range(2, 12) for group in range(GROUPS) for n in range(SAMPLES)]
    mean = sum(right) / len(right)
    assert rows["reward"][:3] == [f"{mean:.4g}", "0", f"{-mean:+.3g}"]
    lines = out.splitlines()
    same = out.index("the same: ")
    assert lines[2] == "means of steps 2 to 11, the last that both have"
    assert out.index("differ by more") < out.index("  reward ") < same < out.index("configuration")
    assert "KL to the reference" in out[same : out.index("configuration")]
    assert "identical" not in out
    same_run = slime(capsys, "compare", first_run, first_run)
    assert same_run.splitlines()[2] == "identical: every reward, loss and evaluation is the same up to step 11"
    assert "means of steps 2 to 11" in same_run and "the same: all " in same_run
    assert "configuration: the same" in same_run and "plugins: the same" in same_run


def test_names_of_runs_and_metrics_stay_whole_at_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    more = {"rollout/reward/a_part_with_a_name_longer_than_any_other_has": 0.5, "train/logprob_gap_mean": 1e-7}
    one, other = (
        make_run(tmp_path / name, 12, metrics=lambda step, by=by: {n: v + by * step for n, v in more.items()})
        for name, by in (("a-run-with-a-long-name-of-a-date", 0.0), ("another-run-with-a-long-name", 0.001))
    )
    compared, shown = slime(capsys, "compare", one, other), slime(capsys, "show", one)
    for out in (compared, shown):
        assert "reward, a part with a name longer than any other has" in out
        assert "log-prob gap, engine to trainer" in out
        # A command to copy, and a path, stay in one line.
        assert [line for line in out.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []


def rows_of(folder: Path, rows: dict[int, dict[str, float]]) -> Metrics:
    """Metrics that a run has written."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, **row}) + "\n" for step, row in rows.items())
    )
    metrics = Metrics(folder / "metrics.jsonl")
    metrics.refresh()
    return metrics


def test_differences_beyond_their_interval_come_first(tmp_path: Path) -> None:
    # Of the mean of the differences -1, 0, 1, 2, by hand: 0.5, with 3.18 * sqrt(5/3) / 2 beside it.
    held = {"eval/a": 0.5, "eval/a/low": 0.4, "eval/a/high": 0.6}
    one = rows_of(tmp_path / "one", {step: {"train/kl": 1.0, "train/loss": 0.0, **held} for step in range(4)})
    held = {"eval/a": 0.8, "eval/a/low": 0.7, "eval/a/high": 0.9}
    noise = {step: {"train/kl": float(step), "train/loss": 5.0 + step / 10, **held} for step in range(4)}
    ends = {found.name: found for found in metric_ends(one, rows_of(tmp_path / "other", noise))}
    assert [name for name, found in ends.items() if found.clear] == list(ends)[:2] == ["train/loss", "eval/a"]
    assert ends["train/kl"].margins[0] == pytest.approx(3.18 * math.sqrt(5 / 3) / 2)
    assert ends["eval/a"].margins[0] == pytest.approx(math.hypot(0.1, 0.1)) and ends["eval/a/low"].margins[0] is None


def test_large_numbers_of_a_comparison_keep_their_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, speed: float) -> Path:
        return make_run(tmp_path / name, steps=12, metrics=lambda step: {"rollout/tokens_per_s": speed + step % 2})

    out = slime(capsys, "compare", run("first", 12596.0), run("second", 22830.0))
    assert re.search(r"12,59[67]  22,83[01]  \+10,234  ", out), out


def test_runs_are_identical_up_to_the_end_of_the_shorter_one_whatever_their_times_are(tmp_path: Path) -> None:
    def run(name: str, steps: int, **last: float) -> Metrics:
        rows = {n: {"rollout/reward_mean": n / 10, "rollout/tokens_per_s": hash((name, n))} for n in range(steps)}
        rows[steps - 1] |= last
        return rows_of(tmp_path / name, rows)

    one = run("one", 5)
    assert identical_until(one, run("longer", 7)) == 4
    assert identical_until(one, run("other", 5, **{"rollout/reward_mean": 0.400001})) is None
    assert identical_until(one, run("evaluated", 5, **{"eval/held": 0.5})) is None
    assert identical_until(run("evaluated too", 5, **{"eval/held": 0.5}), one) is None
    assert identical_until(one, rows_of(tmp_path / "empty", {})) is None
    assert identical_until(one, rows_of(tmp_path / "later", {5: {"rollout/reward_mean": 0.0}})) is None


def test_a_curve_is_drawn_from_the_means_of_its_parts() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 40) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert sparkline([], 40) == "" and sparkline([0, 0], 40) == "▁▁"
    assert set(sparkline([0, -4.7e-10, 0, 2e-10], 40)) <= {"▄", "▅"}, "rounding"
    assert sparkline([5e-7, 3e-7, 1e-7, 0], 40) == "█▅▂▁", "a learning rate"
    assert sparkline([3, 3], 40) == "▅▅"  # a constant is not drawn as zero
    # A share that moves between 0 and 1 % stays at the bottom, and one close to 1 at the top.
    assert set(sparkline([0.0, 0.01] * 3, 40, share=True)) == {"▁"}
    assert set(sparkline([1.0, 0.99] * 3, 40, share=True)) == {"█"}


def test_noise_fills_a_third_of_a_curve_and_a_trend_all_of_it() -> None:
    random = Random(7)
    noisy = [5 + random.gauss(0, 1) for _ in range(2000)]
    assert noise(noisy) == pytest.approx(1.0, rel=0.1)
    levels = ["▁▂▃▄▅▆▇█".index(bar) for bar in sparkline(noisy, 40)]
    assert max(levels) - min(levels) <= 3
    assert not Change.of(noisy).clear and Change.of(noisy).text(words("train/loss")).startswith("about 5")
    rising = [value + step / 100 for step, value in enumerate(noisy)]
    drawn = sparkline(rising, 40)
    assert (drawn[0], drawn[-1]) == ("▁", "█") and Change.of(rising).clear
    # A line without noise, and one jump in it, are no noise.
    assert noise([float(step) for step in range(100)]) == 0 == noise([0.0] * 50 + [9.0] * 50)


def test_one_step_that_stands_out_is_no_change_and_of_few_steps_nothing_is_known() -> None:
    def told(values: list[float]) -> str:
        return Change.of(values).text(words("rollout/failed"))

    for steps in (9, 30, 300):
        for place in range(steps):
            spike = [0.0] * steps
            spike[place] = 1.0
            assert Change.of(spike).clear is False, (steps, place)
    assert told([0.0] * 29 + [1.0]) == "about 0.1"
    # A jump, a trend, and a rise that ends soon are changes.
    assert told([0.0] * 10 + [1.0] * 10) == "0 -> 1"
    assert told([float(step) for step in range(12)]) == "1.5 -> 9.5"
    assert told([0.5, 0.8, 0.9] + [1.0] * 21) == "0.9 -> 1"
    # With fewer than nine steps it gives both means, and does not judge whether they differ by more than noise.
    few = Change.of([0.1, 0.4, 0.2, 0.5])
    assert few.clear is None and few.text(words("train/loss")) == "0.1 -> 0.5"


def test_one_metric_has_one_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=9, metrics=lambda _: {"rollout/truncated_ratio": 0.25})
    out = slime(capsys, "show", folder, "--metric", "rollout/truncated_ratio").splitlines()
    assert out[0] == "rollout/truncated_ratio  25 % throughout" and out[2].split() == ["0", "25"]


@pytest.mark.slow
def test_a_terminal_gets_colours_and_no_color_turns_them_off(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=12)
    for more, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        shown = in_terminal(["show", str(folder)], columns=80, **more)
        assert ("\x1b[" in shown) is coloured
        assert "finished, 12 steps" in shown and "▁" in shown


def test_a_terminal_that_knows_ascii_only_gets_substitutes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=12)
    other = make_run(tmp_path / "other", steps=12, reward=lambda step, *_: float(step % 2))
    for encoding, colours in (("ascii", "xterm"), ("ascii", "dumb"), ("ascii:strict", "xterm")):
        settings = {"PYTHONIOENCODING": encoding, "TERM": colours}
        shown = in_terminal(["show", str(folder)], columns=80, **settings)
        compared = in_terminal(["compare", str(folder), str(other)], columns=80, **settings)
        assert shown.isascii() and compared.isascii() and "?" not in shown + compared
        reward = next(line for line in shown.splitlines() if line.startswith("  reward  "))
        assert re.search(r"[_.:=+*#-]{8,}#", reward) and "+/-" in compared


def in_terminal(words: list[str], columns: int, **more: str) -> str:
    """What `slime` prints to a terminal."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 200, columns, 0, 0))
    variables = {**os.environ, "TERM": "xterm", **more}
    for name in {"NO_COLOR", "COLUMNS", "FORCE_COLOR"} - more.keys():
        variables.pop(name, None)
    command = [sys.executable, "-m", "slime.cli.main", *words]
    with subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, env=variables) as process:
        os.close(writer)
        printed = b""
        with suppress(OSError):  # the end of a terminal
            while part := os.read(reader, 65536):
                printed += part
        assert process.wait(60) == 0, printed.decode()
    os.close(reader)
    return printed.decode()


@pytest.mark.slow
def test_showing_a_run_loads_nothing_heavy(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    script = (
        "import sys; from slime.cli.main import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'ray', 'numpy', 'sglang', 'transformers', 'matplotlib', 'aiohttp'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    for line in (["show", folder], ["show", folder, "--step", "1"], ["compare", folder, folder]):
        command = [sys.executable, "-c", script, *map(str, line)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr


def test_runs_of_a_sweep_are_named_by_what_differs_and_their_seeds_belong_together() -> None:
    lr, names = Difference("megatron.lr", (1e-4, 1e-4, 5e-4)), ["a", "b", "c"]
    seeds = [Difference("run.seed", (1, 2, 1)), Difference("rollout.rollout_seed", (1, 2, 1))]
    assert told_apart([*seeds, lr], names) == ["lr 0.0001, seed 1", "lr 0.0001, seed 2", "lr 0.0005, seed 1"]
    assert seed_sets([*seeds, lr], [], names) == [
        {"label": "lr 0.0001", "runs": [0, 1]},
        {"label": "lr 0.0005", "runs": [2]},
    ]
    other_plugin = Difference("reward.version", ("1", "2", "2"))
    assert [one["runs"] for one in seed_sets([*seeds, lr], [other_plugin], names)] == [[0], [1], [2]]
    swept = Difference("megatron.lr", (0.00015000000000000001, 1.0, 1.00000001))
    assert told_apart([swept], names) == ["lr 0.00015000000000000001", "lr 1.0", "lr 1.00000001"], "six digits are few"
    assert told_apart([replace(swept, values=(0.1 + 0.2, 1 / 3, None))], names) == ["lr 0.3", "lr 0.333333", "lr none"]
    assert told_apart([lr], names) == ["a", "b", "lr 0.0005"], "two that would be called the same keep their names"
    same_end = Difference("critic.lr", (1, 2, 3))
    assert told_apart([lr, same_end], names)[0] == "megatron.lr 0.0001, critic.lr 1"


def test_the_ends_of_three_runs_are_at_the_steps_that_all_have(tmp_path: Path) -> None:
    runs = [
        rows_of(tmp_path / str(n), {step: {"train/loss": float(n + step)} for step in range(steps)})
        for n, steps in enumerate((12, 5, 8))
    ]
    [ends] = metric_ends(*runs)
    assert (ends.step, ends.values, ends.margins) == (4, (2.0, 3.0, 4.0), (0.0, 0.0)) and ends.clear
