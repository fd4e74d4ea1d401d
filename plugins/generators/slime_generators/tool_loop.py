"""Conversations of several turns: the model calls tools and reads their results, until it answers without a call."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from slime.errors import DataError
from slime.kit.chat import ChatTemplate, Conversation, Toolbox, ToolCall, ToolResult
from slime.kit.sessions import parser_factory
from slime.plugin import Context, PolicyClient, Sample, SamplingParams, Status
from slime_generators.options import ToolLoopOptions
from slime_generators.tool_metrics import ToolMetrics
from slime_generators.tools import load, prompt_tools

#: most answers in a conversation if --max-turns is not set
DEFAULT_TURNS = 16


class ToolLoop:
    """Asks the policy, runs the tools that its answer calls, appends their results, and asks again.

    Training uses exactly the tokens that the engine received and returned; see `slime.kit.chat.Conversation`. The
    response is the whole conversation after the prompt, including the tools' results, and
    `--rollout-max-response-len` limits all of it.

    A conversation is COMPLETED by an answer that calls no tool. It is TRUNCATED if an answer is cut off, if a tool's
    result and one more token do not fit, or if the last of `--max-turns` answers still calls a tool.

    A call that fails for any reason gets a result that begins with `error:`, and the model may try again.
    """

    def __init__(self, options: ToolLoopOptions, context: Context) -> None:
        """Initialize.

        Raises:
            ValueError: A tool cannot be loaded, or the tokenizer has no chat template that shows the results of tools.
        """
        config = context.config
        tools = load(options)
        self._template = ChatTemplate(context.tokenizer, **config.data.apply_chat_template_kwargs)
        self._template.require_shown("tool")
        self._toolbox = Toolbox(tools, timeout_s=options.tool_timeout_s, max_chars=options.tool_max_chars)
        self._parser = parser_factory(options.parser, context.tokenizer)([tool.schema for tool in tools])
        self._schemas = prompt_tools(options, config)
        self._max_turns: int = config.rollout.max_turns or DEFAULT_TURNS
        self._max_context: int | None = config.rollout.rollout_max_context_len
        self._turn_max_tokens = options.turn_max_tokens

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        """The sample with its conversation.

        Raises:
            DataError: The sample has no prompt tokens, or prompt and tools leave no room for an answer.
        """
        talk = self._begin(sample)
        metrics = ToolMetrics(self._toolbox.tools)
        session = None if sample.index is None else str(sample.index)
        cut: str | None = None
        while True:
            room = self._room(talk, sampling)
            if room < 1:
                raise DataError(
                    f"sample {sample.index}: a prompt of {talk.prompt_length} tokens leaves no room to answer"
                )
            limit = room if self._turn_max_tokens is None else min(room, self._turn_max_tokens)
            turn = replace(sampling, max_new_tokens=limit, routed_from=talk.answers.routed_tokens)
            answer = await policy.generate(talk.tokens, turn, session=session)
            text = talk.generated(answer)
            metrics.turns += 1
            calls = self._parser.parse(text) if answer.finish_reason == "stop" else []
            if not calls:
                break
            if metrics.turns == self._max_turns:
                cut = "max_turns"
                break
            # The engine's report has an entry per token: free it before tools and the next answer run.
            del answer
            messages = await self._run(calls, metrics)
            new = talk.continuation(messages)
            if len(new) >= self._room(talk, sampling):
                cut = "length"
                break
            talk.add(messages, new)
        finished = talk.to_sample(sample)
        if cut is not None:
            finished.status, finished.finish_reason = Status.TRUNCATED, cut
        finished.non_generation_time += metrics.seconds
        finished.metrics |= metrics.of_sample()
        return [finished]

    @cached_property
    def _described(self) -> bool:
        """Whether the template describes tools to the model."""
        asked = [{"role": "user", "content": "-"}]
        return self._template.prompt(asked) != self._template.prompt(asked, tools=self._schemas or None)

    def _begin(self, sample: Sample) -> Conversation:
        """A conversation with the sample's prompt, which describes the tools if the template does."""
        if not sample.tokens:
            raise DataError(f"sample {sample.index} has no prompt tokens")
        if not self._described:
            return Conversation(self._template, sample.tokens)
        asked = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
        # A data source of one's own may not have rendered the tools.
        tokens = self._template.prompt(asked, tools=self._schemas)
        first: dict[str, Any] = {**asked[0], "tools": list(self._toolbox.tools)}
        return Conversation(self._template, tokens, prompt=[first, *asked[1:]])

    def _room(self, talk: Conversation, sampling: SamplingParams) -> int:
        """Number of tokens by which the response may still grow."""
        room = sampling.max_new_tokens - talk.response_length
        return room if self._max_context is None else min(room, self._max_context - len(talk.tokens))

    async def _run(self, calls: list[ToolCall], metrics: ToolMetrics) -> list[dict[str, Any]]:
        """Run the calls of one turn and return the messages with their results."""
        with metrics.timed():
            results = await self._toolbox.run_all(calls)
        metrics.count(results)
        return [_message(number, result) for number, result in enumerate(results)]


def _message(number: int, result: ToolResult) -> dict[str, Any]:
    # Nine letters and digits, as the strictest chat templates require of an id.
    return {
        "role": "tool",
        "content": result.text,
        "name": result.tool or "unknown",
        "tool_call_id": f"call{number % 100000:05d}",
    }
