"""What a run says fits the terminal, and neither a full disk nor an output that has gone ends it."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import RankFailure
from plait.core.cluster.hardware import HERE
from plait.core.job.refine import Measurements, Timed, Times
from plait.core.job.spec import Job
from plait.core.parallel.strategy import Strategy
from plait.core.runs.missing import Missing
from plait.plan.make import make_plan
from plait.train.record.metrics import MetricsFile
from plait.train.report import Reporter, Screen, describe
from tests.launch.collect.test_live import JOB

PLAN = make_plan(Job.from_dict({**JOB, "run": {"name": "gpt"}}), HERE, vocab=16)


class Terminal(io.StringIO):
    """A terminal that remembers what was written."""

    def isatty(self) -> bool:
        return True


def metrics(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0 / step, "seconds": 0.2, "tokens_per_second": 12345.6, "mfu": 0.3,
            "communication_seconds": 0.03, "exposed_seconds": 0.012, "hidden": 0.6, "idle": 0.1, **more}  # fmt: skip


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 80 columns."""
    monkeypatch.setattr("plait.train.report.terminal_width", lambda _: 80)
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@pytest.mark.parametrize("columns", [60, 80])
def test_the_live_line_has_step_loss_and_time_left(
    said: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("plait.train.report.terminal_width", lambda _: columns)
    with Reporter(tmp_path, speaks=True, steps=100000, out=said) as report:
        report.begin(0)
        for step in range(1, 30):
            report.step(metrics(step, **({"eval_loss": 3.0} if step == 20 else {})), show=step % 10 == 0)
    written = said.getvalue()
    live = [line for line in written.replace("\n", "\r").split("\r") if "left" in line]
    assert len(live) >= 29
    assert "\x1b" not in written
    for line in live:
        assert len(line) < columns
        assert line.startswith("step ")
        assert "─" in line
        assert "  loss " in line
        assert ":" in line.split("  ")[-1]
    stays = [line.split("\r")[-1] for line in written.split("\n")[:-1]]
    assert [line[:59] for line in stays] == ["step     20/100000  loss 0.250  eval 3.000  12,346 tokens/s"]


def test_the_time_left_is_that_of_the_steps_to_come(
    said: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 steps of 10 s each, after 1, 10 and 59."""
    clock = [0.0]
    monkeypatch.setattr("plait.train.report.time.monotonic", lambda: clock[0])
    left: dict[int, str] = {}
    with Reporter(tmp_path, speaks=True, steps=60, out=said) as report:
        report.begin(0)
        for step in range(1, 61):
            clock[0] += 10.0
            said.truncate(said.seek(0))
            report.step(metrics(step), show=False)
            left[step] = said.getvalue().rstrip().rpartition("  ")[2]
    assert (left[1], left[10], left[59], left[60]) == ("9:50 left", "8:20 left", "0:10 left", "")


def test_a_line_says_what_a_step_has_waited_for_beside_what_was_hidden() -> None:
    said = io.StringIO()
    Screen(said).line("  ".join(describe(metrics(10))))
    assert said.getvalue() == (
        "loss 0.500  12,346 tokens/s  exposed 12 ms (6%), hidden 60%  MFU 30%  first stage idle 10%\n"
    )
    assert "exposed 1.2 ms (1%), hidden 96%" in describe(metrics(1, exposed_seconds=0.0012, hidden=0.96))
    alone = describe({"step": 1, "loss": 1e6, "seconds": 0.1, "tokens_per_second": 10.0, "hidden": None})
    assert alone == ["loss 1e+06", "10 tokens/s"]


LOSS, RATE = "loss 1.000", "10 tokens/s"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, [LOSS, RATE]),
        ({"loss": 99999.5}, ["loss 99999.500", RATE]),
        ({"loss": 1e5}, ["loss 1e+05", RATE]),
        ({"loss": -1e5}, ["loss -1e+05", RATE]),
        ({"eval_loss": 2.5}, [LOSS, "eval 2.500", RATE]),
        ({"skipped": 3}, [LOSS, "3 updates skipped", RATE]),
        ({"skipped": 0}, [LOSS, RATE]),
        ({"tokens_per_second": 1234.0}, [LOSS, "1,234 tokens/s"]),
        ({"hidden": 0.5, "exposed_seconds": 0.00994}, [LOSS, RATE, "exposed 9.9 ms (5%), hidden 50%"]),
        ({"hidden": 0.0, "exposed_seconds": 0.01}, [LOSS, RATE, "exposed 10 ms (5%), hidden 0%"]),
        ({"hidden": 0.5, "exposed_seconds": 1.5}, [LOSS, RATE, "exposed 1,500 ms (75%), hidden 50%"]),
        ({"hidden": None, "exposed_seconds": 1.5}, [LOSS, RATE]),
        ({"mfu": 0.0}, [LOSS, RATE, "MFU 0%"]),
        ({"mfu": None}, [LOSS, RATE]),
        ({"idle": 0.0}, [LOSS, RATE, "first stage idle 0%"]),
    ],
)
def test_metrics_in_few_words(more: dict[str, Any], words: list[str]) -> None:
    seconds = 2.0 if more.get("exposed_seconds") == 1.5 else 0.2
    assert describe({"step": 1, "loss": 1.0, "seconds": seconds, "tokens_per_second": 10.0, **more}) == words


class Silent(io.StringIO):
    """What nobody should write to."""

    def write(self, text: str) -> int:
        pytest.fail(f"{text!r} was written")


def test_of_other_ranks_only_warnings_are_heard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, speaks=False, steps=4, out=Silent()) as report:
        report.begin(0)
        report.step(metrics(1), show=True)
        report.say("a line for people")
        report.warn("warning: \x1b[31m")
        report.sync()
        report.end(4, stopped=False, seconds=1.0, tokens=8, plan=PLAN)
    assert capfd.readouterr() == ("", "warning: \\x1b[31m\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stopped", "says"),
    [
        (True, "stopped and saved after step 3; the same command goes on from there\n"),
        (False, "trained 3 steps in 12 s; the run is in {}\n"),
    ],
)
def test_a_run_that_ends_is_summed_up(tmp_path: Path, said: Terminal, stopped: bool, says: str) -> None:
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.begin(0)
        report.step(metrics(2, eval_loss=7.0), show=False)
        report.step(metrics(3, mfu=float("nan")), show=False)
        report.end(3, stopped=stopped, seconds=12.4, tokens=96, plan=PLAN)
    assert said.getvalue().rpartition("\r")[2] == says.format(tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert found.pop("latest") == {**metrics(3, mfu=None), "eval_loss": 7.0}
    assert found == {
        "steps": 3, "seconds": 12.4, "tokens": 96, "plan": PLAN.key, "strategy": PLAN.strategy.to_dict(),
    }  # fmt: skip


def test_what_could_not_be_written_is_said_in_the_end(tmp_path: Path, said: Terminal) -> None:
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.begin(0)
        one, other = report.missing("recording"), report.missing("timeline")
        one.failed(OSError(errno.ENOSPC, "full"), steps=2)
        (tmp_path / "summary.json").mkdir()
        report.end(4, stopped=False, seconds=1.0, tokens=8, plan=PLAN)
    words = said.getvalue()
    assert "warning: recording cannot be written (full); training goes on without\n" in words
    assert "warning: summary.json cannot be written (Is a directory)\n" in words
    assert "warning: this run could not write everything; missing: recording of 2 steps\n" in words
    assert other.steps == 0 and words.endswith(f"trained 4 steps in 1 s; the run is in {tmp_path}\n")


@pytest.mark.parametrize("bad", [1, 2])
def test_lines_that_cannot_be_read_are_counted(said: Terminal, tmp_path: Path, bad: int) -> None:
    (tmp_path / "metrics.jsonl").write_text("?\n" * bad)
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.begin(0)
    assert said.getvalue().startswith(f"warning: {bad} line{'s' * (bad > 1)} of metrics.jsonl cannot be read; set")


def test_the_time_left_is_that_of_steps_of_late(
    said: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on after step 20: slow for 60 steps, then ten times as fast."""
    clock = [0.0]
    monkeypatch.setattr("plait.train.report.time.monotonic", lambda: clock[0])
    left: dict[int, str] = {}
    with Reporter(tmp_path, speaks=True, steps=200, out=said) as report:
        report.begin(20)
        for step in range(21, 151):
            clock[0] += 10.0 if step <= 80 else 1.0
            said.truncate(said.seek(0))
            report.step(metrics(step), show=False)
            left[step] = said.getvalue().rstrip().rpartition("  ")[2]
    assert (left[21], left[60], left[129], left[130]) == ("29:50 left", "23:20 left", "1:11 left", "1:10 left")


def test_the_time_left_is_unknown_before_a_step_was_done(said: Terminal, tmp_path: Path) -> None:
    with Reporter(tmp_path, speaks=True, steps=9, out=said) as report:
        report.step(metrics(5), show=False)  # nobody said when training began
    assert "-:-- left" in said.getvalue()


def test_a_line_that_is_shown_beside_a_live_one_is_that_of_an_evaluation(said: Terminal, tmp_path: Path) -> None:
    with Reporter(tmp_path, speaks=True, steps=100, out=said) as report:
        report.begin(0)
        report.step(metrics(1), show=True)
        report.step(metrics(2, eval_loss=3.0), show=False)
        report.step(metrics(3, eval_loss=3.0), show=True)
    lines = [line.split("\r")[-1] for line in said.getvalue().split("\n")[:-1]]
    assert [line.split("  loss")[0] for line in lines] == ["step   3/100"]


def test_a_live_line_is_drawn_over_to_its_end(said: Terminal) -> None:
    screen = Screen(said)
    screen.live("")
    assert said.getvalue() == "", "there is nothing to remove"
    screen.live("long")
    screen.live("ab")
    screen.line("stays")
    screen.live("")
    screen.live("")
    assert said.getvalue() == "\rlong\rab  \r  \rstays\n\rab\r  \r"


def test_a_live_line_fits_80_columns_where_a_terminal_does_not_say_how_many_it_has(
    said: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.train.report.terminal_width", lambda _: None)
    with Reporter(tmp_path, speaks=True, steps=100, out=said) as report:
        report.begin(0)
        report.step(metrics(1), show=False)
    assert max(len(line) for line in said.getvalue().split("\r")) == 79


def timed(*seconds: float) -> tuple[Timed, ...]:
    return tuple(Timed(Strategy(tp=2, p1=at + 1, sequence_parallel=at == 1), each) for at, each in enumerate(seconds))


def test_what_was_measured_before_training_is_a_table_the_fastest_first(tmp_path: Path) -> None:
    said, plan = io.StringIO(), replace(PLAN, strategy=timed(0.0, 0.0)[1].strategy)
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.choice(Measurements(strategies=timed(0.03, 0.02)), plan)
    first, header, *rows = said.getvalue().splitlines()
    assert first == "Measured before training, a micro-batch:"
    assert header.split("  ")[0].strip() == "batch slices" and "against best" in header
    cells = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]
    found = [row for row in cells if row[0] in ("1", "2")]
    assert found == [["2", "1", "yes", "both", "20.0", "1.00x", "chosen"], ["1", "1", "no", "both", "30.0", "1.50x"]]


def test_notes_of_what_was_measured_are_paragraphs_of_a_width(tmp_path: Path) -> None:
    said = io.StringIO()
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.choice(Measurements(notes={"slices": "word " * 30, "compile": "not tried"}), PLAN)
        report.choice(Measurements(), PLAN)
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("slices: word") and 90 < len(lines[0]) <= 100
    assert lines[1].startswith("  word") and lines[-1] == "compile: not tried"


@pytest.mark.parametrize(("columns", "longest"), [(60, 60), (200, 100)])
def test_notes_fit_a_terminal_and_a_reader(
    columns: int, longest: int, said: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.train.report.terminal_width", lambda _: columns)
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.choice(Measurements(notes={"slices": "word " * 60}), PLAN)
    lines = [line.rstrip() for line in said.getvalue().splitlines()]
    assert longest - 5 <= max(map(len, lines)) <= longest


def test_slack_that_was_measured_is_said_in_micro_batches(tmp_path: Path) -> None:
    said = io.StringIO()
    job = {**JOB, "model": JOB["model"] | {"num_layers": 2}, "strategy": {"pp": 2}, "run": {"name": "gpt"}}
    plan = make_plan(Job.from_dict(job), HERE, vocab=16)
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.choice(Measurements(times=Times((1.0,) * 2, (0.1,))), plan)
    assert said.getvalue() == (
        "slack from measured times: at most 2, 1 micro-batches alive on the stages, one after the other\n"
    )


@pytest.mark.parametrize("term", ["dumb", None])
def test_without_a_terminal_that_redraws_there_are_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str | None
) -> None:
    said = Terminal() if term else io.StringIO()
    monkeypatch.setenv("TERM", term or "xterm")
    with Reporter(tmp_path, speaks=True, steps=40, out=said) as report:
        report.begin(0)
        for step in range(1, 41):
            report.step(metrics(step), show=step % 10 == 0)
    lines = said.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10/40", "20/40", "30/40", "40/40"]
    assert "\r" not in said.getvalue()


def test_what_users_write_is_printed_as_it_is(said: Terminal, tmp_path: Path) -> None:
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.say("the run is in runs/[v2] [/b] :smile: \x1b[31m")
    assert said.getvalue() == "the run is in runs/[v2] [/b] :smile: \\x1b[31m\n"


def test_output_that_fails_ends_nothing() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    Screen(Full()).line("nobody reads this")
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    Screen(ascii_only).line("é")
    assert ascii_only.detach().getvalue() == b"\\xe9\n"  # type: ignore[attr-defined]


def test_a_full_disk_costs_lines_and_is_said_when_it_begins_and_ends(said: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Reporter(tmp_path, speaks=True, steps=10, out=said) as report:
        report.begin(0)
        report.step(metrics(1), show=False)
        path.rename(tmp_path / "before")
        path.symlink_to("/dev/full")
        report._metrics._file = None  # type: ignore[union-attr]  # as a start on a full disk finds it
        for step in (2, 3, 4):
            report.step(metrics(step), show=False)
        path.unlink()
        (tmp_path / "before").rename(path)
        report._metrics._file = None  # type: ignore[union-attr]
        for step in (5, 6):
            report.step(metrics(step), show=False)
    words = said.getvalue()
    assert words.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert words.count("metrics.jsonl is written again; missing: metrics.jsonl of 3 steps") == 1
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 5, 6]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.system
def test_a_disk_that_fills_in_the_midst_of_a_line_leaves_whole_lines_only(small_disk: Path) -> None:
    said: list[str] = []
    missing = Missing("metrics.jsonl", said.append)
    file = MetricsFile(small_disk, missing)
    for step in range(1, 2001):
        file.add(metrics(step))
    found = [json.loads(line)["step"] for line in file.path.read_text().splitlines()]
    assert found == list(range(1, len(found) + 1))
    assert 0 < len(found) < 2000
    assert missing.steps == 2000 - len(found)
    os.truncate(file.path, 0)
    file.add(metrics(2001))
    assert json.loads(file.path.read_text())["step"] == 2001
    assert len(said) == 2
    file.close()


def test_metrics_of_later_steps_and_unfinished_lines_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for rest in ("", '{"step": 5, "lo', '{"step": 5}', "\n"):
        path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 5)) + rest)
        file = MetricsFile(tmp_path, Missing("metrics.jsonl"))
        file.forget_after(3)
        file.add({"step": 4})
        file.close()
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\xfe\x00",
        b"null",
        b"[1, 2]",
        b'{"step": "2"}',
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 2, "loss": Infinity}',
        pytest.param(b"[" * 50_000, id="deep"),
        b'{"loss": 2.0}',
        pytest.param(b"x" * 3_000_000, id="long"),
    ],
)
def test_a_line_that_cannot_be_read_is_set_aside_and_those_after_it_stay(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}}}\n'.encode() for step in range(1, 61)]
    path.write_bytes(b"".join([*lines[:4], bad, b"\n", *lines[4:]]))
    file = MetricsFile(tmp_path, Missing("metrics.jsonl"))
    assert file.forget_after(50) == 1
    assert path.read_bytes() == b"".join(lines[:50])
    assert (tmp_path / "metrics.unreadable").read_bytes() == bad + b"\n"
    assert file.forget_after(50) == 0, "once"
    file.close()


