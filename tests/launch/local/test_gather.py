"""What is known of ranks from outside: living, stopped, killed, of another start, and damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core.record.ring import Header, RecordKind, read_ring
from plait.core.record.ring_progress import host_names
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.runs.evidence import Evidence, Verdict, ring_path
from plait.core.runs.rank_reports import RankReport, read_reports, reports_requested, write_report
from plait.launch.hang import HangDetection, LocalRank, RankStatus, gather

TIER = "unit"

# A rank that records one collective which is over and one that is not, and then holds the interpreter's lock.
RANK = """
import ctypes, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from plait.core.record.ring import RecordKind, call_of
from plait.core.runs.evidence import ring_path
from plait.core.record.ring_writer import RingWriter, this_process
from plait.train.machine.watchdog import stacks_on_signal
stacks_on_signal()
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
ring = RingWriter(ring_path(folder, rank), this_process(rank=rank, world=3, capacity=64))
tp, name = ring.group([0, 1, 2], "tp"), ring.name("attn0.F0")
for sequence in range(1 + (rank != 1)):
    now = time.monotonic_ns()
    ring.begin(RecordKind.COLLECTIVE, name, 0, now, now, now + 1 if sequence == 0 else 0, 64, tp, sequence, -1,
               call_of("all_reduce", "float32"), 7)
(folder / f"ready{{rank}}").touch()
def held():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
held()
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    (tmp_path / "rings").mkdir()
    (tmp_path / "logs").mkdir()
    code = RANK.format(root=str(Path(__file__).parents[2]))
    started = []
    for rank in range(3):
        with open(tmp_path / "logs" / f"rank-{rank}.log", "wb") as log:
            argv = [sys.executable, "-c", code, str(tmp_path), str(rank)]
            started.append(subprocess.Popen(argv, stderr=log))
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(3)))
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.system
def test_processes_are_as_they_are(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    ranks[1].send_signal(signal.SIGSTOP)
    ranks[2].kill()
    ranks[2].wait()
    os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED | os.WNOWAIT)
    found, problems, headers = gather(tmp_path, world=4)
    assert [one.state for one in found] == ["runs", "stopped", "unknown", "unknown"]
    assert [one.recorded for one in found] == [True, True, True, False]
    assert [len(one.calls) for one in found] == [2, 1, 2, 0]
    assert problems == []
    assert headers[1].pid == ranks[1].pid
    assert found[0].calls[1].channel.group.label == "tp"


@pytest.mark.system
def test_the_launcher_asks_collects_and_keeps(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ranks 0 and 2 wait for 1; none can answer, all hold the lock."""
    given: list[list[Evidence]] = []

    def localise(evidence: object) -> Verdict:
        given.append(list(evidence))  # type: ignore[call-overload]
        return Verdict(cause="host code", why="It.", ranks=(1,))

    suspicion = HangDetection(tmp_path, 3, deadline=0.5, localise=localise)
    token = read_ring(ring_path(tmp_path, 0)).header.token

    def seen() -> dict[int, RankStatus]:
        return {rank: RankStatus(state="runs", pid=process.pid) for rank, process in enumerate(ranks)}

    def log(rank: int) -> str:
        return (tmp_path / "logs" / f"rank-{rank}.log").read_text()

    processes = {rank: LocalRank(process.pid, lambda rank=rank: log(rank)) for rank, process in enumerate(ranks)}
    assert suspicion.look(seen, lambda: processes, silent=False) is None
    assert not reports_requested(tmp_path)
    end, verdict = time.monotonic() + 30, None
    while verdict is None and time.monotonic() < end:
        if reports_requested(tmp_path) and not read_reports(tmp_path):
            write_report(tmp_path, RankReport(rank=0, token=token, wall=time.time_ns(), thread="waits", complete=True))
        verdict = suspicion.look(seen, lambda: processes, silent=True)
        time.sleep(0.05)
    assert verdict
    assert verdict.ranks == (1,)
    assert (tmp_path / "hang.json").exists()
    assert [one.thread for one in given[-1]] == ["waits", "silent", "silent"]
    assert given[-1][1].stack[-1].endswith("held")


def test_of_a_run_that_goes_on_nothing_is_kept(tmp_path: Path) -> None:
    """What was said when one rank had not answered yet, and when all go on."""
    said = [Verdict(cause="unknown", why="It.", ranks=()), Verdict(cause="none", why="It goes on.")]
    suspicion = HangDetection(tmp_path, 1, deadline=0.5, localise=lambda _: said[0])
    suspicion.explain({}, {})
    assert (tmp_path / "hang.json").exists()
    suspicion.clear()
    assert not (tmp_path / "hang.json").exists()
    suspicion.explain({}, {})
    said.pop(0)
    assert suspicion.look(dict, dict, silent=True) is None
    assert not (tmp_path / "hang.json").exists()
    assert not reports_requested(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"rank": 0}'])
def test_damaged_parts_and_rings_are_left_out(tmp_path: Path, content: bytes) -> None:
    for folder, name in (("hang", "rank-00000.json"), ("rings", "rank-00000.ring")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
    assert read_reports(tmp_path) == {}
    found, problems, headers = gather(tmp_path, world=2)
    assert [one.recorded for one in found] == [False, False]
    assert len(problems) == 1
    assert headers == {}


def test_hosts_are_told_by_names_or_by_numbers() -> None:
    headers = {rank: Header(rank=rank, world=4, host=f"n{rank // 2}", pid=1, local_rank=rank % 2) for rank in range(4)}
    assert host_names(headers) == {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    same = {rank: replace(header, host="vm") for rank, header in headers.items()}
    assert host_names(same) == {0: "host 0", 1: "host 0", 2: "host 1", 3: "host 1"}


def test_a_ring_that_ended_in_good_order(tmp_path: Path) -> None:
    (tmp_path / "rings").mkdir()
    ring = RingWriter(ring_path(tmp_path, 0), this_process(rank=0, world=1, capacity=16))
    ring.begin(RecordKind.COMPUTE, ring.name("F0"), 0, 1)
    ring.close()
    [one] = gather(tmp_path).evidence
    assert (one.state, one.status) == ("ended", 0)
