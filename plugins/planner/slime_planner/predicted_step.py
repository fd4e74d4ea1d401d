"""The seconds of a step by phase, from the FLOPs and bytes of the layers and the rates of `rates`.

Training: matrix products at a share of the peak, what else moves through memory, the messages between ranks, and the
pipeline's bubble. Generation: each decoding step reads the weights and the caches of the running requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime.config import RunConfig
from slime.weights.operations import active_weights, layer_weights, mixtures, pair_operations
from slime_planner.cluster import Cluster
from slime_planner.known_models import PlannedModel
from slime_planner.pipeline_stages import stage_of_layers, virtual_stages
from slime_planner.predicted_activations import MicroBatch, layer_bytes
from slime_planner.predicted_cache import attention_ranks, cache_token_bytes, quantised_engine
from slime_planner.predicted_memory import RankMemory
from slime_planner.rates import Rates, matrix_share

#: into how many parts the time of a rollout is divided
_PARTS = 32
#: tokens of a prompt, if neither an option nor the data limits them
_PROMPT = 512


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """Bytes of one device of an engine, and what its cache has room for."""

    weights: float
    share: float  #: of the device, for weights and cache
    token: float
    tokens: int  #: that the caches of the engine hold together


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes."""

    samples: int
    prompts: int
    prompt: float  #: mean tokens
    response: float  #: mean tokens
    longest: float  #: tokens of the longest response

    @property
    def tokens(self) -> float:
        """That are trained on or read, in a step."""
        return self.samples * (self.prompt + self.response)


