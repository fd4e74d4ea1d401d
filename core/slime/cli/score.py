"""`slime score`: try rewards on stored responses, before anything is trained."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

from slime.cli.arguments import Arguments
from slime.cli.output import page
from slime.cli.text_layout import count
from slime.cli.train_help import flag_named, flags_block
from slime.compat.functions import place_functions
from slime.config import RunConfig, resolve
from slime.config.assemble import assemble, stop_on
from slime.config.checks import lost_secrets
from slime.config.choices import choice_problems, override
from slime.config.command_line import CommandLine
from slime.config.flag_table import flags_of
from slime.config.flags import Settings
from slime.config.run_file import read_run_file
from slime.errors import ConfigError, DataError, SlimeError
from slime.kit.readers.keys import find
from slime.kit.readers.prompt_source import parse_source
from slime.kit.readers.stored_responses import StoredColumns, StoredRow, stored_rows
from slime.observe.samples import FOLDER
from slime.observe.terminal import printable
from slime.registry.kinds import SLOTS
from slime.registry.plugin_set import PluginSet, load_plugins
from slime.registry.resolve import Resolved, components_used
from slime.rollout.failures import EVALUATION_SAMPLES, over_budget
from slime.run.checkpoint.read import CONFIG
from slime.types import Sample

_USAGE = """\
usage: slime score FILE [RUN.toml] [--flag value]...
       slime score RUN [--flag value]...

Try rewards on stored responses and print every verdict. Nothing is generated
or trained.

  FILE                  rows with a response, and with the prompt, label and
                        metadata that the reward needs: JSON lines, Parquet, a
                        data set
  RUN                   a run folder, or one file of its rollouts/: prints the
                        samples whose reward would change
  RUN.toml              a run file that chooses the rewards

  --expected-key KEY    the reward that a row expects: a number, true, false, an
                        object with parts, or null if its sample must fail. Only
                        rows that differ are printed; then the exit code is 1
  --response-key KEY    key of the response in FILE [response]
  --help                this text

Rewards are called as in a run: in worker processes, with their deadlines. Keys
of a row that are read too: group, finish_reason, response_tokens (the length of
the response), reward (what a generator gave). Exit code: 0 scored, 1 rows
differ or a run would have ended, 2 bad input.
"""
_HELP_FLAGS = ("input-key", "label-key", "metadata-key")
_EVALUATION = re.compile(r"eval_(.+)_\d+\.jsonl")
#: rewards that differ by less are equal
_TOLERANCE = 1e-6
#: characters of a response that are shown, from its end
_SHOWN = 300


@dataclass(frozen=True)
class ScoreRequest:
    """What a command line asks to score."""

    #: resolved
    config: RunConfig
    plugins: PluginSet
    rewards: list[Resolved]
    files: list[str]
    columns: StoredColumns
    #: of a run's samples, the evaluation set; None: training
    eval_set: str | None

    def rows(self) -> Iterator[StoredRow]:
        """The rows of all files."""
        return chain.from_iterable(stored_rows(file, self.columns) for file in self.files)


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        ConfigError: Bad input.
        PluginError: A reward cannot be built.
    """
    if not argv or {"--help", "-h"} & set(argv):
        page(_help())
        return 0 if argv else 2
    request = read_request(argv)
    with tempfile.TemporaryDirectory(prefix="slime-score-") as folder:
        return asyncio.run(_score(request, Path(folder)))


async def _score(request: ScoreRequest, folder: Path) -> int:
    # It imports the engines' client, which the help does not need.
    from slime.cli.scored_samples import Accounts, prompt_metadata, scored, with_metadata

    rows = request.rows()
    if (key := request.columns.expected_key) is not None:
        for row in request.rows():  # before any is scored
            _expected(row, key)
    if request.columns.of_run:
        found, notes = prompt_metadata(request.rows(), request.config, request.eval_set)
        rows = with_metadata(rows, found)
        for note in notes:
            print(f"slime: note: {note}", file=sys.stderr)
    accounts, summary = Accounts(), _Summary(request)
    async for row, sample in scored(rows, request.config, request.plugins, request.rewards, folder, accounts):
        for line in summary.add(row, sample):
            print(printable(line), flush=True)
    for text in accounts.texts:
        print(printable(text), file=sys.stderr)
    for line in summary.lines(accounts.metrics):
        print(printable(line))
    return summary.exit_code


# --- what to score -----------------------------------------------------------------------------------


