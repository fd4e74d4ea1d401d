"""The fixtures of `_slime_pytest` in a plugin's tests, and pytest without slime."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.errors import PluginNotFoundError
from slime.plugin import Context, SamplingParams
from slime.testing import Say, ScriptedPolicy, make_sample


def test_the_context_has_an_artificial_run_in_the_test_folder(slime_context: Context, tmp_path: Path) -> None:
    assert slime_context.run_dir == tmp_path
    assert slime_context.config.rollout.n_samples_per_prompt == 4
    rows = Path(slime_context.config.data.prompt_data[0]).read_text().splitlines()
    assert json.loads(rows[3])["label"] == "4"


def test_the_tokenizer_of_the_context_is_the_tiny_one(slime_context: Context, slime_tokenizer: Any) -> None:
    ids = slime_tokenizer.encode("1+1=", add_special_tokens=False)
    assert slime_context.tokenizer.encode("1+1=", add_special_tokens=False) == ids == make_sample("1+1=", None).tokens
    assert slime_context.tokenizer("1+1=")["input_ids"] == ids
    assert len(slime_context.tokenizer) == len(slime_tokenizer)


def test_a_scripted_policy_is_made_from_a_script(scripted_policy: type[ScriptedPolicy]) -> None:
    policy = scripted_policy([Say.text("4")])
    assert len(asyncio.run(policy.generate([1], SamplingParams(8))).tokens) == 1


def test_an_installed_component_is_built_by_name(slime_component: Callable[..., Any]) -> None:
    reward = slime_component("reward", "rewards/exact_match", {"ignore_case": True})
    [scored] = asyncio.run(reward.score([make_sample(response="A", label="a")]))
    assert scored.value == 1.0
    with pytest.raises(PluginNotFoundError):
        slime_component("reward", "exact_macht")


@pytest.mark.slow
def test_tests_that_do_not_use_slime_do_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n\n\ndef test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('slime')\n"
        "    assert not {'slime', 'torch', 'pydantic'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
