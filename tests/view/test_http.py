"""What the server answers, and what it refuses."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import polars as pl
import pytest

from plait.core.base.errors import DataError, JobError
from plait.core.runs.evidence import Evidence, Verdict, write_hang
from plait.view.app import LARGEST, UPDATE, make_app, make_server
from plait.view.callbacks import status_of
from plait.view.heat_callbacks import WANTED
from plait.view.report import report_of
from plait.view.store import Watched, last_errors, names_of, signature, watch
from tests.support.recordings.made import write_run
from tests.view.served import CULPRIT, SLOW, served

SECRET = "root:secret"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    base = tmp_path_factory.mktemp("runs")
    (base / "passwd").write_text(SECRET)
    with served([write_run(base / "run", SLOW)]) as (url, _):
        yield url


def ask(page: str, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, str, Any]:
    """A path exactly as it is, which other clients would tidy."""
    connection = http.client.HTTPConnection(urlsplit(page).netloc, timeout=120)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        data = json.dumps(body).encode() if body is not None else b""
        sent = {"Content-Type": "application/json", "Content-Length": str(len(data))} | headers
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(data)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace"), answer.headers
    finally:
        connection.close()


def test_the_page_and_what_it_loads(page: str) -> None:
    status, text, headers = ask(page, "/")
    assert status == 200
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "//" not in text.replace("http://www.w3.org", "").partition("<body>")[0].replace("<!--", ""), (
        "nothing from elsewhere"
    )
    status, text, _ = ask(page, "/_dash-layout")
    assert status == 200
    assert "heat-figure" in text
    assert ask(page, "/assets/keys.js")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../passwd", "/assets/../../../../passwd", "/assets/%2e%2e/%2e%2e/%2e%2e/passwd", "/assets/..%2f..%2fpasswd",
        "/assets//etc/passwd", "/etc/passwd", "/assets/....//....//etc/passwd",
        "/_dash-component-suites/../../etc/passwd",
        "/_dash-component-suites/dash/%2e%2e/%2e%2e/passwd", "/assets/..\\..\\passwd", "/runs", "/plan.json",
        "/_dash-component-suites/plait/cli/runs.py", "/assets/%00", "//etc/passwd",
    ],
)  # fmt: skip
def test_paths_that_lead_out_are_refused(page: str, path: str) -> None:
    status, text, _ = ask(page, path)
    assert status in (400, 403, 404, 308), text[:200]
    assert SECRET not in text
    assert "root:" not in text
    assert "Traceback" not in text


def test_who_was_led_here_under_another_name_is_refused(page: str) -> None:
    assert ask(page, "/_dash-layout", Host="evil.example")[0] == 403
    assert ask(page, "/_dash-layout", Origin="http://evil.example")[0] == 403
    assert ask(page, "/_dash-layout", Host=urlsplit(page).netloc.replace("127.0.0.1", "localhost"))[0] == 200


@pytest.mark.parametrize("origin", ["http://[", "http://a@[::1", "null", "http://127.0.0.1:99999", "//", "x" * 5000])
def test_an_origin_that_is_none_is_refused(page: str, origin: str) -> None:
    assert ask(page, "/", Origin=origin)[0] == 403


@pytest.mark.parametrize("host", ["[", "127.0.0.1:x", "[::1"])
def test_a_host_that_is_none_is_refused(page: str, host: str) -> None:
    assert ask(page, "/", Host=host)[0] in (400, 403)


def told(page: str, request: bytes) -> bytes:
    """The first line of what is answered to these bytes."""
    where = urlsplit(page)
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:  # type: ignore[arg-type]
        connection.sendall(request)
        return connection.makefile("rb").readline()


def test_bodies_have_a_limit_and_are_not_read_beyond_it(page: str) -> None:
    head = f"POST {UPDATE} HTTP/1.1\r\nHost: {urlsplit(page).netloc}\r\nContent-Type: application/json\r\n"
    assert b" 413 " in told(page, (head + f"Content-Length: {100 << 20}\r\n\r\n").encode()), "before it has come"
    chunk = b"%x\r\n%b\r\n" % (LARGEST + 1, b" " * (LARGEST + 1))
    assert b" 4" in told(page, (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunk + b"0\r\n\r\n")
    assert ask(page, UPDATE, "POST", "x" * (LARGEST - 2))[0] == 400, "read, and no question"


@pytest.mark.parametrize("depth", [900, 5_000, 400_000])
def test_deep_json_is_refused(page: str, depth: int, capfd: pytest.CaptureFixture[str]) -> None:
    body = b'{"output":' + b"[" * depth + b"]" * depth + b"}"
    head = f"POST {UPDATE} HTTP/1.1\r\nHost: {urlsplit(page).netloc}\r\nContent-Type: application/json\r\n"
    assert b" 400 " in told(page, (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body)
    assert "Traceback" not in capfd.readouterr().err


def test_a_line_that_names_no_url_is_refused(page: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert b" 400 " in told(page, b"GET http://[::1/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("host", ["", " ", "..", "\0", "x" * 100, "192.0.2.1"])
def test_a_host_at_which_nobody_can_listen_is_refused(tmp_path: Path, host: str) -> None:
    app = make_app(watch([write_run(tmp_path / "run", SLOW)]))
    with pytest.raises(JobError, match="--host"):
        make_server(app, host, 0)


def update(page: str, output: str, changed: list[str], inputs: list[Any], state: Any = ()) -> tuple[int, Any]:
    """A callback's answer."""
    status, text = answered(page, output, changed, inputs, state)
    return status, json.loads(text) if status == 200 else text


