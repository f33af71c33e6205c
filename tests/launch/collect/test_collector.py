"""The agent of a host's ranks: what is in a ring comes into files, however the rank ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from plait.core.base.process import process_state
from plait.core.cluster.hardware import HERE
from plait.core.job.collecting import AGAIN, CollectingAgent, CollectorSettings, collecting
from plait.core.job.settings import RunSection
from plait.core.job.spec import Job
from plait.core.record.ring import OpPlace, RecordKind
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.runs.evidence import ring_path
from plait.diagnose.measured.reading import read_timeline
from plait.launch.collect.collector import Collector
from plait.launch.run_folder import write_run
from plait.plan.make import make_plan
from tests.launch.collect.test_live import JOB
from tests.support.lab import wait_until

TIER = "unit"

HASH = "feed"
WANTED = CollectorSettings.of(RunSection())
RANK = """
import os, sys, time
from pathlib import Path
from tests.launch.collect.test_collector import open_ring, write_step
ring = open_ring(Path(sys.argv[1]), int(sys.argv[2]))
for number in range(10**9):
    ring.step(number, time.monotonic_ns())
    write_step(ring, number)
    print(number, flush=True)
    time.sleep(0.001)
"""


@pytest.mark.system
def test_an_agent_that_keeps_no_timeline_loads_no_parquet(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from plait.core.job.collecting import CollectorSettings; "
        "from plait.launch.collect.collector import Collector\n"
        "run = CollectorSettings(timeline_steps=0, timeline_sample=0, metrics_port=0, metrics_address='', loggers=())\n"
        "one = Collector(Path(sys.argv[1]), 0, 1, run); one.look(); one.finish()\n"
        "sys.exit('pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def open_ring(folder: Path, rank: int = 0, *, capacity: int = 1024) -> RingWriter:
    return RingWriter(ring_path(folder, rank), this_process(rank=rank, world=2, plan=HASH, capacity=capacity))


def write_step(ring: RingWriter, number: int, *, records: int = 3, ends: bool = True, measures: bool = False) -> None:
    """Of some ops; ends: whether the step is over. measures: it is only timed, before training
    begins."""
    name = ring.name("mlp0.F0", OpPlace("mlp", 0, 0, True))
    if not measures:
        ring.step(number, time.monotonic_ns())
    for _ in range(records):
        at = time.monotonic_ns()
        ring.begin(RecordKind.COMPUTE, name, number, at, at, at + 1000)
    if ends:
        at = time.monotonic_ns()
        ring.begin(RecordKind.STEP, ring.name("step"), number, at, at - 5000, at)


def collector(folder: Path, ranks: int = 1) -> Collector:
    (folder / "timeline").mkdir(parents=True, exist_ok=True)
    return Collector(folder, 0, ranks, WANTED)


def steps_of(folder: Path) -> dict[int, int]:
    """How many spans of each step are kept."""
    spans = read_timeline(folder).spans
    return dict(spans.group_by("step").len().sort("step").iter_rows())


def test_whole_steps_come_while_the_rank_runs_and_the_rest_when_it_ends(tmp_path: Path) -> None:
    ring = open_ring(tmp_path)
    for number in range(5):
        write_step(ring, number)
    agent = collector(tmp_path)
    agent.look()
    agent.flush()
    assert steps_of(tmp_path) == dict.fromkeys(range(4), 3), "the last one may not be all there"
    at = time.monotonic_ns()
    ring.begin(RecordKind.CHECKPOINT, ring.name("checkpoint"), 4, at, at, at + 1)
    write_step(ring, 5, ends=False)
    ring.close()
    agent.finish()
    assert steps_of(tmp_path) == {**dict.fromkeys(range(4), 3), 4: 4, 5: 3}
    assert len(list((tmp_path / "timeline").glob("*.parquet"))) == 1


@pytest.mark.parametrize("looks", range(4))
def test_what_was_timed_before_training_and_steps_of_no_one_are_left_out(tmp_path: Path, looks: int) -> None:
    """However often the agent looks meanwhile."""
    ring, agent = open_ring(tmp_path, capacity=16), collector(tmp_path)
    for number in range(8):
        write_step(ring, number, measures=True)
        if number < looks:
            agent.look()
    at = time.monotonic_ns()
    ring.begin(RecordKind.STEP, ring.name("forget"), -1, at, at, at)
    if looks == 3:
        agent.look()
    ring.begin(
        RecordKind.COMPUTE, ring.name("mlp0.F0", OpPlace("mlp", 0, 0, True)), 0, at, at, at + 1
    )  # before resuming
    write_step(ring, 2)
    write_step(ring, 3)
    ring.close()
    agent.look()
    agent.finish()
    assert steps_of(tmp_path) == {2: 3, 3: 3}


def test_a_new_start_of_a_rank_appends_to_what_the_old_one_left(tmp_path: Path) -> None:
    old = open_ring(tmp_path)
    for number in range(6):
        write_step(old, number)
    agent = collector(tmp_path)
    agent.look()
    new = open_ring(tmp_path)  # in the place of the other, whose last steps nobody has taken
    for number in range(4, 8):
        write_step(new, number, records=2)
    agent.look()
    new.close()
    agent.finish()
    assert steps_of(tmp_path) == {**dict.fromkeys(range(4), 3), **dict.fromkeys(range(4, 8), 2)}


def test_an_agent_that_was_killed_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    ring = open_ring(tmp_path)
    for number in range(20):
        write_step(ring, number)
    first = collector(tmp_path)
    first.look()
    first.flush(last=True)  # and no more is heard of it
    for number in range(20, 30):
        write_step(ring, number)
    ring.close()
    collector(tmp_path).finish()
    assert steps_of(tmp_path) == dict.fromkeys(range(30), 3)
    rollups = read_timeline(tmp_path).rollups
    assert rollups.filter(kind="compute").sort("step")["step"].to_list() == list(range(30))


def test_a_full_disk_is_said_once_and_costs_the_timeline_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rings").mkdir()
    ring = open_ring(tmp_path)
    (tmp_path / "timeline").write_text("in the way")
    agent = Collector(tmp_path, 0, 2, WANTED)
    for number in range(10):
        write_step(ring, number)
        agent.look()
        agent.flush()
    said = capsys.readouterr().err
    assert said.count("the timeline cannot be written") == 1
    (tmp_path / "timeline").unlink()
    ring.close()
    agent.finish()
    assert steps_of(tmp_path) == dict.fromkeys(range(10), 3)
    assert "is written again" in capsys.readouterr().err


def test_sums_that_cannot_be_written_are_said_also_where_spans_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring, agent = open_ring(tmp_path), collector(tmp_path)
    (tmp_path / "timeline" / "rollup").write_text("in the way")
    for number in range(3):
        write_step(ring, number)
    agent.look()
    agent.flush(last=True)
    agent.flush(last=True)
    assert capsys.readouterr().err.count("the timeline cannot be written") == 1
    (tmp_path / "timeline" / "rollup").unlink()
    agent.flush(last=True)
    assert "is written again" in capsys.readouterr().err
    assert read_timeline(tmp_path).rollups["step"].unique().sort().to_list() == [0, 1]
    ring.close()
    agent.finish()


def test_a_ring_that_is_damaged_or_goes_round_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = open_ring(tmp_path, 1, capacity=64)
    ring_path(tmp_path, 0).write_bytes(b"nothing")
    for number in range(100):
        write_step(ring, number)
    agent = collector(tmp_path, 2)
    agent.look()
    ring.close()
    agent.finish()
    assert min(steps_of(tmp_path)) > 80, "memory stays bounded"
    said = capsys.readouterr().err
    assert said.count("rank-00000.ring cannot be read as a ring") == 1
    assert said.count("were overwritten before they were read") == 1


def test_what_a_start_before_has_left_and_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, agent = open_ring(tmp_path), collector(tmp_path)
    for number in range(3):
        write_step(old, number)
    agent.look()
    (tmp_path / "timeline").rmdir()
    (tmp_path / "timeline").write_text("in the way")
    new = open_ring(tmp_path)
    agent.look()
    assert capsys.readouterr().err.count("the timeline cannot be written") == 1
    new.close()
    agent.finish()


def test_a_run_folder_that_is_gone_stays_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "timeline").mkdir(parents=True)
    ring = open_ring(run)
    write_step(ring, 0)
    agent = collector(run)
    agent.look()
    run.rename(tmp_path / "elsewhere")
    agent.look()
    agent.flush()
    agent.finish()
    assert not run.exists()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_rank_that_is_killed_loses_nothing_that_it_had_recorded(tmp_path: Path, end: str) -> None:
    write_run(make_plan(Job.from_dict({**JOB, "run": {"name": "gpt"}}), HERE, vocab=16), tmp_path)
    with collecting(tmp_path, 0, 2):
        argv = [sys.executable, "-c", RANK, str(tmp_path), "0"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) == 150:
                    os.kill(process.pid, signal.SIGSTOP if end == "stopped" else signal.SIGKILL)
                    break
            state = "T" if end == "stopped" else "Z"
            wait_until(lambda: process_state(process.pid).letter == state, "it goes on")  # type: ignore[union-attr]
            process.kill()
            last = max([150, *map(int, process.stdout.read().split())])
    found = steps_of(tmp_path)
    assert all(found.get(number) == 3 for number in range(last + 1))


@pytest.mark.system
def test_an_agent_that_is_killed_is_followed_by_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(make_plan(Job.from_dict({**JOB, "run": {"name": "gpt"}}), HERE, vocab=16), tmp_path)
    ring = open_ring(tmp_path)
    with collecting(tmp_path, 0, 1):
        for step in range(4):
            write_step(ring, step)
        (agent,) = agents()
        os.kill(agent, signal.SIGKILL)
        until(lambda: agents() not in ([], [agent]))
        for step in range(4, 8):
            write_step(ring, step)
        ring.close()
        os.kill(agents()[0], signal.SIGKILL)  # as the run ends
    assert steps_of(tmp_path) == dict.fromkeys(range(8), 3)
    assert capfd.readouterr().err.count("the timeline collector was killed by SIGKILL; a new one takes over") == 2


@pytest.mark.system
def test_an_agent_that_cannot_work_is_told_and_not_started_for_ever(capfd: pytest.CaptureFixture[str]) -> None:
    started = list[str]()

    def start(code: str) -> subprocess.Popen[bytes]:
        started.append(code)
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)

    CollectingAgent(lambda: start("raise SystemExit(3)")).end(wait=True)
    assert len(started) == 1
    assert "ends here: its collector ended with status 3" in capfd.readouterr().err
    agent = CollectingAgent(lambda: start("import os; os.kill(os.getpid(), 9)"))
    until(lambda: len(started) == 2 + AGAIN)
    agent.end(wait=True)
    assert len(started) == 2 + AGAIN


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def agents() -> list[int]:
    """Agents of this process that live."""
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            of = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if of == os.getpid() and "plait.launch.collect" in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found
