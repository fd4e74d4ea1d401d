"""`slime view` on a run of a million samples: building the index, opening the page, searching.

    python benchmarks/bench_view.py [--samples 1000000] [--steps 1000] [--folder /tmp] [--repeat 5] [--keep] [--live]

It writes a run folder of that size (about 500 bytes a sample), indexes it, and asks a real server on the loopback
address what the page asks. Each question is asked `--repeat` times; the table has the median and the slowest. With a
Chromium, it also times the page from its address to the last curve, and from the Enter of a filter to the new table.

With `--live` the index is built by a process of `slime view`, which is asked meanwhile, and which then finds a step
that the run adds: how long a user waits, and how much memory and time the process takes.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

WORDS = [f"{a}{b}{c}" for a in "bdfglmnprst" for b in ("a", "e", "i", "o", "u") for c in ("rk", "nd", "st", "lm")]
GROUP = 8
#: distinct prompts; each is visited again and again
PROMPTS = 5000


def write_run(folder: Path, samples: int, steps: int) -> int:
    """Write metrics and samples as slime does; returns the bytes of the samples."""
    rng = random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text("[run]\nseed = 1\n")
    per_step, written = samples // steps, 0
    prompts = [" ".join(rng.choices(WORDS, k=25)) for _ in range(PROMPTS)]
    texts = [" ".join(rng.choices(WORDS, k=30)) for _ in range(20_000)]
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(steps):
            rewards = []
            with (folder / "rollouts" / f"{step:06d}.jsonl").open("w") as file:
                for number in range(per_step):
                    group = step * (per_step // GROUP) + number // GROUP
                    reward = float(rng.random() < 0.2 + 0.6 * step / steps)
                    rewards.append(reward)
                    row = {
                        "group": group,
                        "index": step * per_step + number,
                        "prompt": prompts[group % PROMPTS],
                        # One word in a thousand samples, and one in a million.
                        "response": texts[rng.randrange(len(texts))]
                        + (" unusual" if number % 1000 == 7 else "")
                        + (" unique" if step == steps // 2 and number == 3 else ""),
                        "label": "42",
                        "reward": reward,
                        "status": "truncated" if rng.random() < 0.05 else "completed",
                        "finish_reason": "stop",
                        "prompt_tokens": 40,
                        "response_tokens": rng.randrange(20, 200),
                        "trained_tokens": 20,
                        "weight_versions": [str(step)],
                        "failure": None,
                    }
                    written += file.write(json.dumps(row) + "\n")
            mean = statistics.fmean(rewards)
            numbers = {
                "rollout/reward_mean": mean,
                "rollout/reward_std": 0.5,
                "time/step": 1.0,
                "train/entropy": 0.5 - 0.1 * step / steps,
            }
            metrics.write(
                json.dumps({"step": step, **numbers, **{f"train/more_{n}": mean * n for n in range(60)}}) + "\n"
            )
    return written


def timed(ask: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Median and slowest, in milliseconds."""
    taken = []
    for _ in range(repeat):
        started = time.perf_counter()
        ask()
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken), max(taken)


