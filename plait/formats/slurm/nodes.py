"""Reader of node states in the output of Slurm's commands: ``scontrol show nodes`` (with or without
``-o``), ``sinfo`` with columns NODELIST and STATE, and ``squeue``, which has the job on a node and
its end time.

===========  =====================================================================================
read         of scontrol: NodeName, State, Reason, Gres; of sinfo: NODELIST, STATE, GRES; of squeue:
             JOBID, NODELIST, END_TIME, ST or STATE. Of Gres: ``gpu:TYPE:N``; a node without GPUs
             counts as down if other nodes have some
ignored      partitions without nodes, jobs without nodes, generic resources that are parts of GPUs
             (shards, mps, MIG slices); all other fields
refused      an unknown state, a node that scontrol lists twice, a record without State, a row that
             breaks off
===========  =====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import printable
from plait.core.topology.hostlist import MOST_HOSTS
from plait.core.topology.switches import FREE, Hardware, NodeState
from plait.core.topology.wiring import HostLists
from plait.formats.base.source import ReadOptions, ReadResult, Source, without_gpus, worse_state
from plait.formats.slurm.lines import resources

_NODE = re.compile(r"^NodeName=", re.MULTILINE)
_HEADER = re.compile(r"\bNODELIST\b")
PARTS = "parts of GPUs (MIG slices, shards, mps), which are no whole ones"
_DOWN = frozenset({
    "down", "drain", "drained", "draining", "drng", "fail", "failing", "failg", "maint", "maintenance", "unknown",
    "unk", "future", "futr", "error", "inval", "invalid", "invalid_reg", "not_responding", "no_respond", "powered_down",
    "blocked", "powering_down", "power_down", "power_off", "pow_dn", "external", "reboot", "reboot_issued",
    "reboot_requested", "boot",
})  # fmt: skip
_BUSY = frozenset({
    "allocated", "alloc", "mixed", "mix", "completing", "comp", "reserved", "resv", "perfctrs", "npc", "powering_up",
    "power_up", "pow_up",
})  # fmt: skip
_FREE = frozenset(
    {
        "idle",
        "planned",
        "plnd",
        "cloud",
        "dynamic_norm",
        "dynamic_future",
        "power_drain",
        "resume",
        "undrain",
        "reboot_canceled",
    }
)
_SIGNS = {"*": "not_responding", "~": "powered_down", "!": "powering_down", "%": "powering_down", "#": "powering_up",
          "$": "maint", "@": "reboot", "^": "reboot", "-": "planned", "+": ""}  # fmt: skip
"""Flags by the suffix of a state, as in sinfo(1)."""


def is_node_output(source: Source) -> bool:
    """True if the text is the output of one of these commands."""
    head = source.text[:4096]
    return not source.is_json and bool(_NODE.search(head) or _HEADER.search(head))


def read(source: Source, options: ReadOptions) -> ReadResult:
    """Return the nodes' states, and their GPUs if the output has some. Raises JobError naming the
    line."""
    del options
    if _NODE.search(source.text):
        return _of_records(source.text)
    return _of_table(source.text)


def _of_records(text: str) -> ReadResult:
    states: dict[str, NodeState] = {}
    hardware: dict[str, Hardware] = {}
    over, line, last = IgnoredInput(), 1, 0
    starts = [match.start() for match in _NODE.finditer(text)]
    if len(starts) > MOST_HOSTS:
        raise JobError(f"{len(starts)} records of nodes; at most {MOST_HOSTS} are read")
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        line, last = line + text.count("\n", last, start), start
        record = text[start:end]
        words: dict[str, str] = {}
        for word in record.partition("Reason=")[0].split():
            key, _, value = word.partition("=")
            words[key] = value
        where, name = f"line {line}", words["NodeName"]
        if not words.get("State"):
            raise JobError(f"'{name[:60]}' has no State", key=where, fix="The text may have been cut off")
        if name in states:
            raise JobError(f"'{name[:60]}' is listed twice", key=where)
        reason = re.search(r"Reason=(.*?)(?: \[|$)", record, re.MULTILINE)
        states[name] = _state(words["State"], reason[1] if reason else "", where)
        if "Gres" in words:
            hardware[name] = _hardware(words["Gres"], name, over)
    hardware = _reported_hardware(hardware, over)
    return ReadResult(states=without_gpus(states, hardware), hardware=hardware, over=over)


def _hardware(gres: str, name: str, over: IgnoredInput) -> Hardware:
    """Return the whole GPUs in a list of generic resources."""
    kinds: dict[str, None] = {}
    count = 0
    found, whole = resources(gres)
    if not whole:
        over.note("generic resources that cannot be read", f"{name}: {printable(gres)[:60]}")
    for one in found:
        if one.part:
            over.note(PARTS, name, one.number)
        elif one.name == "gpu":
            count += one.number
            kinds |= {one.kind: None} if one.kind else {}
    return Hardware(gpus=count, device="+".join(kinds))


def _reported_hardware(hardware: dict[str, Hardware], over: IgnoredInput) -> dict[str, Hardware]:
    """Return the nodes' hardware; empty if no node has a GPU or a part of one, because Slurm's
    configuration may lack them."""
    return hardware if PARTS in over.counts or any(one.gpus for one in hardware.values()) else {}


def _state(text: str, reason: str, where: str) -> NodeState:
    """Return the state for Slurm's state and flags, such as ``IDLE+DRAIN`` or ``idle*``."""
    word = text.lower()
    signs = re.search(r"[*~!%#$@^+-]*$", word)
    ending = signs[0] if signs else ""
    parts = {part for part in (*word.removesuffix(ending).split("+"), *(_SIGNS[sign] for sign in ending)) if part}
    if unknown := parts - _DOWN - _BUSY - _FREE:
        problem = f"no state of Slurm's is called '{printable(sorted(unknown)[0])[:60]}'"
        raise JobError(problem, key=where, fix="Idle, allocated, mixed, down and drained are among those known")
    if parts & _DOWN:
        return NodeState(status="down", holder=printable(reason.strip())[:200] or "+".join(sorted(parts & _DOWN)))
    return NodeState(status="busy") if parts & _BUSY else FREE


