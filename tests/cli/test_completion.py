"""`slime completion`: the shells themselves complete commands, flags and choices with what it prints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Slime

from slime.cli.main import main

#: words before the cursor -> candidates that must be found, and one that must not
CASES = [
    ("slime tr", {"train"}, "eval"),
    ("slime train --devi", {"--device"}, "--num-rollout"),
    ("slime train --device c", {"cpu", "cuda"}, "auto"),
    ("slime train --advantage-estimator g", {"grpo", "gspo"}, "ppo"),
    ("slime train --reward.box", {"--reward.boxed"}, "--reward.tag"),
    ("slime train --tensor-model", {"--tensor-model-parallel-size"}, "--lr"),
    ("slime train --sglang-mem", {"--sglang-mem-fraction-static"}, "--lr"),
    ("slime eval --n-samples-per-ev", {"--n-samples-per-eval-prompt"}, "--lr"),
    ("slime train --resu", {"--resume"}, "--lr"),
    ("slime eval --", {"--dry-run", "--hf-checkpoint"}, "--resume"),
    ("slime score --exp", {"--expected-key"}, "--lr"),
    ("slime convert --veri", {"--verify"}, "--lr"),
    ("slime plan --host", {"--host-memory"}, "--lr"),
    ("slime plan --tensor-model", {"--tensor-model-parallel-size"}, "--lr"),
    ("slime show --wo", {"--worst"}, "--where"),
    ("slime show --met", {"--metric"}, "--where"),
    ("slime launch --acc", {"--account", "--accelerator"}, "--partition"),
    ("slime plugins sh", {"show"}, "new"),
    ("slime completion ", {"bash", "zsh", "fish"}, "list"),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch, (folder / shell).open("w") as file:
            patch.setattr("sys.stdout", file)
            assert main(["completion", shell]) == 0
    return folder


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
@needs("bash")
@pytest.mark.parametrize(("typed", "found", "left_out"), CASES)
def test_bash(script: Path, typed: str, found: set[str], left_out: str) -> None:
    ask = 'source "$1"; COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2)); _slime; printf "%s\\n" "${COMPREPLY[@]}"'
    candidates = set(run("bash", "--norc", "-c", ask, "ask", str(script / "bash"), *typed.split(" ")).split())
    assert found <= candidates and left_out not in candidates


@needs("fish")
@pytest.mark.parametrize(("typed", "found", "left_out"), CASES)
def test_fish(script: Path, typed: str, found: set[str], left_out: str) -> None:
    told = run("fish", "--no-config", "-c", f"source {script / 'fish'}; complete -C '{typed}'")
    candidates = {line.partition("\t")[0] for line in told.splitlines()}
    assert found <= candidates and left_out not in candidates


@pytest.mark.slow
@needs("zsh")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("slime tra", "slime train "),
        ("slime train --devi", "slime train --device "),
        ("slime train --device cp", "slime train --device cpu "),
        ("slime train --tensor-model-par", "slime train --tensor-model-parallel-size "),
        ("slime plugins sho", "slime plugins show "),
        ("slime show --wor", "slime show --worst "),
    ],
)
def test_zsh(script: Path, tmp_path: Path, typed: str, completed: str) -> None:
    # A line editor with a widget that completes and then writes what stands in the line.
    (tmp_path / "ask.zsh").write_text(
        "zmodload zsh/zpty\n"
        "zpty ask zsh -f -i\n"
        f"zpty -w ask 'autoload -U compinit; compinit -u -D; source {script / 'zsh'}'\n"
        f"zpty -w ask 'told() {{ zle complete-word; print -rn -- \"$BUFFER|\" > {tmp_path}/told; exit }}'\n"
        "zpty -w ask 'zle -N told; bindkey \"^X\" told; print loaded-$((1 + 1))'\n"
        "zpty -r ask out '*loaded-2*'\n"
        f"zpty -w -n ask $'{typed}\\x18'\n"
        f"for ((n = 0; n < 200; n++)); do [[ -s {tmp_path}/told ]] && break; sleep 0.1; done\n"
        "zpty -d ask\n"
    )
    run("zsh", "-f", str(tmp_path / "ask.zsh"))
    assert (tmp_path / "told").read_text().partition("|")[0] == completed


def test_an_unknown_shell_is_refused_with_the_nearest(slime: Slime) -> None:
    refused = slime("completion", "fihs")
    assert refused.code == 2 and "takes one of bash, zsh, fish, got 'fihs'. Did you mean fish?" in refused.err


def test_options_of_another_packages_command_are_known_although_its_parser_exits(slime: Slime, install: Any) -> None:
    source = """
        import argparse

        def run(argv):
            parser = argparse.ArgumentParser("slime mine")
            parser.add_argument("--depth", help="how deep")
            parser.parse_args(argv)
            return 0
    """
    install("slime-mine", "1", {"mine": "mine_command"}, {"mine_command": source}, group="slime.commands")
    printed = slime("completion", "fish")
    assert printed.code == 0
    assert "complete -c slime -n '__fish_seen_subcommand_from mine' -l depth -d 'how deep'" in printed.out
