"""The code that a run uses, and whether other processes and resumed runs use the same."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from slime.cli.preflight_plugins import check_resume
from slime.config import PluginOptions
from slime.errors import PluginLoadError, PluginNotFoundError
from slime.registry.plugin_set import load_plugins, survey_plugins

pytestmark = pytest.mark.slow


def edit(info: Path) -> None:
    """Change the installed module without changing its version."""
    module = info.parent / "slime_reward_math.py"
    module.write_text(module.read_text() + "\n# another version of it\n")


def test_provenance_names_packages_and_resolved_options(install_reward: Any, config_with: Any) -> None:
    install_reward("math", "boxed", version="0.3.1")
    record = survey_plugins().provenance(config_with(reward="boxed", options={"estimator": {"eps": 1e-4}}))
    assert json.loads(json.dumps(record)) == record
    assert record["used"]["reward"]["id"] == "math/boxed"
    assert record["used"]["reward"]["distribution"] == "slime-reward-math"
    assert record["used"]["reward"]["version"] == "0.3.1"
    assert record["used"]["estimator"]["options"] == {"std_normalization": True, "eps": 1e-4}
    assert [plugin["plugin"] for plugin in record["plugins"]][-1] == "math"


def test_the_hash_changes_with_the_installed_files(install_reward: Any, config_with: Any) -> None:
    info = install_reward("math", "boxed")
    config = config_with(reward="boxed")
    before = survey_plugins().provenance(config)["used"]["reward"]["source"]["hash"]
    edit(info)
    assert survey_plugins().provenance(config)["used"]["reward"]["source"]["hash"] != before


def test_the_commit_of_a_repository_install_is_recorded(install_reward: Any, config_with: Any) -> None:
    direct = {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}
    install_reward("math", "boxed", direct_url=direct)
    source = survey_plugins().provenance(config_with(reward="boxed"))["used"]["reward"]["source"]
    assert (source["url"], source["commit"], source["editable"]) == ("https://example.org/r.git", "abc123", False)


def test_an_editable_install_is_recorded_with_commit_and_changes(
    install_reward: Any, config_with: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    (folder / "file").write_text("1")
    git("init", "-q")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    install_reward("math", "boxed", direct_url={"url": folder.as_uri(), "dir_info": {"editable": True}})
    config = config_with(reward="boxed")
    source = survey_plugins().provenance(config)["used"]["reward"]["source"]
    assert source == {
        "editable": True,
        "hash": None,
        "url": folder.as_uri(),
        "commit": git("rev-parse", "HEAD"),
        "dirty": False,
    }
    (folder / "file").write_text("2")
    assert survey_plugins().provenance(config)["used"]["reward"]["source"]["dirty"] is True


def test_two_processes_with_the_same_plugins_agree() -> None:
    code = "from slime.registry.plugin_set import survey_plugins; print(survey_plugins().fingerprint().digest)"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240)
    assert other.stdout.strip() == survey_plugins().fingerprint().digest


def test_the_fingerprint_sees_plugins_versions_and_changed_modules(install_reward: Any) -> None:
    nothing = survey_plugins().fingerprint().digest
    info = install_reward("math", "boxed")
    with_plugin = survey_plugins().fingerprint().digest
    edit(info)
    edited = survey_plugins().fingerprint().digest
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("0.3.1", "0.3.2"))
    assert len({nothing, with_plugin, edited, survey_plugins().fingerprint().digest}) == 4


def test_resume_with_the_same_plugins_is_silent(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    plugins = survey_plugins()
    with caplog.at_level(logging.WARNING):
        check_resume(plugins, plugins.provenance(config), config)
    assert caplog.text == ""


def test_resume_without_a_component_is_refused(install_reward: Any, config_with: Any) -> None:
    info = install_reward("math", "boxed")
    saved = survey_plugins().provenance(config_with(reward="boxed"))
    (info / "entry_points.txt").unlink()
    config = config_with()
    with pytest.raises(
        PluginNotFoundError, match=r"made with reward math/boxed of slime-reward-math 0.3.1, which is missing"
    ):
        check_resume(survey_plugins(), saved, config)


def test_resume_with_another_version_warns_and_strict_refuses(
    install_reward: Any, config_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    info = install_reward("math", "boxed")
    config = config_with(reward="boxed")
    saved = survey_plugins().provenance(config)
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("0.3.1", "0.4.0"))
    with caplog.at_level(logging.WARNING):
        check_resume(survey_plugins(), saved, config)
    assert "math/boxed of slime-reward-math 0.3.1, now it is of slime-reward-math 0.4.0" in caplog.text
    with pytest.raises(PluginLoadError, match="strict is on"):
        check_resume(load_plugins(PluginOptions(strict=True)), saved, config)


def test_resume_with_changed_code_of_one_version_warns_and_strict_refuses(
    install_reward: Any, config_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    info = install_reward("math", "boxed")
    config = config_with(reward="boxed")
    saved = survey_plugins().provenance(config)
    edit(info)
    with caplog.at_level(logging.WARNING):
        check_resume(survey_plugins(), saved, config)
    assert "math/boxed of slime-reward-math 0.3.1 with hash" in caplog.text
    with pytest.raises(PluginLoadError, match="strict is on"):
        check_resume(load_plugins(PluginOptions(strict=True)), saved, config)


def test_code_of_the_model_folder_is_recorded_if_it_may_run_and_resume_with_other_code_warns(
    config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = tmp_path / "tokenization.py"
    code.write_text("class Own: ...")
    config = config.with_options("checkpoint", hf_checkpoint=str(tmp_path))
    plugins = survey_plugins()
    assert plugins.provenance(config)["model_code"] == {}
    config = config.with_options("checkpoint", trust_remote_code=True)
    saved = plugins.provenance(config)
    assert saved["model_code"] == {"tokenization.py": sha256(b"class Own: ...").hexdigest()}
    with caplog.at_level(logging.WARNING):
        check_resume(plugins, saved, config)
        assert caplog.text == ""
        code.write_text("class Own: changed = True")
        check_resume(plugins, saved, config)
    assert "the checkpoint was made with other code of the model folder: tokenization.py" in caplog.text
    with pytest.raises(PluginLoadError, match=r"tokenization.py, and .* strict is on"):
        check_resume(load_plugins(PluginOptions(strict=True)), saved, config)


def test_resume_with_other_options_or_another_component_warns(
    config_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugins = survey_plugins()
    saved = plugins.provenance(config_with(options={"reward": {"ignore_case": True}}))
    with caplog.at_level(logging.WARNING):
        check_resume(plugins, saved, config_with())
    assert "reward rewards/exact_match with options {" in caplog.text
    saved["used"]["reward"]["id"] = "estimators/grpo"
    saved["used"]["reward"]["kind"] = "estimator"
    with caplog.at_level(logging.WARNING):
        check_resume(plugins, saved, config_with())
    assert "made with estimator estimators/grpo, this run has rewards/exact_match as reward" in caplog.text


def test_a_folder_inside_a_foreign_repository_has_no_commit(
    install_reward: Any, config_with: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "outer" / "ignored"
    folder.mkdir(parents=True)
    subprocess.run(["git", "-C", str(folder.parent), "init", "-q"], check=True, timeout=30)
    install_reward("math", "boxed", direct_url={"url": folder.as_uri(), "dir_info": {"editable": True}})
    source = survey_plugins().provenance(config_with(reward="boxed"))["used"]["reward"]["source"]
    assert "commit" not in source


def test_packages_that_change_the_engines_are_recorded(install: Any, config: Any) -> None:
    install("some-patch", "2.0", {"patch": "some_patch"}, {"some_patch": ""}, group="sglang.srt.plugins")
    assert {
        "group": "sglang.srt.plugins",
        "name": "patch",
        "distribution": "some-patch",
        "version": "2.0",
    } in survey_plugins().provenance(config)["engine_plugins"]


def test_a_changed_distribution_is_reported_once_with_its_components(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugins = survey_plugins()
    saved = plugins.provenance(config)
    for used in saved["used"].values():
        used["version"] = "0.0.1"
    with caplog.at_level(logging.WARNING):
        check_resume(plugins, saved, config)
    [record] = caplog.records
    assert "made with estimator estimators/grpo, reward rewards/exact_match, datasource" in record.getMessage()
    assert record.getMessage().count("of slime-rl 0.0.1, now it is of slime-rl") == 1
