"""One holder at a time, whoever dies when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import LaunchError
from plait.core.runs import lock
from plait.core.runs.lock import EXPIRES, NAME, Holder, RunLock

HOLD = """
import sys, time
from pathlib import Path
from plait.core.runs.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def write_lock(folder: Path, *, silent: float, **changes: Any) -> None:
    """A lock as another process would have left it, touched ``silent`` seconds ago."""
    path = folder / NAME
    path.write_text(json.dumps(asdict(replace(Holder.me(), **changes))))
    os.utime(path, (time.time() - silent, time.time() - silent))


def damaged(**values: Any) -> str:
    """A lock whose values somebody has changed."""
    return json.dumps(asdict(Holder.me()) | values)


FOREIGN = {"host": "node7", "place": "another boot of another machine"}


def test_it_makes_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    with RunLock(tmp_path / "runs" / "one"):
        assert [path.name for path in (tmp_path / "runs" / "one").iterdir()] == [NAME]
    assert list((tmp_path / "runs" / "one").iterdir()) == []


@pytest.mark.system
def test_a_second_start_names_the_first(tmp_path: Path) -> None:
    process = hold(tmp_path)
    try:
        with pytest.raises(LaunchError) as refused, RunLock(tmp_path):
            pass
        for word in (str(tmp_path), f"process {process.pid}", os.uname().nodename, "since 2", "run.name"):
            assert word in str(refused.value)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.system
@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_holder_is_followed_at_once(tmp_path: Path, reaped: bool) -> None:
    process = hold(tmp_path)
    process.kill()
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: ended, and not waited for
    with RunLock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []
    process.communicate()


def test_another_process_with_the_dead_ones_number_is_not_the_holder(tmp_path: Path) -> None:
    write_lock(tmp_path, silent=0, started=Holder.me().started - 1)
    with RunLock(tmp_path):
        pass


@pytest.mark.system
def test_a_stopped_holder_on_this_machine_is_alive_however_long_it_is_silent(tmp_path: Path) -> None:
    process = hold(tmp_path)
    try:
        process.send_signal(signal.SIGSTOP)
        os.utime(tmp_path / NAME, (0, 0))
        with pytest.raises(LaunchError, match=f"process {process.pid}"), RunLock(tmp_path):
            pass
    finally:
        process.kill()
        process.communicate()


def test_a_holder_on_another_machine_is_believed_while_it_gives_signs_of_life(tmp_path: Path) -> None:
    write_lock(tmp_path, silent=EXPIRES - 30, **FOREIGN)
    with pytest.raises(LaunchError, match=r"node7.* sign of life 3\d s ago.* again in [23]\d s"), RunLock(tmp_path):
        pass
    write_lock(tmp_path, silent=EXPIRES + 5, **FOREIGN)
    with RunLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_start_of_the_same_cluster_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm ends one start of a job before the next, whatever became of the machine."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_lock(tmp_path, silent=0, place="elsewhere", job="c/7", attempt=0)
    with RunLock(tmp_path):
        pass
    for job, attempt in (("c/8", 0), ("c/7", 1), ("", 0)):
        write_lock(tmp_path, silent=0, place="elsewhere", job=job, attempt=attempt)
        with pytest.raises(LaunchError, match="is in use by"), RunLock(tmp_path):
            pass


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"token": "../../x"}',
        pytest.param("[" * 60_000, id="deep"),
        damaged(since=[]),
        damaged(token="../../x"),
        damaged(user=None),
        damaged(host={"a": 1}),
    ],
)
def test_an_unreadable_lock_is_respected_until_it_is_old(tmp_path: Path, content: str) -> None:
    path = tmp_path / NAME
    path.write_text(content)
    with pytest.raises(LaunchError, match="cannot be read"), RunLock(tmp_path):
        pass
    os.utime(path, (time.time() - EXPIRES - 5, time.time() - EXPIRES - 5))
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("pid", [0, -1, 10**30])
def test_a_number_that_no_process_has_holds_nothing(tmp_path: Path, pid: int) -> None:
    write_lock(tmp_path, silent=0, pid=pid)
    with RunLock(tmp_path):
        pass


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(LaunchError, match="cannot be read"), RunLock(tmp_path):
        pass


def test_a_name_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    write_lock(tmp_path, silent=EXPIRES + 5, token="/../../escaped", **FOREIGN)
    with RunLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(LaunchError, match="cannot be written"), RunLock(tmp_path / "runs" / "one"):
        pass


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "link", link)
    with RunLock(tmp_path):
        with pytest.raises(LaunchError, match=f"process {os.getpid()}"), RunLock(tmp_path):
            pass
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
        mask = os.umask(0)
        os.umask(mask)
        assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o666 & ~mask


def test_an_earlier_start_is_one_of_a_cluster(tmp_path: Path) -> None:
    write_lock(tmp_path, silent=0, place="elsewhere", job="", attempt=-1)
    with pytest.raises(LaunchError, match="is in use by"), RunLock(tmp_path):
        pass


def test_a_lock_that_is_released_while_it_is_asked_for_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, link = list[int](), os.link

    def first_is_late(source: Path, target: Path) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise FileExistsError(17, "was there")
        link(source, target)

    monkeypatch.setattr(os, "link", first_is_late)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert len(tries) == 2


def test_an_answer_that_was_lost_is_asked_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS: the link was made, and made again."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    with RunLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_another_errors_folder_is_no_free_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock file that cannot be opened is not one that is not there."""
    write_lock(tmp_path, silent=0, **FOREIGN)
    monkeypatch.setattr(lock.os, "open", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(LaunchError, match="cannot be written"), RunLock(tmp_path):
        pass


def test_in_a_cluster_too_a_lock_that_cannot_be_read_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (tmp_path / NAME).write_text("{")
    with pytest.raises(LaunchError, match="cannot be read"), RunLock(tmp_path):
        pass


def test_a_holder_in_words() -> None:
    holder = replace(Holder.me(), pid=7, user="ann", host="n1", since="2026-11-26T10:00:00+00:00")
    assert str(holder) == "process 7 of ann on n1, since 2026-11-26 10:00:00+00:00"
    assert str(replace(holder, user="")) == "process 7 on n1, since 2026-11-26 10:00:00+00:00"


def test_a_holder_is_on_the_disk_before_its_lock_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, fsync, link = list[str](), os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "link", lambda a, b: (done.append("link"), link(a, b)))
    with RunLock(tmp_path):
        assert done == ["fsync", "link"]
