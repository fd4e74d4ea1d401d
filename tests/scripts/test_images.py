"""Dockerfile, apptainer.def and compose.yaml: they install as `make install` does, and their parts exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
DEFINITION = (ROOT / "apptainer.def").read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    """What stands behind each of the Dockerfile's instructions of one name."""
    return re.findall(rf"^{name} +(.*)$", DOCKERFILE, re.MULTILINE)


def section(name: str) -> str:
    """One section of the definition."""
    found = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", DEFINITION, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_both_images_install_by_the_makefile(device: str) -> None:
    """The commands are run by make as far as it prints what it would do."""
    [docker] = [run for run in instructions("RUN") if "make install" in run]
    lines = {
        "Dockerfile": re.sub(r"\$\{DEVICE\}", device, docker.split("&&")[0]),
        "apptainer.def": re.sub(r"\{\{ DEVICE \}\}", device, section("post").strip().splitlines()[-1]),
    }
    for file, line in lines.items():
        assert line.split() == ["make", "install", f"DEVICE={device}"], file
        words = [*line.split(), "--dry-run", "VENV=not-there"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        assert f"scripts.install_checks {device}" in done.stdout
        assert f"-r requirements/{'gpu' if device == 'cuda' else 'cpu'}.txt" in done.stdout


def test_both_images_have_the_same_base_and_packages() -> None:
    arguments = dict(line.strip().split("=") for line in section("arguments").strip().splitlines())
    assert [f"{name}={value}" for name, value in arguments.items()] == instructions("ARG")
    assert instructions("FROM") == ["${BASE}"] and "From: {{ BASE }}" in DEFINITION
    installed = re.compile(r"apt-get install (.*?)(?=&&|\n|$)")
    assert installed.findall(DOCKERFILE)[0].split() == installed.findall(DEFINITION)[0].split()


def test_the_image_is_of_a_user_without_rights_and_has_a_health_check() -> None:
    assert DOCKERFILE.index("\nUSER slime\n") < DOCKERFILE.index("make install")
    assert '["slime", "doctor"]' in instructions("HEALTHCHECK")[0]
    copied = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    assert {".git", ".venv", "outputs"} <= copied


def test_one_node_gets_all_gpus_and_room_for_shared_memory() -> None:
    [service] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert service["build"]["args"].keys() <= {name.partition("=")[0] for name in instructions("ARG")}
    assert int(service["shm_size"].removesuffix("gb")) >= 8
    [home] = instructions("WORKDIR")
    assert all(volume.split(":")[1].startswith(f"{home}/") for volume in service["volumes"])
    assert re.search(r"mkdir -p models outputs checkpoints", DOCKERFILE)


def test_the_shell_in_the_definition_and_the_dockerfile_parses() -> None:
    scripts = [section("post").replace("{{ DEVICE }}", "cpu"), section("environment"), section("runscript")]
    for script in [*scripts, section("test"), *instructions("RUN")]:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
