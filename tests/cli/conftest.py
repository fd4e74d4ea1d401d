"""The `slime` command in this process, on a tiny model and a little data."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.distributions import install, install_reward
from tests.support.families import read_architecture
from tests.support.tiny_models import write_tiny_tokenizer

from slime.cli.main import main
from slime.config import RunConfig
from slime.registry.plugin_set import load_plugins
from slime.run.checkpoint.read import TRAINER_PART
from slime.run.checkpoint.save import CheckpointWriter

__all__ = ["install", "install_reward"]

#: a tiny model
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Slime = Callable[..., Ended]


def split(words: str) -> list[str]:
    """Split a command line without quotes."""
    return words.split()


def write_weights(folder: Path, **changed: np.ndarray | None) -> None:
    """Write the weights that config.json describes, all 0.5; `changed` replaces tensors, or leaves them out."""
    shapes = read_architecture(folder).shapes
    tensors = {name: np.full(shape, 0.5, dtype=np.float32) for name, shape in shapes.items()} | changed
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


class Loop(ModuleType):
    """Replaces the start of Ray: records the arguments, and ends as the test wants."""

    def __init__(self) -> None:
        super().__init__("slime.run.entry")
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.outcome: BaseException | None = None
        #: whether a run gets as far as its first rollout
        self.begins = True
        #: rollouts after which it saves a checkpoint and is interrupted
        self.saves: int | None = None

    @property
    def configs(self) -> list[RunConfig]:
        return [arguments[0] for _, arguments in self.calls]

    @property
    def folders(self) -> list[Path]:
        return [arguments[1] for _, arguments in self.calls]

    def train(self, *arguments: Any) -> int:
        code = self._record("train", arguments)
        if self.begins:
            arguments[3](arguments[0])
        if self.saves is not None:
            save_checkpoint(arguments[0], self.saves)
            raise KeyboardInterrupt
        return code

    def evaluate(self, *arguments: Any) -> int:
        return self._record("evaluate", arguments)

    def export(self, *arguments: Any) -> int:
        return self._record("export", arguments)

    def _record(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.calls.append((name, arguments))
        if self.outcome is not None:
            raise self.outcome
        return 0


def change_config(folder: Path, **changed: object) -> None:
    """Set keys of the `config.json` of a model folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


def save_checkpoint(config: RunConfig, done: int) -> None:
    """Write a checkpoint without weights."""
    assert config.checkpoint.save is not None
    writer = CheckpointWriter(Path(config.checkpoint.save), config, load_plugins(config.plugins).provenance(config))
    temporary = writer.begin(done)
    (temporary / TRAINER_PART / "weights").write_text(str(done))
    writer.commit(temporary, {}, rollouts_done=done, weight_version=done, trained_at={})


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """In place of the start of Ray."""
    import slime.run

    module = Loop()
    monkeypatch.setitem(sys.modules, "slime.run.entry", module)
    monkeypatch.setattr(slime.run, "entry", module, raising=False)
    return module


@pytest.fixture(scope="session")
def described_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that passes the checks of a dry run. Context 64, 4 heads, 3 layers."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    write_weights(folder)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def model(described_model: Path, tmp_path: Path) -> Path:
    """A model folder to damage."""
    return Path(shutil.copytree(described_model, tmp_path / "damaged"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three rows."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(3)))
    return path


@pytest.fixture
def slime(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Slime:
    """Runs `slime WORDS` in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Ended:
        code = main(list(words))
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run


@pytest.fixture
def base_words(described_model: Path, prompts: Path) -> list[str]:
    """The arguments of a valid run."""
    words = ["--hf-checkpoint", str(described_model), "--prompt-data", str(prompts)]
    words += split("--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8")
    return words + split("--advantage-estimator grpo --reward exact_match --lr 1e-4 --device cpu --run-name run")


@pytest.fixture
def dry_run(slime: Slime, base_words: list[str]) -> Slime:
    """Runs `slime train --dry-run` with those and further arguments."""
    return lambda *more: slime("train", "--dry-run", *base_words, *more)


@pytest.fixture
def refused(dry_run: Slime) -> Callable[..., str]:
    """The error for those and further arguments: exit code 2, on stderr, no traceback."""
    return lambda *more: _refusal(dry_run(*more))


@pytest.fixture
def refused_start(slime: Slime, base_words: list[str]) -> Callable[..., str]:
    """The same of a run that is to start."""
    return lambda *more: _refusal(slime("train", *base_words, *more))


def _refusal(ended: Ended) -> str:
    assert ended.code == 2, ended
    assert ended.out == ""
    assert "\nslime: error: " in f"\n{ended.err}"  # warnings may precede it
    assert "Traceback" not in ended.err
    return ended.err.removeprefix("slime: error: ").rstrip("\n")


@pytest.fixture
def words(base_words: list[str]) -> list[str]:
    return ["train", *base_words, "--num-rollout", "4", "--save-interval", "2"]


@pytest.fixture
def interrupted(slime: Slime, words: list[str], loop: Loop) -> Loop:
    """After a run named `run` that was interrupted after two rollouts."""
    loop.saves = 2
    assert slime(*words, "--run-name", "run").code == 130
    loop.saves = None
    return loop
