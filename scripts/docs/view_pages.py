"""Takes the pictures of docs/view.md from two runs of `slime view --demo`, in a headless Chromium.

python -m scripts.docs.view_pages outputs/demo-TIME/run outputs/demo-OTHER/run --readme outputs/quickstart

Needs what `scripts.docs.stalled_runs` needs. The runs are called as their folders; the pictures are of the first one,
and of both compared. README's is of the quickstart's run.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlencode

from scripts.docs.stalled_runs import opened, save, serving, settled

WIDTH, HEIGHT, TOKENS_HEIGHT, README_HEIGHT = 1280, 800, 430, 730
#: answers that are wrong late in the run
FILTER = "kind:train reward<1 step>=60"


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2)
    parser.add_argument("--readme", type=Path, required=True, help="the run of README's picture")
    stated = parser.parse_args()
    with serving(*stated.runs) as address, serving(stated.readme) as first, opened(parser) as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": README_HEIGHT})
        page.goto(first)
        settled(page, ".says .answer")
        save(page, "first-screen.png")
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.goto(f"{address}#/samples/0?{urlencode({'q': FILTER})}")
        settled(page, ".samples tbody tr")
        save(page, "view-samples.png")
        views = {
            "run": ("run/0", ".says .answer"),
            "compare": ("compare/0/1", "table.samples tr"),
            "prompt": (f"prompt/0/{quote(most_visited(address), safe='')}", ".u-over"),
        }
        for name, (view, selector) in views.items():
            page.goto(f"{address}#/{view}")
            settled(page, selector)
            save(page, f"view-{name}.png")
        page.goto(f"{address}#/tokens/0")
        page.locator("table.samples tbody a").first.click()
        settled(page, ".heat span")
        page.set_viewport_size({"width": WIDTH, "height": TOKENS_HEIGHT})
        page.get_by_label("column of tokens").select_option("entropy")
        page.locator(".heat span").first.click()
        page.locator(".tokens").evaluate("it => scrollTo(0, it.getBoundingClientRect().top + scrollY - 110)")
        save(page, "view-tokens.png")


def most_visited(address: str) -> str:
    """The prompt that has the most samples among those of the run's last rollouts."""
    question = urlencode({"run": 0, "q": "kind:train", "sort": "-step", "limit": 500})
    with urllib.request.urlopen(f"{address}api/samples?{question}") as answer:
        prompts = {row["prompt"] for row in json.load(answer)["rows"]}

    def visits(prompt: str) -> int:
        with urllib.request.urlopen(f"{address}api/prompt?{urlencode({'run': 0, 'key': prompt})}") as answer:
            return len(json.load(answer)["samples"])

    return max(sorted(prompts), key=visits)


if __name__ == "__main__":
    main()
