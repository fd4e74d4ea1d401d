"""An extension of Markdown for the site: formulas become MathML, and drawings follow light and dark."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor

DOCS = Path(__file__).parents[2] / "docs"
#: what pymdownx.arithmatex makes of $…$ and $$…$$
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_DRAWING = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*(pictures/[\w-]+\.svg)"[^>]*>')


def _formula(match: re.Match[str]) -> str:
    latex = html.unescape(match[3]).strip()
    if match[2] == "(":
        return convert(latex, display="inline")
    return f'<div class="formula">{convert(latex, display="block")}</div>'


def _drawing(match: re.Match[str]) -> str:
    """The drawing itself instead of a link to it: only then does it get the colours of the page."""
    return f'<div class="drawing">{(DOCS / match[2]).read_text(encoding="utf-8")}</div>'


class _Finish(Postprocessor):
    def run(self, text: str) -> str:
        return _DRAWING.sub(_drawing, _FORMULA.sub(_formula, text))


class SiteExtension(Extension):
    """Applied after all other extensions."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the last postprocessor."""
        md.postprocessors.register(_Finish(md), "slime-site", -100)


def makeExtension(**settings: Any) -> SiteExtension:
    """The name that Python-Markdown looks for."""
    return SiteExtension(**settings)
