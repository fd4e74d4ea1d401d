"""Responses in required formats: reasoning tags, the instructions of IFEval and IFBench, JSON, and lengths."""

from __future__ import annotations

import math
from typing import Any

_BOTH = ["think", "answer"]

#: (tags, response, whether it has the format, share of the tags that are opened and closed once)
TAGS: list[tuple[list[str], str, bool, float]] = [
    (_BOTH, "<think>hm</think><answer>4</answer>", True, 1),
    (_BOTH, "<think>hm</think>\n<answer>4</answer>", True, 1),
    (_BOTH, "\n <think>\nhm\n</think>\n\n<answer>\n4\n</answer>\n", True, 1),
    (_BOTH, "<think>2 < 3</think><answer>4</answer>", True, 1),
    (_BOTH, "<think>数学</think><answer>🙂</answer>", True, 1),
    (_BOTH, "<think>hm</think><answer>4", False, 0.5),
    (_BOTH, "<think>hm<answer>4</answer>", False, 0.5),
    # a template of a reasoning model has opened the first tag
    (_BOTH, "hm</think><answer>4</answer>", True, 1),
    (_BOTH, "hm</think>4", False, 0.5),
    (_BOTH, "</think><answer>4</answer>", False, 1),
    (_BOTH, "hm</think><answer>4", False, 0.5),
    (_BOTH, "<think>hm</think>4", False, 0.5),
    (_BOTH, "<answer>4</answer>", False, 0.5),
    (_BOTH, "<answer>4</answer><think>hm</think>", False, 1),
    (_BOTH, "<think>hm<answer>4</answer></think>", False, 1),
    (_BOTH, "<think>hm</think> so <answer>4</answer>", False, 1),
    (_BOTH, "So: <think>hm</think><answer>4</answer>", False, 1),
    (_BOTH, "<think>hm</think><answer>4</answer> done", False, 1),
    (_BOTH, "<think></think><answer>4</answer>", False, 1),
    (_BOTH, "<think>hm</think><answer> \n</answer>", False, 1),
    (_BOTH, "<think>a</think><think>b</think><answer>4</answer>", False, 0.5),
    (_BOTH, "<think>hm</think><answer>4</answer><answer>5</answer>", False, 0.5),
    (_BOTH, "<THINK>hm</THINK><answer>4</answer>", False, 0.5),
    (_BOTH, "< think>hm</think><answer>4</answer>", False, 0.5),
    (_BOTH, "no tags", False, 0),
    (_BOTH, "", False, 0),
    (["answer"], "<answer>4</answer>", True, 1),
    (["answer"], "<answer>4</answer><answer>5</answer>", False, 0),
    (["answer"], "4", False, 0),
    (["a", "b", "c"], "<a>1</a><b>2</b><c>3</c>", True, 1),
    (["a", "b", "c"], "<a>1</a><c>3</c><b>2</b>", False, 1),
    (["a", "b", "c", "d"], "<a>1</a><b>2</b><c>3</c>", False, 0.75),
    ([], "", True, 1),
    ([], "text", False, 1),
]

