"""A solver and a reviewer in one policy: a generate function that returns several samples, and their reward.

    slime train ... --custom-generate-function-path team.py --custom-rm-path team.py

The solver answers. The reviewer, in a branch of the conversation, is asked `ok?` and says `yes` or `no`. If it says
anything but `yes`, the solver gets the message `no` and answers once more. Both branches are trained on, but the answer
that they share only in the solver's. Together they are one rollout and count once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.kit.chat import ChatTemplate, Conversation
from slime.plugin import PolicyClient, Sample, SamplingParams

ANSWER_TOKENS = 4


async def custom_generate(
    args: Any,  # noqa: ARG001 - unused, but shows the usual signature
    sample: Sample,
    sampling: SamplingParams,
    policy: PolicyClient,
    tokenizer: Any,
) -> list[Sample]:
    """The solver's sample and the reviewer's."""
    template, limit = ChatTemplate(tokenizer), replace(sampling, max_new_tokens=ANSWER_TOKENS)

    async def ask(talk: Conversation) -> str:
        """Let the policy answer; returns the text without surrounding white space."""
        answer = await policy.generate(talk.tokens, limit, session=str(sample.index))
        return talk.generated(answer).strip()

    solver = Conversation(template, sample.tokens)
    first = await ask(solver)
    reviewer = solver.fork()
    reviewer.add([{"role": "user", "content": "ok?"}])
    verdict = await ask(reviewer)
    if verdict != "yes":
        solver.add([{"role": "user", "content": "no"}])
        await ask(solver)
    right = first == sample.label
    produced = [solver.to_sample(sample), reviewer.to_sample(sample)]
    for one, role in zip(produced, ("solver", "reviewer"), strict=True):
        one.metadata |= {"role": role, "first_right": right}
        one.metrics |= {"team/first_right": float(right), "team/asked_again": float(verdict != "yes")}
    return produced


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:  # noqa: ARG001 - the usual signature
    """Solver: 1 for a correct last answer. Reviewer: 1 for a correct verdict. The team's reward is their mean."""
    said = sample.response.strip()
    if sample.metadata["role"] == "solver":
        return float(said == sample.label)
    return float(said == ("yes" if sample.metadata["first_right"] else "no"))
