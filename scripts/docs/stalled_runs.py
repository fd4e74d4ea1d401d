"""Takes the pictures of docs/reading-a-run.md from the runs of examples/stalled-runs, in a headless Chromium.

python -m scripts.docs.stalled_runs outputs/reward-bug-TIME outputs/truncation-TIME outputs/entropy-collapse-TIME

Needs `chromium-headless-shell` (Debian) and `playwright`. For each run, one picture of its page and one of the samples
behind the alert that the page tells to open. Keys are used as a reader would.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
#: name of a run -> that of its pictures, the height of the first one, how many alerts it has once all samples are
#: indexed, and which alert's samples the second picture shows
RUNS = {
    "reward-bug": ("reward", 430, 2, 2),
    "truncation": ("truncation", 430, 2, 2),
    "entropy-collapse": ("entropy", 530, 3, 1),
}
WIDTH, SAMPLES_HEIGHT, TIMEOUT_MS = 1000, 430, 60_000


@contextmanager
def serving(*runs: Path) -> Iterator[str]:
    """Serve runs; the address of their page."""
    command = [str(Path(sys.executable).with_name("slime")), "view", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            lines = (re.match(r"open (\S+)", line) for line in viewer.stdout)
            address = next((found[1] for found in lines if found), None)
            if address is None:
                sys.exit(f"`{' '.join(command)}` ended before it had an address; its error is above")
            yield address
        finally:
            viewer.terminate()


@contextmanager
def opened(parser: argparse.ArgumentParser) -> Iterator[Browser]:
    """A headless Chromium, if there is one."""
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        parser.error("there is no Chromium (Debian: apt-get install chromium-headless-shell)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def settled(page: Page, selector: str) -> None:
    """Wait until something is shown, all samples are indexed, and nothing more is asked."""
    page.wait_for_selector(selector, timeout=TIMEOUT_MS)
    page.wait_for_function("!document.body.innerText.includes('are indexed')", timeout=TIMEOUT_MS)
    page.wait_for_load_state("networkidle", timeout=TIMEOUT_MS)


def take(page: Page, run: Path) -> None:
    """Serve a run, and take its two pictures."""
    name, height, alerts, alert = next(how for start, how in RUNS.items() if run.name.startswith(start))
    with serving(run) as address:
        page.set_viewport_size({"width": WIDTH, "height": height})
        page.goto(address)
        settled(page, f"ol.alerts > li:nth-child({alerts}) a")
        save(page, f"stalled-{name}-run.png")
        page.set_viewport_size({"width": WIDTH, "height": SAMPLES_HEIGHT})
        for key in [*"j" * alert, "Enter"]:
            page.keyboard.press(key)
        settled(page, "table tbody tr")
        save(page, f"stalled-{name}-samples.png")


def save(page: Page, name: str) -> None:
    """Write what is seen of the page, in 128 colours, the rare ones among them: half of the bytes."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128, Image.Quantize.MAXCOVERAGE).save(PICTURES / name, optimize=True)


def main() -> None:
    """Take the pictures of all runs that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    runs = parser.parse_args().runs
    if strange := [str(run) for run in runs if not run.name.startswith(tuple(RUNS))]:
        parser.error(f"{', '.join(strange)}: expected runs whose names begin with {', '.join(RUNS)}")
    with opened(parser) as browser:
        for run in runs:
            page = browser.new_page()
            take(page, run)
            page.close()


if __name__ == "__main__":
    main()
