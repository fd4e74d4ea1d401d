"""An agent for sums: it asks a model through OpenAI's client, checks the answer, and objects if it is wrong.

It does not import slime, and works with any OpenAI-compatible server:

    OPENAI_API_KEY=... python examples/openai-agent/agent.py https://api.openai.com/v1 gpt-5-mini "27+58="
"""

from __future__ import annotations

import os
import sys
from typing import Any

from openai import OpenAI

#: maximum number of answers per task
TRIES = 3


def solve(base_url: str, api_key: str, model: str, messages: list[dict[str, Any]]) -> str:
    """The model's answer to a sum. The agent objects to answers whose last digit is wrong."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        talk: list[Any] = list(messages)
        for _ in range(TRIES):
            answer = client.chat.completions.create(model=model, messages=talk, temperature=0.2)
            said = (answer.choices[0].message.content or "").strip()
            if last_digit_fits(str(messages[-1]["content"]), said):
                break
            talk += [answer.choices[0].message, {"role": "user", "content": "no. again"}]
    return said


def last_digit_fits(question: str, answer: str) -> bool:
    """Whether the answer ends in the last digit of the sum."""
    first, _, second = question.rstrip("= ").partition("+")
    return answer[-1:] == str((int(first) + int(second)) % 10)


if __name__ == "__main__":
    base_url, model, question = sys.argv[1:]
    print(solve(base_url, os.environ["OPENAI_API_KEY"], model, [{"role": "user", "content": question}]))
