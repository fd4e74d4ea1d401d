"""The documented multi-turn function with the engines' own answers, started through `train.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiny_models import make_tiny_model
from transformers import AutoTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
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
def test_a_custom_function_trains_on_the_exact_tokens_of_every_turn(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    (tmp_path / "custom_generate.py").write_text(GENERATE)
    rows = ({"prompt": [{"role": "user", "content": f"question {n}"}]} for n in range(8))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    command = [sys.executable, str(ROOT / "train.py"), "--hf-checkpoint", str(model), "--run-name", "run"]
    command += ["--custom-generate-function-path", "custom_generate.py", "--max-turns", "5"]
    command += ["--prompt-data", "data.jsonl", "--label-key", "none", "--apply-chat-template"]
    command += ["--advantage-estimator", "grpo", "--entropy-coef", "0.1", "--lr", "1e-3", "--num-rollout", "2"]
    command += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "200"]
    command += ["--sglang-max-total-tokens", "16384"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    run = tmp_path / "outputs" / "run"
    steps = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "time/step" in row]
    assert len(steps) == 2
    # With one token too many or too few between the turns, the two would not agree.
    assert all(step["train/logprob_gap_max"] < 1e-4 and step["train/grad_norm"] > 1e-3 for step in steps)
    samples = [json.loads(line) for line in (run / "rollouts" / "000000.jsonl").read_text().splitlines()]
    turns = [sum(message["role"] == "assistant" for message in sample["messages"]) for sample in samples]
    assert max(turns) > 1, "no conversation had more than one turn"
    assert all((s["trained_tokens"] < s["response_tokens"]) == (n > 1) for s, n in zip(samples, turns, strict=True))
