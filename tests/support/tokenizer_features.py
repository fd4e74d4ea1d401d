"""Small tokenizers and chat templates with the features of published ones; see `families_of_tokenizers.toml`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

#: family -> features
FAMILIES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("families_of_tokenizers.toml").read_text(encoding="utf-8")
)
#: what a text gets that is encoded alone; "prepend" is "always" as Llama 2 spells it, "add_prefix_space" as GPT-2 does
SPACES = ("none", "first", "always", "prepend", "add_prefix_space")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
MARKS = ("<|im_start|>",)

_CORPUS = (
    "user assistant system tool the answer is that error: results of the search, and then what comes next in the text "
    'name arguments {"name": "search", "arguments": {"query": "where"}} 0123456789 2024 100 1000 look up 42 go on'
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + ' ' }}"
    "{{ ARGUMENTS }}{{ '</tool_call>' }}{% endfor %}"
)
_ARGUMENTS = {
    "object": "call.function.arguments | tojson",
    "text": "call.function.arguments + ''",
    "both": "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
}


def template_of(features: dict[str, Any]) -> str:
    """A chat template with these features."""
    calls = _CALLS.replace("ARGUMENTS", _ARGUMENTS[features["arguments"]])
    if features["turn"] == "next role":
        mark = "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}"
        body = f"{mark}{{{{ '\\n' + m.content }}}}{calls}"
        begin = "<|assistant|>\\n"
    elif features["turn"] == "text":
        body = f"{{{{ '\n[' + m.role + '] ' + m.content }}}}{calls}"
        begin = "\n[assistant] "
    else:
        end = {"token": features.get("mark", "") + "\\n", "eos": features["eos"]}[features["turn"]]
        role = "'user' if m.role == 'tool' else m.role" if features["tools"] == "user" else "m.role"
        text = "('<tool_response>' + m.content + '</tool_response>') if m.role == 'tool' else m.content"
        body = f"{{{{ '<|im_start|>' + ({role}) + '\\n' + ({text}) }}}}{calls}{{{{ '{end}' }}}}"
        begin = "<|im_start|>assistant\\n"
    refused = ""
    if features["tools"] == "call":
        refused = (
            "{% if m.role == 'tool' %}"
            "{% set before = messages[:loop.index0] | selectattr('role', 'equalto', 'assistant') | list | last %}"
            "{% if not before.tool_calls %}{{ raise_exception('a result without its call') }}{% endif %}{% endif %}"
        )
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    generation = f"{{% if add_generation_prompt %}}{{{{ '{begin}' }}}}{{% endif %}}"
    return f"{tools}{{% for m in messages %}}{refused}{body}{{% endfor %}}{generation}"


def backend_of(space: str, special: list[str]) -> Any:
    """A BPE tokenizer that treats the beginning of a text as `space` says."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    byte_level = space in ("none", "add_prefix_space")
    if byte_level:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space == "add_prefix_space")
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, named = sorted(pre_tokenizers.ByteLevel.alphabet()), special
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if space == "prepend":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=space, split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = sorted({*_CORPUS, "▁", *map(chr, range(33, 127))})
        named = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        [_CORPUS] * 3,
        trainers.BpeTrainer(
            vocab_size=800, min_frequency=1, special_tokens=named, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if byte_level:
        return tokenizer
    # The bytes are ordinary entries, and only the named tokens are cut out of texts.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in ("<unk>", *special)]
    return Tokenizer.from_str(json.dumps(state))


def make_tokenizer(features: dict[str, Any], folder: Path, *, space: str | None = None) -> Any:
    """A tokenizer in a model folder whose files name the end tokens as published ones do."""
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys([features["eos"], *features["ends"], *ROLES, *MARKS]))
    backend = backend_of(space or features["space"], special)
    # Only the end-of-sequence token has a name; the others are control tokens without one.
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=features["eos"],
        chat_template=template_of(features),
        clean_up_tokenization_spaces=False,
    )
    made.save_pretrained(folder)
    ids = [made.convert_tokens_to_ids(text) for text in features["ends"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return PreTrainedTokenizerFast.from_pretrained(folder)
