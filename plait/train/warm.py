"""Run the process from which the ranks of one machine are forked (``plait.launch.local.local``
gives the reason):

    python -m plait.train.warm DESCRIPTOR MODULE [ARGUMENTS]

The process first imports the modules that MODULE's ranks will need. Until then it starts no thread,
uses no device and reads no environment variables but the launcher's own. Then it forks a rank for
every message on the inherited socket, and exits when the socket is closed.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from plait.core.base.env import adopt_environment
from plait.core.base.process import die_with_parent, name_process
from plait.core.runs.channel import LONGEST
from plait.train.machine.rank_process import run_and_end


def main() -> None:
    """Fork a rank per message until the launcher closes the socket."""
    die_with_parent()
    name_process("plait-warm")
    line, sys.argv = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    module = import_module(sys.argv[0])
    for name in getattr(module, "IMPORTS", ()):
        import_module(name)
    gc.collect()
    gc.freeze()  # garbage collection in a fork then does not touch, and so copy, the shared pages
    line.send(b"ready")
    while True:
        message, files, _, _ = socket.recv_fds(line, LONGEST, 8)
        if not message:
            return
        line.send(str(_forked(module, json.loads(message), files, line)).encode())
        for file in files:
            os.close(file)


def _forked(module: ModuleType, own: dict[str, str], files: Sequence[int], line: socket.socket) -> int:
    """Fork a rank's process in a session of its own and return its process id. The double fork
    makes it a child of the launcher."""
    ready, tell = os.pipe()
    between = os.fork()
    if not between:
        parent = os.getpid()
        if not os.fork():
            os.close(ready)
            line.close()
            _become(module, own, files, parent, tell)
        os._exit(0)
    os.close(tell)
    os.waitpid(between, 0)
    with os.fdopen(ready) as told:
        return int(told.read())


def _become(module: ModuleType, own: dict[str, str], files: Sequence[int], parent: int, pid_pipe: int) -> NoReturn:
    """Run as a rank. own: the rank's environment variables. files: standard output, standard error,
    the socket to the launcher. parent: the intermediate process, which must exit before the
    launcher becomes the parent. pid_pipe: the pipe to write this process's id to."""
    os.setsid()
    while os.getppid() == parent:
        time.sleep(0.0005)
    os.write(pid_pipe, str(os.getpid()).encode())
    os.close(pid_pipe)
    output, errors, line = files
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    adopt_environment(own, line)
    run_and_end(module.main)


if __name__ == "__main__":
    run_and_end(main)