def questions(key: str, prompt: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is asked, by what a person does."""
    table = {"sort": "step", "limit": 50}
    sample = f"{key.partition('/')[0]}:3"
    filters = {
        "a word in one sample": "unique",
        "a word in one of a thousand": "unusual",
        "a word in one of seven": WORDS[0],
        "two words in a row": f'"{WORDS[0]} {WORDS[1]}"',
        "word and numbers": f"reward<0.5 step>20 status:truncated {WORDS[0]}",
        "word of all training": f"kind:train {WORDS[0]}",
        "words and numbers": f'kind:train reward<0.5 step>20 "{WORDS[0]} {WORDS[1]}"',
        "without a word": f"kind:train -{WORDS[0]}",
        "numbers": "kind:train reward<0.5 step>20 status:truncated",
        "all of training": "kind:train",
        "failed samples, of which there are none": "status:failed",
        "numbers that none has": "kind:train reward>1 step>20",
        "another field, which none has": "kind:train turns>5",
    }
    asked = {f"search: {name}": ("samples", {**table, "q": line}) for name, line in filters.items()}
    asked |= {
        "sort by reward": ("samples", {**table, "q": "kind:train", "sort": "-reward"}),
        "all, sorted by reward": ("samples", {**table, "q": "-kind:failed", "sort": "reward"}),
        "a word, sorted by reward": ("samples", {**table, "q": f"kind:train {WORDS[0]}", "sort": "-reward"}),
        "sort by tokens": ("samples", {**table, "q": "kind:train", "sort": "tokens"}),
        "page 10,000": ("samples", {**table, "q": "kind:train", "offset": 500_000}),
        "rewards over the steps": ("histogram", {"q": "kind:train"}),
        "rewards over the steps, of a word": ("histogram", {"q": f"kind:train {WORDS[0]}"}),
        "place of a sample in a result": ("place", {"q": "kind:train", "sort": "-reward", "key": sample}),
        "the next sample of a result": ("beside", {"q": "kind:train", "sort": "-reward", "key": sample}),
        "a group": ("group", {"key": key}),
        "one prompt through the run": ("prompt", {"key": prompt}),
    }
    return asked


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="use the run and the index of before, and leave them")
    parser.add_argument("--live", action="store_true", help="let `slime view` build the index, and ask it meanwhile")
    stated = parser.parse_args()
    work = stated.folder / "slime-bench-view"
    if not stated.keep:
        shutil.rmtree(work, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    run = work / "run"
    if not run.exists():
        started = time.monotonic()
        size = write_run(run, stated.samples, stated.steps)
        print(f"{stated.samples:,} samples in {stated.steps:,} files, {size / 2**20:.0f} MiB", end="")
        print(f" (written in {time.monotonic() - started:.0f} s)", flush=True)
    if stated.live:
        shutil.rmtree(work / "cache", ignore_errors=True)
        watch(run)
    measure(run, stated.repeat)
    if not stated.keep:
        shutil.rmtree(work)


#: seconds between two rounds of questions while the index is built, and after which an idle process is looked at
_ASK_EVERY_S, _IDLE_S = 15.0, 10.0
#: what is asked of a run while its index is built
WHILE_BUILT = {
    "open: the run": ("runs", {}),
    "table": ("samples", {"run": 0, "sort": "step"}),
    "search: a word in one of a thousand": ("samples", {"run": 0, "q": "unusual", "sort": "step"}),
    "search: a word in one of seven": ("samples", {"run": 0, "q": WORDS[0], "sort": "step"}),
    "search: numbers": ("samples", {"run": 0, "q": "reward<0.5 step>20", "sort": "step"}),
    "sort by reward": ("samples", {"run": 0, "q": "kind:train", "sort": "-reward"}),
}


def watch(run: Path) -> None:
    """Start `slime view` on a run without an index; ask it until all is indexed, and then add a step."""
    import psutil

    started = time.monotonic()
    command = [sys.executable, "-m", "slime.cli.main", "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            address = next((line.split()[1] for line in child.stdout if line.startswith("open ")), None)
            if address is None:
                raise SystemExit("`slime view` ended before it printed its address")
            print(f"live: the address after {time.monotonic() - started:.1f} s", flush=True)
            port, token = address.removeprefix("http://127.0.0.1:").split("/")[:2]
            process, link = psutil.Process(child.pid), http.client.HTTPConnection("127.0.0.1", int(port), timeout=600)

            def ask(question: str, parameters: dict[str, Any]) -> Any:
                link.request("GET", f"/{token}/api/{question}?{urlencode(parameters)}")
                answer = json.loads(link.getresponse().read())
                assert "error" not in answer, answer
                return answer

            taken: dict[str, list[float]] = {what: [] for what in WHILE_BUILT}
            done, shown = False, False
            while not done:
                for what, (question, parameters) in WHILE_BUILT.items():
                    asked = time.monotonic()
                    answer = ask(question, parameters)
                    taken[what].append(1000 * (time.monotonic() - asked))
                    if "runs" in answer:
                        index = answer["runs"][0]["index"]
                        done = index["samples"] > 0 and index["done"] == index["total"]
                    elif answer["rows"] and not shown:
                        shown = True
                        print(f"live: the first samples after {time.monotonic() - started:.1f} s", flush=True)
                time.sleep(0 if done else _ASK_EVERY_S if shown else 0.1)
            cpu = sum(process.cpu_times()[:2])
            size = Path(index["path"]).stat().st_size / 2**20
            print(f"live: {index['samples']:,} samples indexed in {time.monotonic() - started:.0f} s", end="")
            print(f" ({cpu:.0f} s of a core), {size:.0f} MiB", flush=True)
            for what, times in taken.items():
                print(f"{'live: ' + what:42}{statistics.median(times):>10.0f}{max(times):>10.0f}")
            time.sleep(2 * _IDLE_S)
            cpu = sum(process.cpu_times()[:2])
            time.sleep(_IDLE_S)
            print(f"live: idle, {(sum(process.cpu_times()[:2]) - cpu) / _IDLE_S:.0%} of a core", flush=True)
            files = sorted((run / "rollouts").glob("*.jsonl"))
            added = files[-1].read_text().replace('"response": "', '"response": "lately ')
            new = run / "rollouts" / f"{int(files[-1].stem) + 1:06d}.jsonl"
            new.write_text(added)
            written, count = time.monotonic(), added.count("\n")
            while ask("samples", {"run": 0, "q": "lately", "sort": "step"})["total"] < min(count, 10_000):
                time.sleep(0.05)
            print(f"live: {count:,} samples of a new step found after {time.monotonic() - written:.1f} s")
            new.unlink()
            peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{child.pid}/status").read_text())
            print(f"live: {int(peak[1]) / 1024 if peak else 0:.0f} MiB of memory at most", flush=True)
        finally:
            child.send_signal(signal.SIGINT)


def measure(run: Path, repeat: int) -> None:
    """Index the run, and time questions to its server."""
    from slime_viewer.index import open_index
    from slime_viewer.run_files import RunFolder
    from slime_viewer.server import HOST, ViewServer

    started = time.monotonic()
    index = open_index(RunFolder(run))
    added = index.refresh()
    assert index.path is not None
    print(
        f"index: {added:,} samples in {time.monotonic() - started:.1f} s, {index.path.stat().st_size / 2**20:.0f} MiB"
    )
    [(file, group, prompt)] = index.query("SELECT file, grp, prompt FROM samples WHERE id = 1000")
    [(name,)] = index.query("SELECT name FROM files WHERE id = ?", [file])
    index.close()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    server = ViewServer([run])
    asyncio.run_coroutine_threadsafe(server.start(0), loop).result(60)
    link = http.client.HTTPConnection(HOST, server.port, timeout=120)

    def ask(question: str, parameters: dict[str, Any]) -> Any:
        link.request("GET", f"/{server.token}/api/{question}?{urlencode(parameters)}")
        answer = json.loads(link.getresponse().read())
        assert "error" not in answer, answer
        return answer

    names = "\n".join(ask("run", {"run": 0})["names"])
    time.sleep(2)  # the first look at the files
    print(f"{'':42}{'median ms':>10}{'slowest':>10}")
    opened = {"open: the run": ("runs", {}), "open: 60 curves of it": ("series", {"run": 0, "names": names})}
    for what, (question, parameters) in (opened | questions(f"{name.removesuffix('.jsonl')}/{group}", prompt)).items():
        median, slowest = timed(lambda: ask(question, {"run": 0, **parameters}), repeat)  # noqa: B023
        print(f"{what:42}{median:>10.0f}{slowest:>10.0f}", flush=True)
    found = f"{ask('samples', {'run': 0, 'q': 'unusual'})['total']:,} samples"
    browse(server.address, repeat, found)
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)


def browse(address: str, repeat: int, found: str) -> None:
    """Time the page in a headless Chromium, if there is one. `found`: how many samples have the word "unusual"."""
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        print("no Chromium: the page itself is not timed")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})

        def open_page() -> None:
            page.goto("about:blank")
            page.goto(address)
            page.locator(".u-over").nth(1).wait_for()

        def search() -> None:
            page.fill("#filter", "unusual")
            page.press("#filter", "Enter")
            page.locator(".chips .right", has_text=found).wait_for()
            page.fill("#filter", "unique")
            page.press("#filter", "Enter")
            page.locator(".chips .right", has_text=re.compile(r"^\s*1 sample\b")).wait_for()

        for what, action, share in (("page: address to curves", open_page, 1), ("page: filter to table", search, 2)):
            median, slowest = timed(action, repeat)
            print(f"{what:42}{median / share:>10.0f}{slowest / share:>10.0f}", flush=True)
            page.goto(f"{address}#/samples/0")
            page.wait_for_selector(".samples tbody tr")
        browser.close()


if __name__ == "__main__":
    main()
