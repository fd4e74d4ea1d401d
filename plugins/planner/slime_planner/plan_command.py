"""`slime plan`: what a run would need on a cluster that is only described, from the name of a model."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from slime.cli.output import write
from slime.cli.text_layout import UNLIMITED, WIDTH, hanging, terminal_width
from slime.config import RunConfig, read_config, resolve
from slime.config.assemble import stop_on
from slime.config.layer_backend import choose_layers
from slime.errors import ConfigError
from slime_planner.cluster import GIB, Cluster, described_cluster
from slime_planner.fleet_lines import assumed_lines, engine_lines, memory_lines, step_lines, sync_line
from slime_planner.fleet_plan import FleetPlan, cluster_problems, fleet_plan, plan_problems
from slime_planner.known_models import PlannedModel, known_names, planned_model
from slime_planner.proposals import LAYOUT, Proposals, layout_text, layout_words, place, proposals
from slime_planner.rates import FLAGS, Rates, with_rate

_USAGE = """\
usage: slime plan MODEL --nodes N --gpus 8xH100-80GB [--network 400Gb]
                  [--host-memory GIB] [--json] [--rate-... X] [--flag value]...

Say what a run of a model needs on a cluster that need not exist yet: memory of
each kind of rank, of engines and of hosts, KV cache, weight sync, and the
seconds of a step by phase, with the rates that are assumed. It reads no
weights and needs no GPU. Without a layout among the flags it proposes the
three fastest that fit, and says why the others do not.

  MODEL           a model of scripts/models, or a folder with a config.json
  --nodes         nodes of the cluster
  --gpus          devices of a node: 8xH100-80GB
  --network       400Gb: bits per second of an adapter for each device;
                  2x200Gb: adapters of a node; 50GB: bytes
  --host-memory   GiB of a node (2048)
  --json          print JSON
  --flag value    a flag of slime train

rates:
{rates}
models:
{models}
"""
#: the part that is one command, not sentences
_COMMAND = "command"
_OWN = {"--nodes": "", "--gpus": "", "--network": "400Gb", "--host-memory": "2048"}
#: what a run needs and a plan does not ask for
_STATED = {
    ("checkpoint", "hf_checkpoint"): ("--hf-checkpoint", "models/{model}"),
    ("data", "prompt_data"): ("--prompt-data", "prompts.jsonl"),
    ("rollout", "num_rollout"): ("--num-rollout", "100"),
    ("rollout", "rollout_batch_size"): ("--rollout-batch-size", "32"),
    ("rollout", "n_samples_per_prompt"): ("--n-samples-per-prompt", "8"),
    ("algorithm", "advantage_estimator"): ("--advantage-estimator", "grpo"),
    ("reward", "reward"): ("--reward", "exact_match"),
}


@dataclass(frozen=True)
class _Asked:
    model: str
    cluster: Cluster
    rates: Rates
    words: list[str]
    as_json: bool


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code: 1 if nothing fits."""
    if set(argv) & {"-h", "--help"}:
        rates = "".join(
            f"  --rate-{one.name.replace('_', '-')} ({one.default:g})\n"
            + "".join(f"{line}\n" for line in hanging("      ", one.metadata["help"], WIDTH))
            for one in fields(Rates)
        )
        write(_USAGE.format(rates=rates, models="\n".join(hanging("  ", ", ".join(known_names()), WIDTH))))
        return 0
    # Ten thousands of tensors are described, and none of them is garbage.
    gc.disable()
    try:
        asked = _read(argv)
        stated, given, command = stated_config(asked.model, asked.words)
        model = planned_model(asked.model, stated)
        found = plans(stated, given, model, asked.cluster, asked.rates)
        if found.best:
            stop_on(plan_problems(found.best[0].config, model, asked.cluster))
    finally:
        gc.enable()
    shown = _as_json(found, command, stated) if asked.as_json else "\n".join(_lines(found, asked, command, stated))
    print(shown)
    return 0 if any(not [*plan.misfits()] for plan in found.best) else 1


