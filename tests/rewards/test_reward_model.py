"""Reward models: slime's reward for them, and a custom class."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.registry.local_runs import build as build_local
from tests.registry.local_runs import run_config, write
from tests.support.reward_models import make_tiny_reward_model
from tests.support.rewards import ask, build

from slime.errors import ConfigError
from slime.testing import make_sample

SAMPLES = [make_sample("1+1=", text, index=n) for n, text in enumerate(("2", "it is 3", "", "no idea at all"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_reward_model(tmp_path_factory.mktemp("model"), outputs=2)


def logits(folder: Path, texts: list[str]) -> list[list[float]]:
    """Scores one at a time, directly from transformers."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(**tokenizer([text], return_tensors="pt")).logits[0].tolist() for text in texts]


def conversation(folder: Path, prompt: str, response: str) -> str:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return str(AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False))


def test_rewards_do_not_depend_on_the_batch(folder: Path) -> None:
    expected = logits(folder, [conversation(folder, "1+1=", sample.response) for sample in SAMPLES])
    for index in (0, 1):
        rewards = ask(build("reward_model", model_path=str(folder), index=index, batch_size=3), SAMPLES)
        assert [one.value for one in rewards] == pytest.approx([row[index] for row in expected], abs=1e-5)


def test_sigmoid_gives_rewards_between_0_and_1(folder: Path) -> None:
    plain = ask(build("reward_model", model_path=str(folder)), SAMPLES)
    squeezed = ask(build("reward_model", model_path=str(folder), output="sigmoid"), SAMPLES)
    assert [one.value for one in squeezed] == pytest.approx([1 / (1 + math.exp(-one.value)) for one in plain], abs=1e-6)


def test_the_beginning_of_sequence_token_is_added_once(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = make_tiny_reward_model(tmp_path)
    plain = ask(build("reward_model", model_path=str(folder)), SAMPLES)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    begin = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)  # it adds a token at the beginning of texts, but its chat template is complete
    assert [one.value for one in ask(build("reward_model", model_path=str(folder)), SAMPLES)] == pytest.approx(
        [one.value for one in plain], abs=1e-5
    )


def test_without_a_chat_template_the_response_follows_the_prompt(tmp_path: Path) -> None:
    folder = make_tiny_reward_model(tmp_path, chat=False)
    [reward, *_] = ask(build("reward_model", model_path=str(folder)), SAMPLES)
    assert reward.value == pytest.approx(logits(folder, ["1+1=2"])[0][0], abs=1e-5)


def test_the_end_of_long_texts_is_read(folder: Path) -> None:
    reward = build("reward_model", model_path=str(folder), max_tokens=16)
    same_end = [make_sample("q", "x" * n + "the very same end") for n in (50, 500)]
    first, second = ask(reward, same_end)
    assert first.value == pytest.approx(second.value, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"), [({"model_path": "/nowhere"}, "/nowhere is not a folder"), ({"index": 2}, "has 2 outputs")]
)
def test_an_unsuitable_model_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("reward_model", **{"model_path": str(folder), **options})


@pytest.mark.slow
def test_a_custom_reward_model_class_scores_with_a_real_model(folder: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "custom_rm.py",
        """
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        class CustomRewardModel:
            def __init__(self, model_path):
                self.model = AutoModelForSequenceClassification.from_pretrained(model_path)
                self.tokenizer = AutoTokenizer.from_pretrained(model_path)

            def compute_reward(self, prompts, responses):
                texts = [prompt + response for prompt, response in zip(prompts, responses)]
                inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
                with torch.no_grad():
                    scores = self.model(**inputs).logits[:, 0]
                return scores.tolist()
        """,
    )
    config = run_config(reward={"custom_rm_path": str(path)}, component_options={"reward": {"model_path": str(folder)}})
    rewards = ask(build_local(config, "reward", tmp_path), SAMPLES)
    expected = logits(folder, ["1+1=" + sample.response for sample in SAMPLES])
    assert [one.value for one in rewards] == pytest.approx([row[0] for row in expected], abs=1e-5)
