"""Options of the generators. Imported whenever slime starts, so it must stay light."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from slime.plugin import Options
from slime.shops import import_shop


class SupervisedOptions(Options):
    """Options of `supervised`."""

    append_eos: bool = Field(default=True, description="end the response with the tokenizer's end-of-sequence token")


class ToolLoopOptions(Options):
    """Options of `tool_loop`."""

    tools: tuple[str, ...] = Field(
        default=("calculator",),
        description="tools the model may call, separated by commas: calculator, python, search, or FILE.py:function",
    )
    parser: str = Field(
        default="tags",
        description="format of tool calls: tags (<tool_call>{json}</tool_call>), or a name of SGLang's"
        " --tool-call-parser",
    )
    show_tools: bool = Field(
        default=True,
        description="pass the tools to the chat template; false: keep prompts as in the data (always the case without"
        " --apply-chat-template and with --tool-key)",
    )
    tool_timeout_s: float = Field(default=30.0, gt=0, description="deadline of one tool call in seconds")
    tool_max_chars: int = Field(
        default=4096, ge=1, description="characters of a tool's result that the model sees; the rest is cut off"
    )
    turn_max_tokens: int | None = Field(
        default=None, ge=1, description="maximum tokens of one answer; default: the rest of --rollout-max-response-len"
    )
    search_corpus: Path | None = Field(
        default=None, description="file that `search` searches: JSONL rows with `text`, or one passage per line"
    )
    search_results: int = Field(default=3, ge=1, description="maximum number of passages that `search` returns")
    require_isolation: Literal["namespaces", "filter", "limits"] = Field(
        default="filter",
        description="weakest isolation that `python` accepts (see SECURITY.md); a machine that permits less is refused",
    )

    @field_validator("tools", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split the value of a command line, such as `calculator,python`."""
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value

    @field_validator("tools", mode="after")
    @classmethod
    def _sandbox(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse `python` without the sandbox before a run starts, and not at the first call."""
        if "python" in value:
            import_shop("slime_sandbox", "the tool `python`")
        return value


class AgentOptions(Options):
    """Options of all generators that run an agent against an endpoint."""

    agent_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds that an agent has for one sample; its conversations until then are kept as TRUNCATED",
    )
    parser: str = Field(
        default="tags",
        description="format of the model's tool calls: tags (<tool_call>{json}</tool_call>), or a name of SGLang's"
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
            raise ValueError("expected either agent (FILE.py:function) or command")
        return self

    @field_validator("agent", mode="after")
    @classmethod
    def _absolute(cls, value: str) -> str:
        """Make a relative file absolute: processes that read it later have other working folders."""
        file, colon, name = value.rpartition(":")
        if not file.endswith(".py"):
            return value
        path = Path(file).absolute()
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        return f"{path}{colon}{name}"


class VerifiersOptions(AgentOptions):
    """Options of `verifiers_env`."""

    taskset: str = Field(min_length=1, description="id of the taskset, as `vf-eval` takes it")
    env: dict[str, Any] = Field(
        default={},
        description="JSON object of further `env` settings of verifiers, such as `taskset` and `agent`",
    )
    python: str = Field(
        default="", description="Python in which `verifiers` and the taskset are installed; default: slime's own"
    )
    path: tuple[Path, ...] = Field(default=(), description="folders to import the taskset from, separated by commas")
    startup_timeout_s: float = Field(default=120.0, gt=0, description="deadline for loading the taskset in seconds")

    @field_validator("path", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split the value of a command line, and make relative folders absolute."""
        folders = value.split(",") if isinstance(value, str) else value
        return [Path(one).absolute() for one in folders if one] if isinstance(folders, list | tuple) else folders
