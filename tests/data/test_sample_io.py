"""Samples as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.data import Sample, SpecInfo, Status, read_samples, write_samples
from slime.errors import DataError
from slime.utils.types import Sample as FamiliarSample


def full_sample() -> Sample:
    return Sample(
        group_index=3,
        index=12,
        prompt=[{"role": "user", "content": "1+1="}],
        tokens=[4, 5, 6],
        response="2é",
        response_length=2,
        label="2",
        reward={"score": 1.0, "format": 0.5},
        loss_mask=[1, 0],
        status=Status.TRUNCATED,
        metadata={"k": [1]},
        weight_versions=["1", "2"],
        rollout_log_probs=[-0.1234567, -2.0],
        spec_info=SpecInfo(1, 2, 3, 4),
        rollout_id=12,
        finish_reason="length",
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    samples = [full_sample(), Sample(), Sample(response="broken \ud800 text")]
    write_samples(tmp_path / "s.jsonl", samples)
    assert list(read_samples(tmp_path / "s.jsonl")) == samples


def test_samples_read_back_share_nothing(tmp_path: Path) -> None:
    write_samples(tmp_path / "s.jsonl", [Sample(), Sample()])
    first, second = read_samples(tmp_path / "s.jsonl")
    first.metadata["changed"] = True
    assert second.metadata == {} and Sample().metadata == {}


def test_people_read_text_before_numbers(tmp_path: Path) -> None:
    write_samples(tmp_path / "s.jsonl", [full_sample()])
    text = (tmp_path / "s.jsonl").read_text(encoding="utf-8")
    keys = list(json.loads(text))
    assert "é" in text
    assert keys.index("prompt") < keys.index("response") < keys.index("tokens")
    assert "multimodal_inputs" not in keys  # defaults are left out


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{}\n{"nonsense": 1}\n')
    with pytest.raises(DataError, match=r"s\.jsonl:2 is no sample: .*nonsense"):
        list(read_samples(tmp_path / "s.jsonl"))


def test_the_familiar_import_path_names_the_same_class() -> None:
    assert FamiliarSample is Sample
