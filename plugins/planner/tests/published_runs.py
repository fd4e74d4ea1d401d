"""The planner against what others measured: the table of `docs/planning.md`.

    python plugins/planner/tests/published_runs.py

prints it.
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
def planned(model: str, cluster: str, words: str, mean_response: float = 0.5) -> FleetPlan:
    """The plan of a layout on `NODES x GPUS`."""
    nodes, _, gpus = cluster.partition(" x ")
    stated, given, _ = stated_config(model, words.split())
    rates = Rates(mean_response=mean_response)
    found = plans(stated, given, planned_model(model, stated), described_cluster(int(nodes), gpus), rates)
    return found.best[0]


def _seconds(way: str) -> Callable[[FleetPlan], float]:
    return lambda plan: next(one.seconds for one in plan.ways if one.name == way)


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

    @property
    def predicted(self) -> float:
        """By the planner."""
        return self.predict(planned(self.model, self.cluster, self.words))


_EXPERTS = "--expert-tensor-parallel-size 1 --expert-model-parallel-size"
_LONG = "--rollout-max-prompt-len 1 --rollout-max-response-len 8192 --rollout-batch-size"
_SENDERS = "one group of senders for each stage, one after the other"
_MILES = "miles, p2p-weight-transfer.md"
_BRIDGE = "Megatron-Bridge 26.08"
_INSIGHTS = "Insights into DeepSeek-V3, table 1"
ROWS = (
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
    Row("Qwen3-8B, tokens a second and device", _BRIDGE, 10_456, "tokens/s", 2, "qwen3-8B", "4 x 8xH100",
        f"--actor-num-nodes 2 --tensor-model-parallel-size 1 {_LONG} 128", _tokens, "layout not published"),
    Row("Moonlight-16B-A3B, the same", _BRIDGE, 22_528, "tokens/s", 2, "moonlight-16B-A3B", "4 x 8xH100",
        f"--actor-num-nodes 2 --tensor-model-parallel-size 1 {_EXPERTS} 8 {_LONG} 128", _tokens,
        "layout not published"),
    Row("Qwen3-30B-A3B, the same", _BRIDGE, 13_011, "tokens/s", 2, "qwen3-30B-A3B", "4 x 8xH100",
        f"--actor-num-nodes 2 --tensor-model-parallel-size 1 {_EXPERTS} 16 {_LONG} 128", _tokens,
        "experts over two nodes, whose messages overlap with arithmetic there and not here"),
    Row("DeepSeek-V3 on 1,024, the same", _BRIDGE, 1_061, "tokens/s", 2, "deepseek-v3", "160 x 8xH100",
        "--actor-num-nodes 128 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8"
        f" --decoder-last-pipeline-num-layers 5 {_EXPERTS} 64 {_LONG} 1024 --rollout-num-gpus 32"
        " --rollout-num-gpus-per-engine 32", _tokens, "as above"),
)  # fmt: skip


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
    print(table(), end="")
