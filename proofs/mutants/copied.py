"""A copy of the repository in which one line is changed and tests run."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from proofs.mutants.changes import Change

ROOT = Path(__file__).parents[2]
#: what the tests need of the repository
COPIED = (
    "core",
    "plugins",
    "tests",
    "proofs",
    "examples",
    "docs",
    "benchmarks",
    "requirements",
    "conftest.py",
    "pyproject.toml",
    "README.md",
)
#: how pytest's summary names a test
NAMED = ("FAILED tests", "ERROR tests", "FAILED plugins", "ERROR plugins")
#: a change that makes a test hang is noticed too
TIMEOUT_S = 900.0


class Copy:
    """The packages and tests of the repository in another folder.

    Tests run in processes forked from this one, which has imported what most of them need besides slime: an import of
    torch for every change would take longer than most tests.
    """

    def __init__(self, folder: Path, source: Path = ROOT) -> None:
        # So that the forked processes have them.
        import hypothesis  # noqa: F401
        import ray  # noqa: F401
        import sympy  # noqa: F401
        import torch
        import torch.distributed.tensor
        import transformers  # noqa: F401
        import wandb  # noqa: F401

        torch.set_num_threads(1)
        self._folder = folder.resolve()
        for path in (source / name for name in COPIED):
            if path.is_dir():
                shutil.copytree(path, self._folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif path.exists():
                shutil.copy(path, self._folder / path.name)
        plugins = self._folder / "plugins"
        kinds = sorted(path for path in plugins.iterdir() if path.is_dir()) if plugins.is_dir() else []
        self._packages = [str(path) for path in (self._folder / "core", *kinds)]

    @contextmanager
    def changed(self, file: str, change: Change) -> Iterator[None]:
        """Inside the body the copy has the change."""
        path = self._folder / file
        original = path.read_text()
        path.write_text(change.apply(original))
        try:
            yield
        finally:
            path.write_text(original)

    def first_failure(self, *tests: str) -> str | None:
        """The first of these tests that fails; None if they all pass.

        Raises:
            SystemExit: pytest could not run.
        """
        log = self._folder / "pytest.log"
        process = multiprocessing.get_context("fork").Process(target=self._pytest, args=(tests, log))
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            os.killpg(int(process.pid or 0), signal.SIGKILL)
            process.join()
            return f"{' '.join(tests)}: no end within {TIMEOUT_S:g} s"
        text = log.read_text(errors="replace")
        if process.exitcode in (0, 5):  # 5: these files have no tests of the kind asked for
            return None
        # 1: a test failed; 2: one could not be collected; 3: the tests' helpers crashed
        if process.exitcode not in (1, 2, 3):
            raise SystemExit(f"pytest {' '.join(tests)} ended with {process.exitcode}:\n{text[-3000:]}")
        named = [line for line in text.split("\n") if line.startswith(NAMED)]
        return named[0][:300] if named else f"exit code {process.exitcode}"

    def _pytest(self, tests: tuple[str, ...], log: Path) -> NoReturn:
        """Of the forked process: run the tests against the copy's packages."""
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(self._folder)
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": ":".join(self._packages), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[:] = [*self._packages, *(path for path in sys.path if path not in ("", str(ROOT)))]

        import pytest

        code = pytest.main(["-x", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider", *tests])
        import slime

        if not str(slime.__file__).startswith(str(self._folder)):
            print(f"the tests imported {slime.__file__} instead of the copy in {self._folder}", flush=True)
            code = pytest.ExitCode.USAGE_ERROR
        sys.stdout.flush()
        os._exit(int(code))
