"""Combinations of options that cannot work, or would be silently ignored, are refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.config.conftest import GOOD, Load, Refused

from slime.config import RunConfig, checks, config_from_toml, config_notes, config_problems, read_config, resolve
from slime.config.options import ClusterOptions
from slime.config.run_config import nvidia_devices


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # ranks
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2",
            "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 needs 4 ranks, but --actor-num-nodes 1 x"
            " --actor-num-gpus-per-node 2 = 2",
        ),
        (
            "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 3",
            "--tensor-model-parallel-size 2 needs 2 ranks per copy of the model, and --actor-num-nodes 1 x"
            " --actor-num-gpus-per-node 3 = 3 is not a multiple of it",
        ),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size: got '0', expected at least 1"),
        # engines and ports
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "--rollout-num-gpus 3 is not a multiple of"),
        (
            "--engine-port 9000 --rollout-num-gpus 4 --router-port 9003",
            "--router-port 9003 is one of the engines' ports",
        ),
        ("--engine-port 65535 --rollout-num-gpus 2", "goes up to port 65536, expected at most 65535"),
        (
            "--update-weight-transport tensor --device cuda",
            "on GPUs an engine sees only its own devices, none of the trainer's. Use distributed (NCCL), the default",
        ),
        # profiles
        ("--profile-steps 5-3", "--profile-steps: got '5-3', expected a step such as 3, or a range such as 3-5"),
        ("--profile-steps three", "--profile-steps: got 'three', expected a step such as 3, or a range such as 3-5"),
        ("--num-rollout 5 --profile-steps 3-5", "--profile-steps 3-5: the last of 5 rollouts is number 4"),
        (
            "--profile-steps 0 --profile-ranks 0 1",
            "--profile-ranks 1: the last of 1 training ranks is number 0",
        ),
        (
            "--actor-num-gpus-per-node 2 --profile-ranks 1",
            "--profile-ranks [1] has no effect without --profile-steps or --memory-snapshot",
        ),
        ("--memory-snapshot --device cpu", "--memory-snapshot has no effect without --device cuda"),
        # batches
        ("--over-sampling-batch-size 31", "--over-sampling-batch-size 31 is less than --rollout-batch-size 32"),
        (
            "--partial-rollout",
            "--partial-rollout has no effect without --over-sampling-batch-size above",
        ),
        ("--partial-rollout --over-sampling-batch-size 40 --buffer-filter some", "--partial-rollout has no effect"),
        (
            "--deterministic --over-sampling-batch-size 40",
            "--deterministic excludes --over-sampling-batch-size 40 without a buffer filter: the batch is made of what",
        ),
        (
            "--deterministic --async --update-weights-interval 2 --save ckpt --save-interval 3",
            "--deterministic: --save-interval 3 is not a multiple of --update-weights-interval 2",
        ),
        (
            "--deterministic --threads-per-engine 2",
            "--deterministic excludes --threads-per-engine 2: how attention is cut into parts for the threads depends",
        ),
        ("--device cuda --threads-per-engine 2", "--threads-per-engine has no effect on GPUs"),
        # what changed of the weights
        ("--disk-delta", "--disk-delta needs --update-weight-transport disk, and this run sends its weights by tensor"),
        (
            "--update-weight-transport disk --disk-delta --rollout-external-engine-addrs 10.0.0.7:30000",
            "--disk-delta excludes --rollout-external-engine-addrs, since the run has no process on their nodes",
        ),
        ("--disk-delta-full-every 3", "--disk-delta-full-every 3 has no effect without --disk-delta. Drop it"),
        # drafts
        ("--sglang-speculative-algorithm NEXTN", "--sglang-speculative-algorithm NEXTN needs GPUs: on a CPU, SGLang"),
        (
            "--sync-draft-weights",
            "--sync-draft-weights has no effect without --enable-mtp-training: engines keep the layers of the folder,",
        ),
        (
            "--sync-draft-weights --enable-mtp-training",
            "--sync-draft-weights has no effect: engines do not speculate with the model's own layers. Add --sglang-",
        ),
        (
            "--device cuda --sglang-speculative-algorithm EAGLE --sglang-speculative-draft-model-path draft"
            " --update-weight-transport disk",
            "--sglang-speculative-draft-model-path draft with --update-weight-transport disk: SGLang would load the",
        ),
        # prompts once in training
        ("--share-prompts --micro-batch-size 4", "--share-prompts has no effect with --micro-batch-size 4. Drop one"),
        (
            "--share-prompts --context-parallel-size 2 --actor-num-gpus-per-node 2",
            "--share-prompts has no effect with --context-parallel-size 2. Drop one of them",
        ),
        ("--share-prompts --enable-mtp-training", "--share-prompts has no effect with --enable-mtp-training. Drop one"),
        ("--share-prompts --device cuda", "--share-prompts has no effect on GPUs: it is for training on CPU. Drop it"),
        ("--async-save --save ckpt", "--async-save has no effect without --save-interval"),
        # kept checkpoints
        ("--save c --save-keep-last 0", "--save-keep-last: got '0', expected at least 1"),
        ("--save c --save-keep-last 1 --save-keep-every 0", "--save-keep-every: got '0', expected at least 1"),
        ("--save-keep-last 2", "--save-keep-last 2 has no effect without --save or --save-interval"),
        ("--save c --save-keep-every 2", "--save-keep-every 2 has no effect without --save-keep-last: all checkpoints"),
        ("--save c --save-keep-best a", "--save-keep-best a has no effect without --save-keep-last: all checkpoints"),
        ("--save c --save-keep-last 1 --save-keep-best :min", "--save-keep-best :min: expected the name of a metric"),
        (
            "--save c --save-keep-last 1 --save-keep-best eval/held:min",
            "--save-keep-best eval/held:min names no evaluation set: there are none (--eval-prompt-data)",
        ),
        (
            "--save c --save-keep-last 1 --save-keep-best eval/held/pass@2 --eval-prompt-data a f --eval-interval 1",
            "--save-keep-best eval/held/pass@2 names no evaluation set: the evaluation sets are a",
        ),
        (
            "--save-interval 4 --save-keep-last 1 --save-keep-best eval/a --eval-prompt-data a f --eval-interval 6"
            " --num-rollout 12",
            "--save-keep-best eval/a: of the checkpoints, only the last would be evaluated: --save-interval 4,"
            " --eval-interval 6, --num-rollout 12. Make one interval a multiple of the other",
        ),
        ("--skip-damaged-checkpoints", "--skip-damaged-checkpoints has no effect without --load"),
        ("--mask-offpolicy-in-partial-rollout", "has no effect without --partial-rollout"),
        # KL
        ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "--kl-coef 0.1 and --kl-loss-coef 0.1 exclude each other"),
        ("--use-kl-loss", "--use-kl-loss needs --kl-loss-coef"),
        ("--kl-loss-coef 0.1", "--kl-loss-coef 0.1 has no effect without --use-kl-loss"),
        ("--kl-coef -1", "--kl-coef: got '-1', expected at least 0"),
        ("--use-unbiased-kl", "--use-unbiased-kl has no effect without --use-kl-loss"),
        # aggregation
        (
            "--calculate-per-token-loss --loss-constant-length 512",
            "--calculate-per-token-loss and --loss-constant-length 512 exclude each other",
        ),
        # corrections
        ("--tis-threshold 3", "--tis-threshold 3.0 has no effect without --use-tis or --off-policy-correction"),
        ("--tis-threshold-low 0.5", "--tis-threshold-low 0.5 has no effect without --use-tis"),
        ("--off-policy-level sequence", "--off-policy-level sequence has no effect without --use-tis"),
        ("--use-tis --tis-threshold-low 3", "--tis-threshold-low 3.0 is above --tis-threshold 2.0"),
        ("--quiet --verbose", "--quiet and --verbose exclude each other"),
        ("--use-tis --off-policy-correction mask", "--use-tis and --off-policy-correction mask exclude each other"),
        ("--use-tis --use-rollout-logprobs", "--use-tis and --use-rollout-logprobs exclude each other"),
        (
            "--async --off-policy-correction mask --use-rollout-logprobs",
            "--off-policy-correction mask and --use-rollout",
        ),
        # true on-policy
        ("--true-on-policy-mode --async", "--true-on-policy-mode excludes --async: samples would come from older"),
        (
            "--true-on-policy-mode --rollout-top-p 0.9",
            "excludes --rollout-top-p 0.9: samples would come from a truncated",
        ),
        ("--true-on-policy-mode --rollout-top-k 40", "excludes --rollout-top-k 40"),
        ("--true-on-policy-mode --over-sampling-batch-size 64", "excludes --over-sampling-batch-size"),
        ("--true-on-policy-mode --max-reuse 1", "excludes --max-reuse 1: samples would come from older"),
        (
            "--true-on-policy-mode --sampling-filter some",
            "excludes --sampling-filter some: samples would come from",
        ),
        ("--true-on-policy-mode --buffer-filter some", "excludes --buffer-filter some: samples would come from older"),
        ("--true-on-policy-mode --sglang-kv-cache-dtype fp8_e4m3", "excludes --sglang-kv-cache-dtype"),
        ("--true-on-policy-tolerance 0.1", "--true-on-policy-tolerance 0.1 has no effect without"),
        # what would be ignored
        ("--async-buffer-size 4", "--async-buffer-size 4 has no effect without --async"),
        ("--update-weights-interval 2", "--update-weights-interval 2 has no effect without --async"),
        ("--inflight-kv keep", "--inflight-kv keep has no effect without --async"),
        (
            "--max-staleness 0",
            "--max-staleness 0 has no effect without --async, over-sampling, a filter or --max-reuse",
        ),
        ("--async --use-tis --stale-samples correct", "--stale-samples correct has no effect without --max-staleness"),
        (
            "--async --update-weights-interval 4 --max-staleness 2",
            "--max-staleness 2 cannot be met with --update-weights-interval 4: the last of 4 rollouts between two"
            " updates is trained on 4 - 1 = 3 rollouts after its weights. Use at least --max-staleness 3, or at most"
            " --update-weights-interval 3",
        ),
        (
            "--async --max-staleness 1 --stale-samples correct",
            "--stale-samples correct needs a correction: add --use-tis or --off-policy-correction mask",
        ),
        ("--loss-type sft_loss", "--advantage-estimator some has no effect without --loss-type policy_loss"),
        (
            "--micro-batch-size 2 --max-tokens-per-gpu 99",
            "--micro-batch-size 2 and --max-tokens-per-gpu 99 exclude each",
        ),
        ("--save-hf out/{step}", "--save-hf 'out/{step}': only {rollout} is filled in"),
        # evaluation
        ("--eval-prompt-data a f", "--eval-prompt-data needs --eval-interval"),
        ("--eval-interval 1 --eval-prompt-data a f a g", "2 evaluation sets are called 'a'"),
        ("--eval-interval 1 --eval-prompt-data a/b f", "'a/b' cannot name an evaluation set"),
        # lengths
        ("--rollout-max-context-len 1024", "--rollout-max-response-len 1024 leaves no room for a prompt in"),
        ("--rollout-max-context-len 4096 --rollout-max-prompt-len 5000", "--rollout-max-prompt-len 5000 is more than"),
        ("--seq-length 4096 --rollout-max-context-len 2048", "--seq-length 4096 contradicts --rollout-max-context-len"),
        # Megatron's silent traps
        (
            "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
            " --no-overlap-p2p-communication",
            "train on wrong gradients",
        ),
        (
            "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2"
            " --batch-p2p-comm",
            "train on wrong gradients",
        ),
        ("--num-virtual-stages-per-pipeline-rank 2", "virtual pipeline stages need --pipeline-model-parallel-size"),
        ("--overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce"),
        (
            "--overlap-param-gather --overlap-grad-reduce --no-use-distributed-optimizer",
            "--overlap-param-gather needs the distributed optimizer",
        ),
        ("--expert-model-parallel-size 2", "hold each expert once, and --actor-num-nodes 1 x"),
        (
            "--actor-num-gpus-per-node 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
            "--expert-model-parallel-size 2 x --expert-tensor-parallel-size 2 (default: the tensor-parallel size) x",
        ),
        (
            "--moe-token-dispatcher-type flex --actor-num-gpus-per-node 2 --expert-model-parallel-size 2",
            "--moe-token-dispatcher-type flex needs a GPU, and this run is on CPU",
        ),
        ("--moe-token-dispatcher-type allgather", "allgather gathers equally many tokens of every rank, and packed"),
        ("--moe-router-load-balancing-type sinkhorn", "The choice of experts itself must be the engines'"),
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        (
            "--no-position-embedding --position-embedding-type learned_absolute",
            "--no-position-embedding contradicts --position-embedding-type learned_absolute",
        ),
        # what a CPU cannot do
        ("--apply-rope-fusion", "--apply-rope-fusion needs a GPU"),
        ("--transformer-impl transformer_engine", "--transformer-impl transformer_engine needs a GPU"),
        ("--layer-backend te", "--layer-backend te needs a GPU, and this run is on CPU (--device). Drop it"),
        (
            "--layer-backend fused --transformer-impl local",
            "--transformer-impl local contradicts --layer-backend fused: they set the same. Drop one of them",
        ),
        ("--layer-backend fused --deterministic", "--deterministic excludes --layer-backend fused: what is compiled"),
        ("--layer-backend fused --deterministic-mode", "--deterministic-mode excludes --layer-backend fused"),
        ("--attention-backend flash", "--attention-backend flash needs a GPU"),
        ("--fp8-format hybrid", "--fp8 hybrid needs a GPU"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(refused: Refused, words: str, message: str) -> None:
    problem = refused(*words.split())
    assert message in problem
    assert "problems:" not in problem, "one mistake, one message"


@pytest.mark.parametrize(
    "words",
    [
        "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--use-kl-loss --kl-loss-coef 0",
        "--use-kl-loss --kl-loss-coef 0.1",
        "--async --async-buffer-size 4 --update-weights-interval 2",
        "--async --use-tis --tis-threshold 3",
        "--async --max-staleness 0 --inflight-kv keep",
        "--async --update-weights-interval 4 --max-staleness 3",
        "--max-reuse 2 --max-staleness 1 --stale-samples correct --off-policy-correction mask",
        "--use-tis --off-policy-correction truncate --off-policy-level sequence",
        "--off-policy-correction mask --tis-threshold-low 0.5 --tis-threshold 5",
        "--off-policy-sequence-delta 0.1 --use-rollout-logprobs",
        "--true-on-policy-mode --true-on-policy-tolerance 1e-3 --over-sampling-batch-size 32",
        "--calculate-per-token-loss",
        "--loss-constant-length 512",
        "--no-rope-fusion --no-gradient-accumulation-fusion --attention-backend auto --transformer-impl local",
        "--layer-backend torch --transformer-impl local",
        "--device cuda --layer-backend torch --deterministic",
        "--device cuda --gradient-accumulation-fusion --attention-backend flash",
        "--sequence-parallel",
        "--overlap-param-gather --overlap-grad-reduce",
        "--save-hf out/{rollout}",
        "--save-interval 100 --eval-interval 50",
        "--rollout-top-k -1",
        # the continued run's frozen reference still starts from the initial weights
        "--load a --initial-megatron-checkpoint b",
        "--rollout-top-k 1",
        "--share-prompts --context-parallel-size 1",
        # unstated or off, it is no contradiction
        "--micro-batch-size 4 --enable-mtp-training",
        "--no-share-prompts --micro-batch-size 4",
        "--device cuda",
        "--device cuda --sglang-speculative-algorithm NEXTN --enable-mtp-training --sync-draft-weights",
        "--device cuda --sglang-speculative-algorithm NEXTN --update-weight-transport disk",
    ],
)
def test_a_combination_that_works_is_accepted(load: Load, words: str) -> None:
    load(*words.split())


@pytest.mark.parametrize(
    ("words", "installed", "said"),
    [
        ("", "deep_ep", None),
        ("--moe-flex-dispatcher-backend deepep --moe-deepep-num-sms 24", "deep_ep", None),
        ("--moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 24", "deep_ep hybrid_ep_cpp", None),
        ("", "", "needs the package deep_ep (DeepEP), which is not installed. Build it for this PyTorch, or drop"),
        (
            "--moe-flex-dispatcher-backend hybridep",
            "deep_ep",
            "as DeepEP's branch hybrid-ep builds it; the one",
        ),
        ("--expert-model-parallel-size 1", "deep_ep", "flex has nothing to send: each rank has all experts"),
    ],
)
def test_deepep_and_hybridep_dispatch_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, words: str, installed: str, said: str | None
) -> None:
    found = importlib.util.find_spec

    def there(name: str) -> object:
        if name not in ("deep_ep", "hybrid_ep_cpp"):
            return found(name)
        return found("json" if name in installed.split() else "no_such_module")

    monkeypatch.setattr("importlib.util.find_spec", there)
    flex = "--device cuda --layer-backend torch --actor-num-gpus-per-node 2 --moe-token-dispatcher-type flex"
    config = read_config([*GOOD, *flex.split(), "--expert-model-parallel-size", "2", *words.split()])
    problems = config_problems(config)
    assert len(problems) == (said is not None), problems
    assert said is None or said in problems[0]
    assert config_notes(config) == []


@pytest.mark.parametrize(
    ("words", "drafts", "sent"),
    [
        ("", "none", False),
        ("--enable-mtp-training", "none", False),
        ("--enable-mtp-training --sglang-speculative-algorithm nextn", "own", True),
        ("--enable-mtp-training --sglang-speculative-algorithm EAGLE --no-sync-draft-weights", "own", False),
        (
            "--enable-mtp-training --sglang-speculative-algorithm EAGLE --sglang-speculative-draft-model-path draft",
            "other",
            False,
        ),
        ("--enable-mtp-training --sglang-speculative-algorithm NGRAM", "other", False),
    ],
)
def test_trained_drafts_are_sent_where_engines_use_them(words: str, drafts: str, sent: bool) -> None:
    config = read_config([*GOOD, "--device", "cuda", *words.split()])
    assert (config.drafts, config.sends_drafts) == (drafts, sent)
    assert config_notes(config) == []


@pytest.mark.parametrize(
    "stated",
    [
        "--eps-clip 0.3",
        "--eps-clip-high 0.3",
        "--kl-loss-type k1",
        "--kl-reward-type k3",
        "--eps-clip-c 3",
        "--use-rollout-routing-replay",
    ],
)
def test_supervised_training_refuses_options_of_the_policy_loss(refused: Refused, stated: str) -> None:
    problem = refused("--loss-type", "sft_loss", *stated.split())
    assert problem.count("has no effect without --loss-type policy_loss") == 2  # and --advantage-estimator
    assert stated.split()[0] in problem


def test_a_saved_configuration_does_not_state_shared_prompts(load: Load) -> None:
    saved = config_from_toml(load("--micro-batch-size", "4").to_toml())
    assert config_problems(saved) == []


def test_resolving_twice_changes_nothing(load: Load) -> None:
    config = load("--use-tis")
    assert config.algorithm.off_policy_correction == "truncate"
    assert resolve(config) == config


def test_derived_options_are_filled_in(load: Load) -> None:
    config = load("--eps-clip", "0.1", "--seq-length", "4096")
    assert config.algorithm.eps_clip_high == 0.1
    assert config.rollout.rollout_max_context_len == 4096
    assert config.rollout.generator == "single_turn"
    assert config.cluster.rollout_num_gpus == 1
    assert config.evaluation.eval_max_response_len == 1024
    assert config.cluster.device == "cpu"


def test_the_numbers_of_ranks_and_model_copies(load: Load) -> None:
    config = load(*["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2"])
    assert (config.world_size, config.model_parallel_size, config.data_parallel_size) == (8, 2, 4)


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert nvidia_devices(tmp_path, {}) == 2
    assert nvidia_devices(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert nvidia_devices(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert nvidia_devices(tmp_path / "missing", {}) == 0


@pytest.mark.parametrize(
    ("usable", "present", "said"),
    [
        (0, 0, "--device auto: on CPUs, because this machine has no NVIDIA GPU (no /dev/nvidia0)"),
        (0, 2, "--device auto: on CPUs, because CUDA_VISIBLE_DEVICES hides its 2 NVIDIA GPUs"),
        (1, 2, "--device auto: on GPUs, of which this machine has 1"),
    ],
)
def test_a_run_says_what_it_computes_on_where_it_was_not_told(
    monkeypatch: pytest.MonkeyPatch, usable: int, present: int, said: str
) -> None:
    monkeypatch.setattr(checks, "nvidia_devices", lambda environment=None: usable if environment is None else present)
    assert list(checks.chosen_device(RunConfig())) == [said]
    assert not list(checks.chosen_device(RunConfig(cluster=ClusterOptions(device="cpu"))))


def test_gpu_is_another_word_for_cuda() -> None:
    assert {read_config(["--device", word]).device for word in ("gpu", "cuda")} == {"cuda"}


def test_the_device_option_overrides_the_machine() -> None:
    assert RunConfig(cluster=ClusterOptions(device="cuda")).on_gpu is True
    assert RunConfig(cluster=ClusterOptions(device="cpu")).on_gpu is False
    assert RunConfig().on_gpu is (nvidia_devices() > 0)


@pytest.mark.parametrize(
    ("reward", "refused"),
    [
        ("", True),
        ('[reward]\nname = "exact_match"\n', False),
        ('[[reward.terms]]\nname = "exact_match"\n', False),
    ],
)
def test_evaluation_needs_a_reward_from_any_option(reward: str, refused: bool) -> None:
    text = '[algorithm]\nloss_type = "sft_loss"\n[evaluation]\neval_interval = 1\neval_prompt_data = [["a", "f"]]\n'
    found = [problem for problem in config_problems(config_from_toml(text + reward)) if "needs --reward" in problem]
    assert bool(found) is refused
