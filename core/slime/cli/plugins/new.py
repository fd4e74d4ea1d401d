"""`slime plugins new`: a package to start from."""

from __future__ import annotations

from pathlib import Path

from slime.scaffold import Names, write_package

#: how a run selects a component of each kind
_SELECT = {
    "estimator": "--advantage-estimator",
    "reward": "--reward",
    "datasource": "--data-source",
    "buffer_filter": "--buffer-filter",
    "generator": "--generator",
}


def new(kind: str, name: str, into: Path) -> int:
    """Write the package and print what to do next.

    Raises `ConfigError` for a name that cannot be used, and for a folder that is there already.
    """
    names = Names.of(kind, name)
    folder = write_package(names, into)
    print(f"wrote {folder}/")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"  {path.relative_to(folder)}")
    print(
        f"""
next:
  pip install -e {folder}
  pytest {folder}
  slime plugins
  slime plugins check {names.plugin}
  slime train RUN.toml {_SELECT[kind]} {names.plugin}/{names.component}

The component is in {folder}/{names.module}/impl.py, its options in {names.module}/__init__.py."""
    )
    return 0
