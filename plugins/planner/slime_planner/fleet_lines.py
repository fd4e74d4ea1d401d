"""A plan in words, for `slime plan` and `slime train --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from slime.observe.sizes import size_text
from slime_planner.cluster import GIB
from slime_planner.fleet_plan import FleetPlan, StageNeed
from slime_planner.rates import Rates


def rank_text(need: StageNeed, which: str, micro_batch: str, *, critic: bool, reserved: float = 0.0) -> str:
    """What a training rank needs, by part.

    Args:
        need: Of the ranks of a stage.
        which: The stage, in words.
        micro_batch: The largest one, in words.
        critic: Whether a critic is trained beside the policy.
        reserved: Bytes that libraries take besides.
    """
    held, both = need.memory, ", of policy and critic" if critic else ""
    routes = f" + routed experts {size_text(need.routes)}" if need.routes else ""
    libraries = f" + {size_text(reserved)} reserved" if reserved else ""
    return (
        f"a training rank{which}: {size_text(held.total)} = weights {size_text(held.weights)} + gradients"
        f" {size_text(held.gradients)} + optimizer {size_text(held.optimizer)}{both}; in a step"
        f" {size_text(need.total + reserved)} with activations {size_text(need.activations)} (micro-batches of"
        f" {micro_batch}) + {size_text(need.passing)} in passing{routes}{libraries}"
    )


def memory_lines(plan: FleetPlan) -> Iterator[str]:
    """Of training ranks and hosts."""
    have, reserved = plan.cluster.gpu.memory * GIB, plan.rates.reserved
    totals = [need.total + reserved for need in plan.stages]
    if len(totals) > 1:
        yield f"training ranks by stage: {', '.join(f'{total / GIB:.1f}' for total in totals)} GiB"
    for number in {totals.index(max(totals)): None, len(totals) - 1: None}:
        stage = f" of stage {number}" if len(totals) > 1 else ""
        text = rank_text(plan.stages[number], stage, plan.micro_batch, critic=plan.critic, reserved=reserved)
        yield f"{text}: {100 * totals[number] / have:.0f} % of a device's {size_text(have)}"
    host = plan.host
    parts = {
        "offloaded optimizer": host.optimizer,
        "released state, at most": host.colocated,
        "reference": host.reference,
        "routed experts of a batch": host.routes,
    }
    if shown := " + ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size):
        yield f"a host: {size_text(host.total)} of {size_text(plan.cluster.host_memory)} = {shown}"


def engine_lines(plan: FleetPlan) -> Iterator[str]:
    """Of engines and their caches."""
    engine = plan.engine
    at_once = ", ".join(f"{number} of {length:,}" for length, number in plan.requests.items())
    yield (
        f"a device of an engine: weights {size_text(engine.weights)}; cache in what is left of {engine.share:g} of it:"
        f" {engine.tokens:,} tokens in an engine, {engine.token / 1024:.3g} KiB of a token on a device; requests at"
        f" once: {at_once} tokens"
    )


def step_lines(plan: FleetPlan) -> Iterator[str]:
    """Seconds of a step, and of its training."""
    one = plan.training
    turns = f" + turns {plan.turns:.1f}" if plan.turns else ""
    together = "whichever is longer" if plan.config.rollout.async_mode else "in turn"
    yield (
        f"a step: about {plan.step:.0f} s = generation {plan.generating:.0f}, training {one.total:.0f} ({together}) +"
        f" sync {plan.sync.seconds:.1f}{turns}"
    )
    yield (
        f"training: log-probs {one.log_probs:.1f} + matrix products {one.matrices:.1f} + memory {one.memory:.1f} +"
        f" tensor parallelism {one.tensor:.1f} + experts' messages {one.experts:.1f} + bubble {one.bubble:.1f} +"
        f" gradients {one.data:.1f} + optimizer {one.optimizer:.1f} s"
    )


def sync_line(plan: FleetPlan) -> str:
    """The ways of a sync."""
    ways = ", ".join(f"{way.name} {way.seconds:.1f} s" for way in plan.ways)
    return f"weight sync of {plan.sync.bytes / 1e9:.0f} GB: {ways}; a step has {plan.sync.name}"


def assumed_lines(rates: Rates) -> Iterator[str]:
    """The rates behind all of it."""
    yield ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in asdict(rates).items())
    yield (
        "`slime plan --help` describes each, and --rate-NAME changes it there; docs/planning.md compares predictions"
        " with what others measured"
    )
