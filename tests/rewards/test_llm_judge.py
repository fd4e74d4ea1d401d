"""Scores that a judge writes, over real HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from tests.support.http_services import serving
from tests.support.rewards import ask, build

from slime.errors import ConfigError
from slime.testing import make_sample


def says(*texts: str | None) -> Any:
    """A judge that writes these one after the other, and then repeats the last."""

    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return {"choices": [{"message": {"role": "assistant", "content": texts[min(number, len(texts)) - 1]}}]}

    return answer


def judged(handler: Any, response: str = "Paris", **options: Any) -> tuple[Any, list[Any], list[str]]:
    sample = make_sample("Capital of France?", response, label="Paris", index=7)
    with serving(handler) as service:
        [reward] = ask(build("llm_judge", url=service.url, backoff_s=0.01, **options), [sample])
    return reward, service.requests, service.paths


def test_the_judge_sees_question_reference_and_answer() -> None:
    reward, [request], paths = judged(says("Fine. Score: 7"), system="You are strict.", model="m", max_tokens=9)
    assert (reward.value, reward.parts) == (pytest.approx(0.7), {"attempts": 1.0})
    assert paths == ["/v1/chat/completions"]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("m", 9, 0.0)
    system, user = request["messages"]
    assert system == {"role": "system", "content": "You are strict."}
    assert "Question:\nCapital of France?" in user["content"] and "judge:\nParis" in user["content"]


def test_placeholders_in_a_response_are_not_filled_in() -> None:
    _, [request], _ = judged(says("Score: 1"), "I say {label} {question}", template="{response}|{label}")
    assert request["messages"][0]["content"] == "I say {label} {question}|Paris"


def test_a_chat_is_shown_as_text() -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    with serving(says("Score: 10")) as service:
        sample = make_sample("", "2", label=None)
        sample.prompt = chat
        assert ask(build("llm_judge", url=service.url + "/v1"), [sample])[0].value == 1.0
    assert "be brief\n\n1+1?" in service.requests[0]["messages"][0]["content"]
    assert service.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("written", "value"),
    [("Score: 0", 0.0), ("score = 10", 1.0), ("Score: 2, no: Score: **5.5**", 0.55), ("SCORE:3/10", 0.3)],
)
def test_the_last_score_counts(written: str, value: float) -> None:
    assert judged(says(written))[0].value == pytest.approx(value)


def test_scale_and_pattern_are_options() -> None:
    reward, *_ = judged(says("VERDICT -1"), pattern=r"VERDICT (\S+)", lowest=-1, highest=1)
    assert reward.value == 0.0


@pytest.mark.parametrize("first", ["I cannot say", "Score: 11", "Score: -1", "", None])
def test_a_judge_is_asked_again_if_it_gives_no_score(first: str | None) -> None:
    reward, requests, _ = judged(says(first, "Score: 4"))
    assert (reward.value, reward.parts) == (pytest.approx(0.4), {"attempts": 2.0})
    assert len(requests) == 2


def test_a_sample_without_score_fails_or_gets_the_default() -> None:
    message = r"sample 7: the judge wrote no score from 0 to 10 in 3 attempts, but 'No idea 数学'"
    with pytest.raises(ValueError, match=message):
        judged(says("No idea 数学"), attempts=3)
    reward, *_ = judged(says("No idea"), no_score=0.0)
    assert (reward.value, reward.parts) == (0.0, {"attempts": 2.0})


def test_an_answer_that_is_not_a_completion_is_reported() -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return {"error": "no such model"}

    with pytest.raises(RuntimeError, match=r"answered \{'error': 'no such model'\}, expected a chat completion"):
        judged(answer)


def test_a_temporarily_unavailable_judge_is_retried() -> None:
    async def answer(number: int, content: Any) -> Any:
        return web.Response(status=503) if number == 1 else await says("Score: 10")(number, content)

    assert judged(answer)[0].value == 1.0


def test_another_judge_does_not_get_the_key_of_the_runs_engines() -> None:
    with serving(says("Score: 10")) as service:
        reward = build("llm_judge", url=service.url, engine_url="http://engines", engine_key="opens-the-engines")
        assert ask(reward, [make_sample()])[0].value == 1.0
        assert "Authorization" not in service.headers[0]


def test_without_a_url_the_runs_engines_judge() -> None:
    with serving(says("Score: 10")) as service:
        reward = build("llm_judge", engine_url=service.url, engine_key="opens-the-engines")
        assert ask(reward, [make_sample()])[0].value == 1.0
        assert service.headers[0]["Authorization"] == "Bearer opens-the-engines"
    with pytest.raises(ConfigError, match="url is not set, and the run has no engines to use as judge"):
        build("llm_judge")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "Judge!"}, r"the template has no \{response\}"),
        ({"template_path": "/nowhere"}, "template_path /nowhere: "),
        ({"pattern": r"\d+"}, "has no group"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"lowest": 3, "highest": 1}, "lowest is 3 and highest 1"),
    ],
)
def test_invalid_options_are_refused_before_the_run(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("llm_judge", url="http://x", **options)
