"""Dumps of PyTorch's flight recorder: the collectives and messages of one rank, ended, under way and waiting.

It writes pickles unless it is told otherwise, of which nothing is run (``plain_pickle``); and JSON
(``torch._C._distributed_c10d._dump_fr_trace_json``), which has no stacks.

| what                                                             | is                                     |
|------------------------------------------------------------------|----------------------------------------|
| ``entries[]``: ``process_group``, ``profiling_name``, ``state``, | known, of versions 1 and 2; ``seq_id`` |
| ``collective_seq_id``, ``p2p_seq_id``, ``is_p2p``, ``retired``,  | of version 1 too                       |
| ``record_id``, ``input_sizes``, ``output_sizes``, their dtypes,  |                                        |
| ``time_*_ns``, ``duration_ms``, ``frames``                       |                                        |
| ``pg_config``: ``name``, ``desc``, ``ranks``                     | known: the members of groups           |
| a time of 0 or null                                              | not known, or not yet                  |
| ``nccl:coalesced`` and its parts, which have no state of their   | known: the parts have its state        |
| own                                                              |                                        |
| ``pg_status``, ``nccl_comm_state``, ``thread_*``, ``op_id``,     | known, not needed                      |
| ``timeout_ms``, ``comm_lib_version``                             |                                        |
| entries that are no objects or name no operation; times, sizes,  | passed over, counted                   |
| states and groups that cannot be; entries that the recorder has  |                                        |
| overwritten                                                      |                                        |
| a pickle of more than plain data; a dump that does not tell      | refused                                |
| whose it is                                                      |                                        |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

import polars as pl

from plait.core.base.numbers import is_number
from plait.core.base.passed_over import PassedOver
from plait.diagnose.trace_columns import FOREIGN, LATEST, NS, ForeignSpans, axis_of, bytes_of_dtype, members_of

State = Literal["scheduled", "started", "completed"]
STATES: tuple[State, ...] = ("scheduled", "started", "completed")
VERSIONS = ("1", "2")
"""Of the format, before the dot, that are known."""
DIMENSIONS = 64
"""Of a tensor, at most: PyTorch's own limit."""
MOST = 2**53
"""Of bytes, and of numbers in a sequence."""
FRAMES = 3
"""Of a stack that are kept, the innermost."""
MOST_ENTRIES = 50_000
"""Of one dump: a recorder keeps 2,000 unless it is told otherwise."""
MOST_SIZES = 2_000_000
"""Of tensors, of all entries of a dump."""
_VERB = re.compile(r"(?:\w+:)?(\w+)(?: (\d+)(->|<-)(\d+))?$")


class DumpGroup(NamedTuple):
    """A process group. ranks: its members in their order; empty where the dump does not tell them."""

    name: str
    label: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpEntry:
    """An operation on one rank. peer: of a message, the other end's rank in the group; None of a collective.
    Times are ns since 1970, sizes bytes; None: not known."""

    record: int | None
    group: str
    label: str
    verb: str
    message: bool
    peer: int | None
    sends: bool
    sequence: int | None
    state: State
    created: int | None
    started: int | None
    completed: int | None
    took: float | None
    bytes_in: int | None
    bytes_out: int | None
    dtype_in: str
    dtype_out: str
    stack: tuple[str, ...]

    @property
    def open(self) -> bool:
        """Whether it is not known to have ended."""
        return self.state != "completed"

    @property
    def batch(self) -> bool:
        """Whether it stands for all parts that were begun together, which are entries of their own."""
        return self.verb.lower().endswith("coalesced") and self.bytes_in is None and self.bytes_out is None

    @property
    def begun_with(self) -> tuple[str, bool, int | None]:
        """What all parts of a batch have in common, and its own entry."""
        return self.group, self.message, self.sequence


