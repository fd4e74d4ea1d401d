"""Function paths in a run's configuration, its record, and its resume."""

from __future__ import annotations

import json
import logging
import pickle
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.registry.local_runs import answered, plugins_for, run_config, scores, write

from slime.cli.preflight_plugins import check_resume
from slime.compat.functions import place_functions
from slime.config import PluginOptions, RunConfig, config_from_toml, config_problems, read_config, resolve
from slime.config.choices import choice_problems
from slime.errors import PluginLoadError, PluginNotFoundError
from slime.plugin import Context
from slime.registry.component import checked_options
from slime.registry.plugin_set import Fingerprint, load_plugins, survey_plugins

REWARD = "def reward_func(args, sample): return 1.0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a reward function."""
    return write(tmp_path, "custom_rm.py", REWARD)


def problems_of(config: RunConfig) -> list[str]:
    """The problems of a configuration's functions."""
    return [*place_functions(config).problems, *choice_problems(config)]


def by_path(path: Path, **more: Any) -> RunConfig:
    return run_config(reward={"custom_rm_path": str(path)}, **more)


def test_a_flag_becomes_the_components_name_with_an_absolute_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    config = run_config(reward={"custom_rm_path": "custom_rm.py"})
    assert (config.reward.reward, config.reward.custom_rm_path) == (f"{path}:reward_func", None)
    assert run_config(reward={"reward": "custom_rm.py"}).reward.reward == f"{path}:reward_func"
    assert run_config(reward={"terms": [{"name": "custom_rm.py"}]}).reward.terms[0].name == config.reward.reward
    assert resolve(config) == config


def test_the_saved_configuration_gives_the_same_run(path: Path) -> None:
    source = write(path.parent, "source.py", "class Mine:\n    def get_samples(self, n): ...")
    generator = write(path.parent, "gen.py", "async def generate(sample): ...")
    config = by_path(
        path, data={"data_source_path": str(source)}, rollout={"custom_generate_function_path": str(generator)}
    )
    again = resolve(config_from_toml(config.to_toml()))
    assert (again.reward.reward, again.data.data_source, again.rollout.generator) == (
        f"{path}:reward_func",
        f"{source}:Mine",
        f"{generator}:generate",
    )
    assert problems_of(again) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reward": {"reward": "exact_match", "custom_rm_path": "P"}},
            "--custom-rm-path P and --reward exact_match both",
        ),
        (
            {"reward": {"terms": [{"name": "x"}], "custom_rm_path": "P"}},
            r"--custom-rm-path P and \[\[reward.terms\]\] both",
        ),
        (
            {"rollout": {"generator": "single_turn", "custom_generate_function_path": "P"}},
            "--custom-generate-function-path P and --generator single_turn both",
        ),
        (
            {"data": {"data_source": "prompts", "data_source_path": "P"}},
            "--data-source-path P and --data-source prompts",
        ),
        (
            {"rollout": {"buffer_filter": "x", "buffer_filter_path": "P"}},
            "--buffer-filter-path P and --buffer-filter x",
        ),
        ({"reward": {"reward": "exact_match", "group_rm": True}}, "--group-rm has no effect"),
        ({"reward": {"custom_rm_path": "P", "group_rm": True}}, "nothing that can be a reward of whole groups"),
        ({"rollout": {"buffer_filter_path": "P"}}, r"--buffer-filter-path \S+custom_rm.py: .* can be a buffer filter"),
        (
            {"rollout": {"rollout_sample_filter_path": "no.py"}},
            r"--rollout-sample-filter-path no.py: .*no.py cannot be read: No such file",
        ),
        ({"reward": {"custom_reward_post_process_path": "P"}}, "can be a reward post-processing"),
    ],
)
def test_an_unusable_path_is_reported_once(path: Path, options: dict[str, Any], message: str) -> None:
    named = json.loads(json.dumps(options).replace('"P"', json.dumps(str(path))))
    problems = problems_of(run_config(**named))
    assert len(problems) == 1
    assert re.search(message.replace("P ", f"{path} "), problems[0]), problems[0]


