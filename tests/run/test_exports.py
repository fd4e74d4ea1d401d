"""When a run exports its model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime.config.weight_options import CheckpointOptions
from slime.loop import save_where_due


@pytest.mark.parametrize(
    ("folder", "interval", "exported"),
    [
        ("out/{rollout}", 2, {2: "out/2", 4: "out/4", 5: "out/5"}),
        ("out/step{rollout:03}", 3, {3: "out/step003", 5: "out/step005"}),
        ("out/{rollout}", None, {5: "out/5"}),
        ("out", 2, {5: "out"}),
        (None, 2, {}),
    ],
)
def test_weights_are_exported_at_each_interval_if_each_has_its_folder(
    folder: str | None, interval: int | None, exported: dict[int, str]
) -> None:
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointOptions(save_hf=folder, save_interval=interval), num_rollout=5),
        finish_save=lambda **_: None,
        finish_evaluation=lambda **_: None,
        save=lambda done: calls.append(("save", done)),
        export_hf=lambda path: calls.append(("export", path)),
    )
    found: dict[int, str] = {}
    for done in range(1, 6):
        calls.clear()
        save_where_due(cast(Any, run), done=done)
        assert [name for name, _ in calls] in ([], ["save"], ["save", "export"])  # exporting may fail: it comes last
        found.update((done, str(path)) for name, path in calls if name == "export")
    assert found == {done: str(Path(path)) for done, path in exported.items()}
