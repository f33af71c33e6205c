"""What a run says fits the terminal, and neither a full disk nor an output that fails ends it."""

from __future__ import annotations

import errno
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.cluster.hardware import HERE
from plait.core.job.refine import Measurements, TimedTrial, Times
from plait.core.job.spec import Job
from plait.core.parallel.strategy import Strategy
from plait.plan.make import make_plan
from plait.train.report import Reporter, describe, step_line
from plait.train.screen import Screen
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
    monkeypatch.setattr("plait.train.screen.terminal_width", lambda _: 80)
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@pytest.mark.parametrize("columns", [60, 80])
def test_the_live_line_has_step_loss_and_time_left(
    said: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr("plait.train.screen.terminal_width", lambda _: columns)
    with Reporter(tmp_path, speaks=True, steps=100000, out=said) as report:
        report.begin(0)
        for step in range(1, 30):
            report.step(metrics(step, **({"eval_loss": 3.0} if step == 20 else {})), show=step % 10 == 0)
    written = said.getvalue()
    live = [line for line in written.replace("\n", "\r").split("\r") if "─" in line]
    assert len(live) >= 29
    assert "\x1b" not in written
    for line in live:
        assert len(line) < columns
        assert line.startswith("step ")
        assert line.endswith(" left")
        assert "  loss " in line
    stays = [line.split("\r")[-1] for line in written.split("\n")[:-1]]
    assert [line[:59] for line in stays] == ["step     20/100000  loss 0.250  eval 3.000  12,346 tokens/s"]


@pytest.mark.parametrize(
    ("start", "steps", "told"),
    [
        (0, 60, {1: "9:50", 10: "8:20", 59: "0:10", 60: ""}),
        (20, 200, {21: "29:50", 60: "23:20", 104: "16:00", 106: "1:34", 130: "1:10"}),
    ],
)
def test_the_time_left_is_that_of_steps_of_late(
    said: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, steps: int, told: dict[int, str]
) -> None:
    """Steps take 10 s each, and ten times less from step 81 on."""
    clock = [0.0]
    monkeypatch.setattr("plait.train.report.time.monotonic", lambda: clock[0])
    left: dict[int, str] = {}
    with Reporter(tmp_path, speaks=True, steps=steps, out=said) as report:
        report.begin(start)
        for step in range(start + 1, steps + 1):
            clock[0] += 10.0 if step <= 80 else 1.0
            said.truncate(said.seek(0))
            report.step(metrics(step), show=False)
            left[step] = said.getvalue().rstrip().rpartition("  ")[2].removesuffix(" left")
    assert {step: left[step] for step in told} == told


@pytest.mark.parametrize("sets", [0, 1, 20])
def test_the_line_of_a_step_fits_120_columns(sets: int) -> None:
    evaluated = {f"eval_loss/set {one}": 2.5 for one in range(sets)} | {"eval_loss": 2.5}
    found = step_line(metrics(12345, learning_rate=3e-4, **evaluated), 100_000, 400_000.0)
    assert 90 < max(map(len, found.splitlines())) <= 120 and found.endswith("4 d 15 h left")
    assert ("  lr 3.0e-04  12,346 tokens/s  " in found) == (sets < 20)


def test_a_line_says_what_a_step_has_waited_for_beside_what_was_hidden() -> None:
    said = io.StringIO()
    Screen(said).line("  ".join(describe(metrics(10))))
    assert said.getvalue() == ("loss 0.500  12,346 tokens/s  exposed 12 ms (6%), hidden 60%  MFU 30%  idle 10%\n")
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
        ({"learning_rate": 3e-4}, [LOSS, "lr 3.0e-04", RATE]),
        ({"tokens_per_second": 1234.0}, [LOSS, "1,234 tokens/s"]),
        ({"hidden": 0.5, "exposed_seconds": 0.00994}, [LOSS, RATE, "exposed 9.9 ms (5%), hidden 50%"]),
        ({"hidden": 0.0, "exposed_seconds": 0.01}, [LOSS, RATE, "exposed 10 ms (5%), hidden 0%"]),
        ({"hidden": 0.5, "exposed_seconds": 1.5}, [LOSS, RATE, "exposed 1,500 ms (75%), hidden 50%"]),
        ({"hidden": None, "exposed_seconds": 1.5}, [LOSS, RATE]),
        ({"mfu": 0.0}, [LOSS, RATE, "MFU 0%"]),
        ({"mfu": None}, [LOSS, RATE]),
        ({"idle": 0.0}, [LOSS, RATE, "idle 0%"]),
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
    monkeypatch.setattr("plait.train.screen.terminal_width", lambda _: None)
    with Reporter(tmp_path, speaks=True, steps=100, out=said) as report:
        report.begin(0)
        report.step(metrics(1), show=False)
    assert max(len(line) for line in said.getvalue().split("\r")) == 79


def timed(*seconds: float) -> tuple[TimedTrial, ...]:
    return tuple(
        TimedTrial(Strategy(tp=2, p1=at + 1, sequence_parallel=at == 1), each) for at, each in enumerate(seconds)
    )


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
    monkeypatch.setattr("plait.train.screen.terminal_width", lambda _: columns)
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
        "slack from measured times: at most 2, 1 micro-batches in flight on the stages, in order\n"
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


def test_what_is_printed_is_kept_beside_the_logs_of_ranks(said: Terminal, tmp_path: Path) -> None:
    """Of a terminal on which lines are drawn over, too: who reads it later was not there."""
    for start in (0, 2):
        with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
            report.begin(start)
            report.say(f"from {start}\x1b[31m")
            for step in (start + 1, start + 2):
                report.step(metrics(step), show=step % 2 == 0)
    kept = (tmp_path / "logs" / "terminal.log").read_text().splitlines()
    assert [line.partition("  loss")[0] for line in kept] == [
        r"from 0\x1b[31m",
        "step 2/4",
        r"from 2\x1b[31m",
        "step 4/4",
    ]
    with Reporter(tmp_path, speaks=False, steps=4, out=said) as report:
        report.say("of another rank")
    assert (tmp_path / "logs" / "terminal.log").read_text().splitlines() == kept


@pytest.mark.parametrize("what", ["file", "pipe", "folder"])
def test_a_log_of_the_terminal_that_cannot_be_written_costs_nothing(said: Terminal, tmp_path: Path, what: str) -> None:
    log = tmp_path / "logs" / "terminal.log"
    if what == "file":
        log.parent.write_text("in the way")
    else:
        log.parent.mkdir()
        os.mkfifo(log) if what == "pipe" else log.mkdir()
    with Reporter(tmp_path, speaks=True, steps=4, out=said) as report:
        report.say("heard")
    assert "heard" in said.getvalue()


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