def read_request(argv: Sequence[str]) -> ScoreRequest:
    """Read the words after `slime score`. Raises `ConfigError`."""
    place, *words = argv
    if place.startswith("-"):
        raise ConfigError(f"slime score: expected a file or a run folder first, got {place} (see slime score --help)")
    parser = Arguments("slime score")
    parser.add_argument("--expected-key")
    parser.add_argument("--response-key")
    own, rest = parser.parse_known_args(words)
    line = CommandLine(rest)
    folder, files, eval_set = _of_run(Path(place))
    if folder is not None and (line.file is not None or own.response_key is not None):
        dropped = "--response-key" if line.file is None else line.file
        raise ConfigError(f"{place} is of the run {folder}, whose configuration and keys are known: drop {dropped}")
    file = line.file if folder is None else folder / CONFIG
    settings = override(Settings() if file is None else read_run_file(file), line.settings)
    placed = place_functions(assemble(settings), only="reward")
    config = resolve(placed.config)
    of_rewards = RunConfig(
        reward=config.reward,
        component_options={slot: options for slot, options in config.component_options.items() if slot == "reward"},
    )
    stop_on([*placed.problems, *lost_secrets(of_rewards), *choice_problems(of_rewards)])
    if folder is None:
        data = config.data
        keys = (data.input_key, data.label_key, data.metadata_key)
        columns = StoredColumns(*keys, response_key=own.response_key or "response", expected_key=own.expected_key)
    else:
        columns = StoredColumns("prompt", "label", expected_key=own.expected_key, of_run=True)
    plugins = load_plugins(config.plugins, placed.components)
    rewards = _rewards(config, plugins, None if _chooses_reward(line.settings) else eval_set)
    return ScoreRequest(config, plugins, rewards, files, columns, eval_set)


def _of_run(place: Path) -> tuple[Path | None, list[str], str | None]:
    """The run folder of a place, its files to score, and the evaluation set; (None, [place], None) if it has none."""
    if (place / CONFIG).is_file():
        files = sorted(
            str(path) for path in (place / FOLDER).glob("*.jsonl") if re.search(r"^(dropped_)?\d+$", path.stem)
        )
        if not files:
            raise DataError(f"{place} has no samples of training: {place / FOLDER} has no file such as 000000.jsonl")
        return place, files, None
    file = Path(parse_source(str(place)).path)  # without a slice
    folder = file.absolute().parent.parent
    if file.absolute().parent.name != FOLDER or not (folder / CONFIG).is_file():
        return None, [str(place)], None
    match = _EVALUATION.fullmatch(file.name)
    return folder, [str(place)], None if match is None else match[1]


def _chooses_reward(settings: Settings) -> bool:
    slot = SLOTS["reward"]
    return any((slot.section, key) in settings.items for key in (slot.key, slot.list_key, slot.path_key))


def _rewards(config: RunConfig, plugins: PluginSet, eval_set: str | None) -> list[Resolved]:
    """The rewards of an evaluation set, or else of the run."""
    uses = [use for use in components_used(config) if use.kind == "reward"]
    uses = [use for use in uses if use.eval_set == eval_set] or [use for use in uses if use.eval_set is None]
    if not uses:
        raise ConfigError("--reward is missing: the reward to try (`slime plugins` lists those that are installed)")
    problems, rewards = [], []
    for use in uses:
        try:
            rewards.append(plugins.resolve_use(use, config))
        except SlimeError as error:
            problems.append(str(error))
    stop_on(problems)
    return rewards


# --- what came out -----------------------------------------------------------------------------------