#: (pattern, response, whether the whole response matches)
PATTERNS: list[tuple[str, str, bool]] = [
    # reasoning formats
    (r"<think>.*</think>.*", "<think>\nhm\n</think>\n4", True),
    (r"<think>.*</think>.*", "hm</think>4", False),
    (r"<think>(?!.*<think>).*</think>.*", "<think>a<think>b</think>4", False),
    (r".*\\boxed\{.+\}.*", r"so $\boxed{4}$.", True),
    (r".*\\boxed\{.+\}.*", "so 4.", False),
    (r".*#### -?[\d,]+", "2 + 2\n#### 4", True),
    (r".*#### -?[\d,]+", "2 + 2\n#### four", False),
    (r"Answer: \d+", "Answer: 4", True),
    (r"Answer: \d+", "well, Answer: 4", False),
    (r"Answer: \d+", "Answer: 4\n", False),
    # as in IFEval: punctuation, case, beginning and end, counts
    (r"[^,]*", "no commas here", True),
    (r"[^,]*", "well, no", False),
    (r"[^A-Z]*", "all lower case", True),
    (r"[^A-Z]*", "Not all lower case", False),
    (r"[^a-z]*", "ALL UPPER CASE!", True),
    (r'".*"', '"quoted"', True),
    (r'".*"', "quoted", False),
    (r".*Is there anything else\?", "Done. Is there anything else?", True),
    (r".*Is there anything else\?", "Is there anything else? Bye", False),
    (r"(?:[^*]|\*[^ ])*(?:\* [^\n]+\n?){3}", "List:\n* a\n* b\n* c", True),
    (r"(?:[^*]|\*[^ ])*(?:\* [^\n]+\n?){3}", "List:\n* a\n* b", False),
    (r"(?s:.*)<<[^<>\n]+>>(?s:.*)", "<<Title>>\ntext", True),
    (r"(?s:.*)<<[^<>\n]+>>(?s:.*)", "Title\ntext", False),
    (r"(?:\S+\s+){2,4}\S+", "one two three", True),
    (r"(?:\S+\s+){2,4}\S+", "one two", False),
    (r"My answer is (?:yes|no|maybe)\.", "My answer is maybe.", True),
    (r"My answer is (?:yes|no|maybe)\.", "My answer is perhaps.", False),
    (r".*\*\*\*.*", "part one\n***\npart two", True),
    (r".*\n\nP\.S\..*", "Dear you\n\nP.S. bye", True),
    (r".*\n\nP\.S\..*", "Dear you", False),
    # as in IFBench: words and keywords
    (r"(?=.*\bkaleidoscope\b)(?!.*\bbanana\b).*", "a kaleidoscope", True),
    (r"(?=.*\bkaleidoscope\b)(?!.*\bbanana\b).*", "a kaleidoscope and a banana", False),
    (r"(?=.*\bkaleidoscope\b)(?!.*\bbanana\b).*", "a telescope", False),
    (r"(\w+)\b.*\b\1", "echo and echo", True),
    (r"(\w+)\b.*\b\1", "call and answer", False),
    (r"", "", True),
    (r"", "a", False),
]

#: (tokens, free, limit, linear, cosine, overlong), by hand
LENGTHS: list[tuple[int, int, int, float, float, float]] = [
    (tokens, free, limit, 1 - x, (1 + math.cos(math.pi * x)) / 2, -x)
    for tokens, free, limit, x in [
        # DAPO: 16384 tokens, and 4096 more with a penalty
        (0, 16384, 20480, 0.0),
        (1, 16384, 20480, 0.0),
        (16384, 16384, 20480, 0.0),
        (17408, 16384, 20480, 0.25),
        (18432, 16384, 20480, 0.5),
        (19456, 16384, 20480, 0.75),
        (20480, 16384, 20480, 1.0),
        (20481, 16384, 20480, 1.0),
        (10**6, 16384, 20480, 1.0),
        # the whole range
        (0, 0, 100, 0.0),
        (1, 0, 100, 0.01),
        (10, 0, 100, 0.1),
        (50, 0, 100, 0.5),
        (75, 0, 100, 0.75),
        (99, 0, 100, 0.99),
        (100, 0, 100, 1.0),
        (101, 0, 100, 1.0),
        # one step
        (0, 0, 1, 0.0),
        (1, 0, 1, 1.0),
        (511, 511, 512, 0.0),
        (512, 511, 512, 1.0),
        # the defaults
        (512, 512, 1024, 0.0),
        (640, 512, 1024, 0.25),
        (768, 512, 1024, 0.5),
        (1024, 512, 1024, 1.0),
    ]
]

_NUMBER: dict[str, Any] = {"type": "number"}
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2, "uniqueItems": True},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TREE: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["v"]}},
    "$ref": "#/$defs/node",
}

