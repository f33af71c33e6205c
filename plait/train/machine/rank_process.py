"""Begin and end the process of a rank: its rank from the starter's variables or a rank table, its
exit status, its entry in the run's history."""

from __future__ import annotations

import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from plait.core.base.cluster_env import chosen_rank_table, forget, started_values, starter_of, this_host
from plait.core.base.env import RankEnv, become_rank
from plait.core.base.errors import LaunchError, PlacementError
from plait.core.base.process import open_standard_streams
from plait.core.job.plan import CHANGED, Plan
from plait.core.runs.history import History
from plait.core.runs.progress import Progress
from plait.core.topology.hostlist import expand
from plait.core.topology.rank_table import RankTable
from plait.train.machine.control import Control


def run_and_end(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main``, flush the output, and end the process with the returned status (None: 0). If
    ``main`` raises, print a traceback and end with 1; with SystemExit, end with its status.

    The interpreter's own shutdown is avoided. During it, a thread of gloo, or one that waits in
    gloo, may still request the interpreter's lock (to release a tensor). CPython then ends the
    thread in the midst of C++, which ends the process with SIGABRT: a rank that ended well, or with
    a clear message, looks killed.
    """
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception:  # noqa: BLE001  (like the interpreter)
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


class _Output(io.FileIO):
    """A file that ignores write errors."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def ignore_print_errors() -> None:
    """Ignore errors of writing to standard output and error (a closed terminal, a pipe whose reader
    has ended, a full disk). They must neither end training nor hide why it ends."""
    open_standard_streams()
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: TextIO) -> TextIO:
    stream.flush()
    buffer = io.BufferedWriter(_Output(stream.fileno(), "wb", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, "replace", line_buffering=True)


def set_rank_variables() -> None:
    """Become the rank that the starter's variables or the rank table give to this process. Raises
    LaunchError for contradictory variables, PlacementError for a host that is not in the rank
    table."""
    if starter := starter_of():
        forget(("GROUP_RANK", "NODE_RANK"))  # set by an outer starter
        become_rank(_variables(starter.name, started_values(starter)))
    if path := chosen_rank_table():
        become_rank(_by_table(RankTable.read(path), RankEnv.read()))


def _variables(name: str, values: dict[str, str]) -> dict[str, str]:
    found = {"RANK": values["rank"], "WORLD_SIZE": values["world_size"]}
    if "local_rank" in values:
        found["LOCAL_RANK"] = values["local_rank"]
    if "per_node" in values:
        counts = tasks_of_nodes(values["per_node"])
        if not (number := values.get("node", "")).isdecimal():
            raise LaunchError(f"{name} says that this is node {number!r}, which is no number.")
        if (node := int(number)) >= len(counts):
            raise LaunchError(f"{name} says that this is node {node}, and has tasks on {len(counts)}.")
        found |= {"LOCAL_WORLD_SIZE": str(counts[node]), "NODE_RANK": str(node), "GROUP_RANK": str(node)}
    elif "local_world_size" in values:
        found["LOCAL_WORLD_SIZE"] = values["local_world_size"]
    if "nodes" in values:
        try:
            found["MASTER_ADDR"] = expand(values["nodes"])[0]
        except (ValueError, IndexError):
            raise LaunchError(f"{name} says that its nodes are {values['nodes']!r}, which cannot be read.") from None
    return found


def tasks_of_nodes(text: str) -> list[int]:
    """Return the tasks of each node, from Slurm's short form. Raises LaunchError for other text.

    >>> tasks_of_nodes("4(x2),2")
    [4, 4, 2]
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise LaunchError(f"Slurm's tasks per node are {text!r}, which cannot be parsed.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _by_table(table: RankTable, rank: RankEnv) -> dict[str, str]:
    """Return the variables of the rank that the table gives to this process's local rank on its
    host. Raises PlacementError if world size or ranks per host differ."""
    if rank.local_world_size != table.ranks_per_node or rank.world_size != table.world_size:
        raise PlacementError(
            f"{rank.world_size} ranks were started, {rank.local_world_size} of them on this host, and the rank table "
            f"has {table.world_size}, {table.ranks_per_node} on each of {len(table.hosts)} hosts."
        )
    node = table.node_rank(this_host())
    return {
        "RANK": str(node * table.ranks_per_node + rank.local_rank), "NODE_RANK": str(node), "GROUP_RANK": str(node),
        "MASTER_ADDR": table.hosts[0],
    }  # fmt: skip


def record_attempt(run: Callable[[], int], folder: Path, plan: Plan, rank: RankEnv, control: Control) -> int:
    """Return what ``run`` returns, and record this start and its end in the run's
    ``attempts.jsonl``, also if ``run`` raises."""
    history = History(folder)

    def look() -> None:
        progress.heard(0, control.step, time.monotonic(), control.writing())
        if control and not progress.stopping:
            progress.stop_requested("a signal")

    def attempt(_: Progress) -> int:
        try:
            status = run()
        except SystemExit as ended:  # a stop request before there was anything to save
            progress.stopping = True
            return ended.code if isinstance(ended.code, int) else 1
        look()
        return status

    progress = Progress(1, stepped=lambda one: history.record_restart(one, _say))
    hosts = (this_host(),) if rank.local_world_size == rank.world_size else ()
    changed = plan.notes.get(CHANGED, "")
    history.begin_again(rank.world_size, hosts, plan.key, again=rank.attempt > 0, changed=changed)
    control.add_check(look)
    return history.attempt(attempt, progress)


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"plait: {text}", file=sys.stderr, flush=True)
