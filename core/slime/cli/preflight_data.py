"""Checks the rows of prompt files before a run and counts their tokens; of a large file, a sample is read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.cli.output import progress
from slime.cli.preflight_model import ModelFacts
from slime.config import RunConfig
from slime.config.eval_sets import eval_sets
from slime.errors import ConfigError, DataError, did_you_mean
from slime.kit.context_length import response_tokens
from slime.kit.readers.call_arguments import called
from slime.kit.readers.feed.work import BlocksJob, Job, RowsJob, Work
from slime.kit.readers.opening import open_reader
from slime.kit.readers.prompt_file import bad_row_error
from slime.kit.readers.prompt_source import PromptSource, parse_source, parse_sources
from slime.kit.readers.reader import BadRow, Reader
from slime.kit.readers.rows import Columns, PromptRow
from slime.kit.readers.tokenize import PLAIN, PromptFormat

#: files of at most this many pieces (64 KiB of text, or 1,024 rows of a table) are read whole
WHOLE = 1024
#: pieces that are read of a larger file, evenly spaced
SAMPLED = 64
#: row groups that are read of a large Parquet file, where reading a piece means reading its whole group
_GROUPS = 8
#: rows between two reports of progress
_REPORTED_EVERY = 256
#: tokens of an engine's memory that a request needs beside its response: those that SGLang keeps free, and one
_BESIDE_RESPONSE = 8


@dataclass
class DataFacts:
    """What was found in one prompt file."""

    name: str  #: "training", or an evaluation set
    source: PromptSource
    limit: int  #: tokens a prompt may have; 0: tokens are not counted
    rest_checked: str  #: when the rows outside the sample are checked
    rows: int = 0
    nearly: str = ""  #: "about " or "more than " if the rows were not counted
    longest: int = 0  #: tokens of the longest prompt that can be used
    bad: int = 0  #: rows that cannot be used
    overlong: int = 0  #: prompts over the limit
    with_tools: int = 0  #: rows with tools
    with_metadata: int = 0  #: rows with metadata
    names: Sequence[str] = ()  #: keys of the rows
    repeated: int = 0  #: rows whose prompt an earlier row has
    contradicting: int = 0  #: of these, rows with another label
    unshown: int = 0  #: rows with tool calls of which the chat template prints no trace
    same_id: int = 0  #: rows whose "id" an earlier row has
    sampled: int | None = None  #: rows that were read; None: all
    unseen: list[str] = field(default_factory=list)  #: what none of the rows that were read has
    share: float | None = None  #: of the prompts, if files are mixed
    first: PromptRow | None = None  #: the first row that can be used

    def __str__(self) -> str:
        parts = [f"{self.source}: {self.nearly}{self.rows} rows"]
        if self.limit:
            parts.append(f"longest prompt {self.longest} of at most {self.limit} tokens")
        if self.share is not None:
            parts.append(f"{self.share:.1%} of the prompts")
        if self.bad:
            parts.append(f"{self.bad} bad rows are left out")
        if self.overlong:
            parts.append(f"{self.overlong} prompts over the limit are left out")
        if self.repeated:
            other = f" ({self.contradicting} of them with another label)" if self.contradicting else ""
            parts.append(f"{self.repeated} rows repeat the prompt of an earlier one{other}")
        if self.unshown:
            parts.append(f"the chat template leaves out the tool calls of {self.unshown} rows")
        if self.same_id:
            parts.append(f"{self.same_id} rows have the id of an earlier one")
        if self.sampled is not None:
            parts += [f"none of the sampled rows has {one}" for one in self.unseen]
            parts.append(f"by {self.sampled} rows of a sample; the others are checked {self.rest_checked}")
        return ", ".join(parts)


@dataclass(frozen=True)
class PromptSet:
    """Prompt files that are read alike."""

    name: str
    files: Sequence[str]
    columns: Columns
    response: int = 1  #: tokens a response may have
    max_prompt: int | None = None  #: tokens a prompt may have, if an option limits it
    form: PromptFormat = PLAIN  #: how a prompt becomes text
    evaluation: bool = False  #: whether it is an evaluation set, of which no row may be left out
    max_bad_rows: int | None = None  #: unusable rows that may be left out; None: the first is an error
    drop_overlong: bool = False  #: whether prompts over the limit are left out; otherwise the first is an error
    rest_checked: str = "when the run begins"  #: when the rows outside the sample are checked


def prompt_sets(config: RunConfig) -> Iterator[PromptSet]:
    """The prompt files that the configuration names."""
    data = config.data
    if data.prompt_data:
        yield PromptSet(
            "training",
            data.prompt_data,
            Columns(data.input_key, data.label_key, data.metadata_key, data.tool_key),
            response_tokens(config),
            config.rollout.rollout_max_prompt_len,
            PromptFormat(data.apply_chat_template, data.apply_chat_template_kwargs),
            max_bad_rows=data.max_bad_rows if data.bad_rows == "skip" else None,
            drop_overlong=data.overlong_prompts == "drop",
            rest_checked="when they are reached" if data.streaming_data else "when the run begins",
        )
    for one in eval_sets(config):
        yield PromptSet(
            one.name,
            [one.path],
            Columns(one.input_key, one.label_key, one.metadata_key, data.tool_key),
            one.max_response_len,
            one.max_prompt_len,
            PromptFormat(one.apply_chat_template, data.apply_chat_template_kwargs),
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
    limit = 0 if model is None else _prompt_limit(config, model, prompts)
    sources = [parse_source(prompts.files[0])] if prompts.evaluation else parse_sources(prompts.files)
    if prompts.evaluation and sources[0].weight is not None:
        raise DataError(f"{sources[0]}: an evaluation set has no weight")
    vocabulary = None if model is None else int(model.gpt["vocab_size"])
    counted = 0 if tokenizer is None else limit
    facts = [look(source, prompts, tokenizer, counted, vocabulary) for source in sources]
    total = sum(source.weight for source in sources if source.weight is not None)
    for one in facts:
        one.share = None if one.source.weight is None else float(one.source.weight / total)
    columns = prompts.columns
    optional = [(columns.tool_key, "--tool-key", "tools", [one.with_tools for one in facts])]
    inherited = prompts.evaluation and columns.metadata_key == config.data.metadata_key
    if columns.metadata_key != Columns("", None).metadata_key and not inherited:
        optional.append((columns.metadata_key, "--metadata-key", "metadata", [one.with_metadata for one in facts]))
    for key, flag, what, counts in optional:
        if key is not None and not any(counts) and not (prompts.evaluation and what == "tools"):
            sampled = [one for one in facts if one.sampled is not None]
            # Rows outside the sample may have them.
            if any(_may_have(one.source, prompts, key) for one in sampled):
                for one in sampled:
                    one.unseen.append(f"{what} ({flag} {key})")
                continue
            names = list(dict.fromkeys(name for one in facts for name in one.names))
            listed = ", ".join(map(repr, names)) or "none"
            raise DataError(
                f"{', '.join(prompts.files)}: no row has {what} under the key {key!r} ({flag}). Keys of the rows:"
                f" {listed}.{did_you_mean(key, names)}"
            )
    return facts


def _may_have(source: PromptSource, prompts: PromptSet, key: str) -> bool:
    """Whether a row of the whole file may have a key."""
    with contextlib.closing(_opened(source, prompts)) as reader:
        return reader.may_have(key)


def _opened(source: PromptSource, prompts: PromptSet) -> Reader:
    return open_reader(source, prompts.columns, by_block=True, most_unpacked=WHOLE * 2**16)


def look(
    source: PromptSource,
    prompts: PromptSet,
    tokenizer: Any = None,
    limit: int = 0,
    vocabulary: int | None = None,
) -> DataFacts:
    """Read all rows of a file, or a sample of a large one.

    Args:
        source: The file.
        prompts: How it is read.
        tokenizer: Counts tokens if there is a limit; None: they are not counted.
        limit: Tokens a prompt may have; 0: any number.
        vocabulary: Tokens for which the model has embeddings, if prompts are compared with it.

    Raises:
        DataError: A row may not be left out, a prompt has a token that the model does not know, or no row is left.
    """
    facts = DataFacts(prompts.name, source, limit, prompts.rest_checked)
    with (
        contextlib.closing(_opened(source, prompts)) as reader,
        progress(f"reading {Path(source.path).name}:", "block") as tell,
    ):
        jobs, whole = _jobs(reader)
        facts.names = reader.names()
        labels: dict[int, str | None] = {}
        first_bad = ""
        ids: set[str | int] = set()
        work = Work([reader], tokenizer if limit else None, prompts.form, limit or None)
        for done, drawn in ((done, one) for done, job in enumerate(jobs) for one in work.perform(job)):
            if facts.rows % _REPORTED_EVERY == 0:
                tell(done, len(jobs))
            facts.rows += 1
            row = drawn.row
            if not isinstance(row, BadRow):
                tokens = row.tokens or ()
                if vocabulary is not None and max(tokens, default=0) >= vocabulary:
                    unknown = max(tokens)
                    raise DataError(
                        f"{reader.where(drawn.position)}: the prompt has the token {_text_of(tokenizer, unknown)} (id"
                        f" {unknown}), and the model has embeddings for ids 0 to {vocabulary - 1}. Take the token out"
                        " of the prompt, or resize the model"
                    )
                if facts.first is None:
                    facts.first = replace(row, where=reader.where(drawn.position))
                facts.longest = max(facts.longest, len(tokens))
                facts.with_tools += row.tools is not None
                facts.with_metadata += bool(row.metadata.keys() - {"tools"})
                prompt = hash(repr((row.prompt, row.tools)))
                facts.repeated += prompt in labels
                facts.unshown += _leaves_out_calls(row, tokenizer)
                facts.same_id += row.id in ids
                ids |= set() if row.id is None else {row.id}
                facts.contradicting += labels.setdefault(prompt, row.label) != row.label
            elif row.overlong and prompts.drop_overlong:
                facts.overlong += 1
            elif not row.overlong and facts.bad < (prompts.max_bad_rows or 0):
                facts.bad += 1
                first_bad = first_bad or f". The first: {reader.where(drawn.position)}{row.reason}"
            else:
                limit_of_bad = None if row.overlong else prompts.max_bad_rows
                raise bad_row_error(f"{reader.where(drawn.position)}{row.reason}", facts.bad + 1, limit_of_bad)
        if not facts.rows:
            raise DataError(f"{source} has no rows, expected one JSON object per line")
        if facts.rows == facts.bad + facts.overlong:
            raise DataError(
                f"{source} has no rows that can be used: {facts.bad} are bad, and {facts.overlong} over the limit of"
                f" {limit} tokens{first_bad}"
            )
        if not whole:
            facts.sampled = facts.rows
            facts.nearly = "more than " if reader.incomplete else "" if reader.rows else "about "
            facts.rows = reader.rows or round(facts.rows * reader.blocks / len(jobs))
    return facts


def _leaves_out_calls(row: PromptRow, tokenizer: Any) -> bool:
    """Whether the name of a tool that the prompt calls is not in its text."""
    calls = [] if isinstance(row.prompt, str) else [call for message in row.prompt for call in called(message)]
    names = [str(call.get("name")) for call in calls]
    plain = [name for name in names if re.fullmatch(r"[\w.-]+", name, re.ASCII)]  # no template quotes these
    if not plain or not row.tokens:
        return False
    text = tokenizer.decode(row.tokens, skip_special_tokens=False)
    return any(name not in text for name in plain)


def _text_of(tokenizer: Any, token: int) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return repr(tokenizer.convert_ids_to_tokens(token) if backend is None else backend.id_to_token(token))


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
    pool, least = config.sglang.get("max_total_tokens"), prompts.response + _BESIDE_RESPONSE
    if pool is not None and pool < least:
        raise ConfigError(
            f"--sglang-max-total-tokens {pool} has no room for a prompt and a response of {prompts.response} tokens"
            f" (--rollout-max-response-len, --eval-max-response-len): expected at least {least}, and more for longer"
            " prompts"
        )
    return min(prompts.max_prompt or context, context - prompts.response)
