"""Measures how far every model family is from transformers, and writes the table of docs/models.md.

`python -m tests.train.models_table [--only PATTERN] [--write]`
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.engine.test_model_families import NOT_SERVED, answers, log_prob_difference, serving
from tests.support.tiny_models import FAMILIES, MOE_FAMILIES, make_tiny_model, published, transformers_model

from slime.engine.server import EngineSpec, engine_fork_server
from slime.testing import assert_family_matches_transformers

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = (
    "| small model | family | layouts | log-probs, trainer | weights after a step | log-probs, engine |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)
#: small model -> the layouts in which it is compared, besides one rank
_LAYOUTS = {
    "deepseek_v3": ("TP=2", "PP=2", "EP=2 CP=2", "PP=2 EP=2"),
    "glm": ("TP=2", "PP=2"),
    "glm4": ("TP=2", "PP=2", "CP=2"),
    "glm4_moe": ("TP=2", "PP=2", "EP=2 CP=2", "TP=2 ETP=1 EP=2"),
    "glm4_moe_lite": ("TP=2", "PP=2", "EP=2"),
    "kimi_k2": ("TP=2", "PP=2", "EP=2"),
    "llama": ("TP=2", "PP=2", "CP=2", "TP=2 PP=2"),
    "moonlight": ("TP=2", "PP=2", "EP=2 CP=2"),
    "qwen2": ("TP=2", "PP=2", "CP=2"),
    "qwen3": ("TP=2", "PP=2", "CP=2", "TP=2 CP=2"),
    "qwen3_moe": ("TP=2", "PP=2", "CP=2", "EP=2", "TP=2 ETP=1 EP=2"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of a small model: largest differences from transformers, over all layouts."""

    model: str
    trainer: float
    weights: float
    #: None if the engines cannot serve it
    engine: float | None


def layouts_of(model: str) -> tuple[str, ...]:
    """The layouts in which a small model is compared."""
    return ("one rank", *_LAYOUTS.get(model, ()))


def family_of(model: str) -> str:
    """The family of a small model."""
    return str(published(model)["model_type"])


def measure(model: str, folder: Path, fork_server: Path) -> Row:
    """Compare a small model, in the trainer and in an engine. Raises `AssertionError` if it differs."""
    made = make_tiny_model(folder / "model", model, seed=1)
    found = assert_family_matches_transformers(family_of(model), made, layouts=layouts_of(model))
    engine = None
    if model not in NOT_SERVED:
        moe = model in MOE_FAMILIES
        with serving(made, folder, fork_server, moe=moe) as url:
            engine = log_prob_difference(answers(url, moe=moe), transformers_model(made))
    return Row(model, max(one.log_probs for one in found), max(one.weights for one in found), engine)


def table_with(page: str, rows: Sequence[Row]) -> str:
    """The page with these rows of its table replaced; the others stay."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    lines = dict(re.findall(r"^\| `(\w+)` (.*)$", table, re.MULTILINE)) | {row.model: _cells(row) for row in rows}
    text = "".join(f"| `{model}` {lines[model]}\n" for model in FAMILIES if model in lines)
    return before + BEGIN + "\n" + HEAD + text + END + after


def _cells(row: Row) -> str:
    engine = "not served" if row.engine is None else f"{row.engine:.0e}"
    layouts = ", ".join(layouts_of(row.model))
    return f"| `{family_of(row.model)}` | {layouts} | {row.trainer:.0e} | {row.weights:.0e} | {engine} |"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.models_table", description=__doc__)
    parser.add_argument("--only", default="", help="small models whose name matches this regular expression")
    parser.add_argument("--write", action="store_true", help="replace their rows in docs/models.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slime-models-") as scratch:
        folder = Path(scratch)
        server = engine_fork_server(
            EngineSpec(model_path="", device="cpu", log_path=folder / "unused.log"), folder / "fork-server.log"
        )
        server.start()
        try:
            for model in [model for model in FAMILIES if re.search(options.only, model)]:
                own = folder / model
                own.mkdir()
                row = measure(model, own, server.address)
                print(row, flush=True)
                if options.write:
                    PAGE.write_text(table_with(PAGE.read_text(encoding="utf-8"), [row]), encoding="utf-8")
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
