"""Options of the generators."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from slime.plugin import Options


class SupervisedOptions(Options):
    """Options of `supervised`."""

    append_eos: bool = Field(default=True, description="end the response with the tokenizer's end-of-sequence token")


class ToolLoopOptions(Options):
    """Options of `tool_loop`."""

    tools: tuple[str, ...] = Field(
        default=("calculator",),
        description="tools the model may call, with commas: calculator, python, search, or FILE.py:function",
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


class AgentOptions(Options):
    """Options of all generators whose agents talk to the endpoint."""

    agent_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds an agent has for one sample; what it said until then is TRUNCATED"
    )
    parser: str = Field(
        default="tags",
        description="how the model writes tool calls: tags (<tool_call>{json}</tool_call>), or a name of SGLang's"
        " --tool-call-parser",
    )


class BlackBoxOptions(AgentOptions):
    """Options of `black_box`."""

    agent: str = Field(
        default="", description="the agent as a Python function: package.module:function or FILE.py:function"
    )
    command: str = Field(default="", description="the agent as a program; {prompt} in it is the prompt's text")

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if bool(self.agent) == bool(self.command):
            raise ValueError("state one of agent (FILE.py:function) and command")
        return self

    @field_validator("agent", mode="after")
    @classmethod
    def _absolute(cls, value: str) -> str:
        """A relative file is in the folder where the run was started, whichever process reads it later."""
        where, colon, name = value.rpartition(":")
        if not where.endswith(".py"):
            return value
        path = Path(where).absolute()
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        return f"{path}{colon}{name}"


class VerifiersOptions(AgentOptions):
    """Options of `verifiers_env`."""

    taskset: str = Field(min_length=1, description="id of the taskset, as `vf-eval` takes it")
    env: dict[str, Any] = Field(
        default={},
        description="JSON object with more of verifiers' `env` settings, such as `taskset` and `agent`",
    )
    python: str = Field(
        default="", description="Python that has `verifiers` and the taskset installed; default: slime's own"
    )
    path: tuple[Path, ...] = Field(default=(), description="folders to import the taskset from, with commas")
    startup_timeout_s: float = Field(default=120.0, gt=0, description="seconds for the taskset to load")

    @field_validator("path", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """A command line gives one word; a relative folder is one of where the run was started."""
        folders = value.split(",") if isinstance(value, str) else value
        return [Path(one).absolute() for one in folders if one] if isinstance(folders, list | tuple) else folders
