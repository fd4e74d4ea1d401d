"""The options whose values change on the way to slime: responses become prompts, epochs rollouts, names other names.

The other options follow the tables of docs/migrating.md, which `work` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from slime.config.flag_table import find_flag
from slime.config.flags import MEGATRON
from slime.registry.original_names import instead_of
from slime_planner.recipes.recipe import Framework, Recipe
from slime_planner.recipes.work import DROP, WRITE, Translation, Translator

_PACKED = "micro-batches are packed up to --max-tokens-per-gpu"
#: other frameworks' names of estimators
ESTIMATORS: Mapping[Framework, Mapping[str, str]] = {
    "TRL": {},
    "verl": {
        "gae": "ppo",
        "grpo": "grpo",
        "rloo": "rloo",
        "reinforce_plus_plus": "reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    },
    "OpenRLHF": {
        "gae": "ppo",
        "reinforce": "reinforce_plus_plus",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
        "rloo": "rloo",
        "group_norm": "grpo",
        "dr_grpo": "dr_grpo",
    },
    "THUDM's slime": {},
}


def translate(recipe: Recipe) -> Translation:
    """The run of a recipe in slime's words."""
    work = Translator(recipe)
    _SPECIAL[recipe.framework](work)
    for option in work.options:
        if option.name not in work.done:
            work.by_table(option)
    return work.result


def _trackers(work: Translator, name: str, project: str = "") -> None:
    if "wandb" not in work.get(name):
        work.done.add(project)
    if not work.get(name):
        return
    known = [
        one for one in ("wandb", "trackio", "mlflow", "tensorboard") if one in work.get(name) or work.get(name) == "all"
    ]
    others = [one for one in known if one != "tensorboard"]
    if others:
        work.say(name, "tracker", "tensorboard", *others)
    else:
        work.unneeded(name, "TensorBoard, the terminal and the run folder are the default")


def _switch(work: Translator, name: str, flag: str) -> None:
    if work.is_on(name) and not work.result.by_hand.get(name):
        work.say(name, flag)
    else:
        work.done.add(name)


def _kl_in_loss(work: Translator, name: str, switch: str | None = None) -> None:
    """A coefficient of the KL term; 0 is none."""
    if work.number(name, 0) > 0:
        work.say(switch or name, "use-kl-loss")
        work.say(name, "kl-loss-coef", work.get(name))
    else:
        work.done.update({name, *([switch] if switch else [])})


def _trl(work: Translator) -> None:
    micro, accumulated = work.number("per_device_train_batch_size"), work.number("gradient_accumulation_steps")
    each = work.number("num_generations")
    step = micro * accumulated * work.recipe.processes
    batch = work.number("generation_batch_size", 0) or (
        micro * work.recipe.processes * work.number("steps_per_generation", 0) or step
    )
    work.whole(
        "per_device_train_batch_size", "rollout-batch-size", batch / each, f"{batch} responses of {each} a prompt"
    )
    work.say("gradient_accumulation_steps", "global-batch-size", str(int(step)))
    work.done.update({"generation_batch_size", "steps_per_generation"})
    if work.recipe.processes > 1:
        work.say("num_processes of the launcher", "actor-num-gpus-per-node", str(work.recipe.processes))
    _rewards(work)
    for name in ("dataset_name", "train_dataset"):
        work.data(name)
    work.data("eval_dataset", "eval-prompt-data")
    steps = max(Fraction(1), batch / step)
    if work.number("max_steps", -1) > 0:
        work.say("max_steps", "num-rollout", str(max(1, round(work.number("max_steps") / steps))))
        work.done.add("num_train_epochs")
    else:
        work.done.add("max_steps")
        prompts = "dataset_name" if work.get("dataset_name") else "train_dataset"
        work.rollouts("num_train_epochs", prompts, uses=int(work.number("num_iterations")))
    work.interval("save_steps", "save-interval", steps)
    work.interval("eval_steps", "eval-interval", steps)
    if work.get("output_dir"):
        work.say("output_dir", "save", work.get("output_dir"))
    kind = work.get("loss_type")
    level = "gspo" if work.get("importance_sampling_level") == "sequence" else "grpo"
    level_or_program = "importance_sampling_level" if work.get("importance_sampling_level") else "GRPOConfig"
    work.say(level_or_program, "advantage-estimator", "cispo" if kind == "cispo" else level)
    if kind in ("dapo", "bnpo", "cispo"):
        work.say("loss_type", "calculate-per-token-loss")
    elif kind == "dr_grpo":
        work.say("loss_type", "loss-constant-length", work.get("max_completion_length"))
    elif kind == "grpo":
        work.done.add("loss_type")
    else:
        work.by_hand("loss_type", f"{kind}: docs/algorithms.md has the losses that there are")
    match work.get("scale_rewards").lower():
        case "none" | "false":
            work.say("scale_rewards", "estimator.std-normalization", "false")
        case "batch":
            work.by_hand("scale_rewards", "rewards are divided by the deviation of their group, not of the batch")
        case _:
            work.done.add("scale_rewards")
    _kl_in_loss(work, "beta")
    if work.get("lr_scheduler_type") not in ("", "linear", "cosine"):
        work.say("lr_scheduler_type", "lr-decay-style", "constant")
    if work.number("num_iterations") > 1:
        work.say("num_iterations", "max-reuse", str(work.number("num_iterations") - 1))
    work.done.add("num_iterations")
    work.done.add("use_peft")
    if not work.is_on("use_peft") and work.get("use_peft"):
        work.done.update({"lora_r", "lora_alpha", "lora_target_modules"})
    _trackers(work, "report_to")
    work.say("seed", "seed", work.get("seed"))
    work.say("seed", "rollout-seed", work.get("seed"))
    if work.is_on("use_vllm") and work.get("vllm_mode") != "server":
        work.say("vllm_mode", "colocate")
    work.done.add("vllm_mode")


