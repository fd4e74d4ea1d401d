"""Every algorithm on the page exists, and the flags it names are accepted together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.config import load_config
from slime.plugin import EstimatorSpec
from slime.plugins.component import checked_options
from slime.plugins.plugin_set import survey_plugins
from slime_estimators import slime_register_estimators

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
#: estimator -> (flags, description of its options)
ROWS = {
    name: (flags, options)
    for flags, name, options in re.findall(
        r"^\| [^|]+ \| `(--advantage-estimator (\w+)[^`]*)` \| (.*)\|$", PAGE, flags=re.MULTILINE
    )
}
SPECS = slime_register_estimators()
NAMES = [spec.name for spec in SPECS]
BASE = "--hf-checkpoint m --prompt-data p --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 4 --reward r"


def test_every_estimator_has_a_recipe_and_a_formula() -> None:
    assert sorted(ROWS) == sorted(NAMES)
    formulas = PAGE.split("## Formulas")[1].split("## Masked")[0]
    assert re.findall(r"^\| `(\w+)` \|", formulas, flags=re.MULTILINE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_accepted(name: str) -> None:
    flags, _ = ROWS[name]
    config = load_config([*BASE.split(), *flags.split()])
    plugins = survey_plugins()
    checked_options(plugins.find("estimator", name), config.component_options.get("estimator", {}))
    plugins.check_config(config)


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_options_and_clip_ranges_match_the_page(spec: EstimatorSpec) -> None:
    _, said = ROWS[spec.name]
    assert re.findall(r"`([a-z-]+)`", said) == [option.replace("_", "-") for option in spec.options.model_fields]
    own = re.search(rf"`{spec.name}` ([\d.e-]+) and ([\d.e-]+)", PAGE)
    assert spec.clip_range == ((0.2, 0.2) if own is None else (float(own[1]), float(own[2])))
