"""The files of a run folder, read while the run writes them: configuration, plugins, metrics, log, samples."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from slime.errors import DataError, without_escapes
from slime_viewer.lines import complete_lines, open_regular, readable

CONFIG, METRICS, PLUGINS, LOCK, SAMPLES = "config.toml", "metrics.jsonl", "plugins.json", "run.lock", "rollouts"
LOG = Path("logs/driver.log")
#: the newest format of plugins.json that this version knows
PLUGINS_FORMAT = 2
#: bytes at the end of the driver's log that are searched for warnings, and how many of these are shown
_LOG_BYTES, MAX_EVENTS = 256 * 1024, 100
#: bytes of config.toml and plugins.json that are read
_MAX_BYTES = 16 * 2**20
_EVENT = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (WARNING|ERROR|CRITICAL) (\S+): (.*)$")
_FILE = re.compile(r"^(?:(dropped|eval)_)?(?:(.+)_)?(\d{1,12})$|^failed_(.+)$")


@dataclass(frozen=True)
class SampleFile:
    """One file of `rollouts/`."""

    path: Path
    #: "train", "dropped", "eval" or "failed"
    kind: str
    #: the rollout; of an evaluation, how many rollouts had been trained on; None for failed samples
    step: int | None
    #: the evaluation set, or the component whose samples failed
    name: str

    @classmethod
    def of(cls, path: Path) -> SampleFile | None:
        """What a file is by its name; None if it is none of a run's."""
        match = _FILE.match(path.stem)
        if match is None or path.suffix != ".jsonl":
            return None
        kind, name, step, failed = match.groups()
        if failed:
            return cls(path, "failed", None, failed)
        if (kind == "eval") != bool(name):
            return None
        return cls(path, kind or "train", int(step), name or "")


@dataclass(frozen=True)
class Event:
    """One warning or error of the driver's log."""

    time: str
    level: str
    text: str