def _rewards(work: Translator) -> None:
    """Functions by path: TRL's own under `trl.rewards`; several become terms."""
    names = next((option.values for option in work.recipe.options if option.name == "reward_funcs"), ())
    found = [_function(name) for name in names]
    weights = work.get("reward_weights").split()
    if len(found) == 1:
        work.say("reward_funcs", "custom-rm-path", found[0])
    elif found:
        work.result.terms = [*zip(found, [*weights, *["1.0"] * len(found)], strict=False)]
    work.done.update({"reward_funcs", "reward_weights"})


def _function(name: str) -> str:
    """`FILE.py:NAME` or `package.module:NAME` of a function that is named with dots, or is TRL's own."""
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def _verl(work: Translator) -> None:
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    each = work.number(f"{rollout}.n")
    work.say("data.train_batch_size", "rollout-batch-size", work.get("data.train_batch_size"))
    # A smaller batch than the default's is one step.
    per_step = min(work.number(f"{actor}.ppo_mini_batch_size"), work.number("data.train_batch_size"))
    work.say(f"{actor}.ppo_mini_batch_size", "global-batch-size", str(int(per_step * each)))
    work.data("data.train_files")
    work.data("data.val_files", "eval-prompt-data")
    label = "data.train_files"
    if work.get(label):
        work.say(label, "label-key", "reward_model.ground_truth")
        work.say(label, "metadata-key", "extra_info")
        work.say(label, "apply-chat-template")
    uses = max(1, int(work.number(f"{actor}.ppo_epochs")))
    if work.number("trainer.total_training_steps", -1) > 0:
        work.say(
            "trainer.total_training_steps", "num-rollout", str(int(work.number("trainer.total_training_steps") * uses))
        )
        work.done.add("trainer.total_epochs")
    else:
        work.rollouts("trainer.total_epochs", label, uses=uses)
    # Steps of verl are batches; each further use of a batch is a rollout here.
    work.interval("trainer.save_freq", "save-interval", Fraction(1, uses))
    work.interval("trainer.test_freq", "eval-interval", Fraction(1, uses))
    if work.number("trainer.critic_warmup", 0) <= 0 or work.get("algorithm.adv_estimator") != "gae":
        work.unneeded("trainer.critic_warmup", "there is no critic, or it has no head start")
    if work.number("trainer.save_freq", -1) <= 0:
        work.done.add("trainer.default_local_dir")
    _estimator(work, "algorithm.adv_estimator")
    if work.get("algorithm.adv_estimator") != "grpo" or work.is_on("algorithm.norm_adv_by_std_in_grpo"):
        work.done.add("algorithm.norm_adv_by_std_in_grpo")
    if work.get("algorithm.adv_estimator") != "gae":
        work.done.update({"critic.optim.lr", "critic.model.path"})
    match work.get(f"{actor}.loss_agg_mode"):
        case "token-mean":
            work.say(f"{actor}.loss_agg_mode", "calculate-per-token-loss")
        case "seq-mean-token-mean":
            work.done.add(f"{actor}.loss_agg_mode")
        case "seq-mean-token-sum-norm":
            work.say(f"{actor}.loss_agg_mode", "loss-constant-length", work.get("data.max_response_length"))
        case other:
            work.by_hand(f"{actor}.loss_agg_mode", f"{other}: docs/algorithms.md has the ways that there are")
    if work.is_on(f"{actor}.use_kl_loss"):
        _kl_in_loss(work, f"{actor}.kl_loss_coef", f"{actor}.use_kl_loss")
        kind = work.get(f"{actor}.kl_loss_type")
        work.say(f"{actor}.kl_loss_type", "kl-loss-type", {"kl": "k1", "mse": "k2"}.get(kind, kind))
    work.done.update({f"{actor}.use_kl_loss", f"{actor}.kl_loss_coef", f"{actor}.kl_loss_type"})
    if work.is_on("algorithm.use_kl_in_reward"):
        work.say("algorithm.use_kl_in_reward", "kl-coef", work.get("algorithm.kl_ctrl.kl_coef") or "0.001")
    work.done.update({"algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"})
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        if work.get(f"{prefix}.path"):
            name = work.get(f"{prefix}.name") or "compute_score"
            work.say(f"{prefix}.path", "custom-rm-path", f"{work.get(f'{prefix}.path')}:{name}")
        work.done.add(f"{prefix}.name")
    if work.number(f"{actor}.ppo_epochs") > 1:
        work.say(f"{actor}.ppo_epochs", "max-reuse", str(work.number(f"{actor}.ppo_epochs") - 1))
    work.done.add(f"{actor}.ppo_epochs")
    work.unneeded(f"{actor}.ppo_micro_batch_size_per_gpu", _PACKED)
    if work.is_on("data.filter_overlong_prompts"):
        work.say("data.filter_overlong_prompts", "overlong-prompts", "drop")
    if not work.is_on("trainer.val_before_train") and work.get("trainer.val_before_train"):
        work.say("trainer.val_before_train", "skip-eval-before-train")
    work.done.update({"data.filter_overlong_prompts", "trainer.val_before_train"})
    work.unneeded("trainer.resume_mode", "--resume auto goes on with a named run")
    _trackers(work, "trainer.logger", "trainer.project_name")
    work.say("trainer with engines in turns", "colocate")


