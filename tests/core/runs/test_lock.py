"""One holder at a time, whoever dies when."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import LaunchError, RankFailure, RunLost
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
        "[]",
        '{"host": 1}',
        "null",
        '{"token": "../../x"}',
        pytest.param("[" * 60_000, id="deep"),
        damaged(since=[]),
        damaged(token="../../x"),
        damaged(pid=float("inf")),
        damaged(attempt="1"),
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


@pytest.mark.usefixtures("_quick_beat")
def test_the_holder_gives_signs_of_life(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        os.utime(tmp_path / NAME, (0, 0))
        end = time.monotonic() + 30
        while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert (tmp_path / NAME).stat().st_mtime > 0


@pytest.fixture
def _quick_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.02)


def removed(folder: Path) -> None:
    (folder / NAME).unlink()


def removed_with_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def taken(folder: Path) -> None:
    write_lock(folder, silent=0, **FOREIGN)


LOSSES = [(removed, "its lock"), (removed_with_the_folder, "the folder was removed"), (taken, "taken over by .*node7")]


@pytest.mark.parametrize(("lose", "says"), LOSSES)
@pytest.mark.usefixtures("_quick_beat")
def test_a_lock_that_is_lost_is_noticed_while_it_is_held(
    tmp_path: Path, lose: Callable[[Path], None], says: str
) -> None:
    def until_lost() -> None:
        with RunLock(tmp_path / "run") as held:
            held.check()
            lose(tmp_path / "run")
            end = time.monotonic() + 30
            while time.monotonic() < end:
                held.check()
                time.sleep(0.01)
            raise AssertionError("nobody noticed")

    with pytest.raises(RunLost, match=says):
        until_lost()


@pytest.mark.parametrize(("lose", "says"), LOSSES)
def test_or_at_the_end(tmp_path: Path, lose: Callable[[Path], None], says: str) -> None:
    with pytest.raises(RunLost, match=says), RunLock(tmp_path / "run"):
        lose(tmp_path / "run")
    assert (tmp_path / "run" / NAME).exists() == (lose is taken)  # the other one's is left alone


def test_a_disk_in_trouble_does_not_hide_how_the_run_ended(tmp_path: Path) -> None:
    """Its file can be neither read nor removed: here a folder is in its place."""

    def fails() -> None:
        with RunLock(tmp_path):
            (tmp_path / NAME).unlink()
            (tmp_path / NAME).mkdir()
            raise RankFailure("rank 1 was killed by SIGBUS")

    with pytest.raises(RankFailure, match="rank 1 was killed"):
        fails()


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


def _race(folder: Path, start: Any, results: Any, leave: Any) -> None:
    start.wait()
    try:
        with RunLock(folder):
            results.put(os.getpid())
            leave.wait()
    except LaunchError as error:
        results.put(str(error))


@pytest.mark.system
@pytest.mark.parametrize("before", ["nothing", "a dead holder", "a dead holder and a dead successor"])
def test_of_many_starters_exactly_one_wins(tmp_path: Path, before: str) -> None:
    context = mp.get_context("fork")
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        if before != "nothing":
            write_lock(folder, silent=0, started=1, token="dead")
        if before.endswith("successor"):  # killed when it had the right to replace the dead one's lock
            write_lock(folder, silent=0, started=1, token="heir")
            (folder / NAME).rename(folder / f".{NAME}.dead")
            write_lock(folder, silent=0, started=1, token="dead")
        start, leave, results = context.Event(), context.Event(), context.Queue()
        racers = [context.Process(target=_race, args=(folder, start, results, leave)) for _ in range(8)]
        for racer in racers:
            racer.start()
        start.set()
        said = [results.get(timeout=60) for _ in racers]
        leave.set()
        for racer in racers:
            racer.join()
        winners = [word for word in said if isinstance(word, int)]
        assert len(winners) == 1
        assert all(f"process {winners[0]}" in word for word in said if isinstance(word, str))
        assert list(folder.iterdir()) == []


def test_who_is_about_to_replace_a_dead_ones_lock_is_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is alive, and does not come to it."""
    monkeypatch.setattr(lock, "CLAIM", 0.0)
    write_lock(tmp_path, silent=0, token="heir")
    (tmp_path / NAME).rename(tmp_path / f".{NAME}.dead")
    write_lock(tmp_path, silent=0, started=1, token="dead")
    with pytest.raises(LaunchError, match=f"is in use by process {os.getpid()}"), RunLock(tmp_path):
        pass
    assert json.loads((tmp_path / NAME).read_text())["token"] == "dead"


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


def test_who_replaces_a_dead_ones_lock_may_give_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the next one does."""
    write_lock(tmp_path, silent=0, token="heir")
    claim = (tmp_path / NAME).rename(tmp_path / f".{NAME}.dead")
    write_lock(tmp_path, silent=0, started=1, token="dead")
    waited = list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        claim.unlink()

    monkeypatch.setattr(lock.time, "sleep", sleep)
    with RunLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [NAME]
        assert len(waited) == 1


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


def test_who_was_slower_to_replace_a_dead_ones_lock_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock(tmp_path, silent=0, started=1, token="dead")
    link = os.link

    def meanwhile(source: Path, target: Path) -> None:
        link(source, target)
        if target.name.endswith(".dead"):  # now we have the right, and somebody else has used it just before
            write_lock(tmp_path, silent=0, **FOREIGN)

    monkeypatch.setattr(os, "link", meanwhile)
    with pytest.raises(LaunchError, match=r"is in use by .*node7"), RunLock(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
