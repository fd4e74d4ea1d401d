"""Models of SGLang are found by reading its sources: the same ones that it finds by importing them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_cpu.sglang_models import OnDemand

#: of every name that SGLang knows after importing all its modules, the class found on demand before that
COMPARE = """
import json, sys
from slime_cpu.platform import CpuPlatform
CpuPlatform().prepare_engine()
from sglang.srt.models import registry
loaded = [name for name in sys.modules if name.startswith("sglang.srt.models.")]
one = registry.ModelRegistry.resolve_model_cls(["Qwen3ForCausalLM"])[0]
on_demand = registry.ModelRegistry.models
every = registry.import_model_classes("sglang.srt.models")
registry.import_model_classes.cache_clear()
fallback = registry.ModelRegistry.resolve_model_cls(["NoSuchForCausalLM"])[1]
print(json.dumps({
    "loaded": loaded, "qwen3": one.__module__, "count": len(every), "fallback": fallback,
    "different": {name: str(on_demand.get(name)) for name, model in every.items() if on_demand.get(name) is not model},
}))
"""


@pytest.mark.slow
def test_every_model_is_found_without_importing_the_others_and_one_of_the_user_replaces_sglangs(tmp_path: Path) -> None:
    package = tmp_path / "own_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "qwen2.py").write_text(
        "import torch\nclass Qwen2ForCausalLM(torch.nn.Module): ...\nEntryClass = Qwen2ForCausalLM\n", encoding="utf-8"
    )
    own = {"PYTHONPATH": str(tmp_path), "SGLANG_EXTERNAL_MODEL_PACKAGE": "own_models"}
    command = [sys.executable, "-c", COMPARE]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "sglang.srt.models.llama" not in found["loaded"]
    assert found["qwen3"] == "sglang.srt.models.qwen3"
    assert found["count"] > 200
    assert found["different"] == {"Qwen2ForCausalLM": "<class 'own_models.qwen2.Qwen2ForCausalLM'>"}
    assert found["fallback"] == "TransformersForCausalLM"


def test_a_module_that_the_user_does_not_want_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "qwen3.py").write_text("EntryClass = [\n    Wanted,\n    Qwen3ForCausalLM,\n]\n", encoding="utf-8")
    models = OnDemand({"Known": int}, [tmp_path], ["qwen3"])
    assert "Qwen3ForCausalLM" not in models
    assert models.get("Known") is int


def test_a_module_that_cannot_be_imported_leaves_its_model_unknown(tmp_path: Path) -> None:
    (tmp_path / "no_such_module.py").write_text("EntryClass = Odd\n", encoding="utf-8")
    models = OnDemand({}, [tmp_path], [])
    assert models.get("Odd") is None
    assert "Odd" not in models
