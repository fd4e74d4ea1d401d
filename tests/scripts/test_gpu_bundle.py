"""`make gpu-bundle`: wheels and source as pieces, and back on a machine without a network."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.gpu_proof import bundle, pieces

LIMIT = 1000
ROOT = bundle.ROOT


def sums(folder: Path) -> dict[str, str]:
    """Path -> sum of every file in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Files of which one is as large as several pieces, one fills its piece exactly, and one is empty."""
    draw, found = random.Random(0), {}
    (tmp_path / "original").mkdir()
    for name, size in {"wheels/a.whl": 3210, "wheels/b.whl": 790, "empty": 0, "c": 17}.items():
        found[name] = tmp_path / "original" / Path(name).name
        found[name].write_bytes(draw.randbytes(size))
    return found


@pytest.fixture
def packed(tmp_path: Path, files: dict[str, Path]) -> Path:
    pieces.cut(files, tmp_path / "packed", limit=LIMIT, about={"commit": "abc"})
    return tmp_path / "packed"


def test_joined_files_equal_those_that_were_cut(tmp_path: Path, files: dict[str, Path], packed: Path) -> None:
    sizes = [path.stat().st_size for path in sorted(packed.glob("piece-*"))]
    assert sizes == [LIMIT, LIMIT, LIMIT, LIMIT, 17]
    manifest = pieces.join(packed, tmp_path / "joined")
    assert manifest.about == {"commit": "abc"}
    assert {name: (tmp_path / "joined" / name).read_bytes() for name in files} == {
        name: path.read_bytes() for name, path in files.items()
    }
    assert {file.name: file.sha256 for file in manifest.files} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
    }


def test_what_is_there_already_is_not_written_again(tmp_path: Path, files: dict[str, Path], packed: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in packed.glob("piece-*")}
    (packed / "piece-0001").unlink()
    (packed / "piece-0002").write_bytes(b"cut short")
    _, written = pieces.cut(files, packed, limit=LIMIT, about={})
    after = {path.name: path.stat().st_mtime_ns for path in packed.glob("piece-*")}
    assert written == 2
    assert {name for name in after if after[name] != before[name]} == {"piece-0001", "piece-0002"}

    pieces.join(packed, tmp_path / "joined")
    joined = {path: path.stat().st_mtime_ns for path in (tmp_path / "joined").rglob("*.whl")}
    (tmp_path / "joined" / "wheels" / "b.whl").write_bytes(b"cut short")
    pieces.join(packed, tmp_path / "joined")
    changed = {path.name for path, time in joined.items() if path.stat().st_mtime_ns != time}
    assert changed == {"b.whl"}
    assert (tmp_path / "joined" / "wheels" / "b.whl").read_bytes() == files["wheels/b.whl"].read_bytes()


def test_pieces_of_a_larger_bundle_before_are_removed(tmp_path: Path, files: dict[str, Path], packed: Path) -> None:
    manifest, written = pieces.cut({"c": files["c"]}, packed, limit=LIMIT, about={})
    assert (len(manifest.pieces), written) == (1, 1)
    pieces.join(packed, tmp_path / "joined")
    assert {*sums(tmp_path / "joined")} == {"c", "manifest.json"}


DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (lambda folder: (folder / "piece-0001").unlink(), ["piece-0001 is missing"]),
    "cut short": (
        lambda folder: (folder / "piece-0003").write_bytes(b"abc"),
        ["piece-0003 is damaged: 3 bytes of 1,000"],
    ),
    "one bit": (
        lambda folder: (folder / "piece-0004").write_bytes(
            bytes([(content := (folder / "piece-0004").read_bytes())[0] ^ 1]) + content[1:]
        ),
        ["piece-0004 is damaged: its sum is another"],
    ),
    "of another": (
        lambda folder: shutil.copyfile(folder / "piece-0000", folder / "piece-0002"),
        ["piece-0002 is damaged: it holds what piece-0000 holds"],
    ),
    "twice": (
        lambda folder: shutil.copyfile(folder / "piece-0000", folder / "piece-0000 (1)"),
        ["piece-0000 (1) does not belong here: it is piece-0000 a second time. Delete it"],
    ),
    "of another bundle": (
        lambda folder: (folder / "piece-0005").write_bytes(b"x"),
        ["piece-0005 does not belong here: manifest.json does not name it"],
    ),
    "two at once": (
        lambda folder: [(folder / f"piece-{number:04}").unlink() for number in (0, 4)],
        ["piece-0000 is missing", "piece-0004 is missing"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_pieces_that_are_not_whole_are_named_and_nothing_is_written(tmp_path: Path, packed: Path, damage: str) -> None:
    change, says = DAMAGE[damage]
    change(packed)
    with pytest.raises(pieces.BundleError) as error:
        pieces.join(packed, tmp_path / "joined")
    lines = str(error.value).splitlines()
    assert len(lines) == len(says)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, says, strict=True))
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: None, "there is no manifest.json"),
        (lambda text: text[: len(text) // 2], "is damaged (JSONDecodeError"),
        (lambda _: "[]", "is damaged (TypeError"),
        (lambda text: text.replace('"pieces"', '"peaces"'), "is damaged (KeyError"),
        (lambda text: text.replace('"size": 17', '"size": 18', 1), "is damaged (ValueError"),
        (lambda text: text.replace('"c"', '"../c"'), "is damaged (ValueError"),
        (lambda text: text.replace('"c"', '"/c"'), "is damaged (ValueError"),
    ],
)
def test_a_manifest_that_is_none_is_refused(
    tmp_path: Path, packed: Path, change: Callable[[str], str | None], says: str
) -> None:
    path = packed / "manifest.json"
    text = change(path.read_text(encoding="utf-8"))
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(pieces.BundleError) as error:
        pieces.join(packed, tmp_path / "joined")
    assert says in str(error.value)


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4000))
    with pytest.raises(pieces.BundleError, match=r"0\.0 GB are free, and the files take 0\.0 GB"):
        pieces.join(packed, tmp_path / "joined")
    assert sums(tmp_path / "joined") == {}


REQUIREMENTS = """\
# made by hand
alpha==1.0 ; python_full_version < '3.12' and sys_platform == 'linux' \\
    --hash=sha256:{old} \\
    --hash=sha256:{other}
