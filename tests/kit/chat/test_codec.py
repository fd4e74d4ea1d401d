"""Texts become tokens alone and after others, and answers lose the tokens that end them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from slime.kit.chat import Codec
from slime.testing import make_tokenizer

TEXTS = ["", "42", " 6 * 7\n", "ünknown ☃", "a<|end|>b", "<|user|>", " x , y ."]


@pytest.mark.parametrize("text", TEXTS)
def test_a_codec_gives_what_transformers_gives(text: str) -> None:
    tokenizer = make_tokenizer()
    codec, tokens = Codec(tokenizer), tokenizer.encode(text, add_special_tokens=False)
    assert codec.encode(text) == tokens
    for skip in (True, False):
        told = tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=skip)
        assert codec.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=skip) == told


def test_a_codec_does_not_go_past_what_a_tokenizer_does_itself() -> None:
    class Prefixing(PreTrainedTokenizerFast):
        def encode(self, text: str, **options: Any) -> list[int]:
            return super().encode(f"X {text}", **options)

    words = Tokenizer(WordPiece({"[UNK]": 0, "x": 1, ",": 2, "X": 3, "##,": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    prefixing = Prefixing(tokenizer_object=words, unk_token="[UNK]", clean_up_tokenization_spaces=True)
    assert Codec(prefixing).encode("x") == [3, 1]
    assert words.decode([1, 2]) == "x ,"
    assert Codec(prefixing).decode([1, 2], skip_special_tokens=False) == "x,"
