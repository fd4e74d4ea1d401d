"""The pictures of docs/concepts/ are those that the program draws, and each concept has one."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scripts.docs.pictures import FOLDER, PICTURES

CONCEPTS = sorted((Path(__file__).parents[2] / "docs" / "concepts").glob("*.md"))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_current(name: str) -> None:
    drawn = PICTURES[name]().svg()
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawn, "run: python -m scripts.docs.pictures"
    root = ElementTree.fromstring(drawn)
    texts = [element for element in root.iter() if element.tag.endswith("text")]
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    assert texts
    assert all(0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height for text in texts)


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_a_concept_has_a_picture_with_words_for_it(page: Path) -> None:
    [(words, name)] = re.findall(r"^!\[([^]]+)\]\(\.\./pictures/([\w-]+)\.svg\)$", page.read_text(), re.MULTILINE)
    assert PICTURES[name]().svg().count(f"<title>{words}</title>") == 1


def test_every_picture_is_used() -> None:
    assert len(CONCEPTS) == len(PICTURES)
