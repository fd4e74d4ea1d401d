"""Prompt files before a run: checks rows and counts the tokens of prompts; of large files, those of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.cli.preflight_model import ModelFacts
from slime.config import RunConfig
from slime.config.eval_sets import eval_sets
from slime.errors import ConfigError, DataError
from slime.kit.readers.feed.work import BlocksJob, Job, RowsJob, Work
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_file import bad_row_error
from slime.kit.readers.prompt_source import PromptSource, parse_source, parse_sources
from slime.kit.readers.reader import BadRow, Reader
from slime.kit.readers.rows import Columns
from slime.kit.readers.tokenize import PLAIN, PromptFormat

#: files of at most this many pieces (64 KiB of text, or 1,024 rows of a table) are read whole
WHOLE = 1024
#: pieces that are read of a larger file, evenly spaced
SAMPLED = 64
#: row groups that are read of a large Parquet file, where reading a piece means reading its whole group
_GROUPS = 8


@dataclass(frozen=True)
class DataFacts:
    """What was found in one prompt file."""

    name: str  #: "training", or an evaluation set
    source: PromptSource
    rows: int
    nearly: str  #: "about " or "more than " if the rows were not counted
    longest: int  #: tokens of the longest prompt that can be used
    limit: int  #: tokens a prompt may have
    bad: int = 0  #: rows that cannot be used
    overlong: int = 0  #: prompts over the limit
    with_tools: int = 0  #: rows with tools
    sampled: int | None = None  #: rows that were read; None: all
    share: float | None = None  #: of the prompts, if files are mixed
    rest_checked: str = "when the run begins"  #: when the rows outside the sample are checked

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
        if self.sampled is not None:
            parts.append(f"by {self.sampled} rows of a sample; the others are checked {self.rest_checked}")
        return ", ".join(parts)


@dataclass(frozen=True)
class PromptSet:
    """Prompt files that are read alike."""

    name: str
    files: Sequence[str]
    response: int  #: tokens a response may have
    columns: Columns
    apply_chat_template: bool
    max_prompt: int | None  #: tokens a prompt may have, if an option limits it
    evaluation: bool  #: whether it is an evaluation set, of which no row may be left out


def prompt_sets(config: RunConfig, *, with_engines: bool) -> Iterator[PromptSet]:
    """The prompt files that the configuration names."""
    # Without engines responses come from the data, and how long they are shows only there.
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
    """Check the files of a set, each on its own. Tokens are only counted with a model and a tokenizer.

    Raises:
        DataError: A row cannot be used and may not be left out (the first such row).
        ConfigError: Responses leave no room for a prompt.
    """
    data = config.data
    limit = _prompt_limit(config, model, prompts) if tokenizer is not None and model is not None else 0
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
                rest_checked="when they are reached"
                if data.streaming_data and not prompts.evaluation
                else found.rest_checked,
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
    """Read all rows of a file, or a sample of a large one.

    Args:
        source: The file.
        columns: Keys of its rows.
        tokenizer: Counts tokens; None: they are not counted.
        limit: Tokens a prompt may have; 0: any number.
        form: How a prompt becomes text.
        max_bad_rows: Rows that may be left out because they cannot be used; None: none, and the first is an error.
        drop_overlong: Leave out prompts over the limit; otherwise the first is an error.

    Raises:
        DataError: A row may not be left out, or no row is left.
    """
    reader = open_reader(source, columns, by_block=True, most_unpacked=WHOLE * 2**16)
    try:
        jobs, whole = _jobs(reader)
        work = Work([reader], tokenizer, form, limit or None)
        rows = bad = overlong = longest = with_tools = 0
        for drawn in (one for job in jobs for one in work.perform(job)):
            rows += 1
            row = drawn.row
            if not isinstance(row, BadRow):
                longest = max(longest, len(row.tokens or ()))
                with_tools += row.tools is not None
            elif row.overlong and drop_overlong:
                overlong += 1
            elif not row.overlong and max_bad_rows is not None and bad < max_bad_rows:
                bad += 1
            else:
                limit_of_bad = None if row.overlong else max_bad_rows
                raise bad_row_error(f"{reader.where(drawn.position)}{row.reason}", bad + 1, limit_of_bad)
        if not rows:
            raise DataError(f"{source} has no rows, expected one JSON object per line")
        if rows == bad + overlong:
            raise DataError(
                f"{source} has no rows that can be used: {bad} are bad, and {overlong} over the limit of {limit} tokens"
            )
        about = reader.rows or (rows if whole else round(rows * reader.blocks / len(jobs)))
        return DataFacts(
            name="",
            source=source,
            rows=about,
            nearly="more than " if reader.incomplete else "" if whole or reader.rows else "about ",
            longest=longest,
            limit=limit,
            bad=bad,
            overlong=overlong,
            with_tools=with_tools,
            sampled=None if whole else rows,
        )
    finally:
        reader.close()


def _jobs(reader: Reader) -> tuple[list[Job], bool]:
    """The blocks to read of a file, and whether they are all of it."""
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
    return [
        BlocksJob(((0, block),)) if known is None else RowsJob.part(0, known, 0, reader.parts(block))
        for block, known in ((block, reader.positions(block)) for block in chosen)
    ], False


def _prompt_limit(config: RunConfig, model: ModelFacts, prompts: PromptSet) -> int:
    """Tokens a prompt may have beside its response."""
    engine_context = int(config.sglang.get("context_length", model.context))
    context = config.rollout.rollout_max_context_len or engine_context
    if context > engine_context:
        whose = (
            "--sglang-context-length is" if "context_length" in config.sglang else f"the model in {model.folder} has"
        )
        raise ConfigError(f"--rollout-max-context-len {context} is too long: {whose} {engine_context}")
    if prompts.response >= context:
        raise ConfigError(
            f"a response of {prompts.response} tokens (--rollout-max-response-len, --eval-max-response-len) leaves no"
            f" room for a prompt in the context of {context} tokens. Shorten responses"
        )
    return min(prompts.max_prompt or context, context - prompts.response)
