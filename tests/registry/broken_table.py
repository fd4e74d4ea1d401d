"""The table of docs/plugins/broken.md: the messages for every kind of broken plugin.

    python -m tests.registry.broken_table        # updates it

The packages of `broken_cases.py` are created on disk; then plugins are listed, and two runs are resolved: one that uses
the plugin and one that does not.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.registry.broken_cases import CASES, Case
from tests.support.distributions import make_distribution

from slime.cli.plugins_list import installed
from slime.config import PluginOptions, RunConfig
from slime.config.options import AlgorithmOptions, RewardOptions, RolloutOptions
from slime.errors import SlimeError
from slime.plugin import Context
from slime.registry.plugin_set import PluginSet, load_plugins

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "broken.md"
BEGIN, END = "<!-- generated: python -m tests.registry.broken_table -->", "<!-- end -->"


@dataclass(frozen=True)
class Seen:
    """The messages for one case."""

    #: "broken: PROBLEM. REMEDY" of `slime plugins`, or "ok"
    listed: str
    #: the error of a run that uses it; None if it runs
    refused: str | None
    exit_code: int
    #: whether a run that does not use it can be resolved
    others_run: bool


def see(case: Case) -> Seen:
    """Install the case's packages, collect the messages, and remove them."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        install(case, site)
        with on_the_path(site):
            return _seen(case, site)


def _seen(case: Case, site: Path) -> Seen:
    shown = installed().content
    rows = [row for row in shown.plugins if not row.built_in]
    messages = dict.fromkeys(
        f"{row.status}: {_sentence(row.problem)} {row.remedy}" if row.problem else row.status for row in rows
    )
    logging.disable(logging.WARNING)
    try:
        plugins = load_plugins(PluginOptions())
        others = _refusal(plugins, _config("exact_match"), case, site)[0] is None
        refused, code = _refusal(plugins, _config(case.used_as, case), case, site)
    finally:
        logging.disable(logging.NOTSET)
    return Seen(_plain("; ".join([*messages, *shown.notes]), site), refused, code, others)


def everything() -> dict[str, Seen]:
    """What is seen of each mistake."""
    return {case.mistake: see(case) for case in CASES}


def table(found: Mapping[str, Seen]) -> str:
    """The generated part of the page."""
    lines = ["| | mistake | `slime plugins` | a run that uses it |", "| --- | --- | --- | --- |"]
    for number, case in enumerate(CASES, start=1):
        seen = found[case.mistake]
        lines.append(f"| {number} | {case.mistake} | {_cell(seen.listed)} | {_used(case, seen)} |")
    return "\n".join([BEGIN, *lines, END])


def _used(case: Case, seen: Seen) -> str:
    if seen.refused is None:
        return f"runs: `{case.used_as}` means slime's own"
    reason = seen.listed.removeprefix("broken: ")
    # The message of the listing, after the names of component and package.
    # The lines below the first are those of a traceback.
    return _cell(seen.refused.replace(reason, "...").splitlines()[0])


def page_with(generated: str) -> str:
    """The page with its generated part replaced."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(BEGIN)] + generated + text[text.index(END) + len(END) :]


@contextmanager
def on_the_path(site: Path) -> Iterator[None]:
    """Find the packages that are installed in `site`."""
    before = set(sys.modules)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for name in set(sys.modules) - before:
            if name.startswith("slime_reward_"):
                del sys.modules[name]


def install(case: Case, site: Path) -> None:
    """Write the case's packages to disk."""
    for package in case.packages:
        sources = {package.module: package.source, f"{package.module}_impl": package.impl}
        entry = package.entry or package.module
        make_distribution(site, package.distribution, "1.2", {package.plugin: entry}, sources)


def _config(reward: str, case: Case | None = None) -> RunConfig:
    return RunConfig(
        algorithm=AlgorithmOptions(advantage_estimator="grpo"),
        reward=RewardOptions(reward=reward),
        rollout=RolloutOptions(n_samples_per_prompt=2),
        component_options={"reward": dict(case.options)} if case else {},
    )


def _refusal(plugins: PluginSet, config: RunConfig, case: Case, site: Path) -> tuple[str | None, int]:
    """(error, exit code) of a refused run; (None, 0) otherwise."""
    try:
        used = plugins.resolve(config)
        if case.shows == "when it is built":
            context = Context(seed=0, run_dir=site, logger=logging.getLogger("broken"))
            used["reward"].build(context)
    except SlimeError as error:
        return _plain(str(error), site), error.exit_code
    return None, 0


def _sentence(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


def _plain(text: str, site: Path) -> str:
    """Without this machine's temporary paths."""
    return text.replace(str(site), "site-packages")


def _cell(text: str) -> str:
    if text == "ok":
        return text
    quoted = f"`` {text} ``" if "`" in text else f"`{text}`"
    return quoted.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page_with(table(everything())), encoding="utf-8")
