"""``plait diagnose --hang``: what was found is read again; without a launcher it is put together
afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.main import app
from plait.core.base.errors import DataError
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.runs.evidence import Verdict, WaitLink, ring_path, write_hang
from tests.support.ports import own_port
from tests.support.recordings.planted import draw_case
from tests.support.runs import write_job

TIER = "unit"

ROOT = Path(__file__).parents[2]


def test_what_the_launcher_found_is_read_again(tmp_path: Path) -> None:
    case = draw_case("stopped", 3)
    chain = (WaitLink(ranks=(1,), call="all-reduce 3 of tp group 0, 1", on=(0,)),)
    verdict = Verdict(cause="stopped", why="Rank 0 (host 0) is stopped.", ranks=(0,), hosts=("host 0",), chain=chain)
    write_hang(tmp_path, verdict, case.evidence)
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--hang"])
    assert done.exit_code == 3
    assert "A hang: stopped" in done.output
    assert "rank 1 for rank 0: all-reduce 3 of tp group 0, 1" in done.output
    as_json = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--hang", "--json"])
    assert json.loads(as_json.output)["verdict"]["ranks"] == [0]
    assert len(json.loads(as_json.output)["evidence"]) == case.world


def test_rings_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    for rank in range(2):
        RingWriter(ring_path(tmp_path, rank), this_process(rank=rank, world=3, capacity=64)).close()
    ring_path(tmp_path, 2).write_bytes(b"nothing")
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--hang", "--json"])
    [row] = json.loads(done.stdout)["passed_over"]
    assert (row["what"], row["count"]) == ("rings that cannot be read", 1)
    assert str(ring_path(tmp_path, 2)) in row["first"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_tells_nothing_is_refused(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path if exists else tmp_path / "gone"
    done = CliRunner().invoke(app, ["diagnose", str(folder), "--hang"])
    assert isinstance(done.exception, DataError)
    assert ("no rings" if exists else "no such run folder") in str(done.exception)


def start(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Two ranks as a cluster manager starts them: nobody watches."""
    job, port = write_job(folder, steps=100_000, every=0), own_port()
    settings = [f"run.folder={folder / 'runs'}", "run.hang_deadline=2", "run.timeout=60", "train.eval_every=0"]
    argv = [sys.executable, "-m", "plait.train.worker", str(job), *settings]
    where = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(argv, env={**os.environ, **where, "RANK": str(rank)}, cwd=folder, stdout=subprocess.DEVNULL)
        for rank in range(2)
    ]


@pytest.mark.system
def test_without_a_launcher_the_parts_are_put_together(tmp_path: Path) -> None:
    """Of a live run, of which a rank is stopped; and of what is left when all are dead."""
    ranks, run, end = start(tmp_path), tmp_path / "runs" / "job", time.monotonic() + 120
    try:
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < 3:
            assert time.monotonic() < end
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGSTOP)
        answer = run / "hang" / "rank-00000.json"
        while not answer.exists() or not json.loads(answer.read_text())["complete"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        live = CliRunner().invoke(app, ["diagnose", str(run), "--hang"])
        assert live.exit_code == 3
        assert "Rank 1" in live.output
        assert "is stopped" in live.output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    dead = CliRunner().invoke(app, ["diagnose", str(run), "--hang", "--json"])
    verdict = json.loads(dead.output)["verdict"]
    assert (verdict["cause"], verdict["ranks"]) == ("unknown", [1])  # it cannot be told any more what it did
    assert "Rank 1" in verdict["why"]
    assert dead.exit_code == 1
