"""slime's own generators, registered like those of any other plugin."""

from __future__ import annotations

from slime.plugin import GeneratorSpec, hookimpl
from slime_generators.options import BlackBoxOptions, SupervisedOptions, ToolLoopOptions, VerifiersOptions

slime_api = 1


@hookimpl
def slime_register_generators() -> list[GeneratorSpec]:
    """The generators of this package."""
    return [
        GeneratorSpec(
            name="single_turn",
            factory="slime_generators.single_turn:SingleTurn",
            summary="one response of the policy to each prompt",
            resumes=True,
            single_turn=True,
        ),
        GeneratorSpec(
            name="supervised",
            factory="slime_generators.supervised:Supervised",
            options=SupervisedOptions,
            summary="the label as the response, for supervised fine-tuning",
            needs_engine=False,
            single_turn=True,
        ),
        GeneratorSpec(
            name="tool_loop",
            factory="slime_generators.tool_loop:ToolLoop",
            options=ToolLoopOptions,
            summary="a conversation in which the model calls tools, until it answers without a call",
            prompt_tools="slime_generators.tools:prompt_tools",
        ),
        GeneratorSpec(
            name="black_box",
            factory="slime_generators.endpoint:BlackBox",
            options=BlackBoxOptions,
            summary="your own agent, unmodified, with the policy as an OpenAI-compatible endpoint",
        ),
        GeneratorSpec(
            name="verifiers_env",
            factory="slime_generators.endpoint:VerifiersEnv",
            options=VerifiersOptions,
            summary="an environment of the verifiers package, unmodified, with its own harness and rewards",
        ),
    ]
