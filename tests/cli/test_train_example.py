"""What a dry run says about prompts and answers: an example with its tokens, and what is wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Slime, split
from tests.support.tokenizer_features import FAMILIES, make_tokenizer

pytestmark = pytest.mark.slow

Folder = Callable[..., Path]


@pytest.fixture
def model(described_model: Path, tmp_path: Path) -> Folder:
    """(family, vocabulary) -> a model folder with the tokenizer and the template of a family."""

    def make(family: str, *, rows: int = 900, **changed: Any) -> Path:
        from tests.cli.conftest import write_weights

        folder = tmp_path / "model"
        shutil.copytree(described_model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "vocab_size": rows, "max_position_embeddings": 512} | changed)
        )
        write_weights(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).unlink(missing_ok=True)
        make_tokenizer(FAMILIES[family], folder)
        return folder

    return make


@pytest.fixture
def plan(slime: Slime, prompts: Path) -> Callable[..., str]:
    """The output of a dry run with a model, in one line."""

    def run(folder: Path, *words: str, code: int = 0, data: Path = prompts) -> str:
        base = ["--hf-checkpoint", str(folder), "--prompt-data", str(data)]
        base += split("--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 64")
        base += split("--lr 1e-4 --device cpu --run-name run")
        if "--loss-type" not in words:
            base += split("--advantage-estimator grpo")
            base += [] if "--custom-generate-function-path" in words else split("--reward exact_match")
        ended = slime("train", "--dry-run", *base, *words)
        assert ended.code == code, ended
        return ended.out if code == 0 else ended.err

    return run


SFT = ("--loss-type", "sft_loss", "--apply-chat-template")


def test_a_prompt_is_shown_with_its_tokens_and_where_answers_end(model: Folder, plan: Any, prompts: Path) -> None:
    folder = model("qwen3")
    text = plan(folder, "--apply-chat-template")
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "0+1="}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert f"example      {prompts}:1, prompt of {len(ids)} tokens, not trained on:" in text
    assert "<|im_start|>user\\n0+1=<|im_end|>\\n<|im_start|>assistant\\n" in text
    assert f"{ids[0]} '<|im_start|>'" in text
    assert "the response follows: what the policy writes is trained on, results of tools are not" in text
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ("<|im_end|>", "<|endoftext|>")]
    assert (
        f"answers end at '<|im_end|>' ({ends[0]}, the tokenizer), '<|endoftext|>' ({ends[1]}, generation_config.json)"
    ) in text


def test_supervised_data_shows_what_is_trained_on(model: Folder, plan: Any, prompts: Path) -> None:
    text = plan(model("qwen3"), *SFT)
    assert f"{prompts}:1, prompt of" in text
    shown = text[text.index("response of") :].splitlines()
    assert shown[0].startswith("response of 2 tokens, trained on:")
    assert shown[1].strip() == "1<|im_end|>"
    assert "labels end with" not in text


@pytest.mark.parametrize(
    ("family", "eos", "note"),
    [
        ("qwen3", "<|endoftext|>", "labels end with '<|endoftext|>'"),
        ("glm4", "<|endoftext|>", "and the chat template ends a turn with '<|user|>'"),
        ("llama3", "<|end_of_text|>", "and the chat template ends a turn with '<|eot_id|>'"),
    ],
)
def test_labels_that_end_otherwise_than_the_template_are_noted(
    model: Folder, plan: Any, family: str, eos: str, note: str
) -> None:
    folder = model(family)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": eos}))
    assert note in plan(folder, *SFT)


def test_labels_without_an_end_are_noted(model: Folder, plan: Any) -> None:
    text = plan(model("qwen3"), *SFT, "--generator.append-eos", "false")
    assert "and the chat template ends a turn with '<|im_end|>'" in text


@pytest.mark.parametrize("given", ["enable_thinkng", "mood"])
def test_a_variable_that_the_template_never_reads_is_noted(model: Folder, plan: Any, given: str) -> None:
    folder = model("qwen3")
    path = folder / "chat_template.jinja"
    # What the template itself sets, in one branch of it, is nothing that a user can give.
    own = "{% if tools %}{% set shown = 1 %}{% endif %}{% if shown %}.{% endif %}"
    path.write_text(path.read_text() + own + "{% if enable_thinking %}<think>{% endif %}")
    words = ("--apply-chat-template", "--apply-chat-template-kwargs", json.dumps({given: False}))
    text = plan(folder, *words)
    assert f"never reads {given!r}, so it changes nothing; it reads enable_thinking." in text
    assert ("Did you mean enable_thinking?" in text) == (given == "enable_thinkng")
    assert "never reads" not in plan(folder, *words[:2], '{"enable_thinking": false}')


def test_an_end_of_sequence_token_without_an_embedding(model: Folder, plan: Any) -> None:
    folder = model("qwen3")
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([f"<|new{n}|>" for n in range(900 - len(tokenizer))] + ["<|last|>"])
    tokenizer.eos_token = "<|last|>"
    tokenizer.save_pretrained(folder)
    text = plan(folder, "--apply-chat-template")
    assert "the end-of-sequence token '<|last|>' of the tokenizer in" in text
    assert "(900, the tokenizer)" in text
    assert "the response has the token '<|last|>' (id 900)" in plan(folder, *SFT, code=2)


TOOLS = ("--generator", "tool_loop", "--apply-chat-template")


def test_the_schemas_of_tools_count_as_part_of_prompts(model: Folder, plan: Any) -> None:
    folder = model("qwen3")

    def longest(*words: str) -> int:
        return int(plan(folder, "--apply-chat-template", *words).partition("longest prompt ")[2].split()[0])

    without, shown = longest(), longest("--generator", "tool_loop")
    assert shown > without + 50
    assert longest("--generator", "tool_loop", "--generator.show-tools", "false") == without
    error = plan(folder, *TOOLS, "--rollout-max-prompt-len", str(shown - 1), code=2)
    assert f"the prompt has {shown} tokens, expected at most {shown - 1}" in error
    assert '"name": "calculator"' in plan(folder, *TOOLS)


def test_a_template_that_leaves_out_the_results_of_tools_is_refused(model: Folder, plan: Any) -> None:
    folder = model("qwen3")
    path = folder / "chat_template.jinja"
    template = path.read_text()
    path.write_text(template.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"))
    assert "the chat template leaves out messages of the role 'tool' after an answer" in plan(folder, *TOOLS, code=2)


@pytest.mark.parametrize("shown", [True, False])
def test_tool_calls_that_a_template_leaves_out_are_noted(
    model: Folder, plan: Any, tmp_path: Path, *, shown: bool
) -> None:
    folder = model("qwen3")
    path = folder / "chat_template.jinja"
    if not shown:
        path.write_text(path.read_text().replace("for call in m.tool_calls or []", "for call in []"))
    call = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {}}}
    chat = [
        {"role": "user", "content": "look up"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "call00000"},
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"prompt": chat, "label": "42"}) + "\n")
    text = plan(folder, "--apply-chat-template", data=data)
    assert ("the chat template leaves out the tool calls of 1 rows" in text) != shown


def test_an_unknown_tool_is_refused(model: Folder, plan: Any) -> None:
    assert "no tool is called 'calculater'" in plan(model("qwen3"), *TOOLS, "--generator.tools", "calculater", code=2)


GENERATE = "async def custom_generate(args, samples, evaluation=False{more}):\n    {line}\n    return samples\n"
TEXT = "samples[0].response = 'x'"


@pytest.mark.parametrize(
    ("more", "line", "head", "noted"),
    [
        ("", TEXT, "", True),
        ("", TEXT, "async def generate_single(talk):\n    return 'x'\n", True),
        (", policy=None", TEXT, "", False),
        (
            "",
            "samples[0].response = await generate_single('x')",
            "from slime.kit.sessions import generate_single\n",
            False,
        ),
        ("", "samples[0].tokens = [1, 2]", "", False),
        ("", "setattr(samples[0], 'tokens', [1, 2])", "", False),
        ("", TEXT, "import helper\n", False),
    ],
)
def test_a_generate_function_that_returns_text_is_told_so(
    model: Folder, plan: Any, tmp_path: Path, more: str, line: str, head: str, noted: bool
) -> None:
    (tmp_path / "helper.py").write_text("")
    path = tmp_path / "generate.py"
    path.write_text(head + GENERATE.format(more=more, line=line))
    words = ("--custom-generate-function-path", str(path))
    folder = model("qwen3")
    assert (
        "what it returns is text, which is tokenized: the tokens trained on may differ" in plan(folder, *words)
    ) == (noted)
    text = plan(folder, *words, "--async")
    assert ("without the engine's log-probs, which --use-rollout-logprobs" in text) == noted


@pytest.mark.parametrize(
    "head",
    [
        "try:\n    import nothing\nexcept ImportError:\n    def generate_single(talk):\n        return 'x'\n",
        "generate_single: object = print\n",
    ],
)
def test_a_function_of_that_name_may_be_defined_anywhere(model: Folder, plan: Any, tmp_path: Path, head: str) -> None:
    path = tmp_path / "generate.py"
    path.write_text(head + GENERATE.format(more="", line="samples[0].response = generate_single('x')"))
    plan(model("qwen3"), "--custom-generate-function-path", str(path))


def test_a_function_of_slime_that_is_not_imported_is_refused(model: Folder, plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "generate.py"
    path.write_text(GENERATE.format(more="", line="samples[0].response = await generate_single('x')"))
    error = plan(model("qwen3"), "--custom-generate-function-path", str(path), code=2)
    assert (
        "uses generate_single, which its file neither defines nor imports. Add `from slime.kit.sessions import" in error
    )
