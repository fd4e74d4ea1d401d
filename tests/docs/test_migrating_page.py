"""Every name on docs/migrating.md is accepted, or refused with what the page says."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs import migrating

from slime.config import config_problems, read_config
from slime.config.flag_table import component_option, find_flag
from slime.config.flags import UNAVAILABLE
from slime.errors import ConfigError, PluginNotFoundError
from slime.registry.function_path import Reference
from slime.registry.original_names import original_names
from slime.registry.plugin_set import survey_plugins

FLAGS = original_names()["flags"]


def test_the_page_has_the_tables() -> None:
    page = migrating.PAGE.read_text(encoding="utf-8")
    assert migrating.written(page) == page, "run `python -m tests.docs.migrating`"


def test_all_flags_of_the_original_are_on_the_page() -> None:
    """The flags of its release 0.3.1, without those that only begin like another one."""
    names = {*migrating.ACCEPTED, *FLAGS}
    assert len([name for name in names if "*" not in name]) >= 215


@pytest.mark.slow
@pytest.mark.parametrize("name", migrating.ACCEPTED)
def test_an_accepted_flag_is_read(name: str) -> None:
    value, _ = migrating.ACCEPTED[name]
    flag = find_flag(name)
    assert flag is not None and flag.target != UNAVAILABLE and not flag.refusal
    config = read_config([f"--{name}", *(value or "").split()])
    section: Any = getattr(config, flag.target)
    stated = section if isinstance(section, dict) else section.model_dump(exclude_unset=True)
    assert flag.key in stated
    refusals = [text for text in config_problems(config) if re.search("cannot be used|is not supported", text)]
    assert not [text for text in refusals if text.startswith(f"--{name} ")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_a_refused_flag_says_what_to_do(name: str) -> None:
    flag = name.replace("*", "x")
    for words in ([f"--{flag}"], [f"--{flag}", "1", "2"], [f"--{flag}=1"]):
        with pytest.raises(ConfigError, match=re.escape(FLAGS[name])) as refused:
            read_config(words)
        assert str(refused.value).startswith(f"--{flag} ")


def test_a_refused_flag_is_refused_in_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[rollout]\nrollout_function_path = "x"\n[data]\nnum_epoch = 1\n')
    with pytest.raises(ConfigError) as refused:
        read_config([str(tmp_path / "run.toml")])
    assert FLAGS["rollout-function-path"] in str(refused.value) and FLAGS["num-epoch"] in str(refused.value)


@pytest.mark.parametrize("name", original_names()["rewards"])
def test_the_name_of_a_reward_says_what_to_write(name: str) -> None:
    with pytest.raises(PluginNotFoundError, match=re.escape(original_names()["rewards"][name])):
        survey_plugins().find("reward", name)


@pytest.mark.parametrize("name", original_names()["paths"])
def test_the_path_of_a_function_says_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(original_names()["paths"][name])):
        Reference.parse(name.replace("*", "module.name"))


def test_what_is_written_instead_exists() -> None:
    """Flags that are recommended are flags of slime, options of its components, and components that it has."""
    texts = [*FLAGS.values(), *original_names()["rewards"].values(), *original_names()["paths"].values()]
    texts += [text for table in ("TRL", "verl", "OpenRLHF") for text in original_names()[table].values()]
    plugins = survey_plugins()
    for text in texts:
        for flag in re.findall(r"--([a-z][\w.-]*[a-z0-9])", text):
            known = find_flag(flag)
            assert flag == "resume" or component_option(flag) or (known is not None and known.target != UNAVAILABLE), (
                text
            )
        for kind, name in re.findall(r"--(reward|advantage-estimator|generator) (\w+)", text):
            plugins.find(kind.removeprefix("advantage-"), name)
        for name in re.findall(r"--(?:sampling|buffer)-filter (\w+)", text):
            plugins.find("buffer_filter", name)
        for page in re.findall(r"docs/[\w/-]+\.md", text):
            assert (migrating.PAGE.parents[1] / page).is_file(), text


def package_folder(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def test_keys_of_verl_exist() -> None:
    folder = package_folder("verl") / "trainer" / "config"
    trees = [
        yaml.safe_load((folder / f"_generated_ppo_{name}trainer.yaml").read_text(encoding="utf-8"))
        for name in ("megatron_", "")
    ]
    for key in original_names()["verl"]:
        assert any(has_key(tree, key) for tree in trees), key


def has_key(tree: Any, key: str) -> bool:
    """Whether nested tables have a key with dots."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


@pytest.mark.slow
def test_fields_of_trl_exist() -> None:
    from trl import GRPOConfig, ModelConfig, ScriptArguments

    known = {field.name for kind in (GRPOConfig, ModelConfig, ScriptArguments) for field in dataclasses.fields(kind)}
    assert set(original_names()["TRL"]) - set(migrating.TRL_TRAINER) <= known
    # The trainer itself needs packages that slime does not install.
    source = (package_folder("trl") / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8")
    [parameters] = [
        {argument.arg for argument in function.args.args}
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer"
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
    ]
    assert set(migrating.TRL_TRAINER) <= parameters
