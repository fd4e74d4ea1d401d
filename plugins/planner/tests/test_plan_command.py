"""`slime plan`: models by name, clusters in words, what fits, and what others measured."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.model_scripts.test_model_scripts import NAMES, PUBLISHED

from slime.config import RunConfig, read_config
from slime.errors import ConfigError
from slime.weights.models import Models
from slime_planner.cluster import GIB, described_cluster
from slime_planner.known_models import described, known_names, model_config, planned_model
from slime_planner.pipeline_stages import stage_of_layers
from slime_planner.plan_command import run, stated_config
from slime_planner.predicted_memory import rank_memory

sys.path.insert(0, str(Path(__file__).parent))
from published_runs import ROWS, Row, fleet_table, planned, table

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"
_PREDICTING = ("deepseek", "glm4.5", "glm4.6", "glm4.7")  # whose published folders count their MTP layers


@pytest.mark.slow
def test_every_script_has_a_description_of_the_published_size() -> None:
    assert known_names() == NAMES
    for name in NAMES:
        model = planned_model(name, RunConfig())
        if name in PUBLISHED and not name.startswith(_PREDICTING):
            assert model.parameters == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_predictions_are_near_what_others_measured(row: Row) -> None:
    assert 1 / row.within <= row.predicted / row.published <= row.within


@pytest.mark.parametrize("row", [row for row in ROWS if row.unit == "tokens/s"], ids=lambda row: row.what)
def test_layouts_of_published_runs_fit(row: Row) -> None:
    plan = planned(row.model, row.cluster, row.words, row.mean_response)
    assert plan.largest < plan.cluster.gpu.memory * GIB


@pytest.mark.slow
def test_the_page_has_the_tables_of_today() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page, "run `python plugins/planner/tests/published_runs.py`"
    assert fleet_table() in page, "run `python plugins/planner/tests/published_runs.py`"


@pytest.mark.slow
@pytest.mark.row("N8")
def test_a_plan_of_every_script_loads_little_and_tries_few_layouts() -> None:
    """A plan answers in under a second; what its seconds go to is counted, as a clock would depend on the machine."""
    heavy = {"torch", "ray", "megatron", "sglang", "transformers", "pandas", "numpy", "rich", "asyncio"}
    heavy |= {"jinja2", "slime.kit.readers", "psutil", "packaging"}
    script = (
        "import sys; from slime_planner.plan_command import run; from slime_planner.known_models import known_names\n"
        "calls = 0\n"
        "def count(frame, event, argument):\n"
        "    global calls\n"
        "    calls += event == 'call'\n"
        "for name in known_names():\n"
        "    calls = 0\n"
        "    sys.setprofile(count)\n"
        "    run([name, '--nodes', '32', '--gpus', '8xH100-80GB'])\n"
        "    sys.setprofile(None)\n"
        "    print(name, calls, file=sys.stderr)\n"
        f"assert not (loaded := {heavy} & set(sys.modules)), loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    calls = {name: int(number) for name, number in map(str.split, done.stderr.splitlines())}
    assert set(calls) == set(NAMES)
    assert max(calls.values()) <= 250_000, calls  # calls of Python's functions
    tried = [int(number) for number in re.findall(r"(\d+) layouts were\s+tried", done.stdout)]
    assert len(tried) == len(NAMES)
    assert max(tried) <= 200


def test_a_small_model_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    words = "qwen3-8b --nodes 1 --gpus 8xH100-80GB --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --json"
    assert run(words.split()) == 0
    [plan] = json.loads(capsys.readouterr().out)["layouts"]
    [stage] = plan["stages"]
    # Half of 8.19 billion on a rank (but for the norms): 2 bytes of weights, 4 of gradients, and 12 of the optimizer
    # divided by two copies of the model.
    half = 8_190_735_360 / 2
    assert stage["memory"]["weights"] == pytest.approx(2 * half, rel=1e-3)
    assert stage["memory"]["gradients"] == pytest.approx(4 * half, rel=1e-3)
    assert stage["memory"]["optimizer"] == pytest.approx(6 * half, rel=1e-3)
    assert plan["engine"]["token"] == 36 * 2 * 8 * 128 * 2
    room = 0.85 * 79.6 * GIB - 2 * 8_190_735_360
    assert plan["engine"]["tokens"] == int(room / (36 * 2 * 8 * 128 * 2))


def test_optimizers_on_the_host_and_of_chosen_types() -> None:
    layout = "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 4"
    usual = planned("qwen3-8B", "1 x 8xH100", layout).stages[0].memory
    precise = planned("qwen3-8B", "1 x 8xH100", f"{layout} --use-precision-aware-optimizer").stages[0].memory
    # Half of the float32 copy is the bfloat16 weight itself.
    assert precise.optimizer == pytest.approx(usual.optimizer * 10 / 12)
    host = planned("qwen3-8B", "1 x 8xH100", f"{layout} --use-precision-aware-optimizer --optimizer-cpu-offload")
    assert host.stages[0].memory.optimizer == 0
    assert host.host.optimizer == pytest.approx(4 * usual.optimizer * 16 / 12)
    # An optimizer that does not choose its types keeps the float32 weights on the device, and has a copy of them.
    kept = planned("qwen3-8B", "1 x 8xH100", f"{layout} --optimizer-cpu-offload").stages[0].memory
    assert (kept.optimizer, kept.host) == (pytest.approx(usual.optimizer * 4 / 12), usual.optimizer * 16 / 12)


def test_routed_experts_are_on_one_host_and_each_rank_has_a_part() -> None:
    layout = "--pipeline-model-parallel-size 4 --expert-model-parallel-size 2 --use-rollout-routing-replay"
    layout += " --rollout-batch-size 64 --rollout-max-prompt-len 1000 --rollout-max-response-len 7000"
    plan = planned("qwen3-30B-A3B", "2 x 8xH100", layout)
    layers, samples = 48 * 8, plan.config.batch.samples
    assert plan.host.routes == samples * 8000 * layers  # 128 experts: a byte for each
    copies = plan.config.data_parallel_size
    assert copies == 2 and all(stage.routes == samples * 8000 * layers / 4 / copies * 2 for stage in plan.stages)
    without = planned("qwen3-30B-A3B", "2 x 8xH100", layout.replace("--use-rollout-routing-replay", ""))
    assert [stage.routes for stage in without.stages] == [0.0] * 4
    more = plan.stages[0].total - without.stages[0].total
    assert more == pytest.approx(plan.stages[0].routes)


def test_rollouts_that_are_generated_together_take_as_long_as_one_of_all_their_samples() -> None:
    layout = "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 4 --rollout-batch-size"
    together = planned("qwen3-8B", "1 x 8xH100", f"{layout} 16 --async --async-buffer-size 4")
    alone, four = (planned("qwen3-8B", "1 x 8xH100", f"{layout} {prompts}") for prompts in (16, 64))
    assert together.generating == pytest.approx(four.generating / 4)
    assert together.generating < alone.generating


def test_a_pipeline_layout_by_hand() -> None:
    words = ["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Et*2|(tt|)*6,L", "--bf16"]
    stated, _, _ = stated_config("qwen3-8b", words)
    # Eight chunks of two layers, the last of which has none.
    assert stage_of_layers(stated, 14) == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2]
    with pytest.raises(ConfigError, match="14 layers"):
        stage_of_layers(stated, 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("qwen3-8c --nodes 1 --gpus 8xH100", "unknown model 'qwen3-8c'.*qwen3-8"),
        ("qwen3-8b --nodes 1 --gpus eight", "--gpus 'eight' cannot be read: expected such as --gpus 8xH100-80GB"),
        ("qwen3-8b --nodes 1 --gpus 8xH999", "H999 is not known"),
        ("qwen3-8b --nodes 2 --gpus 8xH100,4xH100", "nodes of unequal size"),
        ("qwen3-8b --nodes 1 --gpus 8xH100 --network fast", "--network 'fast' cannot be read"),
        ("qwen3-8b --gpus 8xH100", "--nodes is missing"),
        ("qwen3-8b --nodes 1 --gpus 8xH100 --rollout-num-gpus-per-engine 16", "larger than the cluster"),
        ("qwen3-8b --nodes 1 --gpus 8xH100 --tensor-model-parallel-size 3", "not a multiple|does not divide"),
        ("qwen3-8b --nodes 1 --gpus 8xH100 --rate-matrix zero", "expected a number above 0"),
    ],
)
def test_bad_input_is_named(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(words.split())


@pytest.mark.parametrize("words", ["", "--lora-rank 16"])
def test_a_model_is_planned_in_few_tensors_with_the_same_memory(words: str) -> None:
    stated = f"{words} --bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --actor-num-nodes 3"
    config = read_config(f"{stated} --actor-num-gpus-per-node 8 --expert-model-parallel-size 4".split())
    planned = planned_model("moonlight-16B-A3B", config)
    whole = described(planned.name, Models.installed(config).describe(model_config(planned.name)[1]), config)
    assert (planned.parameters, planned.tensors) == (whole.parameters, whole.tensors)
    assert len(planned.architecture.rules) < len(whole.architecture.rules) / 5
    few, all_of = (rank_memory(config, one.architecture, kinds=one.kinds) for one in (planned, whole))
    assert few == all_of


def test_what_does_not_fit_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deepseek-v3", "--nodes", "8", "--gpus", "8xH100-80GB"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "a training rank needs more than a device has; the nearest, " in " ".join(shown.split())


def test_a_rank_that_needs_more_than_a_device_has_is_named_with_the_remedy() -> None:
    plan = planned("qwen3-8B", "1 x 8xH100", "--tensor-model-parallel-size 1 --actor-num-gpus-per-node 1")
    [first, *_] = plan.misfits()
    assert re.match(r"a training rank needs 1\d\d\.\d GiB of a device's 79\.6 GiB: divide the model among more", first)


@pytest.mark.parametrize("kept", ["--no-offload-train", "--no-offload-rollout"])
def test_sides_of_a_colocated_run_that_keep_their_memory_must_fit_together(kept: str) -> None:
    def largest(words: str) -> float:
        layout = "--tensor-model-parallel-size 8 --rollout-num-gpus-per-engine 8 --colocate"
        return planned("qwen3-8B", "1 x 8xH100", f"{layout} {words}").largest

    alone = largest("--sglang-mem-fraction-static 0.5")
    # The engine's weights are larger than a hundredth of the device, and half of it is larger than they.
    weights = largest(f"{kept} --sglang-mem-fraction-static 0.01") - alone
    assert weights == pytest.approx(2 * 8_190_735_360 / 8, rel=1e-3)
    assert largest(f"{kept} --sglang-mem-fraction-static 0.5") - alone == pytest.approx(0.5 * 79.6 * GIB)


def test_clusters_in_words() -> None:
    cluster = described_cluster(2, "4xH200", "2x200Gb")
    assert (cluster.devices, cluster.node_network, cluster.device_network) == (8, 50e9, 12.5e9)
    assert described_cluster(1, "8xA100-40GB").gpu.memory == pytest.approx(39.8)


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("60", 80), ("120", 120)])
def test_a_plan_fits_the_terminal_and_its_command_a_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns or "")
    words = ["qwen3-8b", "--nodes", "1", "--gpus", "8xH100", "--layer-backend", "torch"]
    words += ["--tensor-model-parallel-size", "2"]
    assert run([*words, "--actor-num-gpus-per-node", "4", "--custom-rm-path", "my file.py"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) in range(width - 12, width + 1)
    command = re.split(r"\n(?=\w)", shown.split("\ncommand\n")[1])[0]
    assert command.count("\n") == command.count(" \\\n") > 1
    written = shlex.split(command)
    assert written[:2] == ["slime", "train"]
    assert written[written.index("--custom-rm-path") + 1] == "my file.py"
    assert "layers       PyTorch's (--layer-backend torch), as a run chooses" in shown


@pytest.mark.parametrize("layers", ["te", "torch"])
def test_a_plan_has_the_layers_that_a_run_would_choose(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_planner.plan_command.choose_layers", lambda **_: layers)
    assert stated_config("qwen3-8B", [])[0].layer_backend == layers
    assert stated_config("qwen3-8B", ["--transformer-impl", "local"])[0].layer_backend == "torch"
