"""The file of a run's metrics: lines that are kept, forgotten, set aside, or cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.core.base.errors import RankFailure
from plait.core.runs.progress import Missing
from plait.train.record.metrics import MetricsFile


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
        file.add({"step": step, "loss": 5.0 / step, "seconds": 0.2, "tokens_per_second": 12345.6})
    found = [json.loads(line)["step"] for line in file.path.read_text().splitlines()]
    assert found == list(range(1, len(found) + 1))
    assert 0 < len(found) < 2000
    assert missing.steps == 2000 - len(found)
    os.truncate(file.path, 0)
    file.add({"step": 2001})
    assert json.loads(file.path.read_text())["step"] == 2001
    assert len(said) == 2
    file.close()


def test_metrics_of_later_steps_and_unfinished_lines_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for rest in ("", '{"step": 5, "lo', '{"step": 5}', "\n"):
        path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 5)) + rest)
        file = MetricsFile(tmp_path, Missing("metrics.jsonl"))
        file.remove_after(3)
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
    assert file.remove_after(50) == 1
    assert path.read_bytes() == b"".join(lines[:50])
    assert (tmp_path / "metrics.unreadable").read_bytes() == bad + b"\n"
    assert file.remove_after(50) == 0, "once"
    file.close()


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
    assert file.remove_after(3) == 0  # there is none
    file.path.mkdir()
    assert file.remove_after(3) == 0 and not said
    file.add({"step": 1})
    assert missing.steps == 1 and len(said) == 1
    file.path.rmdir()
    file.path.write_text('{"step": 1}\n{"step": 2}\n')

    def full(path: Path, end: int) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr(os, "truncate", full)
    assert file.remove_after(1) == 0
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
            with pytest.raises(RankFailure, match="was removed or moved during the run"):
                file.check()
    file.close()


def test_lines_that_are_too_long_are_set_aside_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.train.record.metrics.LONGEST", 20)
    long = b'{"step": 1, "text": "' + b"x" * 50 + b'"}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + long + b'{"step": 2}\n\n{"step": 3}\n{"st')
    file = MetricsFile(tmp_path, Missing("metrics.jsonl"))
    assert file.remove_after(2) == 1
    assert file.path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "metrics.unreadable").read_bytes() == long
    file.close()


def test_a_metrics_file_that_ends_with_what_is_kept_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 2}\n')
    file, before = MetricsFile(tmp_path, Missing("metrics.jsonl")), path.stat()
    assert file.remove_after(2) == 0
    assert path.read_bytes() == b'{"step": 0}\n{"step": 2}\n' and path.stat().st_ino == before.st_ino
    file.close()
