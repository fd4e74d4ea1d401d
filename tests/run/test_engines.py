"""An engine that does not start: whether its options are to blame."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slime.config import RunConfig
from slime.engine.server import EngineServer, EngineSpec
from slime.errors import EngineError, EngineStartError
from slime.kit.processes import Child, DirectChild
from slime.run.engines import EngineProcess, engine_options


@pytest.mark.parametrize(
    ("code", "expected", "exit_code"),
    [
        ("import sys; sys.exit('unrecognized arguments: --sglang-nonsense')", EngineStartError, 2),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", EngineError, 1),
    ],
    ids=["refuses an option", "is killed"],
)
def test_an_engine_that_ends_at_its_start_is_bad_input_unless_it_was_killed(
    code: str, expected: type[EngineError], exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(server: EngineServer) -> Child:
        return DirectChild([sys.executable, "-c", code], env=os.environ, log_path=server.log_path)

    monkeypatch.setattr(EngineServer, "launch", launch)
    spec = EngineSpec("model", tmp_path / "engine-0.log", device="cpu")
    with pytest.raises(EngineError, match=r"engine at http://127\.0\.0\.1:\d+ \(pid \d+\)") as caught:
        EngineProcess(0, spec, reachable=False, timeout_s=30)
    assert (type(caught.value), caught.value.exit_code) == (expected, exit_code)


def test_engines_run_code_of_the_model_folder_only_if_the_run_may() -> None:
    config = RunConfig(sglang={"context_length": 64})
    assert engine_options(config) == ["--context-length", "64"]
    trusted = config.with_options("checkpoint", trust_remote_code=True)
    assert engine_options(trusted) == ["--context-length", "64", "--trust-remote-code"]