@dataclass
class Dump:
    """One rank's dump as it is read. told: what it says its rank is. over: what was passed over. doubts: what
    it says of ranks that cannot be, as ``lists ...``."""

    over: PassedOver
    told: Any = None
    version: str = ""
    groups: dict[str, DumpGroup] = field(default_factory=dict[str, DumpGroup])
    entries: list[DumpEntry] = field(default_factory=list[DumpEntry])
    sizes: int = 0
    doubts: list[str] = field(default_factory=list[str])

    def add(self, value: Any) -> None:
        """One of ``entries``. Raises ValueError where there are too many, or too many tensors in them."""
        if len(self.entries) >= MOST_ENTRIES:
            raise ValueError(f"it has more than {MOST_ENTRIES} entries, the most that are read")
        told = [value.get(key) for key in ("input_sizes", "output_sizes")] if isinstance(value, dict) else []
        self.sizes += sum(len(one) for one in told if isinstance(one, list))
        if self.sizes > MOST_SIZES:
            raise ValueError(f"it has sizes of more than {MOST_SIZES} tensors, the most that are read")
        found = _entry(value, self.over) if isinstance(value, dict) else None
        if found is None:
            self.over.note("entries that are no objects or name no operation")
        else:
            self.entries.append(found)

    def finish(self, header: Mapping[str, Any]) -> None:
        """What stands beside the entries; then what the entries say of each other."""
        self.told, self.version = header.get("rank"), str(header.get("version"))[:20]
        self.groups = _groups(header.get("pg_config"), self)
        records = [one.record for one in self.entries if one.record is not None]
        if records and (lost := max(records) + 1 - len(set(records))) > 0:
            self.over.note("entries that the recorder had overwritten", f"the first kept is {min(records)}", lost)
        self.entries = _with_states_of_batches(self.entries)

    def loose(self, rank: int) -> list[DumpEntry]:
        """What has not ended and cannot be laid beside what others did: messages whose ends are not told,
        also batches whose parts are not in the dump; collectives without a number."""
        parts = {one.begun_with for one in self.entries if not one.batch}
        return [
            one
            for one in self.entries
            if one.open
            and not (one.batch and one.begun_with in parts)
            and (ends_of(one, self, rank) is None if one.message else one.sequence is None)
        ]

    @property
    def mentioned(self) -> set[int]:
        """Ranks that its groups tell."""
        return {rank for group in self.groups.values() for rank in group.ranks}


def is_dump(header: Mapping[str, Any]) -> bool:
    """Whether a JSON object is such a dump. A rank that has done nothing yet has no ``entries``."""
    return "version" in header and any(key in header for key in ("entries", "pg_config", "pg_status"))


def dump_spans(dump: Dump, rank: int) -> ForeignSpans:
    """What has ended and is known when: from when it was seen to begin, or else was enqueued, until it was
    seen to end."""
    since = min((at for one in dump.entries for at in (one.created, one.started) if at), default=0)
    rows: list[tuple[Any, ...]] = []
    for one in dump.entries:
        start, end = one.started or one.created, one.completed
        if end is None and start is not None and one.took is not None:
            end = start + round(one.took)
        if one.open or one.batch:
            continue
        if start is None or end is None or end < start:
            dump.over.note("operations that ended, nobody knows when", one.verb)
            continue
        ends = ends_of(one, dump, rank)
        known = dump.groups.get(one.group)
        members = ",".join(map(str, sorted(known.ranks))) if known and known.ranks else ""
        group = f"{ends[0]}>{ends[1]}" if ends else members or one.label or one.group or "all"
        size = max(one.bytes_in or 0, one.bytes_out or 0) if one.message else one.bytes_in or 0
        rows.append(
            (0, rank, "transfer" if one.message else "comm", one.verb, -1 if one.sequence is None else one.sequence,
             one.verb, (start - since) / NS, (end - since) / NS, size,
             "pp" if one.message else axis_of(one.label), group)
        )  # fmt: skip
    return ForeignSpans(pl.DataFrame(rows, schema=FOREIGN, orient="row"), since)


def ends_of(entry: DumpEntry, dump: Dump, rank: int) -> tuple[int, int] | None:
    """Who sends a message, and to whom; None of a collective, and where the dump does not tell."""
    if not entry.message or entry.peer is None:
        return None
    known = dump.groups.get(entry.group)
    peer = entry.peer
    if known and known.ranks:
        if peer >= len(known.ranks):
            return None
        peer = known.ranks[peer]
    return (rank, peer) if entry.sends else (peer, rank)


# ---- reading ----


def _entry(value: Mapping[str, Any], over: PassedOver) -> DumpEntry | None:
    named = _VERB.match(str(value.get("profiling_name") or "")[:200])
    if named is None:
        return None
    verb, mine, arrow, other = _plain(named[1]), named[2], named[3], named[4]
    message = value.get("is_p2p") is True or arrow is not None
    group, label = _group_of(value)
    keys = ("p2p_seq_id", "seq_id") if message else ("collective_seq_id", "seq_id")
    completed, started = (
        _time(value, "time_discovered_completed_ns", over),
        _time(value, "time_discovered_started_ns", over),
    )
    return DumpEntry(
        record=_whole(value.get("record_id")), group=group, label=label, verb=verb, message=message,
        peer=int(other[:9]) if mine and other else None, sends=arrow == "->",
        sequence=next((n for key in keys if (n := _whole(value.get(key))) is not None), None),
        state=_state(value, started, completed, over), created=_time(value, "time_created_ns", over),
        started=started, completed=completed, took=_took(value.get("duration_ms"), over),
        bytes_in=_bytes(value, "input", over), bytes_out=_bytes(value, "output", over),
        dtype_in=_dtype(value.get("input_dtypes")), dtype_out=_dtype(value.get("output_dtypes")),
        stack=_stack(value.get("frames")),
    )  # fmt: skip