#: (schema, response, is JSON, fits the schema); with and without `fenced` unless the response has a block
JSON: list[tuple[Any, str, bool, bool]] = [
    (_PERSON, '{"name": "Ann", "age": 3}', True, True),
    (_PERSON, ' \n{"name": "Ann", "age": 3}\n', True, True),
    (_PERSON, '{\n  "name": "Ann",\n  "age": 3\n}', True, True),
    (_PERSON, '{"age": 3, "name": "Ann"}', True, True),
    (_PERSON, '{"name": "数学🙂", "age": 3}', True, True),
    (_PERSON, r'{"name": "\u00e9\n", "age": 3}', True, True),
    (_PERSON, '{"name": "Ann", "age": 3.0}', True, True),
    (_PERSON, '{"name": "Ann", "age": 0}', True, True),
    (_PERSON, '{"name": "Ann", "age": 150}', True, True),
    (_PERSON, '{"name": "Ann", "age": 3, "tags": []}', True, True),
    (_PERSON, '{"name": "Ann", "age": 3, "tags": ["x", "y"]}', True, True),
    (_PERSON, '{"name": "Ann", "age": 3, "kind": null}', True, True),
    (_PERSON, '{"name": "Ann"}', True, False),
    (_PERSON, '{"age": 3}', True, False),
    (_PERSON, "{}", True, False),
    (_PERSON, '{"name": "", "age": 3}', True, False),
    (_PERSON, '{"name": null, "age": 3}', True, False),
    (_PERSON, '{"name": "Ann", "age": "3"}', True, False),
    (_PERSON, '{"name": "Ann", "age": 3.5}', True, False),
    (_PERSON, '{"name": "Ann", "age": -1}', True, False),
    (_PERSON, '{"name": "Ann", "age": 151}', True, False),
    (_PERSON, '{"name": "Ann", "age": true}', True, False),
    (_PERSON, '{"name": "Ann", "age": 3, "x": 1}', True, False),
    (_PERSON, '{"name": "Ann", "age": 3, "tags": ["x", "x"]}', True, False),
    (_PERSON, '{"name": "Ann", "age": 3, "tags": ["x", "y", "z"]}', True, False),
    (_PERSON, '{"name": "Ann", "age": 3, "tags": "x"}', True, False),
    (_PERSON, '{"name": "Ann", "age": 3, "kind": "c"}', True, False),
    (_PERSON, '[{"name": "Ann", "age": 3}]', True, False),
    (_PERSON, '"Ann"', True, False),
    (_PERSON, "null", True, False),
    (_PERSON, '{"name": "Ann", "age": 3', False, False),
    (_PERSON, '{"name": "Ann", "age": 3}}', False, False),
    (_PERSON, '{"name": "Ann", "age": 3,}', False, False),
    (_PERSON, "{'name': 'Ann', 'age': 3}", False, False),
    (_PERSON, '{name: "Ann", age: 3}', False, False),
    (_PERSON, '{"name": "Ann", "age": 3} // done', False, False),
    (_PERSON, 'Sure: {"name": "Ann", "age": 3}', False, False),
    (_PERSON, '{"name": "Ann", "age": NaN}', False, False),
    (_PERSON, '{"name": "Ann", "age": 03}', False, False),
    (_PERSON, '{"name": "Ann\n", "age": 3}', False, False),
    (_PERSON, '{"name": Ann, "age": 3}', False, False),
    (_PERSON, "True", False, False),
    (_PERSON, "", False, False),
    (_PERSON, "[" * 100_000, False, False),
    (_NUMBER, "3", True, True),
    (_NUMBER, "-3.5e2", True, True),
    (_NUMBER, '"3"', True, False),
    (_NUMBER, "Infinity", False, False),
    (_NUMBER, "3 4", False, False),
    (_TREE, '{"v": 1, "next": {"v": 2}}', True, True),
    (_TREE, '{"v": 1, "next": {}}', True, False),
    (True, "[1]", True, True),
    (False, "[1]", True, False),
    (None, '{"any": ["thing"]}', True, True),
    (None, "thing", False, False),
    ({"type": "array", "minItems": 1}, "[0]", True, True),
    ({"type": "array", "minItems": 1}, "[]", True, False),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "null", True, True),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "0", True, False),
    ({"type": "string", "pattern": "^[a-z]+$"}, '"abc"', True, True),
    ({"type": "string", "pattern": "^[a-z]+$"}, '"ABC"', True, False),
]

#: (response around a document, whether the document is found with `fenced`, and without)
FENCES: list[tuple[str, bool, bool]] = [
    ("{}", True, True),
    ("```json\n{}\n```", True, False),
    ("```\n{}\n```", True, False),
    ("Sure:\n```json\n{}\n```\nDone", True, False),
    ("```json\nno\n```\nand\n```json\n{}\n```", True, False),
    ("```json\n{}\n```\nand\n```json\nno\n```", False, False),
    ("```json\n{}", True, False),
    ("```json\n{}\n```\n```", True, False),
    ("  ```json\n{}\n  ```", True, False),
    ("Sure: {}", False, False),
]
