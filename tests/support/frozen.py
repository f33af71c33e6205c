"""Processes that the kernel keeps from running: control groups of both versions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = {"v1": Path("/sys/fs/cgroup/freezer"), "v2": Path("/sys/fs/cgroup"), "unified": Path("/sys/fs/cgroup/unified")}
"""Where groups of each kind are made, where there are any."""
SWITCH = {"v1": ("freezer.state", "FROZEN", "THAWED")}
OTHERWISE = ("cgroup.freeze", "1", "0")
"""The file that freezes a group, and what is written to it."""


def why_none(kind: str) -> str | None:
    """Why no group of that kind can be made and frozen; None if it can."""
    group = GROUPS[kind] / f"plait-try-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        return f"no control group can be made in {GROUPS[kind]}: {error.strerror}"
    able = (group / SWITCH.get(kind, OTHERWISE)[0]).exists()
    group.rmdir()
    return None if able else f"a control group in {GROUPS[kind]} cannot be frozen"


@contextmanager
def frozen_group(kind: str) -> Iterator[Path]:
    """A control group that is frozen; it goes on at the end, and what was killed in it ends."""
    file, on, off = SWITCH.get(kind, OTHERWISE)
    group = GROUPS[kind] / f"plait-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(on)
        yield group
    finally:
        (group / file).write_text(off)
        while True:
            with suppress(OSError):
                group.rmdir()
                break


def freeze(group: Path, pid: int) -> None:
    """Move a process into a group that is frozen."""
    (group / "cgroup.procs").write_text(str(pid))
