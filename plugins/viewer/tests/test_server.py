"""The server of `slime view`: who may ask, what is answered, and what happens to the run folder."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from hatchling.builders.wheel import WheelBuilder
from plugins.viewer.tests.conftest import Serve, Served
from plugins.viewer.tests.making import GROUPS, SAMPLES, add_step, make_run, rising
from tests.support.waiting import wait_until

from slime.cli.main import main
from slime.errors import ConfigError, DataError
from slime.observe.metrics import MetricsWriter
from slime_viewer import server as server_module
from slime_viewer.page import STATIC, static_files
from slime_viewer.progress import RunProgress
from slime_viewer.run_files import RunFolder
from slime_viewer.server import WatchedRun


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    first = make_run(folder / "first", steps=12, metrics=lambda _: {"rollout/truncated_ratio": 0.5})
    return first, make_run(folder / "second", steps=12, reward=lambda *_: 0.0, config="[run]\nseed = 2\n")


@pytest.fixture(scope="module")
def served(serve: Serve, runs: tuple[Path, Path]) -> Served:
    one = serve(*runs)
    one.wait(2 * (12 * 12 + 3))
    return one


def test_the_page_needs_nothing_from_outside_and_says_so_to_the_browser(served: Served) -> None:
    base = f"/{served.server.token}/"
    status, body, headers = served.request(base)
    assert status == 200
    policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["require-trusted-types-for"] == "'script'"
    assert re.fullmatch(r"'self' 'sha256-[\w+/]+='", policy["script-src"])
    assert (headers["Referrer-Policy"], headers["X-Content-Type-Options"]) == ("no-referrer", "nosniff")
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["Cache-Control"] == "no-store"
    assert not re.search(rb"https?://", body)
    for name, (path, kind) in static_files().items():
        status, body, headers = served.request(f"{base}static/{name}")
        assert (status, body) == (200, path.read_bytes()) and headers["Content-Type"].startswith(kind)


def test_the_page_is_small_and_its_libraries_come_with_their_licences() -> None:
    files = {name: path.stat().st_size for name, (path, _) in static_files().items()}
    vendored = {name: size for name, size in files.items() if name.startswith("vendor/")}
    assert sum(vendored.values()) < 75_000 and sum(files.values()) < 250_000
    sent = sum(len(gzip.compress(path.read_bytes())) for path, _ in static_files().values())
    assert sent < 100_000
    licences = {path.name for path in (STATIC / "vendor").glob("LICENSE.*")}
    assert licences == {"LICENSE.preact", "LICENSE.htm", "LICENSE.uPlot"}


def test_the_package_has_the_page_the_licences_of_its_libraries_and_the_demo() -> None:
    builder = WheelBuilder(str(Path(__file__).parents[3]))
    packed = {file.distribution_path for file in builder.recurse_included_files()}
    page = {f"slime_viewer/static/{path.relative_to(STATIC)}" for path in STATIC.rglob("*") if path.is_file()}
    assert len(page) > 15 and page <= packed
    assert {"slime_viewer/demo_run.toml", "slime_viewer/demo_model.json"} <= packed
    told = builder.metadata.core.license_files
    assert {name.rpartition("/")[2] for name in told} == {"LICENSE", "LICENSE.preact", "LICENSE.htm", "LICENSE.uPlot"}


def test_only_who_knows_the_token_and_comes_from_this_machine_is_answered(served: Served) -> None:
    token, port = served.server.token, served.server.port
    assert len(token) >= 32
    path = f"/{token}/api/runs"
    assert served.request(path)[0] == 200
    assert served.request(path, Host="localhost:9000", Origin="http://localhost:9000")[0] == 200, "through a tunnel"
    for wrong in (f"/{token[:-1]}/api/runs", f"/{token}x/api/runs", "/api/runs", "/", f"/%ff{token}/"):
        status, body, _ = served.request(wrong)
        assert status in (403, 404) and b"first" not in body
    for headers in (
        {"Host": f"evil.example:{port}"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": f"http://127.0.0.1:{port + 1}"},
        {"Origin": "null"},
    ):
        assert served.request(path, **headers)[0] == 403, headers


def test_nothing_can_be_changed(served: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert served.request(f"/{served.server.token}/api/runs", method)[0] in (403, 405)
    for name in ("../server.py", "..%2fserver.py", "vendor/README.md", "%2e%2e/page.py", "/etc/passwd"):
        assert served.request(f"/{served.server.token}/static/{name}")[0] in (403, 404)


@pytest.mark.row("V2")
def test_the_questions_of_the_page_are_answered(served: Served) -> None:
    first, second = served.ask("runs")["runs"]
    assert (first["name"], first["state"], first["progress"]["done"]) == ("first", "finished", 12)
    assert any("cut off" in alert["text"] for alert in first["verdict"]["alerts"])
    assert [alert["metric"] for alert in second["verdict"]["alerts"]] == ["rollout/reward_mean"]
    assert ["megatron.lr", "0.001"] in first["config"] and first["index"]["samples"] == 147
    series = served.ask("series", run=0, names="train/kl\nnothing")
    assert series["values"] == {"train/kl": [0.01 * step for step in range(12)]}
    found = served.ask("samples", run=0, q="kind:train step=3", sort="-reward", offset=2, limit=5)
    assert found["total"] == 12 and len(found["rows"]) == 5
    rewards = [rising(3, group, number) for group in range(GROUPS) for number in range(SAMPLES)]
    assert found["means"] == {"reward": sum(rewards) / 12, "tokens": 5.0, "cut": 0.0}
    row = found["rows"][0]
    assert row["question"].startswith("what is") and row["key"].startswith("000003:")
    members = served.ask("group", run=0, key=row["group_key"])["samples"]
    assert len(members) == 4 and members[0]["row"]["label"] is not None
    assert served.ask("sample", run=0, key=row["key"])["sample"]["row"]["response"].startswith("it is")
    assert len(served.ask("prompt", run=0, key=row["prompt"])["samples"]) == 49
    compared = served.ask("compare", runs="0,1", kind="train")
    assert {one["name"] for one in compared["config"]} == {"run.seed", "megatron.lr"}
    assert compared["prompts"][0]["runs"][0] == {"reward": 1.0, "visits": 12, "group": "000011/33"}
    assert compared["prompts"][0]["runs"][1]["reward"] == 0.0


@pytest.mark.parametrize(
    ("question", "parameters", "told"),
    [
        ("samples", {"q": "rewrd<1"}, "there is no field 'rewrd'"),
        ("samples", {"sort": "colour"}, "cannot be sorted by 'colour'"),
        ("samples", {"offset": "x"}, "must be numbers"),
        ("samples", {"offset": "9" * 30}, "must be numbers"),
        ("samples", {"q": "a " * 2000}, "there are more than 100 terms"),
        ("series", {"run": "7"}, "there is no run 7"),
        ("series", {"run": "9" * 5000}, "there is no run 9"),
        ("group", {"key": "000000/" + "9" * 5000}, "there is no group"),
        ("sample", {"key": "000000:" + "9" * 30}, "there is no sample"),
        ("group", {"key": "000099/1"}, "there is no group 000099/1"),
        ("sample", {"key": "../../config:0"}, "there is no sample"),
        ("prompt", {"key": ""}, "there is no prompt"),
        ("nothing", {}, "no such question"),
    ],
)
def test_a_wrong_question_is_told(served: Served, question: str, parameters: dict[str, str], told: str) -> None:
    assert told in served.ask(question, **parameters)["error"]


def test_an_export_is_one_file_with_the_samples_that_were_found(served: Served) -> None:
    status, body, headers = served.request(f"/{served.server.token}/api/export?run=0&q=kind:train+step=2&sort=-reward")
    assert status == 200 and headers["Content-Disposition"] == 'attachment; filename="first.html"'
    text = body.decode()
    assert text.count('"key":"000002:') == 12 and "000003:" not in text
    assert not re.search(r'(src|href)="(?!data:,)', text)


def test_what_a_run_writes_is_seen_while_it_goes_on(serve: Serve, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, finished=False)
    one = serve(folder)
    one.wait(15)
    before = one.ask("state")["version"]
    writer = MetricsWriter(folder)
    add_step(folder, writer, 1)
    writer.close()
    one.wait(27)
    wait_until(lambda: one.ask("series", run=0, names="train/kl")["steps"] == [0, 1])
    assert one.ask("state")["version"] != before


def test_a_run_whose_answer_takes_long_holds_up_no_other_one(served: Served) -> None:
    with served.server.runs[0].lock:  # as a question about it does
        assert "version" in served.ask("state")
        assert served.ask("samples", run=1, q="kind:train")["total"] == 144


def test_whatever_fails_while_looking_is_told_and_tried_again(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    failing = [True]

    find = server_module.progress

    def progress(folder: RunFolder) -> RunProgress:
        if failing and threading.current_thread().name.startswith("slime-view"):
            raise RecursionError("injected")
        return find(folder)

    monkeypatch.setattr(server_module, "progress", progress)
    one = serve(folder)
    wait_until(lambda: one.ask("run")["problems"] == ["RecursionError: injected"])
    failing.clear()
    one.wait(15)


def test_a_server_ends_while_a_question_is_being_answered(tmp_path: Path) -> None:
    run = WatchedRun(make_run(tmp_path / "run", steps=1))
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    told: list[str] = []

    def ask() -> None:
        with pytest.raises(DataError) as raised:
            run.reader.query(endless)
        told.append(str(raised.value))

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():  # the first one may come before the question begins
        run.interrupt()
        asking.join(0.1)
    run.end()
    assert "is being closed" in told[0] or "interrupted" in told[0]


def test_a_port_that_is_in_use_is_told(served: Served, serve: Serve, runs: tuple[Path, Path]) -> None:
    port = served.server.port
    with pytest.raises(ConfigError, match=f"port {port} is in use. Choose another one with --port, or none"):
        serve(runs[0], port=port)


def test_the_command_prints_the_address_and_ends_by_a_signal(runs: tuple[Path, Path], cache: Path) -> None:
    command = [sys.executable, "-m", "slime.cli.main", "view", str(runs[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(2)]
        assert re.fullmatch(rf"{runs[0]}  index of the samples: {cache}/[0-9a-f]{{24}}\.sqlite\n", lines[0])
        assert re.fullmatch(r"open http://127\.0\.0\.1:\d+/[\w-]{32}/\n", lines[1])
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
        assert (child.returncode, error) == (0, "")


def test_a_run_on_a_read_only_disk_is_shown(tmp_path: Path, cache: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        # A read-only disk needs a mount, and some containers refuse one even in a user namespace of the test's own.
        pytest.skip("unshare -rm failed: mounting is not allowed on this machine")
    folder = make_run(tmp_path / "run", steps=2)
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && ! touch "$0/x" && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mounted, str(folder), sys.executable, "-m", "slime.cli.main", "view"]
    with subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert f"index of the samples: {cache}/" in child.stdout.readline()
            address = child.stdout.readline().split()[1]
            deadline = time.monotonic() + 60
            while True:
                with urlopen(f"{address}api/runs", timeout=60) as answer:
                    [run] = json.loads(answer.read())["runs"]
                if run["index"]["samples"] == 2 * 12 + 3:
                    break
                assert time.monotonic() < deadline, run
                time.sleep(0.05)
            assert run["problems"] == [] and run["progress"]["done"] == 2
        finally:
            child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
        assert child.returncode == 0 and "Read-only file system" in error  # of touch


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing"], "'missing' does not exist; expected a run folder"),
        (["--port", "99999", "x"], "--port 99999 is no port"),
        (["--prot", "1", "x"], "unknown option '--prot'. Did you mean --port?"),
    ],
)
def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert main(["view", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.row("V2")
def test_a_folder_of_runs_is_listed_and_each_of_them_can_be_opened(serve: Serve, tmp_path: Path) -> None:
    held = {"eval/held_out": 0.75}
    make_run(tmp_path / "outputs" / "first", steps=6, metrics=lambda _: held)
    one = serve(tmp_path / "outputs")
    assert one.ask("runs") == {"runs": [], "listed": True}
    [row] = one.ask("folder")["rows"]
    told = ("first", "finished", 6, 0.75, 1.0)
    assert (row["name"], row["state"], row["done"], row["held"], row["reward"]) == told
    make_run(tmp_path / "outputs" / "second", steps=3, finished=False)
    rows = {row["name"]: row for row in one.ask("folder")["rows"]}
    assert rows.keys() == {"first", "second"}, "a new run appears by itself"
    assert one.ask("open", path=rows["second"]["path"]) == {"run": 0}
    assert one.ask("open", path=row["path"]) == {"run": 1} and one.ask("open", path=row["path"]) == {"run": 1}
    assert [run["name"] for run in one.ask("runs")["runs"]] == ["second", "first"]
    assert "there is no run" in one.ask("open", path=str(tmp_path))["error"]
