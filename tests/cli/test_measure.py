"""``plait measure machine`` as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.core.cluster.profile import Profile
from tests.core.cluster.test_placement_profile import JOB, PROFILE
from tests.support.command import plait, succeed
from tests.support.runs import write_job

LOG = """# Collective test starting: all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid  1 on node1 device  0 [0x01] Acme X1
#  Rank  1 Group  0 Pid  2 on node2 device  0 [0x01] Acme X1
#  size count type redop root time algbw busbw #wrong time algbw busbw #wrong
1024 256 float sum -1 30.0 0.03 0.03 0 20.0 0.05 0.05 0
1048576 262144 float sum -1 90.0 11.65 11.65 0 100.0 10.49 10.49 0
"""


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "plait.cli.main", "measure", "machine", *map(str, words)]


def test_a_log_becomes_a_profile_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_text(LOG)
    done = succeed("measure", "machine", "--import", "nccl.log", folder=tmp_path)
    assert "Acme X1: 2 ranks, 1 on a node, nccl" in done.stdout
    assert "all_reduce" in done.stdout
    assert "20 us" in done.stdout
    assert "10.5" in done.stdout, "GB/s of 1 MiB in 100 us"
    found = Profile.read(tmp_path / "profile.json")
    both = ("--import", "nccl.log", "--import", "profile.json", "--out", "new/two.json", "--json")
    again = plait("measure", "machine", *both, folder=tmp_path)
    told = json.loads(again.stdout)
    assert (told["profile"], told["hash"]) == ("new/two.json", Profile.read(tmp_path / "new" / "two.json").hash)
    assert told["collectives"][0]["latency"] == pytest.approx(found.collectives[0].latency)
    assert done.stderr.splitlines() == [
        "note: passed over 1 missing end of tables, whose rows are taken (the first: line 7)"
    ]
    assert [(one["count"], one["first"]) for one in told["passed_over"]] == [(1, "nccl.log: line 7")]


@pytest.mark.slow
def test_a_jobs_layer_on_two_ranks(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    done = succeed("measure", "machine", job, "world_size=2", "seconds=5", folder=tmp_path)
    for word in ("all_reduce", "overlapped", "matrix products", "memory", "2 ranks, in a node", "profile.json"):
        assert word in done.stdout
    found = Profile.read(tmp_path / "profile.json")
    assert {one.hidden for one in found.modules} == {32}
    assert {one.sequence for one in found.modules} == {16}
    assert not (tmp_path / "profile.json.logs").exists()


@pytest.mark.slow
def test_a_measurement_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("as it was")
    main, side = pty.openpty()  # what is measured is said on terminals alone
    process = subprocess.Popen(
        command("world_size=2", "seconds=60"), cwd=tmp_path, stdout=side, stderr=side, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    os.close(side)
    came, told = b"", False
    with open(main, "rb", buffering=0) as screen, suppress(OSError):  # EIO: the last writer has gone
        while chunk := screen.read(1 << 16):
            came += chunk
            if b" s of about 60 " in came and not told:
                process.send_signal(signal.SIGINT)
                told = True
    assert process.wait(timeout=60) == 130, came
    assert told
    assert (tmp_path / "profile.json").read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert b"Traceback" not in came


@pytest.mark.parametrize(("on", "kept"), [("slurm", True), ("lab:4x1@1gbit,2pods@300mbit", False)])
def test_a_clusters_row_is_known_to_place_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str, kept: bool
) -> None:
    """A lab's is not: its processors and links are nobody's cluster."""
    from plait.api.spreading import SpreadAnswer
    from plait.cli.main import app
    from plait.place.solve.affinity import known_profiled, own_rows

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("plait.api.spreading.profile_spread", lambda *_, **__: SpreadAnswer(PROFILE))
    monkeypatch.setattr("plait.api.spreading.time_by_placement", lambda *_, **__: JOB)
    words = ["measure", "placement", "job.toml", "--on", on, "--out", str(tmp_path / "p.json")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (str(own_rows()) in done.stdout) == kept == own_rows().is_file()
    assert (known_profiled()[0].name == "small") == kept
