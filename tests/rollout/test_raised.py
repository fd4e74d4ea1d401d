"""What a component raises is attributed: the place in its code, its traceback, and who can repair it."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.scoring import health

from slime.errors import ErrorBudgetError, PluginError, one_line
from slime.errors.raised import Raised, naming
from slime.plugin import Reward
from slime.registry.function_path import run_file
from slime.rollout.failures import Fault, fault_of
from slime.rollout.scoring import InLoopReward
from slime.types import Sample


class Unprintable(Exception):
    """Its message cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unpicklable(Exception):
    """Holds what cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__(lambda: None)


def module_of(tmp_path: Path, source: str, name: str = "mine.py") -> ModuleType:
    path = tmp_path / name
    path.write_text(source)
    return run_file(path, source.encode())


def caught(call: Callable[[], object]) -> Raised:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - whatever it raises
        return Raised.of(error)
    raise AssertionError("nothing was raised")


def test_the_place_is_the_line_of_the_component_even_if_a_library_raised(tmp_path: Path) -> None:
    mine = module_of(
        tmp_path, "import json\n\ndef reward():\n    return helper()\n\ndef helper():\n    json.loads('{')\n"
    )
    raised = caught(mine.reward)
    assert raised.where == f"{tmp_path}/mine.py:7"
    assert raised.error.startswith("JSONDecodeError: Expecting property name")
    assert raised.remedy == f"Repair {tmp_path}/mine.py:7."
    assert f'File "{tmp_path}/mine.py", line 4, in reward' in raised.traceback
    assert "json.loads('{')" in raised.traceback and "decoder.py" in raised.traceback
    assert raised.tail().splitlines()[-1].endswith(raised.error)


def test_the_place_of_a_syntax_error_in_an_imported_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "broken_neighbour.py").write_text("x = 1\ndef (:\n")
    raised = caught(lambda: module_of(tmp_path, "import broken_neighbour\n"))
    assert raised.where == f"{tmp_path}/broken_neighbour.py:2"


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise type('Own', (BaseException,), {})('x')", "Own: x"),
        ("raise ExceptionGroup('all', [ValueError('a'), KeyError('b')])", "the first: ValueError: a"),
        (r"raise ValueError('\x1b[31mred\x1b[0m\ntwo lines')", "ValueError: red two lines"),
    ],
)
def test_whatever_is_raised_has_a_place_and_one_line(tmp_path: Path, statement: str, error: str) -> None:
    mine = module_of(tmp_path, f"def reward():\n    {statement}\n")
    raised = caught(mine.reward)
    assert raised.where == f"{tmp_path}/mine.py:2" and error in raised.error
    assert "\n" not in str(raised) and "\x1b" not in raised.traceback
    assert pickle.loads(pickle.dumps(raised)) == raised


def test_the_place_in_a_task_group_is_that_of_the_first_error(tmp_path: Path) -> None:
    source = """\
        import asyncio

        async def fails():
            raise ValueError("inner")

        async def reward():
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
        """
    mine = module_of(tmp_path, "\n".join(line[8:] for line in source.splitlines()))
    raised = caught(lambda: asyncio.run(mine.reward()))
    assert raised.where == f"{tmp_path}/mine.py:4" and raised.error.endswith("the first: ValueError: inner")


@pytest.mark.parametrize("error", [Unprintable(), Unpicklable()])
def test_exceptions_that_cannot_be_printed_or_pickled_are_attributed(error: Exception) -> None:
    def fail() -> None:
        raise error

    raised = caught(fail)
    assert raised.where.startswith(__file__) and type(error).__name__ in raised.error
    assert pickle.loads(pickle.dumps(raised)) == raised


def test_an_unreadable_message_is_said_to_be_one() -> None:
    assert one_line(Unprintable()) == "Unprintable: (its str() raises RuntimeError)"


@pytest.mark.slow
def test_the_remedy_names_an_installed_package_with_its_version() -> None:
    import pydantic

    def call() -> None:
        exec(compile("raise ValueError('x')", pydantic.__file__, "exec"), {"__name__": "pydantic.plugin"})

    # Called by slime: the package's frame is the first one that is not slime's.
    with pytest.raises(ValueError, match="x") as error:
        call()
    assert error.value.__traceback__ is not None and error.value.__traceback__.tb_next is not None
    error.value.__traceback__ = error.value.__traceback__.tb_next.tb_next
    raised = Raised.of(error.value)
    assert f"pydantic {pydantic.VERSION}" in raised.remedy and "(https://" in raised.remedy
    assert "pip install" not in raised.remedy


def test_the_remedy_for_code_of_slime_is_a_report() -> None:
    import slime_rewards.math_answer as own

    def call() -> None:
        exec(compile("raise ValueError('x')", own.__file__, "exec"), {"__name__": own.__name__})

    with pytest.raises(ValueError, match="x") as error:
        call()
    assert error.value.__traceback__ is not None and error.value.__traceback__.tb_next is not None
    error.value.__traceback__ = error.value.__traceback__.tb_next.tb_next
    assert Raised.of(error.value).remedy == "That is code of slime itself: please report it, with the traceback."


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), GeneratorExit(), KeyboardInterrupt()])
def test_a_boundary_names_the_component_and_logs_the_traceback(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PluginError) as caught_error, naming("filter mine.py:keep (local 01)"):
        raise error
    first, *rest = str(caught_error.value).splitlines()
    assert first.startswith(f"filter mine.py:keep (local 01): {__file__}:") and first.endswith(one_line(error))
    assert "        raise error" in str(caught_error.value) and f"Repair {__file__}:" in rest[-1]
    assert "Traceback (most recent call last)" in caplog.text


class Raises:
    """A reward that raises what it is told."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:  # noqa: ARG002 - the interface
        raise self.error


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Unprintable()]
)
def test_a_reward_in_the_event_loop_loses_its_sample_and_not_the_loop(error: BaseException) -> None:
    reward = InLoopReward(Raises(error), "reward faulty", 5.0)
    [result], _ = asyncio.run(reward.call([Sample()]))
    assert isinstance(result, Fault) and result.reason.startswith("reward faulty: ")


