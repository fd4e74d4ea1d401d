"""A tokenizer that is Python code in a model folder, as that of Kimi K2 is, and that leaves a mark when it runs."""

from __future__ import annotations

import json
from pathlib import Path

#: where the code of the tokenizer is
CODE_FILE = "letters.py"
_CODE = """\
import json, os

with open({mark!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")

from transformers import PreTrainedTokenizer


class Letters(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "vocab.json"}}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **others):
        with open(vocab_file) as file:
            self.ids = json.load(file)
        self.letters = {{number: letter for letter, number in self.ids.items()}}
        super().__init__(**others)

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return dict(self.ids)

    def _tokenize(self, text):
        return list(text.swapcase())

    def _convert_token_to_id(self, token):
        return self.ids.get(token, self.ids["<unk>"])

    def _convert_id_to_token(self, number):
        return self.letters.get(number, "<unk>")

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).swapcase()
"""


def give_own_tokenizer(folder: Path, mark: Path) -> None:
    """Replace the tokenizer of a tiny model folder by code.

    It has a token for each character, as the tiny tokenizer, but swaps upper and lower case, so that its tokens differ.

    Args:
        folder: The folder.
        mark: A file to which the code adds the number of the process each time it is run.
    """
    backend = folder / "tokenizer.json"
    vocabulary = json.loads(backend.read_text(encoding="utf-8"))["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    backend.unlink()
    (folder / CODE_FILE).write_text(_CODE.format(mark=str(mark)), encoding="utf-8")
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Letters", "auto_map": {"AutoTokenizer": ["letters.Letters", None]}}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | own), encoding="utf-8")
