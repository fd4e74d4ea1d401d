"""What a run would do, as `slime train --dry-run` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime.cli.preflight import Preflight
from slime.config.eval_sets import eval_sets

_LABEL = 13


def plan_text(checked: Preflight, notes: list[str]) -> str:
    """The plan, ready to print, with what the user should know besides."""
    lines: list[str] = []
    for label, values in (*_sections(checked), ("notes", notes)):
        for i, value in enumerate(values):
            lines.append(f"{label if i == 0 else '':<{_LABEL}}{value}")
    return "\n".join(lines)


def _sections(checked: Preflight) -> Iterator[tuple[str, list[str]]]:
    config = checked.config
    yield "run folder", [str(checked.run_dir)]
    yield "model", [str(checked.model)]
    yield "batch", list(_batch(checked))
    yield "data", [f"{facts.name}: {facts}" for facts in checked.data] or ["by the data source"]
    if config.evaluation.eval_interval is not None:
        yield "evaluation", list(_evaluation(checked))
    yield "processes", list(_processes(checked))
    yield "devices", [_devices(checked)]
    yield "plugins", list(_plugins(checked))
    yield "checkpoints", list(_checkpoints(checked))
    for name, values in (("megatron", config.megatron), ("sglang", config.sglang)):
        if values:
            yield name, [_pairs(values)]


def _batch(checked: Preflight) -> Iterator[str]:
    config = checked.config
    batch, rollouts = config.batch, config.num_rollout
    yield f"{batch}"
    loop = "synchronous"
    if config.rollout.async_mode:
        ahead, every = config.rollout.async_buffer_size, config.rollout.update_weights_interval
        loop = f"asynchronous, {ahead} rollout{_s(ahead)} ahead, weights synced every {every}"
    yield f"{rollouts} rollouts = {rollouts * batch.steps} optimizer steps ({config.algorithm.loss_type}, {loop})"


def _evaluation(checked: Preflight) -> Iterator[str]:
    options = checked.config.evaluation
    by_sampling: dict[tuple[int, float], list[str]] = {}
    for one in eval_sets(checked.config):
        by_sampling.setdefault((one.n_samples, one.temperature), []).append(one.name)
    before = "" if options.skip_eval_before_train else " before the first,"
    when = f"{before} every {options.eval_interval} and after the last rollout"
    for (responses, temperature), names in by_sampling.items():
        yield (
            f"{', '.join(names)}:{when}, {responses} response{_s(responses)} a prompt at temperature {temperature:g}"
        )


def _processes(checked: Preflight) -> Iterator[str]:
    config = checked.config
    stated = config.megatron
    yield "1 driver"
    yield "1 rollout process: data source, generator, reward"
    if checked.with_engines:
        size = config.cluster.rollout_num_gpus_per_engine
        port = config.cluster.engine_port
        where = "" if port is None else f", ports {port}-{port + config.num_engines - 1}"
        yield f"{config.num_engines} SGLang engine{_s(config.num_engines)} x tensor parallel {size}{where}"
        router = config.cluster.router_port
        yield "1 router" + ("" if router is None else f", port {router}")
    else:
        yield "no engines: the generator needs none"
    layout = " x ".join(
        f"{name} {stated.get(key, 1)}"
        for name, key in (
            ("tensor", "tensor_model_parallel_size"),
            ("pipeline", "pipeline_model_parallel_size"),
            ("context", "context_parallel_size"),
        )
    )
    sequence = ", sequence parallel" if stated.get("sequence_parallel") else ""
    ranks = config.world_size
    yield f"{ranks} training rank{_s(ranks)}: {layout} x data {config.data_parallel_size}{sequence}"


def _devices(checked: Preflight) -> str:
    config = checked.config
    engines = config.num_engines * config.cluster.rollout_num_gpus_per_engine if checked.with_engines else 0
    if not config.on_gpu:
        return "cpu: every rank and engine is a process of this machine"
    where = "this machine" if config.cluster.ray_address is None else f"the cluster {config.cluster.ray_address}"
    return f"{config.world_size + engines} GPUs of {where}: {config.world_size} for training + {engines} for engines"


def _plugins(checked: Preflight) -> Iterator[str]:
    for slot, used in checked.used.items():
        component = used.component
        summed = bool(checked.config.reward.terms) and used.use.kind == "reward" and used.use.eval_set is None
        weight = {"weight": f"{used.use.weight:g}"} if summed else {}
        limits = used.limits.model_dump(exclude_unset=True)
        options = _pairs({**weight, **used.options.model_dump(), **limits})
        shown = f"  {options}" if options else ""
        yield f"{slot:<16}{component.id}  ({component.found.package}, {component.origin}){shown}"


def _checkpoints(checked: Preflight) -> Iterator[str]:
    options = checked.config.checkpoint
    if options.load is not None:
        yield f"continue from {options.load}"
        frozen = checked.config.algorithm.ref_update_interval is None
        if options.initial_megatron_checkpoint is not None and options.ref_load is None and frozen:
            yield (
                f"a frozen reference has the weights of {options.initial_megatron_checkpoint},"
                " unless the checkpoint has a reference of its own"
            )
    elif options.initial_megatron_checkpoint is not None:
        yield f"start from the weights of {options.initial_megatron_checkpoint}"
    if options.save is not None:
        every = "" if options.save_interval is None else f" every {options.save_interval} rollouts and"
        yield f"save{every} after the last to {options.save}"
    if options.save_hf is not None:
        yield f"export Hugging Face weights after the last to {options.save_hf}"
    if options.save is None and options.save_hf is None:
        yield "none: nothing is saved (--save, --save-hf)"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _s(count: int) -> str:
    return "" if count == 1 else "s"
