"""The tables of programs, of what judges and services answer, and of rewards that samples already have."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.tables import programs, verdicts
from tests.support.http_services import serving
from tests.support.reward_models import make_tiny_reward_model
from tests.support.rewards import ask, build, score

from slime.testing import make_sample
from slime_rewards import code_tests
from slime_rewards.code_asserts import Setup
from slime_rewards.extraction import last_fenced


def test_the_tables_are_long() -> None:
    assert len([*programs.FORMS, *programs.BLOCKS, *programs.RUNS]) >= 60
    assert len([*verdicts.JUDGED, *verdicts.SCALED]) >= 60
    assert len(verdicts.ANSWERED) * 2 >= 60
    assert len(verdicts.GIVEN) * 3 >= 60


@pytest.mark.parametrize("key", ["tests", "other", None])
def test_tests_of_programs_are_read(key: str | None) -> None:
    """In metadata under either key, and as a label."""
    wrong: list[Any] = []
    for stated, expected in programs.FORMS:
        if key is None:
            sample = make_sample("q", "", label=stated if isinstance(stated, str) else json.dumps(stated), index=7)
        else:
            sample = make_sample("q", "", metadata={key: stated}, index=7)
        try:
            found = code_tests.tests_of(sample, key or "tests", run_asserts=True)
        except ValueError:
            got: Any = None
        else:
            match found:
                case code_tests.Asserts(tests):
                    got = ("asserts", [step.code for [step] in tests if isinstance(step, Setup)])
                case code_tests.IOTests(cases):
                    got = ("io", cases)
                case code_tests.Calls(function, calls):
                    got = (function, calls)
        if key is None and not isinstance(stated, str | list | dict):
            expected = ("asserts", [json.dumps(stated)])  # as a label, 3 is Python
        if got != expected:
            wrong.append((stated, got, expected))
    assert wrong == []


def test_asserts_that_cannot_be_compared_are_refused() -> None:
    """Whatever else can be read, can be read in either way."""
    refused = []
    for stated, expected in programs.FORMS:
        sample = make_sample("q", "", metadata={"tests": stated}, index=7)
        try:
            code_tests.tests_of(sample, "tests")
        except ValueError:
            refused += [] if expected is None else [stated]
        else:
            assert expected is not None
    assert refused == programs.NOT_COMPARABLE


def test_the_code_of_a_response_is_found() -> None:
    found = [last_fenced(response) for response, _ in programs.BLOCKS]
    assert [response if code is None else code for (response, _), code in zip(programs.BLOCKS, found, strict=True)] == [
        code for _, code in programs.BLOCKS
    ]


@pytest.mark.slow
def test_programs_get_their_share_or_all_or_nothing() -> None:
    wrong: list[Any] = []
    for response, tests, share in programs.RUNS:
        reward = score("code", response, metadata={"tests": tests}, score="share", memory_mb=128)
        whole = reward.parts["passed"] == 1.0
        if reward.value != share or whole != (share == 1.0):
            wrong.append((response, tests, reward))
    assert wrong == []
    for response, tests, share in programs.RUNS[:3]:
        assert score("code", response, metadata={"tests": tests}, score="all").value == float(share == 1.0)


@pytest.fixture(scope="module")
def written() -> Any:
    """A judge that writes what it is asked to."""

    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return {"choices": [{"message": {"content": content["messages"][-1]["content"]}}]}

    with serving(answer) as service:
        yield service


@pytest.mark.parametrize(("no_score", "attempts"), [*itertools.product((None, -1.0), (1, 2))])
def test_scores_of_a_judge(written: Any, no_score: float | None, attempts: int) -> None:
    wrong: list[Any] = []
    rows = [({}, text, None if value is None else value / 10) for text, value in verdicts.JUDGED]
    rows += [({"pattern": p, "lowest": a, "highest": z}, text, value) for p, a, z, text, value in verdicts.SCALED]
    for options, text, expected in rows:
        judge = build(
            "llm_judge", url=written.url, template="{response}", no_score=no_score, attempts=attempts, **options
        )
        try:
            [reward] = ask(judge, [make_sample("q", text)])
        except ValueError:
            got: Any = None
        else:
            got = (reward.value, reward.parts["attempts"])
        default = None if no_score is None else (no_score, attempts)
        if got != (default if expected is None else (pytest.approx(expected), 1)):
            wrong.append((options, text, got))
    assert wrong == []


@pytest.mark.parametrize("protocol", ["batch", "single"])
def test_answers_of_a_service(protocol: str) -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        if protocol == "single":
            return verdicts.ANSWERED[int(content["response"])][0]
        return {"rewards": [verdicts.ANSWERED[int(one["response"])][0] for one in content["samples"]]}

    wrong: list[Any] = []
    with serving(answer) as service:
        for key in ("score", "acc"):
            rows = [(n, row) for n, row in enumerate(verdicts.ANSWERED) if row[1] == key]
            reward = build("remote", url=service.url, protocol=protocol, reward_key=key, retries=0)
            answers = ask(reward, [make_sample("q", str(n)) for n, _ in rows])
            for (_, (entry, _, value, parts)), got in zip(rows, answers, strict=True):
                same = math.isnan(got.value) if math.isnan(value) else got.value == value
                if not same or dict(got.parts) != parts:
                    wrong.append((entry, got))
    assert wrong == []


@pytest.mark.parametrize("missing", [None, 0.0, -1.0])
def test_rewards_that_samples_have(missing: float | None) -> None:
    wrong: list[Any] = []
    for stated, value, parts in verdicts.GIVEN:
        sample = make_sample("q", "a", reward=stated)
        expected: Any = (missing if stated is None else None) if value is None else (value, parts)
        try:
            [reward] = ask(build("given", missing=missing), [sample])
        except ValueError:
            got: Any = None
        else:
            got = reward.value if stated is None else (reward.value, dict(reward.parts))
        if got != expected:
            wrong.append((stated, got, expected))
    assert wrong == []


#: prompts, and responses to each of them, for a reward model
_PROMPTS: list[Any] = [
    "1+1=",
    "",
    "数学 🙂",
    [{"role": "user", "content": "1+1="}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "1+1="},
    ],
]
_RESPONSES = ["2", "it is 3", "", "\n", r"\boxed{\frac{1}{2}}", "数学 🙂", "<think>hm</think>2", "yes " * 200]


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_outputs_of_a_reward_model(chat: bool, tmp_path: Path) -> None:
    """Each prompt with each response, both outputs, against transformers with one text at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = str(make_tiny_reward_model(tmp_path, outputs=2, chat=chat))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    for prompt, response in itertools.product(_PROMPTS, _RESPONSES):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": response})
        plain = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        text = tokenizer.apply_chat_template(messages, tokenize=False) if chat else plain + response
        inputs = tokenizer([text], return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            empty = inputs["input_ids"].shape[1] == 0
            expected.append([0.0, 0.0] if empty else model(**inputs).logits[0].tolist())
    assert len(expected) * 2 >= 60

    samples = []
    for prompt, response in itertools.product(_PROMPTS, _RESPONSES):
        sample = make_sample("", response)
        sample.prompt = prompt
        samples.append(sample)

    async def scored(index: int, output: str) -> list[float]:
        reward = build("reward_model", model_path=folder, index=index, output=output, max_tokens=256)
        return [one.value for one in await reward.score(samples)]

    for index in (0, 1):
        logits = [row[index] for row in expected]
        assert asyncio.run(scored(index, "logit")) == pytest.approx(logits, abs=1e-5)
        squeezed = [1 / (1 + math.exp(-value)) for value in logits]
        assert asyncio.run(scored(index, "sigmoid")) == pytest.approx(squeezed, abs=1e-5)
