"""Checks what becomes of a prompt, and shows one: its tokens, which of them are trained on, and where answers end."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.cli.preflight_model import ModelFacts
from slime.config import RunConfig
from slime.errors import ConfigError, SlimeError, did_you_mean, one_line
from slime.kit.chat import ChatTemplate, end_tokens
from slime.kit.readers.light_tokenizer import template_environment
from slime.kit.readers.rows import PromptRow
from slime.plugin import Context, Generation, Sample, SamplingParams
from slime.registry.resolve import Resolved

#: characters of a prompt that are shown of its beginning and of its end, and tokens that are shown of each part
_CHARACTERS, _TOKENS = 240, 8
#: seconds that a generator without engines may take for one sample
_PATIENCE_S = 20


@dataclass
class PromptFacts:
    """What was found about prompts and answers."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: lines of the plan: an example, and the tokens that end answers
    example: list[str] = field(default_factory=list)


def check_prompts(
    config: RunConfig, model: ModelFacts, tokenizer: Any, generator: Resolved | None, row: PromptRow | None
) -> PromptFacts:
    """Check the template, the end tokens and the first training prompt.

    Args:
        config: The run.
        model: Its model.
        tokenizer: The model's.
        generator: The run's generator; None if it could not be found.
        row: The first row of the training files that can be used.
    """
    facts = PromptFacts()
    ends = end_tokens(tokenizer, model.folder)
    facts.notes += [*_template_notes(config, tokenizer), *_unknown_end(model, tokenizer)]
    if row is None or row.tokens is None or generator is None:
        return facts
    with_engine = bool(generator.component.spec.needs_engine)
    sample = Sample(prompt=row.prompt, tokens=list(row.tokens), label=row.label, metadata=row.metadata)
    if with_engine:
        try:
            if generator.prompt_tools(config):
                ChatTemplate(tokenizer, **config.data.apply_chat_template_kwargs).require_shown("tool")
        except SlimeError as error:
            facts.problems.append(str(error))
        facts.example += _example(row.where, tokenizer, sample)
        facts.example.append("the response follows: what the policy writes is trained on, results of tools are not")
    else:
        try:
            sample = _answered(config, generator, tokenizer, sample)
        except Exception as error:  # noqa: BLE001 - a component may raise anything
            refused = facts.problems if isinstance(error, SlimeError) else facts.notes
            refused.append(f"{row.where}: {generator.component.title}: {one_line(error)}")
            return facts
        if max(sample.tokens) >= int(model.gpt["vocab_size"]):
            unknown = max(sample.tokens)
            facts.problems.append(
                f"{row.where}: the response has the token {_shown(tokenizer, unknown)} (id {unknown}), and the model"
                f" has embeddings for ids 0 to {int(model.gpt['vocab_size']) - 1}. Resize the model, or leave the token"
                " out"
            )
            return facts
        facts.example += _example(row.where, tokenizer, sample)
        facts.notes += _end_notes(config, tokenizer, sample, ends)
    named = (f"{_shown(tokenizer, token)} ({token}, {where})" for token, where in ends.items())
    facts.example.append(f"answers end at {', '.join(named) or 'no token: the tokenizer has no end-of-sequence token'}")
    return facts


def _template_notes(config: RunConfig, tokenizer: Any) -> Iterator[str]:
    """Variables that the chat template never reads."""
    given, template = config.data.apply_chat_template_kwargs, getattr(tokenizer, "chat_template", None)
    # A tokenizer that is code in the model folder may read variables itself.
    if not isinstance(template, str) or type(tokenizer).__module__.startswith("transformers_modules."):
        return
    if config.data.apply_chat_template:
        for what, line in _unknown_names(template, given):
            yield (
                f"the chat template of {config.checkpoint.hf_checkpoint} uses {what} in its line {line}, which does not"
                " exist: prompts that reach it are refused"
            )
    if not given:
        return
    words = set(re.findall(r"[^\W\d]\w*", template))
    for name in given:
        if name not in words:
            read = sorted(_variables(template))
            known = f"it reads {', '.join(read)}" if read else "it reads none"
            yield (
                f"--apply-chat-template-kwargs: the chat template of {config.checkpoint.hf_checkpoint} never reads"
                f" {name!r}, so it changes nothing; {known}.{did_you_mean(name, read)}"
            )


def _unknown_names(template: str, given: Collection[str]) -> Iterator[tuple[str, int]]:
    """Filters, tests and functions that a template uses and nobody defines, each with its line."""
    from jinja2 import TemplateSyntaxError, meta, nodes

    environment = template_environment()
    try:
        parsed = environment.parse(template)
    except TemplateSyntaxError:  # tags that only transformers has
        return
    for found in parsed.find_all((nodes.Filter, nodes.Test)):
        there = environment.filters if isinstance(found, nodes.Filter) else environment.tests
        if found.name not in there:
            yield f"the {type(found).__name__.lower()} {found.name!r}", found.lineno
    undefined = meta.find_undeclared_variables(parsed) - environment.globals.keys() - set(given)
    # A template may ask whether it has a function.
    asked = {one.node.name for one in parsed.find_all(nodes.Test) if isinstance(one.node, nodes.Name)}
    for choice in parsed.find_all((nodes.If, nodes.CondExpr)):
        asked |= {one.name for one in (choice.test, *choice.test.find_all(nodes.Name)) if isinstance(one, nodes.Name)}
    # A macro is defined for what follows its block, which may be a branch.
    asked |= {macro.name for macro in parsed.find_all(nodes.Macro)}
    for call in parsed.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in undefined - asked:
            yield f"the function {call.node.name!r}", call.lineno