def plans(stated: RunConfig, given: frozenset[str], model: PlannedModel, cluster: Cluster, rates: Rates) -> Proposals:
    """The plan of the layout that was stated, or those of the best.

    Args:
        stated: The run.
        given: The options of its devices that the user stated.
        model: Its model.
        cluster: Its machines.
        rates: What is assumed of them.
    """
    placed = place(stated, given, model, cluster)
    if any(name in stated.megatron for name in LAYOUT):
        stop_on(plan_problems(placed, model, cluster))
        return Proposals([fleet_plan(placed, model, cluster, rates)], 1, {})
    stop_on(cluster_problems(placed, cluster))
    return proposals(placed, model, cluster, rates)


def stated_config(name: str, words: Sequence[str]) -> tuple[RunConfig, frozenset[str], list[str]]:
    """The resolved configuration of the run flags on GPUs of a cluster.

    Returns:
        It, the options of its devices that were stated, and the flags with what they lacked.
    """
    first = read_config(words)
    added: list[str] = []
    chosen = {"advantage_estimator"} if not first.trains_policy else set()
    if not first.trains_policy or first.reward.custom_rm_path or first.reward.terms:
        chosen.add("reward")
    for (section, option), (flag, value) in _STATED.items():
        if option not in getattr(first, section).model_fields_set | chosen:
            added += [flag, value.format(model=name)]
    if not {"bf16", "fp16"} & set(first.megatron):
        added.append("--bf16")
    if "device" not in first.cluster.model_fields_set:
        added += ["--device", "cuda"]
    if first.cluster.ray_address is None:
        added += ["--ray-address", "auto"]
    if first.cluster.layer_backend == "auto" and "transformer_impl" not in first.megatron:
        added += ["--layer-backend", choose_layers(on_gpu=True, adapters=first.lora.asked)]
    if first.device == "cpu" and "device" in first.cluster.model_fields_set and first.cluster.device == "cpu":
        raise ConfigError("--device cpu: a plan is for GPUs. `slime train --dry-run` predicts a run on this machine")
    given = set(first.cluster.model_fields_set) | (
        {"rollout_num_gpus_per_engine"} if "tp_size" in first.sglang else set()
    )
    return resolve(read_config([*words, *added])), frozenset(given), [*words, *added]


def _read(argv: Sequence[str]) -> _Asked:
    own, rates, words, as_json = dict(_OWN), Rates(), [], False
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if word == "--json":
            as_json = True
        elif flag in own or flag in FLAGS:
            if not equals and (not rest or rest[0].startswith("--")):
                raise ConfigError(f"slime plan: {flag} needs a value (see slime plan --help)")
            value = value if equals else rest.pop(0)
            if flag in own:
                own[flag] = value
            else:
                rates = with_rate(rates, flag, value)
        else:
            words.append(word)
    if not words or words[0].startswith("-"):
        raise ConfigError("slime plan: which model? The first word names one of scripts/models, or a folder")
    for flag, like in (("--nodes", "16"), ("--gpus", "8xH100-80GB")):
        if not own[flag]:
            raise ConfigError(f"slime plan: {flag} is missing, such as {flag} {like}")
    numbers = {}
    for flag in ("--nodes", "--host-memory"):
        if not own[flag].isdigit():
            raise ConfigError(f"{flag} {own[flag]}: expected a whole number")
        numbers[flag] = int(own[flag])
    cluster = described_cluster(numbers["--nodes"], own["--gpus"], own["--network"], numbers["--host-memory"])
    return _Asked(words[0], cluster, rates, words[1:], as_json)


# --- what is printed ---------------------------------------------------------------------------------


#: of the run, whose command is refused where what it names is not installed
_LAYERS = {
    "te": (
        "TransformerEngine's (--layer-backend te), which comes with NVIDIA's images and not with `make install`; plan"
        " with --layer-backend torch where it is missing"
    ),
    "torch": (
        "PyTorch's (--layer-backend torch), as a run chooses where TransformerEngine is not installed; plan with"
        " --layer-backend te where it is, as in NVIDIA's images"
    ),
}


