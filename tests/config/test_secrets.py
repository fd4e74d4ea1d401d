"""Secrets of a configuration are in nothing that slime writes or prints, and ordinary options are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from tests.config.conftest import GOOD, Load

from slime.cli.main import main
from slime.cli.plan import _pairs
from slime.config import RunConfig, config_from_toml, config_problems, read_config
from slime.config.installed import known_options
from slime.config.megatron_options import megatron_flags
from slime.config.run_config import SECTION_OF
from slime.config.sglang_options import sglang_flags
from slime.errors import ConfigError, one_line
from slime.errors.raised import Raised
from slime.errors.redaction import MARK, is_secret, redacted, without_credentials
from slime.plugin import Options, RewardSpec
from slime.registry.component import checked_options
from slime.registry.kinds import KINDS
from slime.registry.load import Defect, check_spec
from slime.registry.plugin_set import survey_plugins
from slime.run.checkpoint.read import data_order

CANARY = "canary-7f3a"
URL = f"http://{CANARY}-user:{CANARY}@judge.example:8000/score?api_key={CANARY}&model=m"
TERMS = f"""
[[reward.terms]]
name = "remote"
url = "{URL}"
[[reward.terms]]
name = "other"
api-key = "{CANARY}"
"""


@pytest.fixture
def with_secrets(load: Load) -> RunConfig:
    """A configuration with a secret in every place that can hold one."""
    config = load("--reward.url", URL, "--reward.auth-token", CANARY, "--data-source.password", CANARY)
    return config.model_copy(update={"sglang": {"loader": {"secret_access_key": CANARY, "region": "eu"}}})


def test_nothing_that_is_made_of_a_configuration_shows_its_secrets(with_secrets: RunConfig, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    data = with_secrets.with_options("data", prompt_data=[str(prompts)])
    shown = {
        "config.toml": with_secrets.to_toml(),
        "terms in config.toml": config_from_toml(TERMS).to_toml(),
        "trackers": str(with_secrets.model_dump(mode="json")),
        "as JSON": with_secrets.model_dump_json(),
        "repr": f"{with_secrets!r} {with_secrets}",
        "plan": _pairs(with_secrets.component_options["reward"]),
        "state.json": str(data_order(data)),
    }
    for name, text in shown.items():
        assert CANARY not in text, name
    assert f'url = "http://{MARK}@judge.example:8000/score?api_key={MARK}&model=m"' in shown["config.toml"]
    assert "region" in shown["config.toml"] and "eu" in shown["config.toml"]
    # The run itself has them.
    assert with_secrets.component_options["reward"]["url"] == URL


def test_a_saved_configuration_says_how_to_give_its_secrets_again(with_secrets: RunConfig, tmp_path: Path) -> None:
    saved = tmp_path / "config.toml"
    saved.write_text(with_secrets.model_copy(update={"sglang": {}}).to_toml())
    problems = "\n".join(config_problems(read_config([str(saved)])))
    for flag in ("--reward.url", "--reward.auth-token", "--datasource.password"):
        assert f"{flag}: this secret is not in the saved configuration. Give it again: add {flag} VALUE" in problems
    again = ["--reward.url", URL, "--reward.auth-token", CANARY, "--datasource.password", CANARY]
    config = read_config([str(saved), *again])
    assert "secret" not in "\n".join(config_problems(config))
    assert config.component_options["reward"]["url"] == URL
    terms = "\n".join(config_problems(config_from_toml(config_from_toml(TERMS).to_toml())))
    assert "reward.terms[0].options.url: this secret is not in the saved configuration. Give it again: write" in terms
    assert "reward.terms[1].options.api_key" in terms


def test_a_refused_value_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Numbers(Options):
        api_key: int
        url: int

    component = next(one for one in survey_plugins().components() if one.id == "rewards/remote")
    with pytest.raises(ConfigError) as caught:
        checked_options(_with_options(component, Numbers), {"api_key": CANARY, "url": URL})
    assert CANARY not in str(caught.value) and f"'api_key' is '{MARK}'" in str(caught.value)
    assert main(["train", *GOOD, "--rollout-num-gpus", URL, "--sglang-api-key", CANARY]) == 2
    told = capsys.readouterr().err
    assert CANARY not in told and f"got 'http://{MARK}@judge.example" in told


def _with_options(component: Any, options: type[Options]) -> Any:
    from dataclasses import replace

    return replace(component, spec=replace(component.spec, options=options))


def test_errors_of_other_peoples_code_show_no_credentials(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ConnectionError(f"no answer from {URL}")
    except ConnectionError as error:
        raised = Raised.of(error)
        assert f"no answer from http://{MARK}@judge.example" in one_line(error)
        with caplog.at_level(logging.ERROR):
            raised.log("reward")
        assert CANARY not in f"{raised} {raised.tail()} {raised.explained('reward')} {caplog.text}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain a@b.c text", "plain a@b.c text"),
        ("http://host/a@b?x=1", "http://host/a@b?x=1"),
        ("see http://u:p@h/ and ftp://x@y.", f"see http://{MARK}@h/ and ftp://{MARK}@y."),
        ("http://u:p@ss@h", f"http://{MARK}@h"),
        ("s3://b?X-Amz-Signature=ab&v=1", f"s3://b?X-Amz-Signature={MARK}&v=1"),
    ],
)
def test_credentials_in_addresses_are_replaced(text: str, shown: str) -> None:
    assert without_credentials(text) == shown == without_credentials(shown)


def test_trees_keep_their_shape() -> None:
    tree = {"a": [1, None, {"password": None, "token": 5}], "b": ("x",), "token_env": "JUDGE_KEY", "max_tokens": 3}
    assert redacted(tree) == {**tree, "a": [1, None, {"password": None, "token": MARK}]}


@pytest.mark.parametrize(
    "name", ["api-key", "judge_api_key", "openai_key", "github_token", "headers.Authorization", "s3.secret_access_key"]
)
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert is_secret(name)


def test_no_ordinary_option_is_named_like_a_secret() -> None:
    sglang = {flag.key for flag in sglang_flags().values()} - set(known_options("sglang")["reserved"])
    options = {name for one in survey_plugins().components() for name in one.spec.options.model_fields}
    names = {*SECTION_OF, *(flag.key for flag in megatron_flags().values()), *sglang, *options}
    assert len(names) > 1000
    assert [name for name in names if is_secret(name)] == []


def test_a_secret_option_of_a_plugin_must_be_named_so() -> None:
    class Hidden(Options):
        judge: SecretStr | None = None

    class Named(Options):
        judge_api_key: SecretStr | None = None

    kind = KINDS["reward"]
    spec = {"name": "mine", "factory": "slime_rewards.remote:RemoteReward"}
    check_spec(RewardSpec(options=Named, **spec), kind)
    with pytest.raises(Defect, match="secret option judge, whose name does not say so"):
        check_spec(RewardSpec(options=Hidden, **spec), kind)
