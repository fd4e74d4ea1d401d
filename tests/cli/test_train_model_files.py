"""A model of another kind than the run needs is found before anything starts: vocabulary, lengths, further models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import Slime, change_config, write_weights
from tokenizers import Tokenizer

from slime.config import load_config
from slime.run.checkpoint.save import CheckpointWriter
from slime.weights.hf_config import read_hf_config
from slime.weights.models import Models

Refused = Callable[..., str]
NORM = "model.norm.weight"


def test_code_in_a_model_folder_is_not_run(
    dry_run: Slime, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that says that its architecture is in a Python file of its own, as many published ones do."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what a user in a hurry answers
    (model / "own.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()")
    change_config(model, auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    assert dry_run("--hf-checkpoint", str(model)).code == 0
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"eos_token_id": 128}, "eos_token_id 128 is outside the model's vocabulary of 128 tokens"),
        ("config.json", {"eos_token_id": [1, 500]}, "eos_token_id 500 is outside"),
        ("config.json", {"pad_token_id": 151643}, "pad_token_id 151643 is outside"),
        ("config.json", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected the id of a token"),
        ("generation_config.json", {"eos_token_id": [2, 128]}, "eos_token_id 128 is outside"),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id is True; expected the id of a token"),
    ],
)
def test_special_tokens_outside_the_vocabulary_are_refused(
    refused: Refused, model: Path, file: str, content: dict[str, object], message: str
) -> None:
    path = model / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    said = refused("--hf-checkpoint", str(model))
    assert f"{path}: {message}" in said


def test_files_that_disagree_on_the_end_of_a_response_are_noted(dry_run: Slime, model: Path) -> None:
    change_config(model, eos_token_id=1)
    path = model / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, 2]}))  # as published chat models have it
    assert "several eos_token_id" not in dry_run("--hf-checkpoint", str(model)).out
    path.write_text(json.dumps({"eos_token_id": 2}))
    done = dry_run("--hf-checkpoint", str(model))
    assert done.code == 0
    said = "several eos_token_id: config.json 1, generation_config.json 2. Engines end a response at any of them"
    assert said in " ".join(done.out.split())


# --- further models ----------------------------------------------------------------------------------


def test_the_weights_of_the_reference_and_the_critic_are_checked_too(refused: Refused, model: Path) -> None:
    write_weights(model, **{NORM: np.full(64, np.nan, np.float32)})
    assert f"--ref-load {model} has NaN or infinity" in refused("--ref-load", str(model))
    assert f"--critic-load {model} has NaN or infinity" in refused("--critic-load", str(model))


def test_a_reference_of_another_size_is_refused(refused: Refused, model: Path) -> None:
    change_config(model, intermediate_size=96)
    write_weights(model)
    assert "has another architecture than --hf-checkpoint: ffn_hidden_size 128 / 96" in refused(
        "--ref-load", str(model)
    )


def test_a_reward_model_may_become_the_critic(refused: Refused, model: Path) -> None:
    write_weights(model, **{"lm_head.weight": None, "score.weight": np.ones((1, 64), np.float32)})
    message = refused("--critic-load", str(model))
    assert "tensors" not in message and "trains no critic" in message  # the estimator has none; the folder is fine


# --- vocabulary, lengths, processes, the Hub -----------------------------------------------------------


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(dry_run: Slime, refused: Refused, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = tokenizer.get_vocab_size()
    change_config(model, vocab_size=rows)
    write_weights(model)
    assert dry_run("--hf-checkpoint", str(model)).code == 0
    change_config(model, vocab_size=rows - 3)
    write_weights(model)
    message = refused("--hf-checkpoint", str(model))
    assert (
        f"with id {rows - 1}, and the model has embeddings for ids 0 to {rows - 4} (vocab_size {rows - 3})" in message
    )
    assert "belongs to another model" in message


@pytest.mark.parametrize("form", ["tokenizers", "transformers"])
def test_an_added_token_without_an_embedding_is_noted_and_a_prompt_that_contains_it_refused(
    dry_run: Slime, refused: Refused, model: Path, prompts: Path, form: str
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = tokenizer.get_vocab_size()
    change_config(model, vocab_size=rows)
    write_weights(model)
    assert "without an embedding" not in dry_run("--hf-checkpoint", str(model)).out
    tokenizer.add_special_tokens(["<|padding|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    if form == "transformers":  # a template with a tag that only transformers has
        template = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
        (model / "chat_template.jinja").write_text(template)
    words = ["--hf-checkpoint", str(model), *(["--apply-chat-template"] if form == "transformers" else [])]
    ended = dry_run(*words)
    assert ended.code == 0
    assert f"has 1 added token without an embedding, '<|padding|>' ({rows})" in " ".join(ended.out.split())
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "1+<|padding|>=", "label": "1"}) + "\n")
    message = refused(*words)
    assert f"prompts.jsonl:4: the prompt has the token '<|padding|>' (id {rows})" in message
    assert f"the model has embeddings for ids 0 to {rows - 1}" in message


def test_engines_with_a_longer_context_than_the_model_are_refused(refused: Refused) -> None:
    message = refused("--sglang-context-length", "65")
    assert "--sglang-context-length 65 is longer than the context of the model" in message


def test_routes_of_a_model_without_routers_are_refused(refused: Refused) -> None:
    message = refused("--use-rollout-routing-replay")
    assert "--use-rollout-routing-replay is for mixtures of experts" in message


def test_lengths_that_cannot_both_be_reached_are_noted(dry_run: Slime) -> None:
    ended = dry_run("--rollout-max-prompt-len", "60")
    assert "notes        --rollout-max-prompt-len 60 + --rollout-max-response-len 8 = 68 tokens, and the" in ended.out
    assert "prompts may have at most 56" in ended.out
    assert "--rollout-max-prompt-len 56 +" not in dry_run("--rollout-max-prompt-len", "56").out


def test_more_processes_than_cores_are_noted(dry_run: Slime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    words = ("--actor-num-gpus-per-node", "2", "--rollout-num-gpus")
    told = dry_run("--async", *words, "2").out
    assert "2 training ranks and 2 engines compute at the same time, and this machine has 3 cores" in told
    assert "compute at the same time" not in dry_run("--async", *words, "1").out
    assert "4 engines compute at the same time, and this machine has 3 cores" in dry_run(*words, "4").out
    assert "compute at the same time" not in dry_run(*words, "3").out, "trainer and engines take turns"


def test_stop_tokens_of_an_evaluation_set_are_checked_too(refused: Refused, prompts: Path) -> None:
    words = ("--eval-prompt-data", "held", str(prompts), "--eval-interval", "1", "--eval-stop-token-ids", "128")
    assert "--eval-prompt-data held, stop_token_ids 128: outside the model's vocabulary" in refused(*words)


def test_the_name_of_a_model_on_the_hub_gets_the_command_that_downloads_it(refused: Refused, tmp_path: Path) -> None:
    message = refused("--hf-checkpoint", "Qwen/Qwen3-0.6B")
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, then --hf-checkpoint Qwen3-0.6B" in message
    assert "`hf download gpt2 --local-dir gpt2`, then --hf-checkpoint gpt2" in refused("--hf-checkpoint", "gpt2")
    for name in ("/Qwen/Qwen3-0.6B", "../../Qwen", str(tmp_path / "a"), "../Qwen"):
        assert "hf download" not in refused("--hf-checkpoint", name)


def test_a_model_that_a_script_expects_has_a_name_on_the_hub_that_is_not_known(refused: Refused) -> None:
    message = refused("--hf-checkpoint", "models/Qwen3-4B")
    assert "`hf download OWNER/Qwen3-4B --local-dir models/Qwen3-4B`" in message
    assert "hf download models/" not in message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a number above 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected a positive integer, at most 10000"),
        ({"architectures": 3}, "architectures is 3"),
    ],
)
def test_an_odd_description_is_refused(refused: Refused, model: Path, changed: dict[str, object], message: str) -> None:
    change_config(model, **changed)
    assert message in refused("--hf-checkpoint", str(model))


def test_a_description_that_is_no_plain_json_file_is_refused(refused: Refused, model: Path) -> None:
    (model / "config.json").write_text("[" * 50_000)
    assert "nested too deeply" in refused("--hf-checkpoint", str(model))
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert "config.json cannot be read: it is not a file" in refused("--hf-checkpoint", str(model))


def test_a_checkpoint_of_another_model_is_refused(
    slime: Slime, base_words: list[str], described_model: Path, tmp_path: Path
) -> None:
    config = load_config([*base_words, "--save", "saved"])
    models = Models.installed(config)
    other = models.describe(read_hf_config(described_model) | {"num_hidden_layers": 2})
    longer = models.describe(read_hf_config(described_model) | {"max_position_embeddings": 128})
    for name, model in (("other", other), ("longer", longer)):
        writer = CheckpointWriter(tmp_path / name, config, {"plugins": []}, model)
        writer.commit(writer.begin(1), {}, rollouts_done=1, weight_version=1, trained_at={})

    problem = f"holds the weights of another model than --hf-checkpoint {described_model}: num_layers 2 / 3."
    for command in (["train", *base_words, "--load"], ["train", *base_words, "--initial-megatron-checkpoint"]):
        ended = slime(*command, "other", "--dry-run")
        assert (ended.code, problem in ended.err) == (2, True), ended.err
        assert problem not in slime(*command, "longer", "--dry-run").err
    evaluation = ["--eval-prompt-data", "own", str(tmp_path / "prompts.jsonl"), "--dry-run"]
    ended = slime("eval", "other", *evaluation)
    assert (ended.code, problem in ended.err) == (2, True), ended.err
    assert slime("eval", "longer", *evaluation).code == 0


def test_a_run_is_not_continued_from_weights_alone(slime: Slime, base_words: list[str], tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "weights", load_config(base_words), {"plugins": []})
    writer.commit(writer.begin(0), {}, rollouts_done=0, weight_version=0, trained_at={})
    ended = slime("train", *base_words, "--load", "weights", "--dry-run")
    assert ended.code == 2 and "holds the weights of a model and no run" in ended.err, ended.err
    assert "--initial-megatron-checkpoint weights/rollout_000000" in ended.err