def test_a_line_that_cannot_be_read_is_said(said: Terminal, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n????\n{"step": 2}\n')
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.begin(2)
        report.sync()
    assert said.getvalue() == "warning: 1 line of metrics.jsonl cannot be read; set aside in metrics.unreadable\n"


def test_metrics_that_are_a_pipe_cost_the_metrics_only(said: Terminal, tmp_path: Path) -> None:
    """Nobody reads it, and whoever opens it to write would wait for that."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.begin(0)
        report.step(metrics(1), show=False)
        report.sync()
    assert "metrics.jsonl cannot be written" in said.getvalue()


def test_numbers_that_are_not_finite_are_null_in_a_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, Missing("metrics.jsonl"))
    file.add({"step": 1, "loss": float("nan"), "norm": float("inf"), "rate": 0.5, "hidden": None, "memory": [1]})
    file.close()
    found = json.loads(file.path.read_text(), parse_constant=pytest.fail)
    assert found == {"step": 1, "loss": None, "norm": None, "rate": 0.5, "hidden": None, "memory": [1]}


def test_a_metrics_file_that_was_removed_begins_anew(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, Missing("metrics.jsonl"))
    file.add({"step": 1})
    file.path.unlink()
    file.add({"step": 2})
    assert file.path.read_text() == '{"step": 2}\n'
    file.close()


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_run_folder_that_is_gone_is_an_error(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = MetricsFile(folder, Missing("metrics.jsonl"))
    file.add({"step": 1})
    if how == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    if how == "replaced":
        folder.mkdir()
    with pytest.raises(RankFailure, match=r"run folder .* was removed or moved"):
        file.add({"step": 2})
    file.close()
    assert not folder.exists() or not list(folder.iterdir())


def test_a_file_that_was_removed_alone_is_made_again_and_lines_are_added(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, Missing("metrics.jsonl"))
    file.add({"step": 1, "loss": float("nan"), "mfu": float("inf"), "text": "x", "idle": 0.5})
    assert json.loads(file.path.read_text()) == {"step": 1, "loss": None, "mfu": None, "text": "x", "idle": 0.5}
    file.path.unlink()
    file.add({"step": 2})
    file.add({"step": 3})
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [2, 3]
    assert file.path.stat().st_mode & 0o600 == 0o600
    file.close()
    file.close()  # nothing is open any more


def test_what_a_disk_refuses_is_counted_and_nothing_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    missing = Missing("metrics.jsonl", said.append)
    file = MetricsFile(tmp_path, missing)
    assert file.forget_after(3) == 0  # there is none
    file.path.mkdir()
    assert file.forget_after(3) == 0 and not said
    file.add({"step": 1})
    assert missing.steps == 1 and len(said) == 1
    file.path.rmdir()
    file.path.write_text('{"step": 1}\n{"step": 2}\n')

    def full(path: Path, end: int) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr(os, "truncate", full)
    assert file.forget_after(1) == 0
    assert missing.steps == 1, "no step of this run is missing"
    assert file.path.read_text() == '{"step": 1}\n{"step": 2}\n'
    file.close()


def test_a_write_that_is_cut_short_leaves_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Missing("metrics.jsonl")
    file = MetricsFile(tmp_path, missing)
    file.add({"step": 1})
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, line: real(handle, line[:5]))
    file.add({"step": 2})
    monkeypatch.setattr(os, "write", real)
    file.add({"step": 3})
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 3]
    assert missing.steps == 1
    file.close()


@pytest.mark.parametrize("error", [FileNotFoundError, NotADirectoryError, PermissionError])
def test_a_folder_that_is_gone_ends_the_run_and_a_disk_in_trouble_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    file = MetricsFile(tmp_path, Missing("metrics.jsonl"))

    def stat(path: Path) -> os.stat_result:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        if error is PermissionError:
            file.check()
        else:
            with pytest.raises(RankFailure, match="was removed or moved while the run went on"):
                file.check()
    file.close()


def test_lines_that_are_too_long_are_set_aside_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.train.record.metrics.LONGEST", 20)
    long = b'{"step": 1, "text": "' + b"x" * 50 + b'"}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + long + b'{"step": 2}\n\n{"step": 3}\n{"st')
    file = MetricsFile(tmp_path, Missing("metrics.jsonl"))
    assert file.forget_after(2) == 1
    assert file.path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "metrics.unreadable").read_bytes() == long
    file.close()


def test_a_metrics_file_that_ends_with_what_is_kept_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 2}\n')
    file, before = MetricsFile(tmp_path, Missing("metrics.jsonl")), path.stat()
    assert file.forget_after(2) == 0
    assert path.read_bytes() == b'{"step": 0}\n{"step": 2}\n' and path.stat().st_ino == before.st_ino
    file.close()
