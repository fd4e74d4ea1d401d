"""slime's own rewards, registered like those of any other plugin."""

from __future__ import annotations

from slime.plugin import RewardSpec, hookimpl
from slime_rewards.options import (
    CodeOptions,
    ExactMatchOptions,
    F1Options,
    FormatOptions,
    GivenOptions,
    JsonSchemaOptions,
    LengthOptions,
    LLMJudgeOptions,
    MathOptions,
    MultipleChoiceOptions,
    RemoteOptions,
    RewardModelOptions,
)

slime_api = 1

_DOCS = "docs/rewards-catalogue.md"


@hookimpl
def slime_register_rewards() -> list[RewardSpec]:
    """The rewards of this package."""
    return [
        RewardSpec(
            name="exact_match",
            factory="slime_rewards.exact_match:ExactMatch",
            options=ExactMatchOptions,
            summary="1 if the answer in the response equals the label, else 0",
            isolation="none",  # a single pass over a string cannot block
            docs=_DOCS,
        ),
        RewardSpec(
            name="math",
            factory="slime_rewards.math_answer:MathAnswer",
            options=MathOptions,
            summary="1 if the answer is mathematically equal to the label, else 0",
            timeout_s=10.0,
            docs=_DOCS,
        ),
        RewardSpec(
            name="multiple_choice",
            factory="slime_rewards.multiple_choice:MultipleChoice",
            options=MultipleChoiceOptions,
            summary="1 if the response chooses the letter or number of the label, else 0",
            isolation="none",  # its regular expressions have bounded repeats
            docs=_DOCS,
        ),
        RewardSpec(
            name="f1",
            factory="slime_rewards.f1:F1",
            options=F1Options,
            summary="word overlap of answer and label, normalized as for SQuAD",
            isolation="none",
            docs=_DOCS,
        ),
        RewardSpec(
            name="format",
            factory="slime_rewards.format:Format",
            options=FormatOptions,
            summary="whether the response has the required tags in order, or matches a pattern",
            timeout_s=10.0,
            docs=_DOCS,
        ),
        RewardSpec(
            name="length",
            factory="slime_rewards.length:Length",
            options=LengthOptions,
            summary="lower for longer responses: linear, cosine, or a penalty for overlong ones",
            isolation="none",
            docs=_DOCS,
        ),
        RewardSpec(
            name="json_schema",
            factory="slime_rewards.json_schema:JsonSchema",
            options=JsonSchemaOptions,
            summary="1 if the response is JSON that a schema allows, else 0",
            timeout_s=10.0,
            docs=_DOCS,
        ),
        RewardSpec(
            name="code",
            factory="slime_rewards.code:Code",
            options=CodeOptions,
            summary="1 if the Python code in the response passes the sample's tests, run in a sandbox",
            timeout_s=120.0,
            deterministic=False,  # time limits depend on the machine
            docs=_DOCS,
        ),
        RewardSpec(
            name="given",
            factory="slime_rewards.given:Given",
            options=GivenOptions,
            summary="the reward that the sample's generator, agent or environment set",
            isolation="none",
            docs=_DOCS,
        ),
        RewardSpec(
            name="remote",
            factory="slime_rewards.remote:Remote",
            options=RemoteOptions,
            summary="the reward that a service over HTTP gives",
            timeout_s=300.0,
            deterministic=False,
            docs=_DOCS,
        ),
        RewardSpec(
            name="llm_judge",
            factory="slime_rewards.llm_judge:LLMJudge",
            options=LLMJudgeOptions,
            summary="the score that a language model gives, through an OpenAI-compatible endpoint",
            timeout_s=300.0,
            deterministic=False,
            docs=_DOCS,
        ),
        RewardSpec(
            name="reward_model",
            factory="slime_rewards.reward_model:RewardModel",
            options=RewardModelOptions,
            summary="the output of a Hugging Face sequence-classification model",
            timeout_s=120.0,
            deterministic=False,  # the last digits depend on which samples share a batch
            docs=_DOCS,
        ),
    ]