def _of_table(text: str) -> ReadResult:
    lists, over = HostLists(), IgnoredInput()
    states: dict[str, NodeState] = {}
    hardware: dict[str, Hardware] = {}
    header, rows = _rows(text)
    if "NODELIST" not in header:
        raise JobError("neither records of nodes nor a table with a column NODELIST")
    squeue = "JOBID" in header
    if not squeue and "STATE" not in header:
        raise JobError("a table with NODELIST has no column STATE", fix="Run sinfo, or sinfo -N -o '%N %T'")
    for where, row in rows:
        if squeue and _waits(row):
            over.note("jobs without nodes", where)
            continue
        if not squeue and "n/a" in row.values():
            over.note("partitions without nodes", where)
            continue
        if len(row) < len(header) and not squeue:
            raise JobError("fewer columns than the header has", key=where, fix="The text may have been cut off")
        if squeue:
            holder = f"job {printable(row['JOBID'])[:60]}"
            state = NodeState(status="busy", until=_time(row.get("END_TIME", ""), where), holder=holder)
        else:
            state = _state(row["STATE"], "", where)
        names = lists(row["NODELIST"], where)
        for name in names:
            states[name] = worse_state(states[name], state) if name in states else state
        if "GRES" in row and names:
            hardware |= dict.fromkeys(names, _hardware(row["GRES"], names[0], over))
    hardware = _reported_hardware(hardware, over)
    return ReadResult(states=without_gpus(states, hardware), hardware=hardware, partial=squeue, over=over)


def _waits(row: Mapping[str, str]) -> bool:
    """True if a job has no nodes yet: squeue prints none, or a reason in brackets, or a pending
    state."""
    nodes, states = row.get("NODELIST", ""), {row.get("ST"), row.get("STATE")}
    return not nodes or nodes.startswith("(") or bool({"PD", "PENDING"} & states)


def _rows(text: str) -> tuple[list[str], Iterator[tuple[str, dict[str, str]]]]:
    """Return the header, and every row's position and cells by column; columns are separated by
    ``|`` or white space. Of columns with equal names the first counts; text in brackets is no part
    of a name."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if _HEADER.search(line)), len(lines))
    sign = "|" if first < len(lines) and "|" in lines[first] else None
    header = [cell.strip().partition("(")[0] for cell in lines[first].split(sign)] if first < len(lines) else []

    def rows() -> Iterator[tuple[str, dict[str, str]]]:
        for number, line in enumerate(lines[first + 1 :], first + 2):
            cells = [cell.strip() for cell in line.split(sign, len(header) - 1)]
            if any(cells):
                yield f"line {number}", dict(reversed(list(zip(header, cells, strict=False))))

    return list(dict.fromkeys(header)), rows()


def _time(text: str, where: str) -> float | None:
    """Return a time in seconds since 1970, None if there is none; Slurm prints the machine's local
    time."""
    if text in ("N/A", "Unknown", "NONE", ""):
        return None
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise JobError(f"'{printable(text)[:60]}' is no time", key=where, fix="As in 2026-01-31T12:00:00") from None