def _plain(verb: str) -> str:
    """``broadcast`` of ``_broadcast_oop``, ``all_gather_base`` of ``_all_gather_base``."""
    return verb.strip("_").removesuffix("_oop") or verb


def _state(value: Mapping[str, Any], started: int | None, completed: int | None, over: PassedOver) -> State:
    """As it is told. What was retired has ended, also where the backend (gloo) tells nothing else."""
    told = value.get("state")
    if told not in (*STATES, None):
        over.note("states of operations that are not known, told from their times", str(told)[:40])
    if told == "completed" or completed is not None or value.get("retired") is True:
        return "completed"
    return "started" if told == "started" or started is not None else "scheduled"


def _with_states_of_batches(entries: list[DumpEntry]) -> list[DumpEntry]:
    """Entries, of which those begun together have the state and the end of their batch: they have none of
    their own."""
    batches = {one.begun_with: one for one in entries if one.batch}
    found: list[DumpEntry] = []
    for one in entries:
        batch = batches.get(one.begun_with)
        if batch is None or one.batch or one.completed is not None:
            found.append(one)
        else:
            found.append(_replaced(one, batch))
    return found


def _replaced(one: DumpEntry, batch: DumpEntry) -> DumpEntry:
    return replace(one, state=batch.state, started=batch.started, completed=batch.completed, took=batch.took)


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Name and description."""
    told = entry.get("process_group")
    if isinstance(told, list) and told:
        return str(told[0])[:200], str(told[-1])[:200]
    name = str(told if told is not None else entry.get("pg_id", ""))[:200]
    return name, name


def _groups(config: Any, dump: Dump) -> dict[str, DumpGroup]:
    """Groups by their names."""
    found: dict[str, DumpGroup] = {}
    for key, one in config.items() if isinstance(config, dict) else ():
        ranks = members_of(one.get("ranks"), in_order=True) if isinstance(one, dict) else None
        if not isinstance(one, dict) or (ranks is None and str(one.get("ranks")).strip() not in ("[]", "None", "")):
            dump.over.note("groups whose members cannot be", str(key)[:40])
            dump.doubts.append(f"lists members of group {str(key)[:40]} that cannot be")
            continue
        name = str(one.get("name", key))[:200]
        members = tuple(int(rank) for rank in ranks.split(",")) if ranks else ()
        found[name] = DumpGroup(name, str(one.get("desc") or name)[:200], members)
    return found


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None


def _time(entry: Mapping[str, Any], key: str, over: PassedOver) -> int | None:
    """ns since 1970; None for 0, which says that nobody knows."""
    value = entry.get(key)
    if value is None or value == 0:
        return None
    if not is_number(value) or not 0 < value <= LATEST * NS:
        over.note("times that cannot be, taken as unknown", key)
        return None
    return int(value)


def _took(value: Any, over: PassedOver) -> float | None:
    """ns."""
    if value is None:
        return None
    if not is_number(value) or not 0 <= value <= LATEST * 1e3:
        over.note("times that cannot be, taken as unknown", "duration_ms")
        return None
    return value * 1e6


def _bytes(entry: Mapping[str, Any], side: str, over: PassedOver) -> int | None:
    """Of all tensors that go in or come out; None where that is not told."""
    sizes, types = entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")
    if not isinstance(sizes, list) or not sizes:
        return None
    total = 0
    for index, shape in enumerate(sizes):
        kind = str(types[index]) if isinstance(types, list) and index < len(types) else ""
        item = bytes_of_dtype(kind)
        sound = isinstance(shape, list) and len(shape) <= DIMENSIONS and all(_whole(n) is not None for n in shape)
        total = total + prod(shape) * item if sound and item else MOST + 1
        if total > MOST:
            over.note(
                "sizes that cannot be, taken as unknown", f"{side}_sizes of record {entry.get('record_id')!s:.20}"
            )
            return None
    return total


def _dtype(types: Any) -> str:
    return "+".join(dict.fromkeys(str(one)[:20] for one in types[:8])) if isinstance(types, list) else ""


def _stack(frames: Any) -> tuple[str, ...]:
    """``file:line function``, innermost last."""
    if not isinstance(frames, list):
        return ()
    told = [one for one in frames[:FRAMES] if isinstance(one, dict)]
    return tuple(f"{one.get('filename')}:{one.get('line')} {one.get('name')}"[:200] for one in reversed(told))
