"""``plait schedule``, as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.command import plait

TIER = "unit"


def show(*arguments: str) -> CompletedProcess[str]:
    return plait("schedule", *arguments)


def test_a_picture_and_what_it_costs() -> None:
    done = show("eager-1f1b", "pp=4", "micro_batches=8")
    assert done.returncode == 0, done.stderr
    assert "longest idle 9 (by formula, without transfers: 9)" in done.stdout
    assert "rank 3" in done.stdout


def test_json_says_the_same() -> None:
    found = json.loads(show("slack-1f1b", "pp=4", "transfer=0,2,0", "--json").stdout)
    assert found["peak_by_stage"] == {"0": 6, "1": 5, "2": 2, "3": 1}
    assert found["closed_form"]["peak_by_rank"] == [6, 5, 2, 1]
    assert {op["op"] for op in found["ops"]} >= {"0F0", "3B7", "1SEND_F0"}


def test_a_schedule_by_hand_goes_in_and_out(tmp_path: Path) -> None:
    made = show("zb-v", "pp=2", "micro_batches=3", "--ops", "skip=0>2")
    file = tmp_path / "mine.txt"
    file.write_text(made.stdout)
    assert show(str(file), "--ops").stdout == made.stdout


STRANGE = {
    "stage": "rank 0: 99999999F0 99999999B0",
    "micro-batch": "rank 0: 0F99999999999 0B99999999999",
    "missing": "rank 0: 0F9 0B0",
    "edge": "edges: 0>99999999999\nrank 0: 0F0 0B0",
    "many": "\n".join(f"rank {number}: {number}F{number} {number}B{number}" for number in range(20000)),
}


@pytest.mark.parametrize("text", list(STRANGE.values()), ids=list(STRANGE))
def test_numbers_beyond_a_schedules_ops_are_refused_at_once(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.txt").write_text(text)
    done = show(str(tmp_path / "mine.txt"))
    assert done.returncode == 2 and len(done.stderr.splitlines()) < 5, done.stderr


@pytest.mark.parametrize(("passes", "status"), [(20_000, 0), (20_001, 2)])
def test_a_schedule_by_hand_has_as_many_passes_as_can_be_shown(tmp_path: Path, passes: int, status: int) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("forward only:\nrank 0: " + " ".join(f"0F{number}" for number in range(passes)))
    done = show(str(file), "--ops")
    assert done.returncode == status
    assert ("20001 forward passes; at most 20000 are shown. Leave out micro-batches" in done.stderr) == (status == 2)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_in_a_file(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"picture.{ending}"
    assert show("1f1b", "transfer=0.5", "--draw", str(file)).returncode == 0
    assert file.read_bytes()[:5] == {"svg": b"<?xml", "png": b"\x89PNG\r"}[ending]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["1f2b"], "did you mean '1f1b'"),
        (["1f1b", "transfer=1,2"], "transfer=1,2: one number is expected, or 3"),
        (["1f1b", "mode=magic"], 'Allowed: "buffered" or "rendezvous" or "blocking"'),
        (["1f1b", "mode=blocking"], "deadlock: rank 0 waits at"),
        (["slack-1f1b", "slack=1,x,1"], "whole numbers"),
        (["1f1b", "skip=3>1"], "edge 3>1"),
        (["1f1b", "--draw", "picture.gif"], "ends in .svg, .png, .pdf"),
        (
            ["1f1b", "pp=2000", "micro_batches=2000"],
            "4000000 forward passes; at most 20000 are shown. Choose at most 10 micro-batches",
        ),
        (["zb-v", "pp=50000", "virtual_stages=2"], "Choose fewer stages"),
    ],
)
def test_a_mistake_is_one_paragraph(arguments: list[str], says: str) -> None:
    done = show(*arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_picture_that_cannot_be_written_is_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = show("1f1b", "pp=2", "--draw", str(tmp_path / "file" / "x.svg"))
    assert done.returncode == 2
    assert "x.svg cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