def _estimator(work: Translator, name: str) -> None:
    known = ESTIMATORS[work.recipe.framework].get(work.get(name))
    if known is None:
        work.by_hand(name, f"{work.get(name)}: docs/algorithms.md lists the estimators that there are")
    else:
        work.say(name, "advantage-estimator", known)


def _openrlhf(work: Translator) -> None:
    work.say("rollout_batch_size", "rollout-batch-size", work.get("rollout_batch_size"))
    work.say("train_batch_size", "global-batch-size", work.get("train_batch_size"))
    work.data("prompt_data")
    work.data("eval_dataset", "eval-prompt-data")
    most = int(work.number("max_samples", 0))
    work.done.add("max_samples")
    work.rollouts("num_episodes", "prompt_data", most=most or None)
    work.interval("save_steps", "save-interval")
    work.interval("eval_steps", "eval-interval")
    _estimator(work, "advantage_estimator")
    if work.get("advantage_estimator") != "gae":
        work.done.update({"value_clip", "critic_learning_rate", "critic_pretrain"})
    if work.is_on("use_kl_loss"):
        _kl_in_loss(work, "init_kl_coef", "use_kl_loss")
        work.say("kl_estimator", "kl-loss-type", work.get("kl_estimator"))
    elif work.number("init_kl_coef", 0) > 0:
        work.say("init_kl_coef", "kl-coef", work.get("init_kl_coef"))
    work.done.update({"init_kl_coef", "use_kl_loss", "kl_estimator"})
    low_high = work.get("eps_clip_low_high").split()
    if len(low_high) == 2:
        work.say("eps_clip_low_high", "eps-clip", low_high[0])
        work.say("eps_clip_low_high", "eps-clip-high", low_high[1])
        work.done.add("eps_clip")
    work.done.add("eps_clip_low_high")
    betas = work.get("adam_betas").split()
    for name, value in zip(("adam-beta1", "adam-beta2"), betas, strict=False):
        work.say("adam_betas", name, value)
    if work.get("lr_scheduler") == "cosine_with_min_lr":
        work.say("lr_scheduler", "lr-decay-style", "cosine")
        work.say("lr_scheduler", "min-lr", f"{float(work.number('actor_learning_rate', 0)) / 10:g}")
    url = work.get("remote_rm_url")
    if url.startswith(("http://", "https://")):
        work.say("remote_rm_url", "reward", "remote")
        work.say("remote_rm_url", "reward.url", url)
    elif url:
        work.say("remote_rm_url", "custom-rm-path", f"{url}:reward_func")
        work.result.by_hand["remote_rm_url"] = "its function needs another signature: docs/plugins/local-functions.md"
    engines, devices = work.number("vllm_num_engines", 0), work.number("vllm_tensor_parallel_size")
    if engines:
        work.say("vllm_num_engines", "rollout-num-gpus", str(engines * devices))
    if work.get("agent_func_path"):
        work.say("agent_func_path", "custom-generate-function-path", work.get("agent_func_path"))
    if work.is_on("dynamic_filtering"):
        work.say("dynamic_filtering", "sampling-filter", "nonzero_variance")
    _switch(work, "async_train", "async")
    _switch(work, "colocate_all_models", "colocate")
    if work.get("use_wandb"):
        work.say("use_wandb", "tracker", "tensorboard", "wandb")
    work.say("seed", "seed", work.get("seed"))
    work.say("seed", "rollout-seed", work.get("seed"))
    work.unneeded("micro_train_batch_size", _PACKED)
    if work.number("max_epochs") <= 1:
        work.done.add("max_epochs")


