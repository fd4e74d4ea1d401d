"""What a run would do, as `slime train --dry-run` prints it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slime.cli.preflight import Preflight
from slime.cli.text_layout import count, hanging
from slime.config import RunConfig
from slime.config.eval_sets import eval_sets
from slime.config.weight_options import CheckpointOptions
from slime.errors.raised import report
from slime.errors.redaction import redacted
from slime.registry.load import hook_of
from slime.weights.lora import adapter_shapes, lora_of

logger = logging.getLogger("slime.registry")


def lines_of_plugins(checked: Preflight) -> dict[str, list[str]]:
    """Label -> lines, from `slime_plan_lines` of every plugin. What one raises is a warning: the run can start."""
    counted = [one.longest for one in checked.data if one.name == "training" and one.limit]
    longest_prompt = max(counted, default=None)
    lines: dict[str, list[str]] = {}
    for plugin in checked.plugins.plugins:
        found = plugin.found
        try:
            planned_by_hooks = hook_of(checked.plugins.manager, "slime_plan_lines", found.name)(
                config=checked.config,
                model=checked.model.architecture,
                with_critic=checked.with_critic,
                with_engines=checked.with_engines,
                longest_prompt=longest_prompt,
            )
            for planned in planned_by_hooks:
                for label, added in planned.items():
                    lines.setdefault(label, []).extend(added)
        except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - the boundary around a plugin
            failure = report(f"slime_plan_lines() of plugin {found.name} ({found.package})", error)
            logger.warning("%s\n  Its lines are missing in the plan.", failure)
    return lines


def plan_text(checked: Preflight, of_plugins: Mapping[str, Sequence[str]], notes: Sequence[str]) -> str:
    """The plan, with the lines of plugins, and with notes for the user at its end."""
    config = checked.config
    parts: list[tuple[str, Iterable[object]]] = [
        ("run folder", [checked.run_dir]),
        ("model", _model(checked)),
        ("batch", _batch(config)),
        ("data", [f"{facts.name}: {facts}" for facts in checked.data] or ["by the data source"]),
        ("example", checked.example),
        ("evaluation", _evaluation(config) if config.evaluation.eval_interval is not None else []),
        ("processes", _processes(checked)),
        ("devices", [_devices(checked)]),
        ("layers", [config.layer_backend] if config.names_layers else []),
        *of_plugins.items(),
        ("network", _network(checked)),
        ("plugins", _plugins(checked)),
        ("checkpoints", _checkpoints(config)),
        ("megatron", [_pairs(config.megatron)] if config.megatron else []),
        ("sglang", [_pairs(config.sglang)] if config.sglang else []),
        ("not checked", _unchecked(checked)),
        ("notes", notes),
    ]
    lines = [
        line
        for label, values in parts
        for number, value in enumerate(values)
        for line in hanging(f"{'' if number else label:<13}", str(value))
    ]
    return "\n".join(lines)


def _model(checked: Preflight) -> Iterator[str]:
    yield str(checked.model)
    if checked.model.not_trained is not None:
        yield checked.model.not_trained
    model = checked.model.architecture
    adapters = lora_of(checked.config.lora, model)
    if adapters is not None:
        whole, trained = (
            sum(map(math.prod, shapes.values())) for shapes in (model.shapes, adapter_shapes(adapters, model))
        )
        yield f"frozen; {adapters}: {trained:,} trained numbers beside {whole:,}"


def _batch(config: RunConfig) -> Iterator[str]:
    batch, rollouts = config.batch, config.num_rollout
    yield f"{batch}"
    loop = "synchronous"
    if config.rollout.async_mode:
        ahead = count(config.rollout.async_buffer_size, "rollout")
        loop = f"asynchronous, {ahead} ahead, weights synced every {config.rollout.update_weights_interval}"
        if (bound := config.rollout.max_staleness) is not None:
            loop += f", at most {count(bound, 'rollout')} stale"
    yield f"{rollouts} rollouts = {rollouts * batch.steps} optimizer steps ({config.algorithm.loss_type}, {loop})"


def _evaluation(config: RunConfig) -> Iterator[str]:
    options = config.evaluation
    by_sampling: dict[tuple[int, float], list[str]] = {}
    for one in eval_sets(config):
        by_sampling.setdefault((one.n_samples, one.temperature), []).append(one.name)
    before = "" if options.skip_eval_before_train else " before the first,"
    when = f"{before} every {options.eval_interval} and after the last rollout"
    for (responses, temperature), names in by_sampling.items():
        per_prompt = f"{count(responses, 'response')} a prompt at temperature {temperature:g}"
        yield f"{', '.join(names)}:{when}, {per_prompt}"


def _processes(checked: Preflight) -> Iterator[str]:
    config = checked.config
    cluster, megatron = config.cluster, config.megatron
    yield "1 driver"
    yield "1 rollout process: data source, generator, reward"
    if checked.with_engines:
        port = cluster.engine_port
        ports = "" if port is None else f", ports {port}-{port + config.num_engines - 1}"
        engines = count(config.num_engines, "SGLang engine")
        turns = ", in turn with training" if cluster.colocate else ""
        yield f"{engines} x tensor parallel {cluster.rollout_num_gpus_per_engine}{ports}{turns}"
        if cluster.rollout_external_engine_addrs:
            yield f"  of others, compared with the run: {', '.join(cluster.rollout_external_engine_addrs)}"
        yield "1 router" + ("" if cluster.router_port is None else f", port {cluster.router_port}")
    else:
        yield "no engines: the generator needs none"
    sizes = {
        "tensor": megatron.get("tensor_model_parallel_size", 1),
        "pipeline": megatron.get("pipeline_model_parallel_size", 1),
        "context": megatron.get("context_parallel_size", 1),
        "data": config.data_parallel_size,
    }
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items())
    sequence = ", sequence parallel" if megatron.get("sequence_parallel") else ""
    yield f"{count(config.world_size, 'training rank')}: {layout}{sequence}"


def _devices(checked: Preflight) -> str:
    config, demand = checked.config, checked.demand
    if not config.on_gpu and config.cluster.ray_address is None:
        return "cpu: every rank and engine is a process of this machine"
    where = "this machine" if config.cluster.ray_address is None else f"the cluster {config.cluster.ray_address}"
    devices = f"{demand.devices} {demand.resource}s of {where}"
    if demand.shares and demand.engines and not config.cluster.colocate:  # on CPUs, at the same time or in turn
        return f"{devices}, shared by training and engines"
    if demand.shares and demand.engines:
        return f"{devices}, on {demand.of_engines} of which training and engines take turns"
    return f"{devices}: {demand.ranks} for training + {demand.of_engines} for engines"


def _network(checked: Preflight) -> Iterator[str]:
    """Where the processes listen, at which ports, and which keys keep others out."""
    config, cluster, address = checked.config, checked.config.cluster, checked.config.cluster.ray_address
    where = "127.0.0.1" if address is None else "the address of its node"
    if address is None:
        yield "everything listens on 127.0.0.1, at free ports unless named above"
        yield "Ray: ports chosen by Ray; key: a random token of this run; no dashboard"
    else:
        yield "engines, router and ranks listen on their nodes' addresses, at free ports from 20000 unless named above"
        key = "RAY_AUTH_TOKEN or ~/.ray/auth_token, if the cluster wants a token (RAY_AUTH_MODE=token)"
        yield f"Ray: the cluster {address}, its ports; key: {key}"
    if checked.with_engines:
        keys = "random keys of this run"
        if config.own_engines:
            yield f"engines: {_ports(cluster.engine_port, config.num_engines)} of {where}; key: {keys}"
        elif cluster.rollout_external_engine_keys is not None:
            keys = f"those of {cluster.rollout_external_engine_keys}"
        where_router = where if address is None else "the address of the driver's node"
        yield f"router: {_ports(cluster.router_port, 1)} of {where_router}; key: {keys}"
    shared = "" if address is None else "; close these ports to everybody but the nodes"
    yield f"meeting points, gloo and NCCL: free ports of {where}; no key{shared} (SECURITY.md)"


def _ports(first: int | None, count: int) -> str:
    if first is None:
        return f"{count} free port{'s' if count != 1 else ''} from 20000"
    return f"port {first}" if count == 1 else f"ports {first}-{first + count - 1}"


def _unchecked(checked: Preflight) -> Iterator[str]:
    yield from checked.unchecked
    if checked.unchecked:
        yield "the plan needs none of these, and the run does: without them it is refused when it starts"


def _plugins(checked: Preflight) -> Iterator[str]:
    for slot, used in checked.used.items():
        component = used.component
        # Only rewards in [[reward.terms]] are added up.
        weight = {"weight": f"{used.use.weight:g}"} if slot.startswith("reward[") and not used.use.eval_set else {}
        options = _pairs({**weight, **used.options.model_dump(), **used.limits.model_dump(exclude_unset=True)})
        origin = f"({component.found.package}, {component.origin})"
        yield f"{slot:<16}{component.id}  {origin}  {options}".rstrip()


def _checkpoints(config: RunConfig) -> Iterator[str]:
    options = config.checkpoint
    if options.load is not None:
        yield f"continue from {options.load}"
        frozen = config.algorithm.ref_update_interval is None
        if options.initial_megatron_checkpoint is not None and options.ref_load is None and frozen:
            yield (
                f"a frozen reference has the weights of {options.initial_megatron_checkpoint},"
                " unless the checkpoint contains one"
            )
    elif options.initial_megatron_checkpoint is not None:
        yield f"start from the weights of {options.initial_megatron_checkpoint}"
    if options.save is not None:
        every = "" if options.save_interval is None else f" every {options.save_interval} rollouts and"
        meanwhile = ", in the background" if options.async_save else ""
        yield f"save{every} after the last to {options.save}{meanwhile}"
        if options.save_keep_last is not None:
            yield f"keep {', '.join(_kept(options))}; older ones are deleted"
    if options.save_hf is not None:
        each = options.exports_each and options.save_interval is not None
        every = f" every {options.save_interval} rollouts and" if each else ""
        yield f"export Hugging Face weights{every} after the last to {options.save_hf}"
    if options.save is None and options.save_hf is None:
        yield "none: nothing is saved (--save, --save-hf)"


def _kept(options: CheckpointOptions) -> Iterator[str]:
    yield "the newest" if options.save_keep_last == 1 else f"the newest {options.save_keep_last}"
    if options.save_keep_every is not None:
        yield f"those after multiples of {options.save_keep_every} rollouts"
    if options.best_metric is not None:
        name, lower = options.best_metric
        yield f"the one with the {'lowest' if lower else 'highest'} {name}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in redacted(values).items())
