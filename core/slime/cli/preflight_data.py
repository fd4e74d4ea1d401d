"""Prompt files before a run: rows checked and prompts counted in tokens; of large files those of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.cli.preflight_model import ModelFacts
from slime.config import RunConfig
from slime.config.eval_sets import eval_sets
from slime.data.dataset import too_many
from slime.data.feed.work import BlocksJob, Drawn, Work
from slime.data.prompt_source import PromptSource, parse_source, parse_sources
from slime.data.readers.opening import open_reader
from slime.data.readers.reader import Reader
from slime.data.rows import Columns
from slime.data.tokenize import PromptFormat
from slime.errors import ConfigError, DataError

#: pieces of 64 KiB of text, or of 1,024 rows of a table, up to which a file is read whole
WHOLE = 1024
#: pieces of a larger one that are looked at, evenly spaced
SAMPLED = 64
#: row groups of a large Parquet file: a piece of one costs reading all of it
_GROUPS = 8


@dataclass(frozen=True)
class DataFacts:
    """One prompt file."""

    name: str  #: "training", or an evaluation set
    source: PromptSource
    rows: int
    nearly: str  #: "about " or "more than " where the rows were not counted
    longest: int  #: tokens of its longest prompt that is used
    limit: int  #: tokens a prompt may have
    bad: int = 0  #: rows that cannot be used
    overlong: int = 0  #: prompts over the limit
    with_tools: int = 0  #: rows with tools
    looked_at: int | None = None  #: rows that were read; None: all
    share: float | None = None  #: of the prompts, where files are mixed
    later: str = ""  #: when the other rows are checked

    def __str__(self) -> str:
        parts = [
            f"{self.source}: {self.nearly}{self.rows} rows,"
            f" longest prompt {self.longest} of at most {self.limit} tokens"
        ]
        if self.share is not None:
            parts.append(f"{self.share:.1%} of the prompts")
        if self.bad:
            parts.append(f"{self.bad} bad rows are left out")
        if self.overlong:
            parts.append(f"{self.overlong} prompts over the limit are left out")
        if self.looked_at is not None:
            parts.append(f"by {self.looked_at} rows of a sample; the others are checked {self.later}")
        return ", ".join(parts)


@dataclass(frozen=True)
class PromptSet:
    """Files to check, and how long their responses may be."""

    name: str
    files: Sequence[str]
    response: int
    columns: Columns
    apply_chat_template: bool
    #: the option that limits its prompts, where one does
    max_prompt: int | None
    #: whether rows may be left out; no evaluation is of fewer rows than stated
    evaluation: bool


def prompt_sets(config: RunConfig, *, with_engines: bool) -> Iterator[PromptSet]:
    """The files the configuration names.  Without engines responses come from the data, and leave what they leave."""
    response = config.rollout.rollout_max_response_len if with_engines else 1
    data = config.data
    if data.prompt_data:
        yield PromptSet(
            "training",
            data.prompt_data,
            response,
            Columns(data.input_key, data.label_key, data.metadata_key, data.tool_key),
            data.apply_chat_template,
            config.rollout.rollout_max_prompt_len,
            evaluation=False,
        )
    for one in eval_sets(config):
        yield PromptSet(
            one.name,
            [one.path],
            one.max_response_len if with_engines else 1,
            Columns(one.input_key, one.label_key, one.metadata_key, data.tool_key),
            one.apply_chat_template,
            one.max_prompt_len,
            evaluation=True,
        )


def check_data(
    config: RunConfig, prompts: PromptSet, model: ModelFacts | None, tokenizer: Any | None
) -> list[DataFacts]:
    """Look at the files of a set, each on its own.

    Without a tokenizer, prompts are not counted.  Raises `DataError` for the first row that stops the run,
    `ConfigError` when no prompt would have room.
    """
    limit = 0
    if tokenizer is not None and model is not None:
        limit = prompt_room(config, model, prompts.response, prompts.max_prompt)
    sources = [parse_source(prompts.files[0])] if prompts.evaluation else parse_sources(prompts.files)
    total = sum(source.weight for source in sources if source.weight is not None)
    facts = [
        _look(config, prompts, source, tokenizer if limit else None, limit, float(source.weight / total))
        if source.weight is not None and total
        else _look(config, prompts, source, tokenizer if limit else None, limit, None)
        for source in sources
    ]
    key = prompts.columns.tool_key
    if key is not None and not prompts.evaluation and not any(one.with_tools for one in facts):
        raise DataError(f"{', '.join(prompts.files)}: no row has tools under the key {key!r} (--tool-key)")
    return facts


def _look(
    config: RunConfig, prompts: PromptSet, source: PromptSource, tokenizer: Any, limit: int, share: float | None
) -> DataFacts:
    """The facts of one file."""
    data = config.data
    if prompts.evaluation and source.weight is not None:
        raise DataError(f"{source}: an evaluation set has no weight")
    reader = open_reader(source, prompts.columns, by_block=True, most_unpacked=WHOLE * 2**16)
    try:
        jobs, whole = _jobs(reader)
        form = PromptFormat(prompts.apply_chat_template, data.apply_chat_template_kwargs)
        work = Work([reader], tokenizer, form, limit or None)
        budget = data.max_bad_rows if data.bad_rows == "skip" and not prompts.evaluation else None
        drop = data.overlong_prompts == "drop" and not prompts.evaluation
        rows = bad = overlong = longest = with_tools = 0
        for drawn in (one for job in jobs for one in work.perform(job)):
            rows += 1
            if drawn.row is not None:
                longest = max(longest, len(drawn.row.tokens or ()))
                with_tools += drawn.row.tools is not None
            elif drawn.fault == "overlong" and drop:
                overlong += 1
            elif drawn.fault == "bad" and budget is not None:
                bad += 1
                if bad > budget:
                    raise too_many(bad, budget, _message(reader, drawn))
            else:
                raise DataError(_message(reader, drawn))
        if rows == bad + overlong:
            raise DataError(
                f"{source} has no rows that can be used: {bad} are bad, and {overlong} over the limit of {limit} tokens"
                if rows
                else f"{source} has no rows, expected one JSON object per line"
            )
        about, exact = (rows, True) if whole else reader.rows_about()
        nearly = "" if exact else "more than " if reader.incomplete else "about "
        later = "when they are reached" if data.streaming_data and not prompts.evaluation else "when the run begins"
        return DataFacts(
            prompts.name,
            source,
            about,
            nearly,
            longest,
            limit,
            bad,
            overlong,
            with_tools,
            None if whole else rows,
            share,
            later,
        )
    finally:
        reader.close()


def _jobs(reader: Reader) -> tuple[list[BlocksJob], bool]:
    """What to read of a file, and whether that is all of it."""
    blocks = reader.blocks
    pieces = 0
    for block in range(blocks):
        pieces += reader.parts(block)
        if pieces > WHOLE:
            break
    else:
        if not reader.incomplete:
            return [BlocksJob(((0, block),)) for block in range(blocks)], True
    few = min(blocks, _GROUPS if reader.parts(0) > 1 else SAMPLED)
    chosen = [number * blocks // few for number in range(few)]
    return [BlocksJob(((0, block),), None, 0, reader.parts(block)) for block in chosen], False


def _message(reader: Reader, drawn: Drawn) -> str:
    return f"{reader.where(drawn.place)}{drawn.reason}"


def prompt_room(config: RunConfig, model: ModelFacts, response: int, max_prompt: int | None) -> int:
    """Tokens a prompt may have beside a response of `response` tokens, at most `max_prompt`.

    Raises `ConfigError` when that is none, and for a context the engines would not accept.
    """
    engine_context = int(config.sglang.get("context_length", model.context))
    context = config.rollout.rollout_max_context_len or engine_context
    if context > engine_context:
        whose = (
            "--sglang-context-length is" if "context_length" in config.sglang else f"the model in {model.folder} has"
        )
        raise ConfigError(f"--rollout-max-context-len {context} is too long: {whose} {engine_context}")
    if response >= context:
        raise ConfigError(
            f"a response of {response} tokens (--rollout-max-response-len, --eval-max-response-len) leaves no room for"
            f" a prompt in the context of {context} tokens. Shorten responses"
        )
    return min(max_prompt or context, context - response)
