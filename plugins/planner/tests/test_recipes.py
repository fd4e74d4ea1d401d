"""`slime train --from-recipe`: scripts of other frameworks as run files."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slime.cli import train
from slime.config import config_from_toml
from slime.errors import ConfigError
from slime_planner.recipes.recipe import read_recipe
from slime_planner.recipes.rules import translate
from slime_planner.recipes.run_file import run_file
from slime_planner.recipes.shell import read_script

RECIPES = {
    "verl": """
        data=/data/gsm8k   # folder
        python3 -m verl.trainer.main_ppo \\
            algorithm.adv_estimator=grpo data.train_files="$data/train.parquet" \\
            data.train_batch_size=1024 actor_rollout_ref.model.path=${MODEL_OF_TEST:-Qwen/Qwen2.5-7B} \\
            actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=5 \\
            actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
            custom_reward_function.path=rm.py custom_reward_function.name=score \\
            trainer.total_training_steps=90 trainer.experiment_name=x_$(date +%s) +made.up=1 $@
        """,
    "OpenRLHF": """
        ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray \\
            --pretrain some/model --advantage_estimator group_norm --rollout_batch_size 128 --train_batch_size 128 \\
            --n_samples_per_prompt 8 --eps_clip_low_high 0.2 0.3 --use_kl_loss --init_kl_coef 1e-3 \\
            --kl_estimator k3 --max_samples 20000 --prompt_data some/prompts --vllm_num_engines 4 \\
            --vllm_tensor_parallel_size 2 --packing_samples --dynamic_filtering_reward_range 0 1
        """,
    "TRL": """
        accelerate launch --num_processes 4 trl grpo --model_name_or_path some/model --dataset_name some/prompts \\
            --reward_funcs accuracy_reward think_format_reward --reward_weights 1.0 0.2 --num_generations 8 \\
            --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --max_steps 200 --beta 0.04 \\
            --loss_type dr_grpo --max_completion_length 1024 --min_p 0.1
        """,
    "THUDM's slime": """
        ARGS=(
           --hf-checkpoint /models/m   # the weights
           #--hf-checkpoint it's another
           --rm-type deepscaler
           --prompt-data /data/p.jsonl
           --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
           --advantage-estimator grpo --gamma 0.9 --balance-data
           --use-routing-replay
        )
        GPUS=$((4 * 2))
        python3 train_async.py --actor-num-gpus-per-node ${GPUS} "${ARGS[@]}" --num-layers 36
        """,
}


def translated(folder: Path, text: str, name: str = "run.sh") -> tuple[dict[str, Any], str]:
    path = folder / name
    path.write_text(text)
    written = run_file(translate(read_recipe(path)))
    config_from_toml(written)  # every key and value is one of slime
    return tomllib.loads(written), written


def test_each_further_use_of_a_batch_is_a_rollout(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1"}\n' * 320)
    yaml = "num_iterations: 2\nnum_train_epochs: 1\nnum_generations: 8\nper_device_train_batch_size: 32\n"
    run, _ = translated(tmp_path, f"{yaml}dataset_name: {prompts}\nmodel_name_or_path: m\n", "trl.yaml")
    assert run["rollout"]["rollout_batch_size"] == 4
    # 80 batches of 4 prompts, each in 2 rollouts
    assert run["rollout"]["num_rollout"] == 160
    assert [table["max_reuse"] for table in run.values() if "max_reuse" in table] == [1]
    epochs = "actor_rollout_ref.actor.ppo_epochs"
    verl = RECIPES["verl"].replace("trainer.total", f"{epochs}=2 trainer.save_freq=5 trainer.total")
    run, _ = translated(tmp_path, verl)
    assert (run["rollout"]["num_rollout"], run["checkpoint"]["save_interval"]) == (180, 10)


def test_verl(tmp_path: Path) -> None:
    run, text = translated(tmp_path, RECIPES["verl"])
    assert run["checkpoint"]["hf_checkpoint"] == "Qwen/Qwen2.5-7B"
    assert run["data"]["prompt_data"] == ["/data/gsm8k/train.parquet"]
    rollout = run["rollout"]
    assert (rollout["rollout_batch_size"], rollout["n_samples_per_prompt"], rollout["global_batch_size"]) == (
        1024,
        5,
        1280,
    )
    assert rollout["num_rollout"] == 90 and rollout["rollout_max_response_len"] == 512  # verl's default
    assert run["reward"]["custom_rm_path"] == "rm.py:score"
    algorithm = run["algorithm"]
    assert algorithm["use_kl_loss"] and algorithm["kl_loss_coef"] == 0.001 and algorithm["calculate_per_token_loss"]
    lost = text.partition("No counterpart")[2]
    assert "made.up" in lost and "trainer.experiment_name: its value is the output of a command" in text


def test_openrlhf(tmp_path: Path) -> None:
    run, text = translated(tmp_path, RECIPES["OpenRLHF"])
    assert run["estimator"]["name"] == "grpo" and run["rollout"]["num_rollout"] == 20000 // 128
    assert (run["algorithm"]["eps_clip"], run["algorithm"]["eps_clip_high"]) == (0.2, 0.3)
    assert run["algorithm"]["kl_loss_coef"] == 0.001 and run["data"]["prompt_data"] == ["hf://some/prompts"]
    assert run["cluster"]["rollout_num_gpus"] == 8 and run["megatron"]["adam_beta2"] == 0.95
    assert "packing_samples: samples are always packed" in text
    assert "dynamic_filtering_reward_range" in text.partition("No counterpart")[2]


def test_openrlhf_in_its_newer_spelling(tmp_path: Path) -> None:
    run, _ = translated(
        tmp_path, "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --rollout.batch_size 64\n"
    )
    assert run["checkpoint"]["hf_checkpoint"] == "m" and run["rollout"]["rollout_batch_size"] == 64


def test_trl(tmp_path: Path) -> None:
    run, text = translated(tmp_path, RECIPES["TRL"])
    # 4 processes x 8 responses x 4 = 128 responses a step, of 8 for each prompt
    assert (run["rollout"]["rollout_batch_size"], run["rollout"]["global_batch_size"]) == (16, 128)
    assert run["algorithm"]["loss_constant_length"] == 1024 and run["algorithm"]["kl_loss_coef"] == 0.04
    assert [term["weight"] for term in run["reward"]["terms"]] == [1.0, 0.2]
    assert "min_p" in text.partition("No counterpart")[2]


def test_scripts_and_yaml_of_trl(tmp_path: Path) -> None:
    run, _ = translated(
        tmp_path,
        "def short(completions, **kwargs):\n    return [0.0]\n"
        "args = GRPOConfig(num_generations=16, per_device_train_batch_size=16, max_steps=100)\n"
        'GRPOTrainer(model="some/model", reward_funcs=short, args=args)\n',
        "train.py",
    )
    assert run["rollout"]["n_samples_per_prompt"] == 16 and run["rollout"]["num_rollout"] == 100
    assert run["reward"]["custom_rm_path"].endswith("train.py:short")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' * 40)
    run, _ = translated(
        tmp_path, "model_name_or_path: m\ndataset_name: p.jsonl\nnum_train_epochs: 2\nlearning_rate: 1.0e-5\n", "r.yaml"
    )
    assert run["rollout"]["num_rollout"] == 2 * 40 / 1 and run["megatron"]["lr"] == 1e-5


def test_the_original_slime(tmp_path: Path) -> None:
    run, text = translated(tmp_path, RECIPES["THUDM's slime"])
    assert run["reward"] == {"name": "math", "after": "</think>", "boxed": True}
    assert run["estimator"] == {"name": "grpo", "gamma": 0.9}
    assert run["rollout"]["async"] and run["cluster"]["actor_num_gpus_per_node"] == 8
    assert "num-layers: the model's config.json says so" in text and "balance-data: " in text
    assert "use_rollout_routing_replay" in text


def test_words_are_those_of_bash(tmp_path: Path) -> None:
    """Against bash itself, which prints the words of the same command."""
    script = (
        'A="x y"; B=(one "two three" $A); N=$((3 * 4)); P=/a/b/c.txt\n'
        'run \'a $A\' "$A" $A "${B[@]}" ${N} ${U:-none} ${P##*/} ${P%.txt} q\\ r \\\n  end # not this\n'
    )
    path = tmp_path / "run.sh"
    said = subprocess.run(
        ["bash", "-c", f"run() {{ printf '%s\\n' \"$@\"; }}\n{script}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert read_script(path, script, {}).commands[-1] == ["run", *said]


@pytest.mark.parametrize(
    ("loop", "word", "told"),
    [
        ("for seed in 11 12 13; do", "11", "11, its first value"),
        ('seeds=(7 8)\nfor seed in "${seeds[@]}"\ndo', "7", "7, its first value"),
        ("for ((seed=3; seed<9; seed++)); do", "3", "3, its first value"),
        ("for seed in {4..8}; do", "4", "4, its first value"),
        ("for seed in {5,7} {1..3}; do", "5", "5, its first value"),
        ("for seed in s{8..2..2}; do", "s8", "s8, its first value"),
        ("low=6\nfor seed in {${low},9}; do", "6", "6, its first value"),
        ("for seed in '{1..3}'; do", "{1..3}", "{1..3}, its first value"),
        ("for seed in $(seq 3); do", "\N{REPLACEMENT CHARACTER}", "which only a shell knows"),
    ],
)
def test_a_loop_is_read_once_which_is_said(tmp_path: Path, loop: str, word: str, told: str) -> None:
    script = read_script(tmp_path / "run.sh", f"{loop}\n  run --seed $seed\ndone\n", {})
    assert script.commands[-1] == ["run", "--seed", word]
    line = 1 + loop[: loop.index("for ")].count("\n")
    assert script.notes == [f"$seed of the loop in run.sh:{line} was read as {told}; this is one run of it"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "echo hello\n", "no command with options of TRL, verl, OpenRLHF or THUDM's slime"),
        ("a.sh", 'python train.py --lr "1e-6\n', "is opened and not closed"),
        ("a.yaml", "a: [1", "is not valid YAML"),
        ("a.yaml", "a: 1\n", "none of its options"),
        ("a.py", "x = (", "is not valid Python"),
        ("a.py", "x = 1\n", "no GRPOConfig"),
        ("a.toml", "", "a run file of slime already"),
        ("a.sh", "trl sft --model_name_or_path m\n", "only `trl grpo`"),
    ],
)
def test_files_that_are_no_recipes(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        train.run(["--from-recipe", str(tmp_path / name)])


def test_words_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="expected a file"):
        train.run(["--from-recipe", str(tmp_path / "missing.sh")])
    with pytest.raises(ConfigError, match="needs one file"):
        train.run(["--from-recipe"])
    (tmp_path / "run.sh").write_text(RECIPES["THUDM's slime"])
    with pytest.raises(ConfigError, match="prints a run file and starts nothing"):
        train.run(["--from-recipe", str(tmp_path / "run.sh"), "--lr", "1"])
    assert train.run([f"--from-recipe={tmp_path / 'run.sh'}"]) == 0
    assert "[checkpoint]" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="/models/m is not a folder"):
        train.run(["--from-recipe", str(tmp_path / "run.sh"), "--dry-run"])
