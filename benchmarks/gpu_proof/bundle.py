"""`make gpu-bundle`: what a GPU machine without a network needs to run `make gpu-proof`, in pieces of at most 60 MB.

    python -m benchmarks.gpu_proof.bundle FOLDER [--python 3.12] [--glibc 2.35] [--has packages.json]

The pieces hold the wheels of requirements/gpu.txt for that machine, and all checked-in files of this commit. Wheels and
pieces that an earlier call left are not fetched or written again. `make gpu-proof BUNDLE=FOLDER` puts them together, or
`python3 FOLDER/pieces.py FOLDER TARGET` where there is no checkout.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_proof import pieces
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
#: of a piece
LIMIT_MB = 60


def pinned(text: str, python: str) -> Iterator[tuple[Requirement, str]]:
    """The packages in a requirements file that a Python on x86-64 Linux installs, and the line with hashes for each."""
    machine = {"python_version": python, "python_full_version": f"{python}.0"}
    machine |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line and not line.startswith("#"):
            stated, *hashes = re.split(r"\s+(?=--hash)", line)
            requirement = Requirement(stated)
            if requirement.marker is None or requirement.marker.evaluate(machine):
                # Without the marker, which pip would evaluate for the Python that it runs on.
                yield requirement, " ".join([f"{requirement.name}{requirement.specifier}", *hashes])


def installed(path: Path) -> dict[str, str]:
    """Package -> version, as `pip list --format=json` prints them.

    Raises:
        BundleError: The file holds something else.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {canonicalize_name(row["name"]): row["version"] for row in rows}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise pieces.BundleError(
            f"--has {path}: expected what `python -m pip list --format=json` prints ({type(error).__name__}: {error})"
        ) from None


def lacking(wanted: Sequence[tuple[Requirement, str]], has: Mapping[str, str]) -> list[tuple[Requirement, str]]:
    """What a machine that has packages of these versions still needs. Of another version it needs ours."""
    return [
        (requirement, line)
        for requirement, line in wanted
        if not requirement.specifier.contains(_version(has.get(canonicalize_name(requirement.name))), prereleases=True)
    ]


def _version(text: str | None) -> Version:
    """A version that equals no pinned one stands for none, and for a build for the CPU, which GPUs do not serve."""
    try:
        found = Version(text or "")
    except InvalidVersion:
        return Version("0+none")
    return Version("0+none") if found.local == "cpu" else found


def fetch(wanted: Sequence[tuple[Requirement, str]], folder: Path, *, python: str, glibc: str) -> list[Path]:
    """The wheels for a machine, downloaded unless they are in the folder, which holds those of such machines alone.

    Raises:
        BundleError: There is no such wheel.
    """
    major, minor = glibc.split(".")
    tags = [f"manylinux_{major}_{number}_x86_64" for number in range(5, int(minor) + 1)]
    tags += [f"manylinux{year}_x86_64" for year in ("1", "2010", "2014")] + ["linux_x86_64"]
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "--python-version", python, "--dest", str(folder)]
    command += [part for tag in tags for part in ("--platform", tag)]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{line}\n" for _, line in wanted))
        file.flush()
        if subprocess.run([*command, "-r", file.name], check=False).returncode:
            raise pieces.BundleError("pip could not fetch the wheels; what it says stands above")
    found = {parse_wheel_filename(path.name)[:2]: path for path in sorted(folder.glob("*.whl"))}
    specifiers = {canonicalize_name(requirement.name): requirement.specifier for requirement, _ in wanted}
    # An earlier call may have left others.
    return [path for (name, version), path in found.items() if name in specifiers and version in specifiers[name]]


def archive_source(path: Path) -> str:
    """Write all checked-in files to a file; returns their commit. Two calls write the same bytes."""
    content = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    path.write_bytes(gzip.compress(content, mtime=0))
    return _git("rev-parse", "--short=10", "HEAD")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def pack(options: argparse.Namespace) -> None:
    """Fetch and cut.

    Raises:
        BundleError: The wheels cannot be had, or this is no checkout.
    """
    try:
        _git("rev-parse", "HEAD")
    except subprocess.CalledProcessError:
        raise pieces.BundleError(f"{ROOT} is no git repository with a commit, whose files would be packed") from None
    wanted = [*pinned(options.requirements.read_text(encoding="utf-8"), options.python)]
    needed = lacking(wanted, installed(options.has) if options.has else {})
    print(f"{len(needed)} of {len(wanted)} packages are needed; fetching their wheels", flush=True)
    cache = options.folder.with_name(f"{options.folder.name}-wheels-{options.python}-{options.glibc}")
    wheels = fetch(needed, cache, python=options.python, glibc=options.glibc) if needed else []
    source = cache.with_name(f"{cache.name}-{pieces.SOURCE}")
    about = {"commit": archive_source(source), "Python": options.python, "glibc": options.glibc}
    if _git("status", "--porcelain", "--untracked-files=no"):
        print("note: changes that are not committed are not in the bundle")
    # The source last: when it alone changes, so does the last piece.
    files = {f"wheels/{path.name}": path for path in wheels} | {pieces.SOURCE: source}
    manifest, written = pieces.cut(files, options.folder, limit=int(options.limit_mb * 1e6), about=about)
    source.unlink()
    shutil.copyfile(Path(pieces.__file__), options.folder / "pieces.py")
    size = sum(piece.size for piece in manifest.pieces) / 1e6
    count = len(manifest.pieces)
    print(f"{options.folder}: {count} pieces, {size:,.1f} MB in all, {written} of them written now")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pieces go")
    parser.add_argument("--python", choices=("3.11", "3.12"), default="3.12", help="of the GPU machine (%(default)s)")
    parser.add_argument("--glibc", default="2.34", help="of the GPU machine, as `ldd --version` says it (%(default)s)")
    parser.add_argument("--has", type=Path, help="what `python -m pip list --format=json` printed there")
    parser.add_argument("--limit-mb", type=float, default=LIMIT_MB, help="size of a piece (%(default)s)")
    parser.add_argument("--requirements", type=Path, default=ROOT / "requirements" / "gpu.txt")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"2\.\d{1,2}", options.glibc):
        parser.error(f"--glibc {options.glibc}: expected a version such as 2.35")
    if not 0.001 <= options.limit_mb <= LIMIT_MB * 100:
        parser.error(f"--limit-mb {options.limit_mb:g}: expected megabytes, such as {LIMIT_MB}")
    try:
        pack(options)
    except pieces.BundleError as error:
        print(f"cannot make the bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
