"""Options of the generators."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from slime.plugin import Options


class SupervisedOptions(Options):
    """Options of `supervised`."""

    append_eos: bool = Field(default=True, description="end the response with the tokenizer's end-of-sequence token")


class ToolLoopOptions(Options):
    """Options of `tool_loop`."""

    tools: tuple[str, ...] = Field(
        default=("calculator",),
        description="tools the model may call, with commas: calculator, python, search, or module:function of your own",
    )
    parser: str = Field(
        default="tags",
        description="how calls are written: tags (<tool_call>{json}</tool_call>), or a name of SGLang's"
        " --tool-call-parser",
    )
    show_tools: bool = Field(
        default=True,
        description="give the tools to the chat template; false: prompts as the data has them (always so for prompts"
        " without --apply-chat-template and for rows with tools of their own)",
    )
    tool_timeout_s: float = Field(default=30.0, gt=0, description="seconds one call of a tool may take")
    tool_max_chars: int = Field(
        default=4096, ge=1, description="characters of a tool's result that the model is shown; the rest is cut off"
    )
    turn_max_tokens: int | None = Field(
        default=None, ge=1, description="tokens of one answer; default: what is left of --rollout-max-response-len"
    )
    search_corpus: Path | None = Field(
        default=None, description="what `search` searches: JSONL rows with `text`, or one passage a line"
    )
    search_results: int = Field(default=3, ge=1, description="passages that `search` gives at most")

    @field_validator("tools", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """A command line gives one word: `calculator,python`."""
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
