"""The planner against what others measured: the tables of `docs/planning.md`.

    python plugins/planner/tests/published_runs.py

prints them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from slime_planner.cluster import described_cluster
from slime_planner.fleet_plan import FleetPlan
from slime_planner.known_models import planned_model
from slime_planner.plan_command import plans, stated_config
from slime_planner.predicted_step import work_of
from slime_planner.rates import Rates


@functools.cache
def planned(model: str, cluster: str, words: str, mean_response: float = 0.5, network: str = "400Gb") -> FleetPlan:
    """The plan of a layout on `NODES x GPUS`."""
    nodes, _, gpus = cluster.partition(" x ")
    layers = [] if "--lora" in words else ["--layer-backend", "te"]  # all of them were run with TransformerEngine
    stated, given, _ = stated_config(model, [*words.split(), *layers])
    rates = Rates(mean_response=mean_response)
    found = plans(stated, given, planned_model(model, stated), described_cluster(int(nodes), gpus, network), rates)
    return found.best[0]


def _seconds(way: str) -> Callable[[FleetPlan], float]:
    return lambda plan: next(one.seconds for one in plan.ways if one.name == way)


def _of_last_stage(plan: FleetPlan) -> float:
    """GB that PyTorch holds at the peak of a rank of the last stage. The source does not say whose peak it states."""
    return plan.stages[-1].total / 1e9


def _peak(plan: FleetPlan) -> float:
    """GB that PyTorch holds at the peak of the rank that needs most."""
    return max(need.total for need in plan.stages) / 1e9


def _held(plan: FleetPlan) -> float:
    """GB of weights, gradients and optimizer of the rank that needs most."""
    return max(need.memory.total for need in plan.stages) / 1e9


def _tokens(plan: FleetPlan) -> float:
    """Tokens a second of a device, of forward and backward passes alone."""
    seconds = plan.training.total - plan.training.log_probs
    return work_of(plan.config, plan.rates).tokens / seconds / plan.config.world_size


@dataclass(frozen=True)
class Row:
    """One published number, and how it is predicted."""

    what: str
    source: str
    published: float
    unit: str
    #: the factor that the prediction may be off
    within: float
    model: str
    cluster: str
    words: str
    predict: Callable[[FleetPlan], float]
    remark: str = ""
    mean_response: float = 0.5

    @property
    def predicted(self) -> float:
        """By the planner."""
        return self.predict(planned(self.model, self.cluster, self.words, self.mean_response))


_EXPERTS = "--expert-tensor-parallel-size 1 --expert-model-parallel-size"
_FULL = (
    "--no-accumulate-allreduce-grads-in-fp32 --max-tokens-per-gpu 4096 --rollout-max-prompt-len 1"
    " --rollout-max-response-len 4095 --rollout-batch-size"
)
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_LLAMA = (
    f"--actor-num-nodes 4 --sequence-parallel --fp8-format hybrid --fp8-param-gather --no-no-bias-swiglu-fusion {_FULL}"
    " 4 --rollout-num-gpus 32 --rollout-num-gpus-per-engine 8"
)
_FOUR = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4"
_EIGHT = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 2"
_WIDE = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4"
_TUNING = "Megatron-Bridge, perf-memory-tuning"
_RECOMPUTE = "Megatron-Bridge, perf-activation-recompute"
_ALSO = "the same"
_SENDERS = "one group of senders for each stage, one after the other"
_MILES = "miles, p2p-weight-transfer.md"
_BRIDGE = "Megatron-Bridge 26.08"
_INSIGHTS = "Insights into DeepSeek-V3, table 1"
_FIRST = (
    Row("DeepSeek-V3, bytes of a token in the cache", _INSIGHTS, 70.272, "kB", 1.15, "deepseek-v3", "32 x 8xH100", "",
        lambda plan: plan.engine.token / 1000),
    Row("Kimi K2, bytes of the weights in bfloat16", "parameters of its safetensors files, 2 bytes each", 2052.8, "GB",
        1.15, "kimi-k2",
        "64 x 8xH100", "", lambda plan: plan.sync.bytes / 1e9),
    Row("Qwen3-30B-A3B, sync", _MILES, 2.67, "s", 1.5, "qwen3-30B-A3B", "4 x 8xH100",
        f"--actor-num-nodes 2 --tensor-model-parallel-size 4 {_EXPERTS} 8 --rollout-num-gpus 16"
        " --rollout-num-gpus-per-engine 8", _seconds("one sender"), "sets the cost of a tensor's calls"),
    Row("GLM-4.5-Air, sync", _MILES, 5.00, "s", 1.5, "glm4.5-106B-A12B", "8 x 8xH100",
        f"--actor-num-nodes 4 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 10 {_EXPERTS} 8"
        " --rollout-num-gpus 32 --rollout-num-gpus-per-engine 8", _seconds("stages in turn"), _SENDERS),
    Row("Qwen3-235B-A22B, sync", _MILES, 10.75, "s", 1.5, "qwen3-235B-A22B", "16 x 8xH100",
        "--actor-num-nodes 8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 2"
        f" --decoder-last-pipeline-num-layers 22 {_EXPERTS} 16 --rollout-num-gpus 64 --rollout-num-gpus-per-engine 16",
        _seconds("stages in turn"), _SENDERS),
    Row("Kimi K2 to fp8 engines, sync", _MILES, 53.3, "s", 1.5, "kimi-k2", "64 x 8xH100",
        "--actor-num-nodes 32 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --context-parallel-size 4"
        f" --decoder-last-pipeline-num-layers 5 {_EXPERTS} 32 --rollout-num-gpus 256 --rollout-num-gpus-per-engine 32"
        " --sglang-quantization fp8", _seconds("stages in turn"), "the arithmetic of quantisation is not in it"),
    Row("Llama 3 70B in fp8, TP 4 PP 4, peak of a training rank", _TUNING, 58.8, "GB", 1.15, "llama3-70B",
        "8 x 8xH100", f"{_LLAMA} {_FOUR} {_SELECTIVE} core_attn", _of_last_stage,
        "the last stage is assumed: rank 0 ran out of its 80 GB. Stage 0 is predicted to have 69.5 GB", 1),
    Row("TP 4 PP 8", _TUNING, 53.2, "GB", 1.15, "llama3-70B", "8 x 8xH100",
        f"{_LLAMA} {_EIGHT} {_SELECTIVE} core_attn", _of_last_stage, f"{_ALSO}; stage 0: 63.4 GB", 1),
    Row("TP 8 PP 4", _TUNING, 50.2, "GB", 1.15, "llama3-70B", "8 x 8xH100",
        f"{_LLAMA} {_WIDE} {_SELECTIVE} core_attn", _of_last_stage, f"{_ALSO}; stage 0: 48.4 GB", 1),
    Row("TP 4 PP 4, feed-forward recomputed", _RECOMPUTE, 55.6, "GB", 1.15, "llama3-70B", "8 x 8xH100",
        f"{_LLAMA} {_FOUR} {_SELECTIVE} mlp", _of_last_stage, f"{_ALSO}; stage 0: 56.1 GB", 1),
    Row("Qwen3-8B, tokens a second and device", _BRIDGE, 10_456, "tokens/s", 2, "qwen3-8B", "4 x 8xH100",
        f"--actor-num-nodes 2 --tensor-model-parallel-size 1 {_FULL} 128", _tokens,
        "sets the share of the peak that matrix products reach", 1),
    Row("Moonlight-16B-A3B, the same", _BRIDGE, 22_528, "tokens/s", 2, "moonlight-16B-A3B", "4 x 8xH100",
        f"--actor-num-nodes 2 --tensor-model-parallel-size 1 {_EXPERTS} 8 {_FULL} 128", _tokens,
        "micro-batches of two sequences there", 1),
    Row("Qwen3-30B-A3B, the same", _BRIDGE, 13_011, "tokens/s", 2, "qwen3-30B-A3B", "4 x 8xH100",
        f"--actor-num-nodes 2 --tensor-model-parallel-size 1 {_EXPERTS} 16 {_FULL} 128", _tokens,
        "experts over two nodes, whose messages overlap with arithmetic there and not here", 1),
    Row("DeepSeek-V3 on 1,024, the same", _BRIDGE, 1_061, "tokens/s", 2, "deepseek-v3", "160 x 8xH100",
        "--actor-num-nodes 128 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8"
        f" --pipeline-model-parallel-layout Et|(tt|)*30L {_SELECTIVE} mla_up_proj mlp {_EXPERTS} 64 {_FULL} 2048"
        " --rollout-num-gpus 32 --rollout-num-gpus-per-engine 32", _tokens,
        "as above; without its layer for multi-token prediction", 1),
)  # fmt: skip


def _sequences(length: int, count: int) -> str:
    """Flags of `count` sequences of one length, each a micro-batch, with gradients summed in bfloat16."""
    return (
        f"--no-accumulate-allreduce-grads-in-fp32 --max-tokens-per-gpu {length} --rollout-max-prompt-len 1"
        f" --rollout-max-response-len {length - 1} --n-samples-per-prompt 1 --rollout-batch-size {count}"
    )


_FP8 = "--fp8-format hybrid --fp8-param-gather --no-no-bias-swiglu-fusion"
_ARCHIVE = "Megatron-Bridge, performance-summary-archive"
_OFFLOAD = "Megatron-Bridge, perf-cpu-offloading"
_THIRTY = "--actor-num-nodes 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
_ON_HOST = "--optimizer-cpu-offload --optimizer-offload-fraction"
#: trainers alone, and ranks' memory, of recipes whose layout, precision and batches are published
_TRAINERS = (
    Row("Moonlight-16B-A3B, TP 2 EP 8, peak of a training rank", _RECOMPUTE, 36.6, "GB", 1.25, "moonlight-16B-A3B",
        "2 x 8xH100", f"--actor-num-nodes 1 --tensor-model-parallel-size 2 {_EXPERTS} 8 --use-precision-aware-optimizer"
        f" --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 {_sequences(4096, 4)}", _peak,
        "the logits of a sequence are whole there: 2 to 4 GB; the rest is not explained", 1),
    Row("Qwen3-30B-A3B, EP 16, the same", "Megatron-Bridge, moe-optimization", 61.4, "GB", 1.15, "qwen3-30B-A3B",
        "4 x 8xH100", f"--actor-num-nodes 2 --tensor-model-parallel-size 1 {_EXPERTS} 16"
        f" --use-precision-aware-optimizer {_sequences(4096, 1024)}", _peak, "", 1),
    *(
        Row(what, _OFFLOAD, published, "GB", 1.15,
            "qwen3-30B-A3B", "4 x 8xH100", f"{_THIRTY} {_EXPERTS} 4 {words}", _held,
            "what is allocated is taken for weights, gradients and optimizer")
        for what, published, words in (
            ("Qwen3-30B-A3B, TP 2 PP 2 EP 4, memory of a training rank", 47.2, ""),
            ("half of the optimizer on the host", 39.6, f"{_ON_HOST} 0.5"),
            ("all of the optimizer on the host", 32.0, f"{_ON_HOST} 1"),
        )
    ),
    Row("what that adds to a step", _OFFLOAD, 3.19, "s", 2, "qwen3-30B-A3B", "4 x 8xH100",
        f"{_THIRTY} {_EXPERTS} 4 {_ON_HOST} 1", lambda plan: plan.training.optimizer),
    Row("Llama 3 8B in fp8 on 8, tokens a second and device", f"{_ARCHIVE} 25.11", 14_451, "tokens/s", 2, "llama3-8B",
        "4 x 8xH100", f"--actor-num-nodes 1 --tensor-model-parallel-size 1 {_FP8} {_sequences(8192, 128)}", _tokens,
        "", 1),
    Row("Llama 3 70B in fp8 on 64, the same", f"{_ARCHIVE} 26.04.01", 1_664, "tokens/s", 2, "llama3-70B", "12 x 8xH100",
        f"--actor-num-nodes 8 --sequence-parallel {_EIGHT} {_FP8} {_sequences(8192, 256)}", _tokens, "", 1),
    Row("Qwen3-235B-A22B in fp8 on 256, the same", f"{_ARCHIVE} 26.04.01", 1_712, "tokens/s", 2, "qwen3-235B-A22B",
        "40 x 8xH100", "--actor-num-nodes 32 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8"
        f" --pipeline-model-parallel-layout Et*3|(t*3|)*30t*1L {_EXPERTS} 32 {_FP8} {_sequences(4096, 8192)}", _tokens,
        "", 1),
)  # fmt: skip


def _step(
    what: str, published: float, model: str, nodes: int, words: str, mean: float, longest: int, remark: str = ""
) -> Row:
    """A step of GRPO by NeMo-RL 0.6, of sequences of `mean` tokens and at most `longest`, 200 of them in the prompt."""
    lengths = f"--rollout-max-prompt-len 200 --rollout-max-response-len {longest - 200}"
    share = (mean - 200) / (longest - 200)
    words = f"{words} {lengths} --use-kl-loss --kl-loss-coef 0.01"
    return Row(
        what, "NeMo-RL 0.6, performance-summary", published, "s", 2, model, f"{nodes} x 8xH100", words,
        lambda plan: plan.step, remark, share,
    )  # fmt: skip


_SMALL = (
    f"{_EXPERTS} 8 --rollout-num-gpus-per-engine 2 --rollout-batch-size 64 --n-samples-per-prompt 32"
    " --num-steps-per-rollout 4 --max-tokens-per-gpu 4096"
)
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_MIDDLE = (
    "--pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 11"
    f" {_EXPERTS} 16 {_RECOMPUTED} --use-precision-aware-optimizer --rollout-batch-size 16 --n-samples-per-prompt 32"
)
_LARGE = (
    "--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
    f" {_EXPERTS} 16 {_RECOMPUTED} --use-precision-aware-optimizer --rollout-batch-size 32 --n-samples-per-prompt 16"
    " --max-tokens-per-gpu 1536 --rollout-num-gpus-per-engine 32"
)
_TURNS = "--colocate --sglang-mem-fraction-static 0.6"
_WIDER = f"--tensor-model-parallel-size 2 --context-parallel-size 2 {_MIDDLE} --rollout-num-gpus-per-engine 16"
_SYNC_IN_IT = "more than half of it is slime's own way of sending weights"
_STEPS = (
    _step("Qwen3-30B-A3B on 32, a step of GRPO", 192, "qwen3-30B-A3B", 4, f"{_TURNS} --actor-num-nodes 4 {_SMALL}",
          3203, 4096),
    _step("the same, one rollout ahead", 152, "qwen3-30B-A3B", 4, "--async --actor-num-nodes 2"
          f" --pipeline-model-parallel-size 2 --rollout-num-gpus 16 {_SMALL}", 3201, 4096),
    _step("on 192, eight ahead", 34.5, "qwen3-30B-A3B", 24, "--async --async-buffer-size 8 --actor-num-nodes 16"
          f" --rollout-num-gpus 64 {_SMALL}", 3206, 4096),
    _step("Qwen3-235B-A22B on 128, a step of GRPO", 395, "qwen3-235B-A22B", 16,
          f"{_TURNS} --actor-num-nodes 16 {_WIDER} --max-tokens-per-gpu 4096", 5698, 8192),
    _step("on 256", 312, "qwen3-235B-A22B", 32, f"{_TURNS} --actor-num-nodes 32 {_WIDER} --max-tokens-per-gpu 4096",
          5713, 8192),
    _step("on 256, one rollout ahead", 231, "qwen3-235B-A22B", 32, "--async --actor-num-nodes 16"
          f" --tensor-model-parallel-size 4 {_MIDDLE} --rollout-num-gpus 128 --rollout-num-gpus-per-engine 8"
          " --max-tokens-per-gpu 8192", 5721, 8192),
    _step("DeepSeek-V3 on 256, a step of GRPO", 134, "deepseek-v3", 32, f"{_TURNS} --actor-num-nodes 32 {_LARGE}", 701,
          1536, _SYNC_IN_IT),
    _step("on 512", 111, "deepseek-v3", 64, f"{_TURNS} --actor-num-nodes 64 {_LARGE}", 697, 1536, _SYNC_IN_IT),
    _step("on 512, one rollout ahead", 64.1, "deepseek-v3", 64, "--async --actor-num-nodes 32 --rollout-num-gpus 256"
          f" {_LARGE}", 710, 1536),
)  # fmt: skip
ROWS = (*_FIRST, *_TRAINERS, *_STEPS)


#: the fleet of which no run is published: 16 stages of 8 devices on 16 nodes, and 64 engines of a node each
_FLEET = (
    "--actor-num-nodes 16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
    " --decoder-last-pipeline-num-layers 2 --expert-tensor-parallel-size 1"
    " --expert-model-parallel-size 8 --rollout-num-gpus 512 --rollout-num-gpus-per-engine 8 --rollout-batch-size 64"
)


def fleet_table() -> str:
    """Seconds of a sync by way, on networks of three speeds."""
    networks = ("100Gb", "200Gb", "400Gb")
    lines = [f"| GLM-4.5, 706 GB, by | {' | '.join(networks)} |", f"| --- |{' --- |' * len(networks)}"]
    plans_of = [planned("glm4.5-355B-A32B", "80 x 8xH100", _FLEET, network=one) for one in networks]
    for ways in zip(*(plan.ways for plan in plans_of), strict=True):
        lines.append(f"| {ways[0].name} | {' | '.join(f'{way.seconds:.1f} s' for way in ways)} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """The table of the page."""
    lines = ["| what | source | published | predicted | ratio | remark |", "| --- | --- | --- | --- | --- | --- |"]
    for row in ROWS:
        predicted = row.predicted
        digits = 0 if row.published > 100 else 1
        lines.append(
            f"| {row.what} | {row.source} | {row.published:,.{digits}f} {row.unit} | {predicted:,.{digits}f}"
            f" {row.unit} | {predicted / row.published:.2f} | {row.remark} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), fleet_table(), sep="\n", end="")