alpha==2.0 ; python_full_version == '3.12.*' \\
    --hash=sha256:{new}
beta-kernels==0.5.1 --hash=sha256:{beta}
windows-only==1.0 ; sys_platform == 'win32' \\
    --hash=sha256:{other}
"""
WHEELS = {"old": "alpha-1.0-py3-none-any", "new": "alpha-2.0-py3-none-any"}
WHEELS |= {"beta": "beta_kernels-0.5.1-cp312-cp312-manylinux_2_28_x86_64"}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose commit is bundled, with a file that is not in it. These tests may run without one."""
    folder = tmp_path / "checkout"
    (folder / "core").mkdir(parents=True)
    for name in ("Makefile", "core/slime.py"):
        (folder / name).write_text(f"# {name}\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, timeout=30)
    (folder / "notes.txt").touch()
    monkeypatch.setattr(bundle, "ROOT", folder)
    return folder


@pytest.fixture
def requirements(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: ARG001
    """A requirements file, and wheels for it where pip finds them without an index."""
    index = tmp_path / "index"
    index.mkdir()
    hashes = {"other": "0" * 64}
    for key, stem in WHEELS.items():
        name, version, *_ = stem.split("-")
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(index / f"{stem}.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", f"VERSION = '{version}'\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        hashes[key] = hashlib.sha256((index / f"{stem}.whl").read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    path = tmp_path / "gpu.txt"
    path.write_text(REQUIREMENTS.format(**hashes), encoding="utf-8")
    return path


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in pieces.read_manifest(folder).files)


@pytest.mark.slow
def test_a_bundle_holds_the_wheels_of_that_machine_and_the_source(
    tmp_path: Path, requirements: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = tmp_path / "bundle", tmp_path / "machine"
    command = [str(folder), "--requirements", str(requirements), "--limit-mb", "0.5"]
    assert bundle.main(command) == 0
    assert names(folder) == ["source.tar.gz", *(f"wheels/{WHEELS[key]}.whl" for key in ("new", "beta"))]
    assert all(path.stat().st_size <= 500_000 for path in folder.iterdir())
    assert "2 of 2 packages are needed" in capsys.readouterr().out

    assert bundle.main(command) == 0  # the same bytes again
    assert " 0 of them written now" in capsys.readouterr().out

    # On the machine there is nothing but Python and the folder.
    alone = [sys.executable, "-I", str(folder / "pieces.py"), str(folder), str(target)]
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pieces are whole; 3 files are in" in done.stdout
    source = {name: found for name, found in sums(checkout).items() if not name.startswith(".git/")}
    assert source.pop("notes.txt")
    assert sums(target / "source") == source


@pytest.mark.slow
def test_a_bundle_leaves_out_what_the_machine_has(
    tmp_path: Path, requirements: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has = tmp_path / "has.json"
    has.write_text(json.dumps([{"name": "Alpha", "version": "2.0"}, {"name": "beta_kernels", "version": "0.5"}]))
    command = [str(tmp_path / "bundle"), "--requirements", str(requirements), "--has", str(has)]
    assert bundle.main(command) == 0
    assert names(tmp_path / "bundle") == ["source.tar.gz", f"wheels/{WHEELS['beta']}.whl"]
    assert "1 of 2 packages are needed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "needed"),
    [("2.0", []), ("2.0+cu130", []), ("2.0+cpu", ["torch"]), ("2.0.1", ["torch"]), ("of our own", ["torch"])],
)
def test_a_version_that_the_machine_has_serves_if_it_is_the_pinned_one(version: str, needed: list[str]) -> None:
    wanted = [*bundle.pinned("torch==2.0 --hash=sha256:0\n", "3.12")]
    assert [requirement.name for requirement, _ in bundle.lacking(wanted, {"torch": version})] == needed


def test_without_a_checkout_there_is_no_bundle(
    tmp_path: Path, requirements: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundle, "ROOT", tmp_path / "unpacked")
    (tmp_path / "unpacked").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert bundle.main([str(tmp_path / "bundle"), "--requirements", str(requirements)]) == 1
    assert f"{tmp_path}/unpacked is no git repository" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["torch 2.0\n", '{"torch": "2.0"}', '[["torch", "2.0"]]', '[{"name": "torch"}]'])
def test_a_list_of_packages_that_pip_did_not_print_is_refused(
    tmp_path: Path, requirements: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "has.json").write_text(text)
    command = [str(tmp_path / "bundle"), "--requirements", str(requirements), "--has", str(tmp_path / "has.json")]
    assert bundle.main(command) == 1
    assert "expected what `python -m pip list --format=json` prints" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wheel_that_is_not_to_be_had_is_named(
    tmp_path: Path, requirements: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [str(tmp_path / "bundle"), "--requirements", str(requirements), "--glibc", "2.17"]
    assert bundle.main(command) == 1
    printed = capfd.readouterr().err
    assert "beta-kernels==0.5.1" in printed and "cannot make the bundle: pip could not fetch the wheels" in printed
    assert not (tmp_path / "bundle").exists()


def test_the_locked_packages_are_read_whole() -> None:
    text = (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8")
    for python, airports in (("3.11", "20260905"), ("3.12", "20261103")):
        found = {requirement.name: line for requirement, line in bundle.pinned(text, python)}
        assert len(found) == 221
        assert found["airportsdata"].startswith(f"airportsdata=={airports} --hash=sha256:")
        assert all(" --hash=sha256:" in line and ";" not in line for line in found.values())