def longest_sample(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest response, or of the context, if that is smaller."""
    rollout = config.rollout
    most = (rollout.rollout_max_prompt_len or _PROMPT) + rollout.rollout_max_response_len
    return min(most, rollout.rollout_max_context_len or most)


def work_of(config: RunConfig, rates: Rates) -> StepWork:
    """The work of a run: its batch, with mean lengths as shares of the longest."""
    batch, rollout = config.batch, config.rollout
    longest = float(rollout.rollout_max_response_len)
    prompt = float(rollout.rollout_max_prompt_len or _PROMPT)
    return StepWork(batch.samples, batch.prompts, prompt, longest * rates.mean_response, longest)


@dataclass(frozen=True, slots=True)
class Training:
    """Seconds of one forward and backward pass over a step's tokens, by part."""

    matrices: float
    memory: float
    tensor: float
    experts: float
    bubble: float
    data: float
    optimizer: float
    log_probs: float

    @property
    def total(self) -> float:
        """All of them: they follow one another."""
        return (
            self.matrices
            + self.memory
            + self.tensor
            + self.experts
            + self.bubble
            + self.data
            + self.optimizer
            + self.log_probs
        )


def training_seconds(
    config: RunConfig,
    model: PlannedModel,
    cluster: Cluster,
    rates: Rates,
    work: StepWork,
    micro: MicroBatch,
    held: RankMemory,
) -> Training:
    """Of a rank of the busiest stage, which holds `held`, for all optimizer steps of a rollout."""
    stated, sizes = config.megatron, model.architecture.transformer
    tensor, pipeline, context, expert = (
        int(stated.get(f"{kind}_parallel_size", 1))
        for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
    )
    hidden, kinds = int(sizes["hidden_size"]), mixtures(sizes)
    stages = stage_of_layers(config, len(kinds))
    vocabulary = int(model.architecture.gpt["vocab_size"])
    length = work.prompt + work.response
    flops = [0.0] * pipeline
    scores = pair_operations(sizes) * length / 2  # half of the pairs are masked
    each = {mixture: 2 * layer_weights(sizes, mixture=mixture) + scores for mixture in set(kinds)}
    for mixture, stage in zip(kinds, stages, strict=True):
        flops[stage] += each[mixture]
    flops[-1] += 2 * hidden * vocabulary
    if model.architecture.predicts and model.architecture.predicting is not None:
        one = 2 * layer_weights(sizes, mixture=kinds[-1]) + 4 * hidden * hidden + 2 * hidden * vocabulary
        flops[-1] += model.architecture.predicting.count * one
    busiest = flops.index(max(flops))
    here = [mixture for mixture, stage in zip(kinds, stages, strict=True) if stage == busiest]
    full = stated.get("recompute_granularity") == "full"
    tokens = work.tokens / max(1, config.data_parallel_size)  # of a copy of the model
    on_rank = tokens / context
    peak = (cluster.gpu.fp8 if stated.get("fp8") and cluster.gpu.fp8 else cluster.gpu.bf16) * 1e12
    reached = peak * matrix_share(rates, config.layer_backend, hidden)
    once = on_rank * flops[busiest] / tensor / reached
    matrices = once * (4 if full else 3)
    traffic = sum(
        here.count(mixture) * layer_bytes(config, model.architecture, micro, mixture=mixture) for mixture in set(here)
    )
    # Each activation is written and read forward, and so is its gradient; once more if it is computed again.
    memory_once = on_rank * traffic * 2 / (cluster.gpu.bandwidth * 1e9 * rates.memory)
    memory = memory_once * (3 if full else 2)
    within = cluster.gpu.link * 1e9 * rates.link_share
    between = cluster.device_network * rates.network_share
    tensor_once = 4 * len(here) * on_rank * hidden * 2 * (tensor - 1) / tensor / within
    tensor_s = tensor_once * (3.5 if full else 2.5)
    inner = expert * int(stated.get("expert_tensor_parallel_size") or tensor)
    rows = on_rank / tensor * int(sizes.get("moe_router_topk") or 0) * hidden * 2
    outside = 1 - min(1.0, cluster.each / inner)
    experts_once = 2 * sum(here) * rows * (1 - 1 / expert) * ((1 - outside) / within + outside / between)
    experts = experts_once * (3 if full else 2)
    virtual = virtual_stages(config, len(kinds))
    steps = max(1, config.batch.steps)
    number = max(1.0, tokens / steps / context / max(1, micro.tokens))
    passes = matrices + memory + tensor_s + experts
    bubble = passes * (pipeline - 1) / (number * virtual)
    data, optimizer = _updates(config, cluster, rates, held)
    scored = int(not config.algorithm.use_rollout_logprobs) + int(bool(config.algorithm.use_kl_loss))
    forward = (once + memory_once / 2 + tensor_once + experts_once) * (1 + (pipeline - 1) / (number * virtual))
    return Training(matrices, memory, tensor_s, experts, bubble, data * steps, optimizer * steps, forward * scored)


def _updates(config: RunConfig, cluster: Cluster, rates: Rates, held: RankMemory) -> tuple[float, float]:
    """Seconds of gradients and weights between copies of the model, and of the optimizer, of one optimizer step."""
    copies = max(1, config.data_parallel_size)
    spread = copies > 1 and cluster.nodes > 1
    wire = cluster.device_network * rates.network_share if spread else cluster.gpu.link * 1e9 * rates.link_share
    data = (held.gradients + held.weights) * (copies - 1) / copies / wire
    optimizer = 2 * (held.optimizer + held.gradients) / (cluster.gpu.bandwidth * 1e9 * rates.memory)
    if held.host:
        # A quarter of what is on the host are gradients that come, and half as much are weights that go back.
        optimizer += held.host * 0.375 / rates.host_link + 1.75 * held.host * cluster.each / rates.host_adam
    return data, optimizer


def decode_seconds(
    config: RunConfig,
    model: PlannedModel,
    cluster: Cluster,
    rates: Rates,
    running: float,
    length: float,
    weights: float,
) -> float:
    """Of one decoding step of an engine with so many running requests of this mean length, and these weights."""
    sizes, devices = model.architecture.transformer, config.cluster.rollout_num_gpus_per_engine
    kinds = mixtures(sizes)
    touched, experts = 1.0, int(sizes.get("num_moe_experts") or 0)
    if experts:
        top, inner = int(sizes["moe_router_topk"]), int(sizes["moe_ffn_hidden_size"])
        of_experts = 3 * experts * inner * int(sizes["hidden_size"]) * sum(kinds) / devices
        of_experts *= 1 if quantised_engine(config) else 2
        touched = 1 - (1 - top / experts) ** max(1.0, running)
        weights -= of_experts * (1 - touched)
    cache = running * length * cache_token_bytes(config, model.architecture)
    if config.sglang.get("enable_dp_attention"):
        cache /= devices / attention_ranks(config)
    memory = (weights + cache) / (cluster.gpu.bandwidth * 1e9 * rates.memory)
    active = active_weights(sizes)
    active += int(sizes["hidden_size"]) * int(model.architecture.gpt["vocab_size"])
    peak = (cluster.gpu.fp8 if quantised_engine(config) and cluster.gpu.fp8 else cluster.gpu.bf16) * 1e12
    arithmetic = running * 2 * active / devices / (peak * rates.matrix)
    messages = 0.0
    if devices > 1:
        wide = running * int(sizes["hidden_size"]) * 2 * 2 * (devices - 1) / devices
        over_nodes = devices > cluster.each
        wire = cluster.device_network if over_nodes else cluster.gpu.link * 1e9 * rates.link_share
        messages = 2 * len(kinds) * (rates.all_reduce * (3 if over_nodes else 1) + wide / wire)
    return max(memory, arithmetic) + messages + rates.decode_overhead


def rollout_seconds(
    config: RunConfig, model: PlannedModel, cluster: Cluster, rates: Rates, work: StepWork, engine: EngineNeed
) -> float:
    """Of the generation of a batch: until the longest response ends.

    Lengths are spread so that the share of responses still running falls from 1 to 0 at the longest, with the mean of
    the work. Those that the cache has no room for wait. An asynchronous run generates several
    rollouts together (--async-buffer-size), and each takes its share of the time.

    Args:
        config: The run.
        model: Its model.
        cluster: Its machines.
        rates: What is assumed of them.
        work: What is generated.
        engine: What an engine holds.
    """
    weights, room = engine.weights, max(1, engine.tokens)
    engines = max(1, config.num_engines)
    together = config.rollout.async_buffer_size if config.rollout.async_mode else 1
    each = math.ceil(together * work.samples / engines)
    fall = max(0.0, work.longest / max(1.0, work.response) - 1)
    seconds = 0.0
    step = work.longest / _PARTS
    for part in range(_PARTS):
        done = (part + 0.5) * step
        asked = each * (1 - done / work.longest) ** fall
        length = work.prompt + done
        running = max(min(asked, room / length), 1e-9)
        waits = max(1.0, asked / running)
        decode = decode_seconds(config, model, cluster, rates, max(running, 1.0), length, weights)
        seconds += step / together * waits * decode
    if config.drafts != "none":
        seconds /= rates.speculation
    sizes = model.architecture.transformer
    active = active_weights(sizes)
    read = math.ceil(work.prompts / engines) * work.prompt * 2 * active
    devices = config.cluster.rollout_num_gpus_per_engine
    return seconds + read / devices / (cluster.gpu.bf16 * 1e12 * rates.matrix * 0.7)


def turn_seconds(config: RunConfig, rates: Rates, held: RankMemory, engine_weights: float) -> float:
    """Of the turns of a colocated run: the trainer's state to the host and back, and the engines' weights."""
    if not config.cluster.colocate:
        return 0.0
    return (2 * (held.weights + held.optimizer) + engine_weights) / rates.host_link
