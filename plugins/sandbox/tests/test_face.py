"""`slime.kit.sandbox`: the documented path of this package, imported on first use."""

from __future__ import annotations

import subprocess
import sys

import slime.kit.sandbox
import slime_sandbox


def test_the_kit_has_every_name_of_the_sandbox() -> None:
    assert slime.kit.sandbox.__all__ == slime_sandbox.__all__
    for name in slime_sandbox.__all__:
        assert getattr(slime.kit.sandbox, name) is getattr(slime_sandbox, name)


def test_importing_the_kit_imports_no_shop() -> None:
    code = "import sys, slime.kit.sandbox, slime.kit.sessions; print([n for n in sys.modules if n[:7] in PACKAGES])"
    code = code.replace("PACKAGES", "('slime_s', 'slime_e')")
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240, check=True)
    assert made.stdout == b"[]\n"
