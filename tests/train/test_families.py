"""Every model family: log-probs, one optimizer step and the exported tensors equal those of transformers."""

from __future__ import annotations

import pytest
from tests.support.model_folders import Folders
from tests.support.tiny_models import FAMILIES
from tests.train.models_table import family_of, layouts_of

from slime.testing import assert_family_matches_transformers

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("model", FAMILIES)
def test_a_family_computes_what_transformers_does(model: str, model_folder: Folders) -> None:
    layouts = layouts_of(model)
    found = assert_family_matches_transformers(family_of(model), model_folder(model), layouts=layouts)
    assert tuple(one.layout for one in found) == layouts