def answered(page: str, output: str, changed: list[str], inputs: list[Any], state: Any = ()) -> tuple[int, str]:
    """A callback, as the browser calls it. inputs: a list in place of one stands for buttons of a
    kind."""
    parts = output.strip(".").split("...")
    outputs: Any = [dict(zip(("id", "property"), part.split("@")[0].rsplit(".", 1), strict=True)) for part in parts]
    if not output.startswith(".."):
        outputs = outputs[0]

    def said(one: Any) -> Any:
        return [said(each) for each in one] if isinstance(one, list) else dict(zip(KEYS, one, strict=True))

    values = [[said(one) for one in group] for group in (inputs, state)]
    body = {"output": output, "outputs": outputs, "inputs": values[0], "state": values[1], "changedPropIds": changed}
    return ask(page, "/_dash-update-component", "POST", body)[:2]


KEYS = ("id", "property", "value")
VERDICT = "..text.children...hang.children...notes.children...attempts-table.children.."


@pytest.mark.parametrize("number", [0, 99, -1, "../../passwd", None, [1], True, 1.5])
def test_a_run_is_a_number_in_the_list(page: str, number: Any) -> None:
    status, answer = update(page, VERDICT, ["version.data"], [("version", "data", "0:1")], [("run", "value", number)])
    assert status == 200
    text = answer["response"]["text"]["children"]
    assert f"SLOW PROCESSOR: rank {CULPRIT}" in text
    assert SECRET not in text


USUAL = {
    "run.value": 0, "statistic.value": "mean", "columns.value": "steps", "order.value": "pp dp", "version.data": "x",
}  # fmt: skip
ODD: list[Any] = [
    [1], "x", ["a", None], 10**30, True, float("inf"), {"points": "x"}, {"points": [3]}, {"rank": "x", "step": []},
    {"rank": 6, "step": -5, "span": ["a"]}, {"rank": 6, "step": 3, "span": [3, 6, "idle", "1RECV_F3", 0]},
    {"rank": 10**30, "step": 10**30}, {"points": [{"customdata": float("inf"), "y": float("nan")}]},
    {"row": float("inf"), "window": [float("nan"), 2]},
    {"yaxis.range[0]": float("nan"), "yaxis.range[1]": 1.0, "xaxis.range[0]": float("nan"), "xaxis.range[1]": 1.0},
]  # fmt: skip


