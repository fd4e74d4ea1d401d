"""The contract of generators, tried with a scripted policy."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from slime.errors import EngineError
from slime.plugin import Generator, GeneratorSpec, SamplingParams
from slime.registry.contracts import Snapshot, check_cut_short, check_generated, check_tokens_generated, copy_samples
from slime.testing.contract_rules import Contract, Subject, assert_contract, attributed, check, rule
from slime.testing.samples import CHARACTERS, END, encode, make_sample
from slime.testing.scripted_policy import Say, ScriptedPolicy, Step
from slime.types import Sample, Status

_LIMIT = 16
_DEADLINE_S = 30.0
_SETTLING_S = 5.0


def assert_generator_contract(
    generator: Generator,
    *,
    spec: GeneratorSpec | None = None,
    samples: Sequence[Sample] = (),
    script: Sequence[Step] = (),
) -> None:
    """Raise `AssertionError` with every rule of its kind that a generator breaks.

    Args:
        generator: The generator, built with a tokenizer that knows the tokens of `samples` and `script`; for the
            defaults that is the one of `slime.testing.make_tokenizer`.
        spec: What its plugin registers (whether it needs engines); default: `GeneratorSpec`'s defaults.
        samples: Pending samples to answer; default: additions.
        script: What the policy says to each; default: one text that ends with the end-of-sequence token.
    """
    assert_contract(
        partial(GeneratorContract, samples=samples, script=script),
        lambda **_: generator,
        spec or GeneratorSpec(name="it", factory="module:Class"),
    )


class GeneratorContract(Contract):
    """Tries a generator."""

    method = "generate"

    def __init__(self, subject: Subject, samples: Sequence[Sample] = (), script: Sequence[Step] = ()) -> None:
        super().__init__(subject)
        self._samples = list(samples) or [
            make_sample(f"{n}+1=", None, label=str(n + 1), index=10 + n, group_index=3) for n in range(4)
        ]
        self._script = list(script) or [Say([*encode("so it is 42"), CHARACTERS.index(END)])]

    @rule("returns finished samples for a pending one", basic=True)
    def finished(self) -> None:
        produced = self._run(ScriptedPolicy(self._script), "a response that ends")
        check(
            any(sample.trainable for sample in produced),
            f"{self.call}, given a response that ends, returned only samples with status"
            f" {', '.join(sample.status.name for sample in produced)}; expected one to train on",
        )

    @rule("answers several samples at once without mixing them up")
    def several(self) -> None:
        samples = copy_samples(self._samples)
        asked = [Snapshot.of(sample) for sample in samples]
        policy = ScriptedPolicy(self._script)

        async def all_at_once() -> list[list[Sample]]:
            calls = (self.component.generate(sample, _sampling(), policy) for sample in samples)
            return list(await asyncio.gather(*calls))

        with attributed(self.call, f"{len(samples)} samples at once"):
            answers = self._ask(all_at_once)
            for produced, wanted in zip(answers, asked, strict=True):
                check_generated(produced, wanted)
                # A generator may build a prompt around the one that it was given.
                got = sorted({_text(sample.prompt) for sample in produced if sample.index == wanted.index})
                check(
                    not got or any(_text(wanted.prompt) in prompt for prompt in got) or len(produced) > 1,
                    f"sample {wanted.index} came back with prompt {got}; expected {wanted.prompt!r}",
                )

    @rule("returns samples that can be sent to another process")
    def picklable(self) -> None:
        produced = self._run(ScriptedPolicy(self._script), "a response that ends")
        with attributed("pickling what it returned", "for the trainer's process"):
            pickle.dumps(produced)

    @rule("never calls the policy", when=lambda contract: not contract.spec.needs_engine)
    def never_asks(self) -> None:
        policy = ScriptedPolicy(self._script)
        self._run(policy, "a sample")
        check(not policy.calls, f"{self.call} asked the policy, but its spec says needs_engine=False")

    @rule("trains on the policy's own tokens and log-probs", when=lambda contract: contract.spec.needs_engine)
    def own_tokens(self) -> None:
        policy = ScriptedPolicy(self._script)
        produced = self._run(policy, "a response that ends")
        with attributed(self.call, "a response that ends"):
            check_tokens_generated(produced, policy.answers)
        versions = {version for answer in policy.answers for version in answer.weight_versions}
        for sample in produced:
            check(
                not sample.trainable or (bool(sample.weight_versions) and versions.issuperset(sample.weight_versions)),
                f"{self.call} returned weight_versions {sample.weight_versions}; expected those of the answers it"
                f" used, {sorted(versions)} (without them nobody knows how stale the sample is)",
            )

    @rule("requests no more tokens than allowed", when=lambda contract: contract.spec.needs_engine)
    def limit(self) -> None:
        policy = ScriptedPolicy(self._script)
        self._run(policy, f"max_new_tokens={_LIMIT}")
        greatest = max((call.sampling.max_new_tokens for call in policy.calls), default=0)
        check(
            greatest <= _LIMIT, f"{self.call} asked for {greatest} tokens; expected at most the {_LIMIT} it was given"
        )

    @rule("marks a response that was cut at its limit as TRUNCATED", when=lambda contract: contract.spec.needs_engine)
    def truncated(self) -> None:
        policy = ScriptedPolicy([Say([20 + n for n in range(_LIMIT)], finish_reason="length")])
        for sample in self._run(policy, "a response that hit its limit"):
            check(
                sample.status is not Status.COMPLETED,
                f"{self.call}, given a response that hit its limit (finish_reason 'length'), returned status"
                " COMPLETED; expected TRUNCATED, or a status that is not trained on",
            )

    @rule("does not train on a response that the engine aborted", when=lambda contract: contract.spec.needs_engine)
    def aborted(self) -> None:
        policy = ScriptedPolicy([Say([20, 21], finish_reason="abort")])
        for sample in self._run(policy, "a response that was aborted"):
            check(
                not sample.trainable,
                f"{self.call}, given a response that the engine aborted, returned status {sample.status.name};"
                " expected ABORTED",
            )

    @rule("passes on errors of the engines", when=lambda contract: contract.spec.needs_engine)
    def engine_error(self) -> None:
        error = EngineError("engine 0 died (scripted)")
        policy = ScriptedPolicy([error])
        try:
            self._ask(lambda: self._start(policy))
        except AssertionError:
            raise
        except Exception as raised:  # noqa: BLE001 - a generator may wrap the error
            reason: BaseException | None = raised
            while reason is not None and reason is not error:
                reason = reason.__cause__ or reason.__context__
            check(reason is error, f"{self.call} raised {raised!r} where its policy raised {error!r}; expected that")
        else:
            check(not policy.calls, f"{self.call} swallowed {error!r} of its policy; expected it to be raised")

    @rule("stops when it is cancelled and leaves nothing running", when=lambda contract: contract.spec.needs_engine)
    def cancelled(self) -> None:
        policy = ScriptedPolicy([Say([20], delay_s=math.inf)])

        async def cancel() -> None:
            before = asyncio.all_tasks()
            task = asyncio.ensure_future(self._start(policy))
            asked = asyncio.ensure_future(policy.asked.wait())
            await asyncio.wait({task, asked}, timeout=_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if not policy.calls:
                check(task.done(), f"{self.call} did not ask its policy within {_DEADLINE_S:g} s")
                return
            task.cancel()
            await asyncio.wait({task}, timeout=_SETTLING_S)
            check(
                task.done(),
                f"{self.call} went on for {_SETTLING_S:g} s after it was cancelled; expected it to end at once",
            )
            check(
                task.cancelled(),
                f"{self.call} swallowed its cancellation; expected asyncio.CancelledError to be raised",
            )
            await _check_nothing_runs(f"{self.call}, when it was cancelled,", before | {asked})

        with attributed(self.call, "a cancellation"):
            self._ask(cancel, timeout_s=2 * _DEADLINE_S)

    @rule(
        "ends what it started when it is closed, and can be closed twice",
        when=lambda contract: hasattr(contract.component, "close"),
    )
    def closed(self) -> None:
        close = self.component.close

        async def twice() -> None:
            for _ in range(2):
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
            await _check_nothing_runs(what, {asyncio.current_task()})

        what = f"{self.name}.close"
        with attributed(what, "twice"):
            self.subject.caller.call(twice, timeout_s=_DEADLINE_S, what=what)

    @rule("continues a response that was cut short, as its spec says", when=lambda contract: contract.spec.resumes)
    def resumes(self) -> None:
        """Cut short after two tokens, then handed out again as slime does it."""
        first, then = ScriptedPolicy([Say([20, 21], finish_reason="abort")]), ScriptedPolicy(self._script)
        case = "a response that was aborted after two tokens"
        with attributed(self.call, case):
            asked = Snapshot.of(self._samples[0])
            produced = self._ask(lambda: self._start(first))
            check_cut_short(check_generated(produced, asked), asked)
        [sample] = produced
        sample.status, sample.failure, sample.finish_reason, sample.rollout_id = Status.PENDING, None, None, None
        before = Snapshot.of(sample)
        with attributed(self.call, f"{case}, again"):
            check_generated(self._ask(lambda: self.component.generate(sample, _sampling(), then)), before)
        check(bool(then.calls), f"{self.call} did not ask its policy to continue {case}")
        asked_for, left = then.calls[0], _LIMIT - len(before.begun)
        check(
            asked_for.tokens == before.prompt_tokens + before.begun and asked_for.sampling.max_new_tokens == left,
            f"{self.call} asked its policy for {asked_for.sampling.max_new_tokens} tokens after {asked_for.tokens};"
            f" expected {left} after {before.prompt_tokens + before.begun}, the prompt and the tokens so far",
        )

    async def _start(self, policy: ScriptedPolicy) -> list[Sample]:
        produced: list[Sample] = await self.component.generate(copy_samples(self._samples[:1])[0], _sampling(), policy)
        return produced

    def _run(self, policy: ScriptedPolicy, case: str) -> list[Sample]:
        with attributed(self.call, case):
            return check_generated(self._ask(lambda: self._start(policy)), Snapshot.of(self._samples[0]))

    def _ask(self, make: Callable[[], Any], *, timeout_s: float = _DEADLINE_S) -> Any:
        return self.subject.caller.call(make, timeout_s=timeout_s, what=self.call)


async def _check_nothing_runs(what: str, but: AbstractSet[object]) -> None:
    """Check that `what` has left no task running in this event loop except `but`."""
    await asyncio.sleep(0.05)
    left = [str(task.get_coro()) for task in asyncio.all_tasks() - but]
    check(not left, f"{what} left tasks running: {', '.join(left)}")


def _text(prompt: str | Sequence[dict[str, Any]]) -> str:
    """The text of a prompt."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)


def _sampling() -> SamplingParams:
    return SamplingParams(max_new_tokens=_LIMIT, sampling_seed=1)