def _variables(template: str) -> set[str]:
    """The variables that a template reads and users may set; empty if only transformers can parse it."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:
        return set()
    own = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace"}
    own |= {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    return {name for name in meta.find_undeclared_variables(parsed) - own if not name.endswith("_token")}


def _unknown_end(model: ModelFacts, tokenizer: Any) -> Iterator[str]:
    """An end-of-sequence token that the model cannot generate; ids in its configuration files are refused."""
    rows, token = int(model.gpt["vocab_size"]), getattr(tokenizer, "eos_token_id", None)
    if token is not None and token >= rows:
        yield (
            f"the end-of-sequence token {_shown(tokenizer, token)} of the tokenizer in {model.folder} has id {token},"
            f" and the model has embeddings for ids 0 to {rows - 1}: no answer ends with it. Resize the model, or set"
            " eos_token in tokenizer_config.json to a token that it has"
        )


def _end_notes(config: RunConfig, tokenizer: Any, sample: Sample, ends: dict[int, str]) -> Iterator[str]:
    """A label that ends otherwise than the turns of the chat template."""
    if not sample.response_length:
        return
    last, own = sample.tokens[-1], None
    if config.data.apply_chat_template:
        try:
            own = ChatTemplate(tokenizer, **config.data.apply_chat_template_kwargs).turn_end
        except ConfigError:
            own = None  # it refuses a conversation of several turns
    if own is not None and last != own and sample.finish_reason == "stop":
        taught = f"labels end with {_shown(tokenizer, last)} ({last})"
        yield f"{taught}, and the chat template ends a turn with {_shown(tokenizer, own)} ({own})"
    elif own is None and ends and last not in ends and sample.finish_reason == "stop":
        yield f"labels end with no end token: the model does not learn to stop after {_shown(tokenizer, last)}"


class _Nobody:
    """The policy of a generator that asks none."""

    async def generate(
        self,
        tokens: Sequence[int],  # noqa: ARG002 - the contract of policies
        sampling: SamplingParams,  # noqa: ARG002
        *,
        session: str | None = None,  # noqa: ARG002
    ) -> Generation:
        """Raise, because a generator has asked."""
        raise ConfigError("it asks the policy, and its spec says that it does not (needs_engine=False)")


def _answered(config: RunConfig, generator: Resolved, tokenizer: Any, sample: Sample) -> Sample:
    """A sample with its response, by a generator that asks no policy."""
    context = Context(config.data.rollout_seed, Path(), logging.getLogger(__name__), config, tokenizer)
    made = generator.build(context)
    sampling = SamplingParams(max_new_tokens=config.rollout.rollout_max_response_len)

    async def answer() -> Sample:
        answered: list[Sample] = await asyncio.wait_for(made.generate(sample, sampling, _Nobody()), _PATIENCE_S)
        return answered[0]

    return asyncio.run(answer())


def _example(where: str, tokenizer: Any, sample: Sample) -> Iterator[str]:
    """A sample's text and tokens, part by part: what is trained on, and what is not."""
    prompt = sample.prompt_length
    mask = [0] * prompt + (sample.loss_mask or [1] * sample.response_length)
    starts = [n for n in range(len(mask)) if n == 0 or mask[n] != mask[n - 1] or n == prompt]
    for start, end in zip(starts, [*starts[1:], len(mask)], strict=True):
        part = sample.tokens[start:end]
        what = "prompt" if start < prompt else "response"
        trained = "trained on" if mask[start] else "not trained on"
        yield f"{where if start == 0 else ''}{', ' if start == 0 else ''}{what} of {len(part)} tokens, {trained}:"
        yield f"  {_cut(_joined(tokenizer, part))}"
        yield f"  {_ids(tokenizer, part)}"


def _joined(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, control tokens included, in one line."""
    return repr(tokenizer.decode(list(tokens), skip_special_tokens=False))[1:-1]


def _cut(text: str) -> str:
    if len(text) <= 2 * _CHARACTERS:
        return text
    return f"{text[:_CHARACTERS]} [{len(text) - 2 * _CHARACTERS} characters] {text[-_CHARACTERS:]}"


def _ids(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The first and the last tokens, as `id 'text'`."""
    one = [f"{token} {_shown(tokenizer, token)}" for token in tokens]
    if len(one) > 2 * _TOKENS:
        one[_TOKENS:-_TOKENS] = [f"[{len(one) - 2 * _TOKENS} tokens]"]
    return "  ".join(one)


def _shown(tokenizer: Any, token: int) -> str:
    return repr(tokenizer.decode([token], skip_special_tokens=False))
