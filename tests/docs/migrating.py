"""Writes the tables of docs/migrating.md.

    python -m tests.docs.migrating

The refused names come from `slime.registry.original_names`; the accepted flags and the tables for TRL and verl are
here.
"""

from __future__ import annotations

import re
from pathlib import Path

from slime.config.flag_table import find_flag
from slime.registry.original_names import original_names

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"

#: flags of the original slime that mean the same here: name -> (a value; None for a switch, what differs)
ACCEPTED: dict[str, tuple[str | None, str]] = {
    "actor-num-nodes": ("2", ""),
    "actor-num-gpus-per-node": ("8", "default 1"),
    "rollout-num-gpus": ("8", ""),
    "rollout-num-gpus-per-engine": ("2", ""),
    "colocate": (None, "releases the memory of both sides"),
    "distributed-timeout-minutes": ("10", ""),
    "use-fault-tolerance": (
        None,
        "restarts the whole run, from its newest checkpoint; engines are restarted without it",
    ),
    "update-weight-transport": ("disk", "`nccl` is called `distributed`"),
    "update-weight-buffer-size": ("1000000", ""),
    "update-weights-interval": ("2", ""),
    "check-weight-update-equal": (None, ""),
    "hf-checkpoint": ("model", ""),
    "ref-load": ("model", "a Hugging Face folder; default: the initial weights"),
    "load": ("checkpoints", "checkpoints of this slime; Megatron's are not read"),
    "save": ("checkpoints", ""),
    "save-interval": ("10", ""),
    "async-save": (None, "needs `--save-interval`"),
    "save-hf": ("model-{rollout}", "`{rollout}` instead of `{rollout_id}`"),
    "seed": ("1", ""),
    "rollout-temperature": ("0.8", ""),
    "rollout-top-p": ("0.9", ""),
    "rollout-top-k": ("50", ""),
    "rollout-max-context-len": ("4096", ""),
    "rollout-max-prompt-len": ("1024", ""),
    "rollout-max-response-len": ("2048", "default 1024"),
    "rollout-stop": ("END", ""),
    "rollout-stop-token-ids": ("1", ""),
    "rollout-shuffle": (None, ""),
    "rollout-seed": ("1", ""),
    "over-sampling-batch-size": ("64", ""),
    "dynamic-sampling-filter-path": ("filter.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "partial-rollout": (None, ""),
    "mask-offpolicy-in-partial-rollout": (None, ""),
    "use-rollout-routing-replay": (None, ""),
    "custom-generate-function-path": ("generate.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "buffer-filter-path": ("filter.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "rollout-sample-filter-path": ("filter.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "num-rollout": ("100", ""),
    "data-source-path": ("source.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "prompt-data": ("prompts.jsonl", ""),
    "apply-chat-template": (None, ""),
    "apply-chat-template-kwargs": ("{}", ""),
    "input-key": ("question", "default `prompt`"),
    "label-key": ("answer", "default `label`; `none` if rows have none"),
    "metadata-key": ("extra", ""),
    "tool-key": ("tools", "no default"),
    "rollout-batch-size": ("32", ""),
    "n-samples-per-prompt": ("8", ""),
    "global-batch-size": ("256", ""),
    "num-steps-per-rollout": ("1", ""),
    "micro-batch-size": ("1", "default: packed up to `--max-tokens-per-gpu`"),
    "max-tokens-per-gpu": ("4096", "default 8192"),
    "eval-interval": ("10", ""),
    "eval-prompt-data": ("aime aime.jsonl", "may be repeated"),
    "skip-eval-before-train": (None, ""),
    "n-samples-per-eval-prompt": ("4", ""),
    "eval-temperature": ("0.6", "default 0"),
    "eval-top-p": ("0.9", ""),
    "eval-top-k": ("50", ""),
    "eval-max-response-len": ("4096", ""),
    "eval-max-prompt-len": ("1024", ""),
    "clip-grad": ("1.0", "Megatron's"),
    "lr": ("1e-6", "Megatron's"),
    "calculate-per-token-loss": (None, ""),
    "num-critic-only-steps": ("1", ""),
    "eps-clip": ("0.2", ""),
    "eps-clip-high": ("0.28", ""),
    "eps-clip-c": ("3.0", ""),
    "value-clip": ("0.2", ""),
    "kl-coef": ("0.01", ""),
    "loss-type": ("policy_loss", "no `custom_loss`: write an estimator plugin"),
    "kl-loss-type": ("low_var_kl", "default `k3`"),
    "advantage-estimator": ("grpo", "no default"),
    "use-kl-loss": (None, ""),
    "kl-loss-coef": ("0.001", ""),
    "use-unbiased-kl": (None, ""),
    "ref-update-interval": ("10", ""),
    "entropy-coef": ("0.001", ""),
    "normalize-advantages": (None, ""),
    "mtp-num-layers": ("1", "as many as the model has"),
    "enable-mtp-training": (None, "neither with context parallelism nor with LoRA"),
    "mtp-loss-scaling-factor": ("0.2", ""),
    "use-rollout-logprobs": (None, "default with `--async`, filters and over-sampling"),
    "use-tis": (None, ""),
    "tis-clip": ("2.0", "also called `--tis-threshold`"),
    "tis-clip-low": ("0", "also called `--tis-threshold-low`"),
    "rm-type": ("math", "also called `--reward`; the names are below"),
    "reward-key": ("score", ""),
    "group-rm": (None, ""),
    "custom-rm-path": ("rm.py", "`FILE.py:NAME` or `package.module:NAME`"),
    "custom-reward-post-process-path": ("post.py", "`FILE.py:NAME` or `package.module:NAME`"),
}
#: flags of the original slime that the command line knows and that this release cannot do
UNAVAILABLE = ("allgather-cp",)

#: fields of TRL's GRPOConfig (6 of them arguments of GRPOTrainer) -> here
TRL: dict[str, str] = {
    "model": "`--hf-checkpoint`",
    "reward_funcs": "`--custom-rm-path FILE.py:NAME`; several as `[[reward.terms]]` of the run file",
    "train_dataset": "`--prompt-data`",
    "eval_dataset": "`--eval-prompt-data`",
    "tools": "`--generator tool_loop` (docs/multi-turn.md)",
    "peft_config": "`--lora-rank`, `--lora-alpha`, `--lora-targets` (docs/lora.md)",
    "reward_weights": "`weight` in `[[reward.terms]]`",
    "num_generations": "`--n-samples-per-prompt`",
    "max_completion_length": "`--rollout-max-response-len`",
    "temperature": "`--rollout-temperature`",
    "top_p": "`--rollout-top-p`",
    "top_k": "`--rollout-top-k`",
    "generation_batch_size": "`--rollout-batch-size` (prompts, not responses)",
    "steps_per_generation": "`--num-steps-per-rollout`",
    "per_device_train_batch_size": "`--micro-batch-size`, or packed up to `--max-tokens-per-gpu`",
    "gradient_accumulation_steps": "follows from `--global-batch-size`",
    "learning_rate": "`--lr`",
    "max_grad_norm": "`--clip-grad`",
    "beta": "`--use-kl-loss --kl-loss-coef`",
    "epsilon": "`--eps-clip`",
    "epsilon_high": "`--eps-clip-high`",
    "delta": "`--eps-clip-c`",
    "loss_type": "`bnpo` and `dapo`: `--calculate-per-token-loss`; `dr_grpo`: `--loss-constant-length`",
    "scale_rewards": "`--estimator.std-normalization`",
    "importance_sampling_level": "`sequence`: `--advantage-estimator gspo`",
    "mask_truncated_completions": "`--rollout-sample-filter-path` with a function that sets `remove_sample`",
    "sync_ref_model": "`--ref-update-interval`, which copies the weights",
    "entropy_coef": "`--entropy-coef`",
    "use_bias_correction_kl": "`--use-unbiased-kl`",
    "vllm_importance_sampling_correction": "`--use-tis`",
    "vllm_importance_sampling_cap": "`--tis-threshold`",
    "off_policy_mask_threshold": "`--off-policy-sequence-delta`",
    "max_tool_calling_iterations": "`--max-turns`",
    "use_vllm": "SGLang engines always generate",
    "num_train_epochs": "`--num-rollout`: epochs x prompts / `--rollout-batch-size`",
    "save_steps": "`--save-interval`, in rollouts",
    "eval_steps": "`--eval-interval`, in rollouts",
    "output_dir": "`--save`, `--save-hf` and `--output-dir`",
    "report_to": "`--tracker`",
    "seed": "`--seed` and `--rollout-seed`",
}
#: arguments of GRPOTrainer
TRL_TRAINER = ("model", "reward_funcs", "train_dataset", "eval_dataset", "tools", "peft_config")

#: keys of verl's trainer configuration -> here
VERL: dict[str, str] = {
    "actor_rollout_ref.model.path": "`--hf-checkpoint`",
    "actor_rollout_ref.model.trust_remote_code": "`--trust-remote-code`",
    "actor_rollout_ref.model.lora_rank": "`--lora-rank` (docs/lora.md)",
    "actor_rollout_ref.model.lora_alpha": "`--lora-alpha`; its default here is the rank",
    "actor_rollout_ref.model.target_modules": "`--lora-targets`",
    "actor_rollout_ref.model.lora_adapter_path": "`--lora-load`",
    "data.train_files": "`--prompt-data`",
    "data.val_files": "`--eval-prompt-data`",
    "data.prompt_key": "`--input-key`",
    "data.train_batch_size": "`--rollout-batch-size`",
    "data.max_prompt_length": "`--rollout-max-prompt-len`",
    "data.max_response_length": "`--rollout-max-response-len`",
    "data.shuffle": "`--rollout-shuffle`",
    "actor_rollout_ref.rollout.n": "`--n-samples-per-prompt`",
    "actor_rollout_ref.rollout.temperature": "`--rollout-temperature`",
    "actor_rollout_ref.rollout.top_p": "`--rollout-top-p`",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "`--rollout-num-gpus-per-engine`",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "`--sglang-mem-fraction-static`",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "`--global-batch-size`: times `--n-samples-per-prompt`",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "`--max-tokens-per-gpu`",
    "actor_rollout_ref.actor.clip_ratio": "`--eps-clip`",
    "actor_rollout_ref.actor.clip_ratio_high": "`--eps-clip-high`",
    "actor_rollout_ref.actor.clip_ratio_c": "`--eps-clip-c`, which is off by default",
    "actor_rollout_ref.actor.loss_agg_mode": "`token-mean`: `--calculate-per-token-loss`; default: by sample",
    "actor_rollout_ref.actor.use_kl_loss": "`--use-kl-loss`",
    "actor_rollout_ref.actor.kl_loss_coef": "`--kl-loss-coef`",
    "actor_rollout_ref.actor.kl_loss_type": "`--kl-loss-type`",
    "actor_rollout_ref.actor.entropy_coeff": "`--entropy-coef`",
    "actor_rollout_ref.actor.optim.lr": "`--lr`",
    "critic.optim.lr": "`--critic-lr`",
    "algorithm.adv_estimator": "`--advantage-estimator`; `gae` is `ppo`",
    "algorithm.gamma": "`--estimator.gamma`",
    "algorithm.lam": "`--estimator.lambd`",
    "algorithm.norm_adv_by_std_in_grpo": "`--estimator.std-normalization`",
    "algorithm.use_kl_in_reward": "`--kl-coef`",
    "trainer.total_epochs": "`--num-rollout`: epochs x prompts / `--rollout-batch-size`",
    "trainer.nnodes": "`--actor-num-nodes`",
    "trainer.n_gpus_per_node": "`--actor-num-gpus-per-node`",
    "trainer.save_freq": "`--save-interval`",
    "trainer.test_freq": "`--eval-interval`",
    "trainer.default_local_dir": "`--save`",
    "trainer.experiment_name": "`--run-name`",
    "trainer.logger": "`--tracker`",
}


def tables() -> dict[str, str]:
    """The tables of the page, by name."""
    refused = dict(original_names()["flags"])
    for name in UNAVAILABLE:
        flag = find_flag(name)
        refused[name] = flag.refusal if flag is not None else ""
    return {
        "accepted": _table("flag", "what differs", {f"`--{name}`": note for name, (_, note) in ACCEPTED.items()}),
        "refused": _table("flag", "here", {f"`--{name}`": text for name, text in refused.items()}),
        "rewards": _table("`--rm-type`", "here", _coded(original_names()["rewards"])),
        "paths": _table("path", "here", _coded(original_names()["paths"])),
        "trl": _table("TRL", "here", _coded(TRL)),
        "verl": _table("verl", "here", _coded(VERL)),
    }


def written(page: str) -> str:
    """The page with its tables."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        page = re.sub(f"{begin}.*?{end}", lambda _, text=f"{begin}\n{table}\n{end}": text, page, flags=re.DOTALL)
    return page


def _coded(rows: object) -> dict[str, str]:
    assert isinstance(rows, dict)
    return {f"`{name}`": text for name, text in rows.items()}


def _table(first: str, second: str, rows: dict[str, str]) -> str:
    return "\n".join(
        [f"| {first} | {second} |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())]
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
