"""A byte-level tokenizer, and chat templates that trim, drop and refuse messages like real ones."""

from __future__ import annotations

from functools import cache
from typing import Any

PAD, EOS, START, END = "<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, EOS, START, END)
#: added tokens that are not marked as special, as in real tokenizers
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

PLAIN = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    + _GENERATION
)
#: trims contents, with nothing between turns
TRIMS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
    + _GENERATION
)
#: drops reasoning of earlier turns, begins an answer with a thought, merges neighbouring results into one message
DROPS_REASONING = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
#: answers end with the end-of-sequence token, others with nothing
ENDS_WITH_EOS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '<|eos|>' }}"
    "{% else %}{{ '[' + m.role | upper + '] ' + m.content }}{% endif %}{% endfor %}"
)
#: a tool's message must follow the call it answers
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% set before = messages[:loop.index0] | selectattr('role', 'equalto', 'assistant') | list | last %}"
    "{% if not before.tool_calls %}{{ raise_exception('a tool message without a tool call') }}{% endif %}"
    "{{ '<|im_start|>' + m.name + ' to=assistant\\n' + m.content | tojson + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}" + _GENERATION
)
TEMPLATES = {
    "plain": PLAIN,
    "trims": TRIMS,
    "drops_reasoning": DROPS_REASONING,
    "ends_with_eos": ENDS_WITH_EOS,
    "strict": STRICT,
}

_CORPUS = (
    "user assistant system tool the answer is that error: results of the search, and then what comes next in the text "
    'name arguments {"name": "search", "arguments": {"query": "where"}} 0123456789 2024 100 1000 größer naïve Δ 漢字'
)


@cache
def vocabulary_size() -> int:
    """Token ids are below it."""
    return len(make_bpe_tokenizer("plain"))


def make_bpe_tokenizer(template: str) -> Any:
    """A byte-level BPE tokenizer with merges, special tokens and the template of that name.

    Any text can be encoded, and most token sequences that a random model samples are not what their text encodes to.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS] * 3, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[START, END],
        chat_template=TEMPLATES[template],
        clean_up_tokenization_spaces=False,
    )
