"""How many files a process may have open: a launcher has some for every rank."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from plait.core.base.errors import LaunchError

SPARE = 64
"""Files beside those that are asked for and those that are open: of imports, looks at /proc, starts."""


def make_room(files: int, what: str) -> None:
    """Raise this process's limit of open files (``ulimit -Sn``) so that it can open ``files`` more; processes
    that it starts have it too. what: whose they are, for the error.

    Raises LaunchError where the system allows fewer (``ulimit -Hn``).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _open() + files + SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{what} take this process {needed} open files, and the system allows it {hard} (ulimit -Hn). Raise that, "
            f"such as by a line '* hard nofile {needed}' in /etc/security/limits.conf, or run fewer ranks on a machine."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _open() -> int:
    """Files that are open now; none where the system does not say."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0