@pytest.mark.parametrize(
    ("file", "flags", "chosen"),
    [
        ('[reward]\nname = "exact_match"', ["--custom-rm-path", "P"], (None, "P", 0)),
        ('[[reward.terms]]\nname = "exact_match"', ["--custom-rm-path", "P"], (None, "P", 0)),
        ('[reward]\ncustom_rm_path = "x.py"', ["--reward", "exact_match"], ("exact_match", None, 0)),
        ('[[reward.terms]]\nname = "exact_match"', ["--rm-type", "math"], ("math", None, 0)),
        ('[reward]\nname = "exact_match"', [], ("exact_match", None, 0)),
        ('[reward]\nname = "exact_match"\ncustom_rm_path = "P"', [], ("exact_match", "P", 0)),
    ],
)
def test_a_flag_of_either_form_overrides_the_run_file(
    tmp_path: Path, file: str, flags: list[str], chosen: tuple[Any, ...]
) -> None:
    (tmp_path / "run.toml").write_text(file)
    reward = read_config([str(tmp_path / "run.toml"), *flags]).reward
    assert (reward.reward, reward.custom_rm_path, len(reward.terms)) == chosen


def test_a_function_counts_as_the_reward_that_a_run_must_have(path: Path) -> None:
    def missing(config: RunConfig) -> bool:
        return any(problem.startswith("--reward is missing") for problem in config_problems(config))

    generator = write(path.parent, "gen.py", "async def generate(sample): ...")
    assert missing(run_config())
    assert not missing(by_path(path))
    assert not missing(run_config(reward={"terms": [{"name": f"{path}"}]}))
    assert not missing(run_config(rollout={"custom_generate_function_path": str(generator)}))


def test_the_record_of_a_run_has_path_and_hash(path: Path) -> None:
    batch = write(path.parent, "batch.py", "def sample_filter(args, groups): ...")
    config = by_path(path, rollout={"rollout_sample_filter_path": str(batch)})
    record = plugins_for(config).provenance(config)
    assert json.loads(json.dumps(record)) == record
    used = record["used"]["reward"]
    whole = sha256(path.read_bytes()).hexdigest()
    assert (used["id"], used["distribution"], used["entry"]) == (f"{path}:reward_func", "local", str(path))
    assert (used["version"], used["source"]) == (
        whole[:12],
        {"editable": False, "hash": whole, "url": path.as_uri()},
    )
    assert record["used"]["rollout_sample_filter"]["id"] == f"{batch}:sample_filter"


@pytest.mark.slow
def test_resume_with_a_changed_file_warns_and_strict_refuses(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = by_path(path)
    saved = plugins_for(config).provenance(config)
    with caplog.at_level(logging.WARNING):
        check_resume(plugins_for(config), saved, config)
        assert caplog.text == ""
        path.write_text(REWARD + "  # edited\n")
        check_resume(plugins_for(config), saved, config)
    assert f"made with reward {path}:reward_func of local {saved['used']['reward']['version']}, now" in caplog.text
    strict = load_plugins(PluginOptions(strict=True), place_functions(config).components)
    with pytest.raises(PluginLoadError, match="strict is on"):
        check_resume(strict, saved, config)


@pytest.mark.slow
def test_resume_with_a_file_that_has_moved_warns(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = by_path(path)
    saved = plugins_for(config).provenance(config)
    moved = path.rename(path.with_name("moved.py"))
    config = by_path(moved)
    with caplog.at_level(logging.WARNING):
        check_resume(plugins_for(config), saved, config)
    assert f"made with reward {path}:reward_func, this run has {moved}:reward_func" in caplog.text


def test_all_processes_run_the_file_as_the_driver_read_it(path: Path) -> None:
    driver = plugins_for(by_path(path)).fingerprint()
    sent: Fingerprint = pickle.loads(pickle.dumps(driver))
    assert (sent.digest, sent.functions) == (driver.digest, driver.functions)
    path.write_text("def reward_func(args, sample): return 2.0")
    actor = load_plugins(PluginOptions(), sent.functions)
    component = actor.find("reward", f"{path}:reward_func")
    options, _ = checked_options(component, {})
    reward = component.build(options, Context(seed=0, run_dir=path.parent, logger=logging.getLogger("test")))
    assert scores(reward, answered("x")) == [1.0]


@pytest.mark.slow
def test_only_located_functions_are_components(path: Path) -> None:
    with pytest.raises(PluginNotFoundError, match="nothing has loaded it"):
        survey_plugins().resolve(by_path(path))
