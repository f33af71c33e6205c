"""The process from which ranks of one machine are forked (``plait.launch.warm`` says why):

    python -m plait.train.warm DESCRIPTOR MODULE [ARGUMENTS]

It imports what MODULE's ranks will, before anything reads who it is: no thread runs, no device is asked, no
environment but the launcher's own is read. Then it forks a rank for every message on the line, and ends when
the line does.
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

from plait.core.base.env import take_on
from plait.core.base.process import die_with_parent, name_process
from plait.core.runs.channel import LONGEST
from plait.train.machine.rank_process import run_and_end


def main() -> None:
    """Fork ranks until the line ends."""
    die_with_parent()
    name_process("plait-warm")
    line, sys.argv = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    module = import_module(sys.argv[0])
    for name in getattr(module, "IMPORTS", ()):
        import_module(name)
    gc.collect()
    gc.freeze()  # what is collected in a copy need not look at, and write to, what it shares
    line.send(b"ready")
    while True:
        message, files, _, _ = socket.recv_fds(line, LONGEST, 8)
        if not message:
            return
        line.send(str(_forked(module, json.loads(message), files, line)).encode())
        for file in files:
            os.close(file)


def _forked(module: ModuleType, own: dict[str, str], files: Sequence[int], line: socket.socket) -> int:
    """A rank's process, the launcher's child by now, in a session of its own."""
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


def _become(module: ModuleType, own: dict[str, str], files: Sequence[int], parent: int, tell: int) -> NoReturn:
    """Be a rank. own: its variables. files: standard output, errors, the line to the launcher. parent: who
    has to end before the launcher is the parent. tell: where to say who this is."""
    os.setsid()
    while os.getppid() == parent:
        time.sleep(0.0005)
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    output, errors, line = files
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    take_on(own, line)
    run_and_end(module.main)


if __name__ == "__main__":
    run_and_end(main)