@dataclass
class _Summary:
    """Compares rewards with those that a run gave or a row expects, and counts them."""

    request: ScoreRequest
    samples: int = 0
    failed: int = 0
    #: samples that no reward was asked for
    unanswered: int = 0
    #: by rollout, or of all: samples, and those that failed
    by_rollout: dict[str, list[int]] = field(default_factory=dict)
    differ: int = 0
    higher: int = 0
    lower: int = 0
    #: rewards of samples that have one: now, and before
    rewards: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)

    def add(self, row: StoredRow, sample: Sample) -> Iterator[str]:
        """Count a scored sample, and say what there is to say of it."""
        if not row.sample().trainable:
            self.unanswered += 1
            return
        now = sample.reward_value if sample.trainable else None
        self.samples += 1
        self.failed += now is None
        counts = self.by_rollout.setdefault(row.file if self.request.columns.of_run else "", [0, 0])
        counts[0] += 1
        counts[1] += now is None
        if now is not None:
            self.rewards.append(now)
        key = self.request.columns.expected_key
        if key is not None:
            expected = _expected(row, key)
            if not _equal(sample.reward if sample.trainable else None, expected):
                self.differ += 1
                yield f"{row.where}  {_verdict(sample)}, expected {_shown(expected)}"
                yield from _about(row)
        elif self.request.columns.of_run:
            stored = _stored(row)
            if stored is not None:
                self.before.append(stored)
            if not _equal(now, stored):
                self.differ += 1
                self.higher += now is not None and (stored is None or now > stored)
                self.lower += stored is not None and (now is None or now < stored)
                yield f"{row.where}  reward {_shown(stored)} -> {_verdict(sample).removeprefix('reward ')}"
                yield from _about(row)
        else:
            yield f"{row.where}  {_verdict(sample)}"

    def lines(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """The last lines: counts, means, and the accounts of the rewards."""
        parts = [count(self.samples, "sample")]
        if self.request.columns.expected_key is not None:
            parts.append(f"{self.samples - self.differ} as expected, {self.differ} not")
        elif self.request.columns.of_run:
            parts.append(f"{count(self.differ, 'reward')} would change: {self.higher} higher, {self.lower} lower")
        mean = _shown(_mean(self.rewards))
        compares = self.request.columns.of_run and self.request.columns.expected_key is None
        parts.append(f"mean reward {_shown(_mean(self.before))} -> {mean}" if compares else f"mean reward {mean}")
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.unanswered:
            parts.append(f"{self.unanswered} without an answer")
        yield ", ".join(parts)
        for resolved in self.request.rewards:
            tag = f"plugin/reward/{resolved.component.label}/"
            own = {name.removeprefix(tag): value for name, value in metrics.items() if name.startswith(tag)}
            text = ", ".join(f"{name} {value:.4g}" for name, value in own.items())
            yield f"{resolved.component.title}{': ' if text else ''}{text}"
        for reason in self._ends():
            yield f"a run with these samples would have ended: {reason}"

    @property
    def exit_code(self) -> int:
        """1 if rows differ from what they expect, or a run would have ended."""
        differs = self.request.columns.expected_key is not None and self.differ > 0
        return int(differs or bool(self._ends()))

    def _ends(self) -> list[str]:
        """Why a run would have ended, of each rollout or evaluation; failures that rows expect are none."""
        if self.request.columns.expected_key is not None:
            return []
        budget = min(one.limits.error_budget for one in self.request.rewards)
        evaluates, found = self.request.eval_set is not None, []
        for file, (samples, failed) in self.by_rollout.items():
            where = f" in {file}" if file else ""
            if evaluates and failed == samples:  # no budget permits that: there is no mean reward
                found.append(f"none of {samples} samples has a reward{where}")
            elif over_budget(failed, max(samples, EVALUATION_SAMPLES if evaluates else 0), budget):
                found.append(f"{failed} of {samples} samples failed{where} (--reward.error-budget)")
        return found


def _expected(row: StoredRow, key: str) -> float | dict[str, float] | None:
    """What a row expects. Raises `DataError` if that is no reward."""
    value: Any = find(row.entries, key)
    numbers = value.values() if isinstance(value, dict) else [value]
    if value is None or (value != {} and all(isinstance(one, int | float) for one in numbers)):
        return cast("float | dict[str, float] | None", value)
    raise DataError(
        f"{row.where}: {key!r} is {value!r}, expected a number, true, false, null if the sample must fail, or an object"
        ' of numbers, such as {"score": 1, "format": 0}'
    )


def _stored(row: StoredRow) -> float | None:
    """The reward that the run gave, if it gave one."""
    reward = row.entries.get("reward")
    if isinstance(reward, dict):
        reward = reward.get("score")
    return float(reward) if isinstance(reward, int | float) else None


def _equal(reward: float | dict[str, Any] | None, expected: float | dict[str, float] | None) -> bool:
    if reward is None or expected is None:
        return reward is None and expected is None
    named = reward if isinstance(reward, dict) else {"score": reward}
    wanted = expected if isinstance(expected, dict) else {"score": expected}
    return all(
        name in named and math.isclose(float(named[name]), float(value), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        for name, value in wanted.items()
    )


def _verdict(sample: Sample) -> str:
    if not sample.trainable:
        return f"failed: {sample.failure}"
    return f"reward {_shown(sample.reward)}"


def _shown(reward: float | Mapping[str, Any] | None) -> str:
    if reward is None:
        return "none"
    if isinstance(reward, Mapping):
        parts = ", ".join(f"{name} {_shown(value)}" for name, value in reward.items() if name != "score")
        return f"{_shown(reward['score'])} ({parts})" if "score" in reward else parts
    return f"{float(reward):.6g}"


def _about(row: StoredRow) -> Iterator[str]:
    """Label and end of the response."""
    if row.label is not None:
        yield f"    label     {_excerpt(row.label)}"
    yield f"    response  {_excerpt(row.response)}"


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else "…" + line[-_SHOWN:]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _help() -> str:
    listed = [
        flag for flag in flags_of("reward") if flag.alias_of is None and flag.name != "custom-reward-post-process-path"
    ]
    keys = flags_block("keys of FILE", map(flag_named, _HELP_FLAGS))
    return "\n".join([_USAGE, keys, flags_block("[reward]", listed)])
