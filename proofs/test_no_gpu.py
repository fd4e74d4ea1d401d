"""`python -m proofs.no_gpu` names what it finds; that it finds something needs the packages for GPUs (nightly)."""

from __future__ import annotations

from typing import Any

import pytest

from proofs.no_gpu.__main__ import line, problems
from proofs.no_gpu.cases import ATTENTION, CASES, TURNS, config_of

GIB = 2**30
STEP: dict[str, Any] = {
    "part": "dense",
    "held": 10 * GIB,
    "expected_held": 10 * GIB,
    "peak": 20 * GIB,
    "expected_peak": 21 * GIB,
    "waits": {"slime/train/model.py:259 sum_over_ranks": 3},
    "products": {},
}
TURN: dict[str, Any] = {
    "part": TURNS,
    "equal": True,
    "of_trainer_while_generating": 5,
    "allowed_bytes": 10,
    "sent_bytes": 4,
    "parameters_bytes": 4,
}
KERNELS: dict[str, Any] = {"part": next(iter(ATTENTION)), "target": "sm_90a", "kernels": {"fwd": 1, "bwd": 2}}


@pytest.mark.parametrize("found", [STEP, TURN, KERNELS])
def test_what_is_as_it_should_be_is_no_problem(found: dict[str, Any]) -> None:
    assert [*problems(found)] == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            {"part": next(iter(ATTENTION)), "error": "not compiled: bwd, fwd for sm_100a"},
            "not compiled: bwd, fwd for sm_100a",
        ),
        ({"part": "dense", "error": "RuntimeError: on the CPU"}, "RuntimeError: on the CPU"),
        (
            STEP | {"waits": {"slime/train/attention.py:9 _plan": 2}},
            "waits for the device at slime/train/attention.py:9",
        ),
        (
            STEP | {"products": {"mm in float32 at slime/train/x.py:1 f": 4}},
            "4 x mm in float32 at slime/train/x.py:1 f",
        ),
        (STEP | {"peak": 26 * GIB}, "peak is 27,917,287,424 bytes, and the prediction is -19% off"),
        (STEP | {"expected_held": 11 * GIB}, "held is 10,737,418,240 bytes, and the prediction is +10% off"),
        (TURN | {"equal": False}, "the trainer has not what it had before"),
        (TURN | {"of_trainer_while_generating": 11}, "11 bytes of the trainer stay while engines generate"),
        (TURN | {"sent_bytes": 3}, "3 bytes were sent of 4"),
    ],
)
def test_what_is_wrong_is_named(found: dict[str, Any], says: str) -> None:
    [problem] = problems(found)
    assert problem.startswith(says)


def test_a_row_has_the_memory_and_the_waits() -> None:
    assert line(STEP).split() == ["dense", "10.00", "10.00", "20.00", "21.00", "+5.0%", "3"]
    assert line(KERNELS).split("B", 1)[1].split() == ["compiled", "for", "sm_90a:", "1", "fwd,", "2", "bwd"]


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_run_on_gpus(name: str, tmp_path: Any) -> None:
    config, folder = config_of(CASES[name], tmp_path)
    assert config.on_gpu and config.world_size == CASES[name].ranks and (folder / "config.json").is_file()
