"""Bad input: a clear message and exit code 2, before any process starts."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import Slime, split
from tests.support.forked import forked
from tests.support.tiny_models import make_tiny_model

from slime.cli.run_folders import unwritable

pytestmark = pytest.mark.slow

Refused = Callable[..., str]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


# --- data ------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_named_with_the_numbers(refused: Refused, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "label": "b"}, {"prompt": "a" * 57, "label": "b"})
    message = refused("--prompt-data", path)
    assert f"{path}:2: the prompt has 57 tokens, expected at most 56" in message


def test_a_prompt_that_just_fits_is_accepted(dry_run: Slime, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a" * 56, "label": "b"})
    assert "longest prompt 56 of at most 56 tokens" in dry_run("--prompt-data", path).out


def test_prompts_of_an_evaluation_set_are_checked_too(refused: Refused, tmp_path: Path) -> None:
    path = write(tmp_path / "e.jsonl", {"prompt": "a" * 60, "label": "b"})
    words = ("--eval-prompt-data", "held_out", path, "--eval-interval", "1")
    assert f"{path}:1: the prompt has 60 tokens" in refused(*words)


def test_the_chat_templates_tokens_count_towards_the_limit(refused: Refused, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": [{"role": "user", "content": "a" * 50}], "label": "b"})
    # <|im_start|> user \n ... <|im_end|> \n <|im_start|> assistant \n, one token a character and a mark
    assert "the prompt has 69 tokens, expected at most 56" in refused("--prompt-data", path, "--apply-chat-template")


def test_a_response_that_leaves_no_room_is_refused(refused: Refused) -> None:
    assert "leaves no room for a prompt in the context of 64 tokens" in refused("--rollout-max-response-len", "64")


def test_a_context_beyond_the_engines_is_refused(refused: Refused) -> None:
    assert "--rollout-max-context-len 65 is too long: the model in" in refused("--rollout-max-context-len", "65")
    words = ("--sglang-context-length", "32", "--rollout-max-context-len", "33")
    assert "--rollout-max-context-len 33 is too long: --sglang-context-length is 32" in refused(*words)


def test_stop_tokens_outside_the_vocabulary_are_refused_with_the_numbers(refused: Refused) -> None:
    message = refused("--rollout-stop-token-ids", "127", "128", "130")
    assert (
        "--rollout-stop-token-ids 128 130: outside the model's vocabulary of 128 tokens, expected ids from 0 to 127"
        in (message)
    )


# --- arithmetic and ranks ----------------------------------------------------------------------------


def test_more_gpus_than_available_are_refused_with_the_numbers(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("preflight", "preflight_machine"):
        monkeypatch.setattr(f"slime.cli.{module}.nvidia_devices", lambda: 2)
    words = ("--device", "cuda", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2")
    assert "the run needs 4 GPUs (2 training ranks + 2 engines x 1), and this machine has 2" in refused(*words)


def test_a_ray_cluster_may_provide_the_gpus(dry_run: Slime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.cli.preflight_machine.nvidia_devices", lambda: 0)
    ended = dry_run("--device", "cuda", "--ray-address", "head:6379")
    assert "2 GPUs of the cluster head:6379: 1 for training + 1 for engines" in ended.out


# --- plugins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "wrong", "near"),
    [
        ("--advantage-estimator", "grpoo", "grpo"),
        ("--reward", "exact_mach", "exact_match"),
        ("--rm-type", "exact_mach", "exact_match"),
        ("--generator", "single_tern", "single_turn"),
        ("--data-source", "prompt", "prompts"),
    ],
)
def test_an_unknown_component_is_refused_with_the_nearest(refused: Refused, flag: str, wrong: str, near: str) -> None:
    message = refused(flag, wrong)
    assert wrong in message
    assert f"Did you mean {near}?" in message


# --- the model folder --------------------------------------------------------------------------------


def test_a_model_folder_that_is_missing(refused: Refused) -> None:
    assert "--hf-checkpoint some/model is not a folder" in refused("--hf-checkpoint", "some/model")


def test_a_model_folder_without_config(refused: Refused, model: Path) -> None:
    (model / "config.json").unlink()
    assert f"--hf-checkpoint {model}: {model}/config.json does not exist" in refused("--hf-checkpoint", str(model))


def test_a_model_folder_without_tokenizer(refused_start: Refused, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert f"--hf-checkpoint {model} has no tokenizer" in refused_start("--hf-checkpoint", str(model))


def test_a_model_folder_with_a_broken_tokenizer(refused: Refused, model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert f"the tokenizer in {model} cannot be loaded" in refused("--hf-checkpoint", str(model))


def test_a_model_folder_without_weights(refused_start: Refused, model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert f"--hf-checkpoint {model} has no weights" in refused_start("--hf-checkpoint", str(model))


def test_a_model_of_an_unknown_architecture(refused: Refused, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "llam"}))
    message = refused("--hf-checkpoint", str(model))
    assert "model family 'llam' (--model-family, or model_type in config.json of --hf-checkpoint)" in message
    assert "Did you mean llama?" in message


def test_a_reference_folder_is_checked_too(refused: Refused) -> None:
    assert "--ref-load no is not a folder" in refused("--ref-load", "no")
    assert "--critic-load no is not a folder" in refused("--critic-load", "no")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layers 4", "--num-layers says 4, and config.json of"),
        ("--untie-embeddings-and-output-weights=false", "--untie-embeddings-and-output-weights says False"),
        ("--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3", "does not divide the model's 4 attention heads"),
        ("--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2", "does not divide the model's 3 layers"),
        ("--rollout-num-gpus-per-engine 3", "--rollout-num-gpus-per-engine 3 does not divide the model's 4 attention"),
    ],
)
def test_a_configuration_that_does_not_match_the_model(refused: Refused, words: str, message: str) -> None:
    assert message in refused(*words.split())


# --- the machine -------------------------------------------------------------------------------------


@contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("option", ["--router-port", "--engine-port"])
def test_a_port_in_use_is_named(refused: Refused, option: str) -> None:
    with listening() as port:
        assert f"{option} {port}: another process already listens on 127.0.0.1:{port}" in refused(option, str(port))


def test_the_port_of_a_later_engine_in_use_is_named(refused: Refused) -> None:
    with listening() as port:
        message = refused("--engine-port", str(port - 1), "--rollout-num-gpus", "2")
        assert f"--engine-port {port}: another process already listens" in message


def test_an_unwritable_run_folder_is_refused(refused: Refused) -> None:
    assert "the run folder /proc/nobody/run cannot be written to" in refused("--output-dir", "/proc/nobody")


def test_a_run_folder_below_a_file_is_refused(refused: Refused, prompts: Path) -> None:
    assert f"cannot be made: {prompts} is a file" in refused("--output-dir", str(prompts))


def test_checkpoint_and_export_folders_must_be_writable(refused: Refused) -> None:
    message = refused("--save", "/proc/a", "--save-hf", "/proc/b")
    assert "--save /proc/a cannot be written to" in message
    assert "--save-hf /proc/b cannot be written to" in message


def test_on_a_cluster_only_what_this_process_writes_is_tried(dry_run: Slime, refused: Refused) -> None:
    cluster = ("--ray-address", "127.0.0.1:1")
    ended = dry_run(*cluster, "--save-hf", "/proc/b")
    assert ended.code == 0, ended.err
    assert "whether --save-hf /proc/b can be written is not checked: a node of the cluster writes it" in ended.out
    message = refused(*cluster, "--save", "/proc/a", "--output-dir", "/proc/nobody")
    assert "--save /proc/a cannot be written to" in message
    assert "the run folder /proc/nobody/run cannot be written to" in message


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    """A file-size limit simulates a full disk: it fails the same write."""
    limit = 2**16

    def refused() -> str | None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return unwritable(tmp_path / "run")

    assert forked(refused) == f"cannot be written to: File too large ({tmp_path}). Free space or choose another folder"


def test_the_write_test_leaves_no_files(tmp_path: Path) -> None:
    assert unwritable(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_is_not_overwritten(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    (tmp_path / "outputs" / "run" / "metrics.jsonl").touch()
    assert "the run folder outputs/run exists and is not empty" in refused()


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\nb", "\x1b[31mred"])
def test_a_run_name_stays_in_the_output_folder_and_can_be_shown(refused: Refused, name: str) -> None:
    assert f"--run-name {name!r} cannot name a folder" in refused("--run-name", name)


@pytest.mark.parametrize("flag", ["--load", "--initial-megatron-checkpoint"])
def test_a_checkpoint_that_is_missing(refused: Refused, flag: str) -> None:
    assert "no checkpoint in nowhere" in refused(flag, "nowhere")


# --- together ----------------------------------------------------------------------------------------


def test_problems_of_every_kind_are_reported_together(refused: Refused) -> None:
    message = refused(*split("--prompt-data no.jsonl --reward nope --hf-checkpoint no --global-batch-size 3"))
    assert message.startswith("4 problems:\n")


def test_supervised_training_cannot_evaluate_without_engines(refused: Refused, prompts: Path) -> None:
    words = ("--eval-prompt-data", "a", str(prompts), "--eval-interval", "1", "--generator", "supervised")
    assert "--eval-prompt-data needs engines, and the generator supervised starts none" in refused(*words)


def test_a_model_that_engines_cannot_serve(refused: Refused, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "glm", "glm", seed=0)
    assert "SGLang 0.5.23 has no class for GlmForCausalLM" in refused("--hf-checkpoint", str(folder))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cuda-graph-scope hot", "refuses these options: 'hot' is no name that it knows"),
        ("--recompute-granularity selective --recompute-modules hot", "Invalid choices for recompute_modules"),
    ],
)
def test_names_that_megatron_checks_in_its_ranks_are_refused_before(
    refused: Callable[..., str], words: str, said: str
) -> None:
    assert said in refused(*split(words))


@pytest.mark.parametrize(
    "words", ["--cuda-graph-scope attn", "--recompute-granularity selective --recompute-modules mlp"]
)
def test_names_that_megatron_knows_are_taken(dry_run: Slime, words: str) -> None:
    assert dry_run(*split(words)).code == 0
