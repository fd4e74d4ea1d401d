"""An engine that does not start: whether its options are to blame."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.config.sglang_options import engine_options
from slime.config.weight_options import CheckpointOptions
from slime.engine.server import EngineServer, EngineSpec
from slime.errors import EngineError, EngineStartError
from slime.kit.processes import Child, DirectChild
from slime.run import engines
from slime.run.engines import EngineProcess, Engines


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


@pytest.mark.parametrize(("several", "forked"), [(True, 0), (False, 1)])
def test_engines_on_one_node_share_an_import_also_in_a_cluster(
    several: bool, forked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    server = SimpleNamespace(start=lambda: started.append("a fork server"), address=tmp_path / "socket")
    monkeypatch.setattr(engines, "engine_fork_server", lambda *_: server)
    monkeypatch.setattr(engines, "of_several_nodes", lambda: several)
    monkeypatch.setattr(engines, "node_address", lambda: "127.0.0.1")
    cluster = ClusterOptions(device="cpu", ray_address="auto", rollout_num_gpus=2)
    config = RunConfig(cluster=cluster, checkpoint=CheckpointOptions(hf_checkpoint="model"))
    watch: Any = SimpleNamespace(enlist=lambda _: None)
    made = Engines(config, tmp_path, watch, models=None)  # type: ignore[arg-type]
    made.__dict__["_model_arguments"] = []  # else it would read the model
    built: list[Any] = []
    made._workers = SimpleNamespace(  # type: ignore[assignment]  # no processes
        start=lambda *_, **__: None, build=lambda _, servers, **__: built.extend(servers)
    )
    made.start([{}, {}])
    assert len(started) == forked
    assert [spec.fork_server for _, spec, *_ in built] == 2 * [server.address if forked else None]
