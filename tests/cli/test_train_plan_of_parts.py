"""A dry run of what is not all there: planned, with what was not checked by name, where a start is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import Ended, Slime, change_config, write_weights

from slime.cli import train
from slime.engine.ports import ReservedPort
from slime.errors import ConfigError

Refused = Callable[..., str]
WEIGHTS, TOKENIZER = "has no weights; expected *.safetensors files", "has no tokenizer; expected one of the files"
NEEDED = "the plan needs none of these, and the run does: without them it is refused when it starts"


def unchecked(ended: Ended) -> str:
    """What a plan says was not checked, in one line."""
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("not checked")), len(lines))
    end = next((number for number in range(first + 1, len(lines)) if lines[number][:1] != " "), len(lines))
    return " ".join(" ".join(lines[first:end]).split()).removeprefix("not checked ")


@pytest.fixture
def described(model: Path) -> Path:
    """A model folder with a `config.json` and nothing else."""
    for path in model.iterdir():
        if path.name != "config.json":
            path.unlink()
    return model


def test_of_a_model_that_is_there_all_is_checked(dry_run: Slime) -> None:
    assert unchecked(dry_run()) == ""


def test_a_description_alone_is_planned(dry_run: Slime, refused_start: Refused, described: Path) -> None:
    words = ("--hf-checkpoint", str(described))
    ended = dry_run(*words)
    said = unchecked(ended)
    for part in (f"{words[0]} {described} {TOKENIZER}", f"{words[0]} {described} {WEIGHTS}"):
        assert part in said
        assert part in refused_start(*words)
    assert said.endswith(NEEDED)
    # prompts are read, and not counted
    assert "3 rows\n" in ended.out and "longest prompt" not in ended.out
    whole = dry_run()
    for label in ("memory", "weight sync", "batch"):
        [line], [other] = ([one for one in each.out.splitlines() if one.startswith(label)] for each in (ended, whole))
        assert line.partition("; in a step")[0] == other.partition("; in a step")[0]


def test_with_a_tokenizer_and_no_weights_prompts_are_counted(
    dry_run: Slime, refused: Refused, refused_start: Refused, model: Path, tmp_path: Path
) -> None:
    (model / "model.safetensors").unlink()
    words = ("--hf-checkpoint", str(model))
    ended = dry_run(*words)
    said = unchecked(ended)
    assert WEIGHTS in said and TOKENIZER not in said
    assert "3 rows, longest prompt 4 of at most 56 tokens" in ended.out
    assert WEIGHTS in refused_start(*words)
    long = tmp_path / "long.jsonl"
    long.write_text(f'{{"prompt": "{"1" * 60}", "label": "1"}}\n')
    assert "56" in refused(*words, "--prompt-data", str(long))


def test_weights_without_a_tokenizer_are_checked(dry_run: Slime, refused: Refused, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    words = ("--hf-checkpoint", str(model))
    said = unchecked(dry_run(*words))
    assert TOKENIZER in said and WEIGHTS not in said
    write_weights(model, **{"model.norm.weight": np.full(64, np.nan, np.float32)})
    assert "has NaN or infinity" in refused(*words)
    write_weights(model, **{"model.norm.weight": None})
    assert "does not hold the tensors" in refused(*words)


def test_what_is_there_is_refused_as_before(dry_run: Slime, refused: Refused, described: Path) -> None:
    words = ("--hf-checkpoint", str(described))
    assert "--tensor-model-parallel-size 3" not in dry_run(*words).out
    message = refused(*words, "--tensor-model-parallel-size", "3", "--actor-num-gpus-per-node", "3")
    assert "does not divide the model's 4 attention heads" in message and "weights" not in message
    assert "leaves no room for a prompt" in refused(*words, "--rollout-max-response-len", "64")
    assert "no.jsonl" in refused(*words, "--prompt-data", "no.jsonl")
    change_config(described, model_type="llam")
    assert "model family 'llam'" in refused(*words)
    (described / "config.json").unlink()
    assert "config.json does not exist" in refused(*words)


def test_a_reference_and_a_critic_may_be_descriptions_too(
    dry_run: Slime, refused: Refused, refused_start: Refused, described: Path
) -> None:
    words = ("--ref-load", str(described))
    assert f"--ref-load {described} {WEIGHTS}" in unchecked(dry_run(*words))
    assert f"--ref-load {described} {WEIGHTS}" in refused_start(*words)
    change_config(described, intermediate_size=96)
    assert "has another architecture than --hf-checkpoint" in refused(*words)


@pytest.mark.parametrize("value", ["no", pytest.param("torch_native", marks=pytest.mark.nightly)])
def test_options_that_sglang_is_asked_about_need_no_tokenizer(
    dry_run: Slime, refused: Refused, described: Path, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    words = ("--hf-checkpoint", str(described), "--sglang-attention-backend", value)
    if value == "no":
        said = refused(*words)
        assert "--sglang-attention-backend: got 'no', expected one of" in said and "tokenizer" not in said
    else:
        assert TOKENIZER in unchecked(dry_run(*words))
        assert "SGLang could not be asked" not in caplog.text


def test_engines_that_others_started_are_asked_without_a_tokenizer(refused: Refused, described: Path) -> None:
    port = ReservedPort()
    url = f"127.0.0.1:{port.number}"
    words = ("--rollout-external-engine-addrs", url, "--update-weight-transport", "disk")
    assert f"--rollout-external-engine-addrs: http://{url}: " in refused("--hf-checkpoint", str(described), *words)
    port.release()


def test_a_run_that_is_handed_over_needs_all_of_it(
    base_words: list[str], described: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `slime launch` checks it before it waits in a queue."""
    monkeypatch.chdir(tmp_path)
    words = [*base_words, "--hf-checkpoint", str(described), "--dry-run"]
    with pytest.raises(ConfigError, match=re.escape(WEIGHTS)):
        train.run(words, elsewhere=True)
    assert train.run(words) == 0


@pytest.mark.parametrize(("present", "there"), [(0, "this machine has 0"), (1, "this machine has 1")])
def test_a_run_on_gpus_is_planned_where_there_is_none(
    dry_run: Slime,
    refused: Refused,
    refused_start: Refused,
    monkeypatch: pytest.MonkeyPatch,
    present: int,
    there: str,
) -> None:
    for module in ("preflight", "preflight_machine"):
        monkeypatch.setattr(f"slime.cli.{module}.nvidia_devices", lambda: present)
    words = ("--device", "cuda", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--bf16")
    lacking = f"the run needs 4 GPUs (2 training ranks + 2 engines x 1), and {there}"
    assert lacking in refused_start(*words)
    if present:  # too few are no plan of another machine's
        assert lacking in refused(*words)
        return
    ended = dry_run(*words)
    assert lacking in unchecked(ended) and NEEDED in unchecked(ended)
    assert "devices      4 GPUs of this machine: 2 for training + 2 for engines" in ended.out
    assert "planned for  1 node x 4 H100" in ended.out