def test_no_value_that_is_none_is_a_fault_of_the_server(page: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every value of every callback, one after the other."""
    asked = 0
    for one in json.loads(ask(page, "/_dash-dependencies")[1]):
        values = [*one["inputs"], *one["state"]]
        if one["clientside_function"] or any("{" in value["id"] for value in values):
            continue
        for place, what in enumerate(values):
            for odd in ODD:
                said = [(v["id"], v["property"], USUAL.get(f"{v['id']}.{v['property']}")) for v in values]
                said[place] = (what["id"], what["property"], odd)
                count = len(one["inputs"])
                cause = "{}.{}".format(*said[0][:2])
                status, text = answered(page, one["output"], [cause], said[:count], said[count:])
                assert status in (200, 204), (one["output"], what, odd, text)
                asked += 1
    assert asked > 500
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", [{"kind": "unlike", "rank": "x"}, {"kind": "unlike", "rank": 10**30}])
def test_no_button_that_is_none_is_a_fault_of_the_server(page: str, name: Any) -> None:
    dependencies = json.loads(ask(page, "/_dash-dependencies")[1])
    one = next(each for each in dependencies if any("unlike" in value["id"] for value in each["inputs"]))
    state = [(v["id"], v["property"], USUAL.get(f"{v['id']}.{v['property']}")) for v in one["state"]]
    cause = json.dumps(name, separators=(",", ":")) + ".n_clicks"
    status, text = answered(page, one["output"], [cause], [[(name, "n_clicks", 1)]], state)
    assert status in (200, 204), text


@pytest.mark.parametrize(
    "body", [None, 3, [], {}, {"output": 3}, {"output": "x.y"}, {"output": VERDICT}, {"output": VERDICT, "inputs": 3},
             {"output": VERDICT, "inputs": [3]}, {"output": VERDICT, "inputs": [{"id": "version"}], "outputs": 3},
             {"output": VERDICT, "inputs": [], "outputs": [], "state": 3, "changedPropIds": {}}],
)  # fmt: skip
def test_a_request_that_asks_for_nothing_is_refused(page: str, body: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(page, "/_dash-update-component", "POST", body)[0] == 400
    assert "Traceback" not in capfd.readouterr().err


def test_broken_files_are_said_and_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SLOW)
    parts = sorted((run / "timeline").glob("*.parquet"))
    parts[0].write_bytes(parts[0].read_bytes()[:-30])
    parts[1].write_bytes(b"PAR1 nothing")
    pl.DataFrame({"a": [1]}).write_parquet(run / "timeline" / "foreign.parquet")
    (run / "hang.json").write_text('{"version": 1, "verdict": {')
    (run / "attempts.jsonl").write_text('{"number": 1, "outcome": "<b>x</b>"}\n[1]\n{"numb')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": "much"}\n{"step": "x"}\nnull\n')
    (run / "rank_table.json").write_text("[]")
    (run / "plan.json.tmp").mkdir()
    with served([run]) as (url, watched):
        status, answer = update(url, VERDICT, ["version.data"], [("version", "data", "x")], [("run", "value", 0)])
        assert status == 200
        said = json.dumps(answer)
        for word in (parts[0].name, parts[1].name, "foreign.parquet", "rank_table.json", "<b>x</b>", "hang.json"):
            assert word in said
        assert watched[0].snapshot.recording is not None
        assert watched[0].snapshot.recording.ranks == 6


def test_a_run_without_anything_says_so_and_lives_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with served([tmp_path / "run"]) as (url, watched):
        assert "holds no timeline" in watched[0].snapshot.problem
        assert ask(url, "/")[0] == 200
        write_run(tmp_path / "run", SLOW)
        end = time.monotonic() + 240
        while watched[0].look(all_of_it=True).report is None and time.monotonic() < end:
            time.sleep(0.05)
        assert watched[0].snapshot.named() == {CULPRIT: "slow processor"}


def test_a_run_that_hung_in_its_first_step_shows_its_grid(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SLOW)
    shutil.rmtree(run / "timeline")
    verdict = Verdict(cause="stopped", why="rank 3 <i>is</i> stopped", ranks=(3,))
    write_hang(run, verdict, [Evidence(rank=rank, state="runs", thread="waits") for rank in range(8)])
    watched = Watched(run, "run")
    found = watched.read()
    assert found.run is None
    assert [one.state for one in found.standings()] == ["waits"] * 3 + ["named"] + ["waits"] * 4
    text = report_of(found)
    assert "rank 3 &lt;i&gt;is&lt;/i&gt; stopped" in text
    assert 'id="grid"' in text


HEAT = "..heat-figure.figure...cell.children.."


def test_steps_that_are_none_are_said_to_be(page: str) -> None:
    controls = [("excess", "mean", "segments", "pp dp cp tp", first, last) for first, last in ((9, 3), (3, 9))]
    said: list[str] = []
    for values in controls:
        named = [(name, "value", value) for name, value in zip(WANTED, values, strict=True)]
        inputs = [("version", "data", "0:1"), ("heat-at", "data", {}), *named]
        said.append(answered(page, HEAT, ["first.value"], inputs, [("run", "value", 0)])[1])
    assert [("no step in this range was recorded" in text) for text in said] == [True, False]


def test_a_run_whose_folder_goes_is_shown_as_it_was(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SLOW)
    watched = Watched(run, "run")
    assert watched.read().report
    shutil.rmtree(run)
    end = time.monotonic() + 240
    while not (snapshot := watched.look()).problem:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert snapshot.report
    assert f"this is what was read before: {run}: no such run folder" in status_of(snapshot)


def test_a_live_run_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SLOW)
    watched = Watched(run, "run")
    first = watched.read()
    before = signature(run)
    assert watched.look().generation == first.generation
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert signature(run) != before
    watched._not_before = 0.0
    end = time.monotonic() + 240
    while watched.look(all_of_it=True).report is None or not watched.snapshot.run.metrics:  # type: ignore[union-attr]
        assert time.monotonic() < end
        time.sleep(0.05)
    assert watched.snapshot.generation > first.generation


def test_last_words_of_logs(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "outside").write_text("Traceback (most recent call last):\nsecret")
    (logs / "rank-00002.log").symlink_to(tmp_path / "outside")
    (logs / "rank-00001.log").write_text("x\nTraceback (most recent call last):\n  File\nValueError: <b>bad</b>\n")
    (logs / "rank-00000.log").write_text("all is well\n")
    (logs / "rank-x.log").write_text("Traceback (most recent call last):\n")
    assert last_errors(tmp_path) == {1: "ValueError: <b>bad</b>"}


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    app = make_app(watch([tmp_path / "run"]))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(JobError, match="Choose another --port"):
        make_server(app, "127.0.0.1", taken.getsockname()[1])


def test_names_tell_runs_apart() -> None:
    assert names_of([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert names_of([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]


def test_a_report_is_no_file_of_the_run(tmp_path: Path) -> None:
    from tests.cli.test_diagnose import run_cli

    run = write_run(tmp_path / "run", SLOW)
    before = (run / "plan.json").read_bytes()
    for name in ("plan.json", "metrics.jsonl", "rings/rank-00000.ring", "page"):
        with pytest.raises(JobError, match=r"is no name for a page. Name it NAME.html"):
            run_cli("view", run, "--save", run / name)
    assert (run / "plan.json").read_bytes() == before


def test_view_needs_a_folder(tmp_path: Path) -> None:
    from tests.cli.test_diagnose import run_cli

    for save in ((), ("--save", tmp_path / "page.html")):
        with pytest.raises(DataError, match="no such run folder"):
            run_cli("view", tmp_path / "nothing", *save)


def test_view_says_that_a_folder_is_no_run_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from plait.cli.runs import view

    monkeypatch.setattr("werkzeug.serving.BaseWSGIServer.serve_forever", lambda self: None)
    (tmp_path / "empty").mkdir()
    view([tmp_path / "empty"], port=0)
    told = capsys.readouterr().out
    assert f"{tmp_path / 'empty'} holds no run yet" in told
    assert told.index("no run yet") < told.index("http://127.0.0.1:")
    (tmp_path / "empty" / "plan.json").touch()
    view([tmp_path / "empty"], port=0)
    assert "no run yet" not in capsys.readouterr().out
