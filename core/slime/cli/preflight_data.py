"""Prompt files before a run: rows checked and prompts counted in tokens; of large files those of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from slime.data.tokenize import PLAIN, PromptFormat
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
    later: str = "when the run begins"  #: when the other rows are checked

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
    data = config.data
    limit = 0
    if tokenizer is not None and model is not None:
        limit = prompt_room(config, model, prompts.response, prompts.max_prompt)
    sources = [parse_source(prompts.files[0])] if prompts.evaluation else parse_sources(prompts.files)
    if prompts.evaluation and sources[0].weight is not None:
        raise DataError(f"{sources[0]}: an evaluation set has no weight")
    total = sum(source.weight for source in sources if source.weight is not None)
    facts = []
    for source in sources:
        found = look(
            source,
            prompts.columns,
            tokenizer=tokenizer if limit else None,
            limit=limit,
            form=PromptFormat(prompts.apply_chat_template, data.apply_chat_template_kwargs),
            max_bad_rows=data.max_bad_rows if data.bad_rows == "skip" and not prompts.evaluation else None,
            drop_overlong=data.overlong_prompts == "drop" and not prompts.evaluation,
        )
        facts.append(
            replace(
                found,
                name=prompts.name,
                share=None if source.weight is None else float(source.weight / total),
                later="when they are reached" if data.streaming_data and not prompts.evaluation else found.later,
            )
        )
    key = prompts.columns.tool_key
    if key is not None and not prompts.evaluation and not any(one.with_tools for one in facts):
        raise DataError(f"{', '.join(prompts.files)}: no row has tools under the key {key!r} (--tool-key)")
    return facts


def look(
    source: PromptSource,
    columns: Columns,
    *,
    tokenizer: Any = None,
    limit: int = 0,
    form: PromptFormat = PLAIN,
    max_bad_rows: int | None = None,
    drop_overlong: bool = False,
) -> DataFacts:
    """The facts of one file: of all its rows, or of a sample where it is large.

    tokenizer, limit   None and 0: prompts are not counted
    max_bad_rows       None: no row may be left out

    Raises `DataError` for a row that may not be left out, and where no row is left.
    """
    reader = open_reader(source, columns, by_block=True, most_unpacked=WHOLE * 2**16)
    try:
        jobs, whole = _jobs(reader)
        work = Work([reader], tokenizer, form, limit or None)
        rows = bad = overlong = longest = with_tools = 0
        for drawn in (one for job in jobs for one in work.perform(job)):
            rows += 1
            if drawn.row is not None:
                longest = max(longest, len(drawn.row.tokens or ()))
                with_tools += drawn.row.tools is not None
            elif drawn.fault == "overlong" and drop_overlong:
                overlong += 1
            elif drawn.fault == "bad" and max_bad_rows is not None:
                bad += 1
                if bad > max_bad_rows:
                    raise too_many(bad, max_bad_rows, _message(reader, drawn))
            else:
                raise DataError(_message(reader, drawn))
        if not rows:
            raise DataError(f"{source} has no rows, expected one JSON object per line")
        if rows == bad + overlong:
            raise DataError(
                f"{source} has no rows that can be used: {bad} are bad, and {overlong} over the limit of {limit} tokens"
            )
        about, exact = (rows, True) if whole else reader.rows_about()
        return DataFacts(
            name="",
            source=source,
            rows=about,
            nearly="more than " if reader.incomplete else "" if exact else "about ",
            longest=longest,
            limit=limit,
            bad=bad,
            overlong=overlong,
            with_tools=with_tools,
            looked_at=None if whole else rows,
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
