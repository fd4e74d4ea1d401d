"""The documented multi-turn function with the engines' own answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.in_house import train_in_house
from tests.support.engines import cpu_engine, running
from tests.support.tiny_models import make_tiny_model
from transformers import AutoTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GENERATE = '''
from slime.data import Sample
from slime.kit.sessions import build_loss_mask, generate_single


def extract_tool_call(response):
    # A random model calls no tool on purpose: half of its answers count as calls.
    return response if sum(map(ord, response)) % 2 else None


async def execute_tool(tool_call):
    return f" the length is {len(tool_call)}, <|eos|> "


def compute_reward(sample):
    return float(len(sample.response) % 2)


async def custom_generate(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    """Multi-turn generation with tool calling."""
    for sample in samples:
        conversation = sample.prompt if isinstance(sample.prompt, list) else [
            {"role": "user", "content": sample.prompt}
        ]

        for turn in range(args.max_turns):
            response = await generate_single(conversation, max_tokens=6)

            tool_call = extract_tool_call(response)
            if tool_call:
                tool_result = await execute_tool(tool_call)
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_result})
            else:
                break

        sample.response = response
        sample.reward = compute_reward(sample)
        sample.loss_mask = build_loss_mask(sample)

    return samples
'''


@pytest.mark.row("G1")
def test_a_custom_function_trains_on_the_exact_tokens_of_every_turn(fork_server: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    (tmp_path / "custom_generate.py").write_text(GENERATE)
    rows = ({"prompt": [{"role": "user", "content": f"question {n}"}]} for n in range(8))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    flags = ["--hf-checkpoint", str(model), "--custom-generate-function-path", f"{tmp_path}/custom_generate.py"]
    flags += ["--prompt-data", f"{tmp_path}/data.jsonl", "--label-key", "none", "--apply-chat-template"]
    flags += ["--max-turns", "5", "--advantage-estimator", "grpo", "--entropy-coef", "0.1", "--lr", "1e-3"]
    flags += ["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"]
    engine = cpu_engine(model, tmp_path, fork_server=fork_server)
    with running(engine):
        steps = train_in_house([*flags, "--rollout-max-response-len", "200"], engine, tmp_path)
    assert len(steps) == 2
    # With one token too many or too few between the turns, the two would not agree.
    assert all(step["logprob_gap_max"] < 1e-4 and step["grad_norm"] > 1e-3 for step in steps)
    samples = [json.loads(line) for line in (tmp_path / "rollouts" / "000000.jsonl").read_text().splitlines()]
    turns = [sum(message["role"] == "assistant" for message in sample["messages"]) for sample in samples]
    assert max(turns) > 1, "no conversation had more than one turn"
    assert all((s["trained_tokens"] < s["response_tokens"]) == (n > 1) for s, n in zip(samples, turns, strict=True))
