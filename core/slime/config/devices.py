"""Checks of what engines and trainer compute on, for `slime.config.checks`."""

from __future__ import annotations

from collections.abc import Iterator

from slime.config.layer_backend import MEGATRONS_WORDS, missing_for
from slime.config.run_config import RunConfig


def engine_devices(config: RunConfig) -> Iterator[str]:
    """The devices must divide into engines of one size."""
    per_engine = config.cluster.rollout_num_gpus_per_engine
    if config.rollout_devices % per_engine:
        yield (
            f"--rollout-num-gpus {config.rollout_devices} is not a multiple of --rollout-num-gpus-per-engine"
            f" {per_engine}: {config.num_engines} engines would leave {config.rollout_devices % per_engine} unused"
        )
    tp_size = config.sglang.get("tp_size", per_engine)
    if tp_size != per_engine:
        yield (
            f"--sglang-tp-size {tp_size} contradicts --rollout-num-gpus-per-engine {per_engine}:"
            " they set the same number. Set only one of them"
        )
    copies = config.sglang.get("dp_size", 1)
    if copies > 1 and not config.sglang.get("enable_dp_attention"):
        yield (
            f"--sglang-dp-size {copies} would need {copies} times the devices in one engine."
            " Use --rollout-num-gpus for more engines"
        )


def external_engines(config: RunConfig) -> Iterator[str]:
    """--rollout-external-engine-addrs: what needs an engine of the run's own."""
    addresses, flag = config.cluster.rollout_external_engine_addrs, "--rollout-external-engine-addrs"
    if not addresses:
        return
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
            yield f"{flag}: got {address!r}, expected HOST:PORT, as 10.0.0.7:30000 or [fd00::7]:30000"
    if repeated := sorted({one for one in addresses if addresses.count(one) > 1}):
        yield f"{flag} names {', '.join(repeated)} more than once. Name each engine once"
    per_engine = config.cluster.rollout_num_gpus_per_engine
    if config.rollout_devices != len(addresses) * per_engine:
        yield (
            f"--rollout-num-gpus {config.rollout_devices} contradicts {flag}, which names {len(addresses)} engines of"
            f" {per_engine} (--rollout-num-gpus-per-engine). Drop --rollout-num-gpus"
        )
    excluded = {
        "--update-weight-transport tensor": config.sync.update_weight_transport == "tensor",
        "--colocate": config.cluster.colocate,
        "--engine-port": config.cluster.engine_port is not None,
        "--rollout-quantization": config.sync.rollout_quantization is not None,
        "--disk-delta": config.sync.disk_delta,
    }
    why = {
        "--update-weight-transport tensor": "somebody else's engines share no memory with the trainer: use disk or"
        " distributed",
        "--colocate": "their devices are not the trainer's",
        "--engine-port": "they have their ports already",
        "--disk-delta": "the run has no process on their nodes that could apply what changed to a copy: use"
        " --update-weight-transport disk without it",
        "--rollout-quantization": "how they hold their weights was decided when they were started",
    }
    yield from (f"{name} excludes {flag}, since {why[name]}" for name, asked in excluded.items() if asked)


def colocation(config: RunConfig) -> Iterator[str]:
    """With --colocate, engines run on the trainer's devices, while the trainer waits."""
    cluster, per_engine = config.cluster, config.cluster.rollout_num_gpus_per_engine
    if not cluster.colocate:
        return
    if config.rollout.async_mode:
        yield (
            "--colocate excludes --async: asynchronous training does not support colocation, since it would need the"
            " same devices at the same time. Drop one of them"
        )
    kept = [side for side in ("train", "rollout") if not getattr(cluster, f"offload_{side}")]
    if kept and config.on_gpu and "mem_fraction_static" not in config.sglang:
        yield (
            f"--no-offload-{kept[0]} on GPUs needs --sglang-mem-fraction-static: otherwise the engines, which start"
            " first, size their KV cache for the whole of a device, and the trainer finds no room beside it. Set the"
            " engines' share of a device, or drop the flag"
        )
    if config.rollout_devices > config.world_size:
        yield (
            f"--colocate: {config.num_engines} engines x {per_engine} GPUs need {config.rollout_devices} devices, and"
            f" the trainer, whose devices they share, has {config.world_size} (--actor-num-nodes"
            f" {cluster.actor_num_nodes} x --actor-num-gpus-per-node {cluster.actor_num_gpus_per_node}). Lower"
            " --rollout-num-gpus or --rollout-num-gpus-per-engine, or train on more"
        )
    elif (
        cluster.actor_num_nodes > 1
        and cluster.actor_num_gpus_per_node % per_engine
        and per_engine % cluster.actor_num_gpus_per_node
    ):
        yield (
            f"--colocate: --rollout-num-gpus-per-engine {per_engine} neither divides --actor-num-gpus-per-node"
            f" {cluster.actor_num_gpus_per_node} nor is a multiple of it: an engine would have a part of a node"
        )


def deltas(config: RunConfig) -> Iterator[str]:
    """--disk-delta is a way of writing versions to a disk."""
    transport = config.sync.update_weight_transport
    if config.sync.disk_delta and transport != "disk":
        yield (
            f"--disk-delta needs --update-weight-transport disk, and this run sends its weights by {transport}. Add it,"
            " or drop --disk-delta"
        )


def shared_memory(config: RunConfig) -> Iterator[str]:
    """Handles of GPU memory can be opened only by a process that sees the same GPU; NCCL wants different ones."""
    transport, colocated = config.sync.update_weight_transport, config.cluster.colocate
    if not config.on_gpu:
        return
    if transport == "tensor" and not colocated:
        yield (
            "--update-weight-transport tensor hands over GPU memory, and on GPUs an engine sees only its own devices,"
            " none of the trainer's. Use distributed (NCCL), the default, or share the devices with --colocate"
        )
    if transport == "distributed" and colocated:
        yield (
            "--update-weight-transport distributed cannot be used with --colocate on GPUs: NCCL refuses two processes"
            " on one device. Drop it, or use disk"
        )


def layer_backend(config: RunConfig) -> Iterator[str]:
    """--layer-backend: layers that this machine cannot compute, or that exclude another option."""
    chosen, word = config.layer_backend, config.megatron.get("transformer_impl")
    flag = f"--layer-backend {chosen}" if word is None else f"--transformer-impl {word}"
    if word is not None and MEGATRONS_WORDS.get(word, chosen) != chosen:
        yield f"{flag} contradicts --layer-backend {chosen}: they set the same. Drop one of them"
        return
    if lacks := missing_for(chosen, on_gpu=config.on_gpu):
        yield f"{flag} {lacks}"
    if chosen == "te" and config.lora.asked:
        yield (
            f"{flag} excludes adapters (--lora-rank, --lora-load): its layers join norm and projection, and an adapter"
            " needs what is between them. Drop the flag"
        )
    exact = config.stated("deterministic")
    exact += ["--deterministic-mode"] if config.megatron.get("deterministic_mode") else []
    if chosen == "fused" and exact:
        yield (
            f"{exact[0]} excludes {flag}: what is compiled for a micro-batch depends on those before it, and a resumed"
            " run has seen others. Drop one of them, or use --layer-backend torch"
        )