def _thudm(work: Translator) -> None:
    program = work.recipe.program[-1] if work.recipe.program else ""
    if program.endswith("train_async.py"):
        work.say("train_async.py", "async")
    for option in work.recipe.options:
        table = "rewards" if option.name == "rm-type" else "paths"
        text = None
        if option.name == "rm-type" or (option.values and option.name.endswith("-path")):
            text = instead_of("rewards" if table == "rewards" else "paths", option.value)
        if (
            text is not None
            and (written := WRITE.fullmatch(text.partition(", and")[0])) is not None
            and "-path" not in text
        ):
            for flag, *words in (part.split() for part in written[1].split("--") if part.strip()):
                work.say(option.name, flag, *(word.strip("\"'") for word in words))
        elif text is not None and DROP.search(text):
            work.unneeded(option.name, DROP.sub("", text))
        elif text is not None:
            work.by_hand(option.name, text)
        elif option.name.endswith("-path") and option.values and ".py" not in option.value and ":" not in option.value:
            work.say(option.name, option.name, _function(option.value))
        elif option.name == "update-weight-transport" and option.value == "nccl":
            work.say(option.name, option.name, "distributed")
        elif option.name == "save-hf":
            work.say(option.name, option.name, option.value.replace("{rollout_id}", "{rollout}"))
        elif option.name in ("ref-load", "load") and "torch_dist" in option.value:
            work.by_hand(option.name, "a checkpoint of Megatron: --initial-megatron-checkpoint reads its weights")
        else:
            continue
    if not work.get("label-key"):
        work.say("label-key", "label-key", "none")
    flags = [find_flag(option.name) for option in work.recipe.options]
    ours = {flag.name for flag in flags if flag is not None and flag.target == MEGATRON}
    for name in ours & _SHAPE:
        work.unneeded(name, "the model's config.json says so")


#: flags of Megatron that describe the model, which `--hf-checkpoint` does here
_SHAPE = frozenset(
    {
        "num-layers",
        "hidden-size",
        "ffn-hidden-size",
        "num-attention-heads",
        "num-query-groups",
        "group-query-attention",
        "kv-channels",
        "max-position-embeddings",
        "seq-length",
        "swiglu",
        "normalization",
        "norm-epsilon",
        "rotary-base",
        "rotary-percent",
        "position-embedding-type",
        "use-rotary-position-embeddings",
        "untie-embeddings-and-output-weights",
        "disable-bias-linear",
        "add-qkv-bias",
        "qk-layernorm",
        "vocab-size",
        "tokenizer-type",
        "tokenizer-model",
        "make-vocab-size-divisible-by",
        "no-position-embedding",
        "attention-softmax-in-fp32",
        "accumulate-allreduce-grads-in-fp32",
    }
)
_SPECIAL: Mapping[Framework, Callable[[Translator], None]] = {
    "TRL": _trl,
    "verl": _verl,
    "OpenRLHF": _openrlhf,
    "THUDM's slime": _thudm,
}