def _lines(found: Proposals, asked: _Asked, command: Sequence[str], stated: RunConfig) -> Iterator[str]:
    wide = terminal_width()
    width = WIDTH if wide == UNLIMITED else max(WIDTH, wide)
    for label, texts in _parts(found, asked, command, stated):
        if label == _COMMAND:
            yield label
            yield from _continued(texts, width)
            continue
        for number, text in enumerate(texts):
            yield from hanging(f"{'' if number else label:<13}", text, width)


def _continued(words: Sequence[str], width: int) -> Iterator[str]:
    """A command over several lines, as a shell takes it: each flag beside its value."""
    line = shlex.join(words[:2])
    for flag in _flags_of(words[2:]):
        if len(line) + len(flag) + 3 > width:
            yield f"{line} \\"
            line = f"   {flag}"
        else:
            line = f"{line} {flag}"
    yield line


def _flags_of(words: Sequence[str]) -> Iterator[str]:
    flag: list[str] = []
    for word in words:
        if word.startswith("--") and flag:
            yield shlex.join(flag)
            flag = []
        flag.append(word)
    if flag:
        yield shlex.join(flag)


def _parts(
    found: Proposals, asked: _Asked, command: Sequence[str], stated: RunConfig
) -> Iterator[tuple[str, list[str]]]:
    yield "cluster", [str(asked.cluster)]
    if not found.best:
        yield "does not fit", [f"none of {found.tried} layouts", *_refusals(found)]
        return
    first = found.best[0]
    yield "model", [f"{first.model.name}: {first.model.parameters / 1e9:.2f} billion parameters"]
    if (layers := first.config.layer_backend) in _LAYERS:
        yield "layers", [_LAYERS[layers]]
    for number, plan in enumerate(found.best, 1):
        head = f"layout {number}" if len(found.best) > 1 else "layout"
        yield (
            head,
            [layout_text(plan.config), *memory_lines(plan), *engine_lines(plan), *step_lines(plan), sync_line(plan)],
        )
        yield _COMMAND, ["slime", "train", *command, *layout_words(plan.config, stated)]
        if wrong := [*plan.misfits(), *plan.tight()]:
            yield "warning", wrong
    if found.tried > 1:
        yield "others", [f"{found.tried} layouts were tried", *_refusals(found)]
    yield "assumed", [*assumed_lines(asked.rates)]


def _refusals(found: Proposals) -> Iterator[str]:
    for kind, (number, example) in found.refused.items():
        yield f"{number} do not fit: {kind}; the nearest, {example}"


def _as_json(found: Proposals, command: Sequence[str], stated: RunConfig) -> str:
    return json.dumps(
        {
            "layouts": [_plan_json(plan, command, stated) for plan in found.best],
            "tried": found.tried,
            "refused": {kind: {"layouts": n, "nearest": text} for kind, (n, text) in found.refused.items()},
        },
        indent=2,
    )


def _plan_json(plan: FleetPlan, command: Sequence[str], stated: RunConfig) -> dict[str, Any]:
    return {
        "layout": layout_text(plan.config),
        "command": ["slime", "train", *command, *layout_words(plan.config, stated)],
        "parameters": plan.model.parameters,
        "stages": [asdict(need) | {"total": need.total + plan.rates.reserved} for need in plan.stages],
        "device_bytes": plan.cluster.gpu.memory * GIB,
        "engine": asdict(plan.engine) | {"requests": plan.requests},
        "host": asdict(plan.host) | {"total": plan.host.total},
        "sync": {way.name: {"bytes": way.bytes, "seconds": way.seconds, "how": way.how} for way in plan.ways},
        "seconds": {
            "generation": plan.generating,
            "training": asdict(plan.training),
            "sync": plan.sync.seconds,
            "turns": plan.turns,
            "step": plan.step,
        },
        "misfits": [*plan.misfits()],
        "warnings": [*plan.tight()],
        "rates": asdict(plan.rates),
    }
