"""Where the profiles of a run are: Chrome traces, which https://ui.perfetto.dev opens, and snapshots of memory."""

from __future__ import annotations

from pathlib import Path


def folder_of_profiles(run_dir: Path) -> Path:
    """The folder in a run folder."""
    return run_dir / "profiles"


def profile_name(step: int) -> str:
    """What the names of a step's files begin with; the part of the run that was profiled follows."""
    return f"step-{step:06d}"