@dataclass
class Metrics:
    """The rows of `metrics.jsonl`, merged by step; `refresh` reads what was appended.

    If a resumed run repeated a step, its later values win.
    """

    path: Path
    rows: dict[int, dict[str, float | None]] = field(default_factory=dict)
    #: step -> when its last row was written, in seconds since 1970
    times: dict[int, float] = field(default_factory=dict)
    #: lines that are a row, lines that are none, and bytes of a last line without an end
    read: int = 0
    broken: int = 0
    unfinished: int = 0
    #: why the file cannot be read, if it is there
    trouble: str = ""
    _done: int = 0
    _inode: int = -1
    _names: dict[str, None] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Read on; returns whether anything was new. A file that was replaced is read anew."""
        before, trouble = self.position, self.trouble
        try:
            with open_regular(self.path) as file:
                self._read_on(file)
            self.trouble = ""
        except FileNotFoundError:
            self.trouble = ""
        except OSError as error:
            self.trouble = error.strerror or str(error)
        return self.position != before or self.trouble != trouble

    def _read_on(self, file: BinaryIO) -> None:
        stat = os.fstat(file.fileno())
        if stat.st_ino != self._inode or stat.st_size < self._done:
            self.rows, self.times, self._names, self.read, self.broken = {}, {}, {}, 0, 0
            self._done, self._inode = 0, stat.st_ino
        for line in complete_lines(file, self._done):
            self._done = line.offset + line.length
            self._add(line.row)
        self.unfinished = max(0, stat.st_size - self._done)

    def _add(self, row: dict[str, Any] | None) -> None:
        step = None if row is None else row.get("step")
        if row is None or not isinstance(step, int) or isinstance(step, bool):
            self.broken += 1
            return
        self.read += 1
        written = row.get("unix_time")
        if isinstance(written, int | float) and not isinstance(written, bool):
            self.times[step] = float(written)
        merged = self.rows.setdefault(step, {})
        for name, value in row.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in ("step", "unix_time") and (number or value is None):
                merged[name] = None if value is None else float(value)
                self._names[name] = None

    @property
    def position(self) -> tuple[int, int]:
        """Which file was read, and how far: the same as long as nothing is new."""
        return self._inode, self._done

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in order of appearance."""
        return list(self._names)

    @property
    def steps(self) -> list[int]:
        """All steps, ascending."""
        return sorted(self.rows)

    @property
    def trained(self) -> list[int]:
        """The steps that were trained, ascending: not those that have an evaluation alone."""
        return [step for step in self.steps if any(not name.startswith("eval/") for name in self.rows[step])]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric was recorded and finite, and its values."""
        pairs = [(step, value) for step in self.steps if (value := self.rows[step].get(name)) is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]


class RunFolder:
    """A run folder. Reading it changes nothing in it, and whatever is damaged is left out and told by `problems`."""

    def __init__(self, path: Path) -> None:
        """Open a run folder.

        Raises:
            DataError: It is missing or no run folder.
        """
        if not path.is_dir():
            found = "is not a folder" if path.exists() else "does not exist"
            raise DataError(f"{str(path)!r} {found}; expected a run folder, such as outputs/NAME")
        try:
            names = {child.name for child in path.iterdir()}
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        if not names & {CONFIG, METRICS, SAMPLES}:
            inside = [child for child in sorted(path.iterdir()) if (child / CONFIG).is_file()]
            hint = f" Its folder {inside[-1].name} is a run: {inside[-1]}." if inside else ""
            raise DataError(
                f"{path} is no run folder: it has no {CONFIG}, {METRICS} or {SAMPLES}/; expected a folder that slime"
                f" train or slime eval wrote, such as outputs/NAME.{hint}"
            )
        self.path = path
        self.name = path.resolve().name
        self.metrics = Metrics(path / METRICS)
        #: what the names in `rollouts/` mean: there may be ten thousand, and they are looked at every second
        self._sample_files: dict[str, SampleFile | None] = {}
        #: the configuration that was read, and of which file: it is asked for every second, and rarely changes
        self._config_read: tuple[tuple[int, int, int], dict[str, Any]] | None = None

    # --- what the run was told to do ---------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The tables of `config.toml`; empty if it cannot be read."""
        return self._config()[0]

    def _config(self) -> tuple[dict[str, Any], str | None]:
        try:
            stat = (self.path / CONFIG).stat()
            file = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if self._config_read is None or self._config_read[0] != file:
                self._config_read = file, readable(tomllib.loads(self._text(self.path / CONFIG)))
            return self._config_read[1], None
        except OSError as error:
            return {}, f"{CONFIG} cannot be read: {error.strerror}"
        except (ValueError, RecursionError) as error:
            return {}, f"{CONFIG} is not TOML: {error}"

    def plugins(self) -> dict[str, Any]:
        """The content of `plugins.json`; empty if it cannot be read."""
        return self._plugins()[0]

    def _plugins(self) -> tuple[dict[str, Any], str | None]:
        try:
            content = readable(json.loads(self._text(self.path / PLUGINS)))
        except FileNotFoundError:
            return {}, None
        except OSError as error:
            return {}, f"{PLUGINS} cannot be read: {error.strerror}"
        except (ValueError, RecursionError) as error:
            return {}, f"{PLUGINS} is not JSON: {error}"
        if not isinstance(content, dict):
            return {}, f"{PLUGINS} has no object"
        form = content.get("format")
        if isinstance(form, int) and form > PLUGINS_FORMAT:
            newer = (
                f"{PLUGINS} has format {form}, and this slime knows {PLUGINS_FORMAT}: a newer slime wrote the folder"
            )
            return content, f"{newer}; what is unknown is not shown"
        return content, None

    @staticmethod
    def _text(path: Path) -> str:
        with open_regular(path) as file:
            return file.read(_MAX_BYTES).decode("utf-8")

    # --- how the run goes --------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """The last warnings and errors of the driver's log, oldest first."""
        found = (match for line in self.end_of_log(_LOG_BYTES).split("\n") if (match := _EVENT.match(line)))
        return [Event(match[1], match[2].lower(), match[4]) for match in found][-MAX_EVENTS:]

    def end_of_log(self, most: int) -> str:
        """The last `most` bytes of the driver's log; empty if it cannot be read."""
        try:
            with open_regular(self.path / LOG) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
                return without_escapes(file.read(most).decode("utf-8", "replace"))
        except OSError:
            return ""

    def sample_files(self) -> Iterator[SampleFile]:
        """The files of samples, by step."""
        known = self._sample_files
        found = []
        for name in self.sample_names():
            if name not in known:
                known[name] = SampleFile.of(self.path / SAMPLES / name)
            if (file := known[name]) is not None:
                found.append(file)
        yield from sorted(found, key=lambda file: (file.step is None, file.step or 0, file.kind, file.name))

    def sample_names(self) -> frozenset[str]:
        """The names of all files in `rollouts/`."""
        try:
            return frozenset(os.listdir(self.path / SAMPLES))
        except OSError:
            return frozenset()

    def problems(self) -> list[str]:
        """What of the folder could not be read, in words. Of metrics, what `metrics.refresh` has met."""
        found = [problem for _, problem in (self._config(), self._plugins()) if problem]
        if self.metrics.trouble:
            found.append(f"{METRICS} cannot be read: {self.metrics.trouble}")
        elif not self.metrics.path.exists():
            found.append(f"{METRICS} is missing: there are no curves")
        if self.metrics.broken:
            found.append(f"{METRICS}: {self.metrics.broken} broken lines are left out")
        if self.metrics.unfinished:
            found.append(f"{METRICS}: the last line is half-written ({self.metrics.unfinished} bytes)")
        return found

    def command(self) -> str:
        """The command that makes the same run again, beside this one; for a shell."""
        return shlex.join(["slime", "train", str(self.path / CONFIG), "--run-name", f"{self.name}-again"])
