"""One token a character: the texts of made-up samples as token ids, and the tokenizer that does the same.

Ids: padding 0, end of sequence 1, the two marks of a chat message 2 and 3, unknown 4, newline 5, then printable ASCII.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

PAD, END, START, STOP, UNKNOWN = "<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<unk>"
CHARACTERS = (PAD, END, START, STOP, UNKNOWN, "\n", *string.printable[:95])
_IDS = {character: number for number, character in enumerate(CHARACTERS)}

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def encode(text: str) -> list[int]:
    """Token ids of plain text, as `make_tokenizer().encode(text, add_special_tokens=False)` gives them."""
    return [_IDS.get(character, _IDS[UNKNOWN]) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids, without special tokens."""
    return "".join(CHARACTERS[token] for token in tokens if _IDS[UNKNOWN] < token < len(CHARACTERS))


def make_tokenizer() -> Any:
    """A transformers tokenizer of single characters with a chat template, made without a download.

    Importing transformers takes seconds; `encode` and `decode` do the same for plain text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(_IDS), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START, STOP],
        chat_template=_CHAT_TEMPLATE,
    )
