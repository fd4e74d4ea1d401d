"""docs/plugins/ is complete, and every command on it works as shown."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.console import PAGES, Workplace, refiled, refreshed, schemas, workplace

from slime import plugin
from slime.cli.plugins_json import Listing, Provided, Row, RunListing, UseRow
from slime.config import config_from_toml
from slime.plugin import hooks as hookspecs

NAMES = sorted(page.name for page in PAGES.glob("*.md"))
TEXT = {name: (PAGES / name).read_text(encoding="utf-8") for name in NAMES}
AGAIN = "run: python -m tests.docs.console"
WALK_THROUGHS = ("reward", "estimator", "datasource", "buffer-filter", "generator", "family", "tracker", "panel")


@pytest.fixture(scope="module")
def place() -> Iterator[Workplace]:
    """Where the packages of the walk-throughs are installed."""
    with workplace() as place:
        yield place


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NAMES if "```console" in TEXT[name]])
def test_the_commands_print_what_the_page_shows(name: str, place: Workplace) -> None:
    assert refreshed(TEXT[name], place) == TEXT[name], AGAIN


def _commands() -> list[str]:
    """The `slime train` lines of all pages whose components the walk-throughs make."""
    lines = (line for text in TEXT.values() for line in text.splitlines() if line.startswith("slime train run.toml"))
    return sorted(
        {line.partition("#")[0].strip() for line in lines if "my_reward" not in line and "--help" not in line}
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", _commands())
def test_commands_on_the_pages_find_their_components(command: str, place: Workplace) -> None:
    words = command.removeprefix("slime train ")
    printed = place.run(f"slime plugins --for {words} || echo refused")
    assert printed.rstrip().endswith("everything this run uses is there"), printed


@pytest.mark.parametrize(
    "block", [b for text in TEXT.values() for b in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
)
def test_the_run_files_on_the_pages_can_be_read(block: str) -> None:
    config_from_toml(block)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_files_on_the_pages_match_the_scaffold(name: str) -> None:
    assert refiled(TEXT[name]) == TEXT[name], AGAIN


@pytest.mark.parametrize("kind", WALK_THROUGHS)
def test_a_walk_through_is_complete(kind: str) -> None:
    text = TEXT[f"{kind}.md"]
    assert f"$ slime plugins new {kind} " in text
    assert re.search(r"^\$ pytest -q slime-", text, re.MULTILINE)
    for file in ("__init__.py", "impl.py", "tests/test_contract.py"):
        assert re.search(rf"^`slime-{kind}-[\w-]+/(\w+/)?{re.escape(file)}`:", text, re.MULTILINE)


def test_every_hook_has_a_heading() -> None:
    hooks = [name for name in vars(hookspecs) if name.startswith("slime_")]
    assert len(hooks) >= 10
    assert [hook for hook in hooks if f"### `{hook}`\n" not in TEXT["index.md"]] == []


def test_the_heading_of_a_hook_is_followed_by_its_arguments() -> None:
    for name, hook in vars(hookspecs).items():
        if name.startswith("slime_"):
            arguments = ", ".join(hook.__code__.co_varnames[: hook.__code__.co_argcount])
            assert re.search(rf"### `{name}`\n`\({arguments}\)", TEXT["index.md"]), name


def test_every_public_name_of_slime_plugin_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", TEXT["index.md"], re.MULTILINE)
    assert sorted(rows) == sorted(plugin.__all__)


@pytest.mark.parametrize(
    ("spec", "page"),
    [
        ("RewardSpec", "reward.md"),
        ("EstimatorSpec", "estimator.md"),
        ("GeneratorSpec", "generator.md"),
        ("FamilySpec", "family.md"),
    ],
)
def test_every_field_of_a_spec_is_explained(spec: str, page: str) -> None:
    shared = {field.name for field in dataclasses.fields(plugin.ComponentSpec)}
    own = {field.name for field in dataclasses.fields(getattr(plugin, spec))} - shared
    explained = set(re.findall(r"^\| `(\w+)` \|", TEXT[page], re.MULTILINE))
    assert own - explained == set()


def test_every_option_of_the_listing_is_explained() -> None:
    from slime.cli.plugins import _HELP

    options = set(re.findall(r"--[a-z-]+", _HELP))
    assert {option for option in options if option not in TEXT["listing.md"]} == set()


def test_the_schemas_match_the_output() -> None:
    assert {path: path.read_text(encoding="utf-8") for path in schemas()} == schemas(), AGAIN


@pytest.mark.parametrize("model", [Listing, Row, Provided, RunListing, UseRow])
def test_every_key_of_the_json_is_explained(model: type[Listing]) -> None:
    assert [name for name, info in model.model_fields.items() if not info.description] == []


def test_links_lead_somewhere() -> None:
    for name, text in TEXT.items():
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (PAGES / link).resolve().exists(), f"{name}: {link}"


def test_every_kind_has_a_walk_through() -> None:
    from slime.registry.kinds import KINDS

    assert {kind.replace("_", "-") for kind in KINDS} == set(WALK_THROUGHS)
    assert Path(PAGES / "index.md").is_file()