def over_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, list[dict[str, Any]]]:
    faulty = health("reward faulty", error_budget=0, run_dir=tmp_path)
    mine = module_of(tmp_path, "def reward():\n    raise ValueError('no verdict')\n")
    with caplog.at_level(logging.ERROR), pytest.raises(ErrorBudgetError) as error:
        try:
            mine.reward()
        except ValueError as raised:
            faulty.record(Sample(index=3), fault_of("reward faulty", raised))
    rows = [json.loads(line) for line in (tmp_path / "rollouts/failed_reward_tests_faulty.jsonl").open()]
    return str(error.value), rows


def test_the_error_that_ends_a_run_and_the_failed_samples_have_the_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message, [row] = over_budget(tmp_path, caplog)
    assert f"1x reward faulty: {tmp_path}/mine.py:2: ValueError: no verdict" in message
    assert "        raise ValueError('no verdict')\n    ValueError: no verdict\n" in message
    assert f"Repair {tmp_path}/mine.py:2." in message
    assert row["traceback"].startswith("Traceback (most recent call last)")
    assert f'File "{tmp_path}/mine.py", line 2, in reward' in row["traceback"]
    assert f'File "{tmp_path}/mine.py", line 2, in reward' in caplog.text


def test_the_traceback_of_each_place_is_logged_and_shown_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faulty = health("reward faulty", error_budget=1, rollout_samples=100)
    mine = module_of(tmp_path, "def reward(n):\n    if n % 2:\n        raise ValueError(n)\n    raise KeyError(n)\n")
    for number in range(10):
        try:
            mine.reward(number)
        except Exception as raised:  # noqa: BLE001 - whatever it raised
            faulty.record(Sample(), fault_of("reward faulty", raised))
    shown = faulty.tracebacks()
    assert [text.splitlines()[0] for text in shown] == [
        f"reward faulty: {tmp_path}/mine.py:4: KeyError: 0",
        f"reward faulty: {tmp_path}/mine.py:3: ValueError: 1",
    ]
    assert faulty.tracebacks() == []
    assert caplog.text.count("Traceback (most recent call last)") == 2


def test_frames_of_modules_without_a_name_do_not_disturb() -> None:
    code = compile("def f():\n    raise ValueError('x')\n", "<string>", "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    assert caught(space["f"]).where.startswith(__file__)
    assert "slime" in sys.modules
