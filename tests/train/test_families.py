"""Every model family: log-probs, one optimizer step and the exported tensors equal those of transformers."""

from __future__ import annotations

import pytest
from tests.support.model_folders import Folders
from tests.support.tiny_models import FAMILIES, published

from slime.testing import assert_family_matches_transformers

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]

#: model -> the layouts in which it is compared, besides one rank
LAYOUTS = {
    "deepseek_v3": ("EP=2 CP=2", "PP=2"),
    "glm": ("TP=2",),
    "glm4": ("TP=2", "PP=2"),
    "glm4_moe": ("TP=2", "PP=2"),
    "moonlight": ("TP=2",),
    "qwen2": ("TP=2",),
    "qwen3_moe": ("EP=2", "TP=2 ETP=1 EP=2"),
}


@pytest.mark.parametrize("model", FAMILIES)
def test_a_family_computes_what_transformers_does(model: str, model_folder: Folders) -> None:
    layouts = ("one rank", *LAYOUTS.get(model, ()))
    family = str(published(model)["model_type"])
    found = assert_family_matches_transformers(family, model_folder(model), layouts=layouts)
    assert [one.layout for one in found] == list(layouts)
