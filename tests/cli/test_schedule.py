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


def test_a_schedule_by_hand_has_as_many_passes_as_can_be_shown(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("forward only:\nrank 0: " + " ".join(f"0F{number}" for number in range(20_000)))
    assert show(str(file), "--ops").returncode == 0


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_in_a_file(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"picture.{ending}"
    assert show("1f1b", "transfer=0.5", "--draw", str(file)).returncode == 0
    assert file.read_bytes()[:5] == {"svg": b"<?xml", "png": b"\x89PNG\r"}[ending]
