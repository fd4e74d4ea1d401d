"""What every test of the page in a headless Chromium needs.

Importing it skips a file of tests where there is no playwright.
"""

from __future__ import annotations

import pytest
from plugins.viewer.tests.conftest import CHROMIUM

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
expect.set_options(timeout=20_000)

#: how long such a test takes, and the browser that it starts
MARKS = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium-headless-shell"),
]
