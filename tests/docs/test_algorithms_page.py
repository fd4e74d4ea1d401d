"""Every algorithm has a page: flags that are accepted together, options with their defaults, a formula, the paper."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from latex2mathml.converter import convert

from slime.cli.preflight_plugins import check_config
from slime.config import load_config
from slime.plugin import EstimatorSpec
from slime.registry.component import checked_options
from slime.registry.plugin_set import survey_plugins
from slime_estimators import slime_register_estimators

DOCS = Path(__file__).parents[2] / "docs"
OVERVIEW = (DOCS / "algorithms.md").read_text(encoding="utf-8")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "algorithms").glob("*.md")}
SPECS = slime_register_estimators()
NAMES = [spec.name for spec in SPECS]
BASE = "--hf-checkpoint m --prompt-data p --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 4 --reward r"


def test_every_estimator_has_a_page_and_a_row() -> None:
    assert sorted(PAGES) == sorted(NAMES)
    assert re.findall(r"^\| \[[^]]+\]\(algorithms/(\w+)\.md\)", OVERVIEW, flags=re.MULTILINE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_flags_of_a_page_are_accepted(name: str) -> None:
    [flags] = re.findall(r"^slime train run\.toml (.*)$", PAGES[name], flags=re.MULTILINE)
    assert f"--advantage-estimator {name}" in flags
    config = load_config([*BASE.split(), *flags.split()])
    plugins = survey_plugins()
    checked_options(plugins.find("estimator", name), config.component_options.get("estimator", {}))
    check_config(plugins, config)


def written(default: object) -> str:
    """A default as the pages state it."""
    if isinstance(default, float):
        return re.sub(r"e-0*", "e-", f"{default:g}")
    return "none" if default is None else str(default).lower()


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_options_and_clip_ranges_match_the_page(spec: EstimatorSpec) -> None:
    page = PAGES[spec.name]
    said = dict(re.findall(r"^\| `--estimator\.([a-z-]+)` \| ([^|]+) \|", page, flags=re.MULTILINE))
    assert list(said) == [option.replace("_", "-") for option in spec.options.model_fields]
    defaults = [info.default for info in spec.options.model_fields.values()]
    assert list(said.values()) == [written(default) for default in defaults]
    [(low, high)] = re.findall(r"The clip range is ([\d.e-]+) and ([\d.e-]+) unless", page)
    assert (float(low), float(high)) == (spec.clip_range or (0.2, 0.2))


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_a_page_links_the_papers_of_the_code(spec: EstimatorSpec) -> None:
    module = importlib.import_module(spec.factory.partition(":")[0])
    papers = set(re.findall(r"arXiv (\d{4}\.\d{5})", (module.__doc__ or "").replace("\n", " ")))
    linked = set(re.findall(r"\[arXiv [\d.]+\]\(https://arxiv\.org/abs/([\d.]+)\)", PAGES[spec.name]))
    assert papers
    assert papers <= linked


@pytest.mark.parametrize("name", ["algorithms", *NAMES])
def test_formulas_can_be_rendered(name: str) -> None:
    page = PAGES.get(name, OVERVIEW)
    blocks = re.findall(r"^\$\$\n(.*?)\n\$\$$", page, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for formula in [*blocks, *re.findall(r"(?<![\w$])\$([^$\n]+)\$", page)]:
        mathml = convert(formula)
        assert mathml.startswith("<math") and "\\" not in mathml, formula
