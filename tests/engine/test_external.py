"""The watch over an engine that somebody else started, with a fake server that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.fake_sglang import FakeSGLang, serving

from slime.engine import external
from slime.engine.control import EngineKeys
from slime.engine.external import ExternalEngine
from slime.errors import EngineStartError

pytestmark = pytest.mark.row("N9")
KEYS = EngineKeys("a", "b")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_ASK_S", 0.01)


def failure_of(engine: ExternalEngine) -> str:
    deadline = time.monotonic() + 60
    while (failure := engine.failure()) is None:
        assert time.monotonic() < deadline, "nothing was noticed"
        time.sleep(0.01)
    return failure


def test_one_that_is_gone_is_named_and_its_keys_are_not(tiny_model: Path) -> None:
    with serving(FakeSGLang(tiny_model)) as fake:
        engine = ExternalEngine(fake.url, KEYS, silent_s=60)
        assert engine.address() == fake.url and engine.failure() is None
    assert f"the external engine at {fake.url} is gone" in failure_of(engine)


def test_one_that_its_owner_started_again_is_lost_since_its_weights_are_others(tiny_model: Path) -> None:
    with serving(FakeSGLang(tiny_model)) as fake:
        fake.model["weight_version"] = "3"
        engine = ExternalEngine(fake.url, KEYS, silent_s=60)
        fake.model["weight_version"] = "default"
        assert "was started again by somebody: its weights are of version 'default'" in failure_of(engine)


def test_one_whose_key_is_changed_refuses_the_run(tiny_model: Path) -> None:
    with serving(FakeSGLang(tiny_model)) as fake:
        fake.api_key = KEYS.api
        engine = ExternalEngine(fake.url, KEYS, silent_s=60)
        fake.api_key = "another"
        assert "refuses the run" in failure_of(engine)


def test_one_that_does_not_answer_at_the_start_ends_the_start(tiny_model: Path) -> None:
    with serving(FakeSGLang(tiny_model)) as fake:
        pass
    with pytest.raises(EngineStartError, match=f"the external engine at {fake.url} does not answer"):
        ExternalEngine(fake.url, KEYS, silent_s=60)
