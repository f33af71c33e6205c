"""Reader of PyTorch's flight recorder dumps: one rank's collectives and messages, completed,
started and scheduled.

The recorder writes pickles by default, from which no code is run (``core.base.codec.pickles``), or
JSON (``torch._C._distributed_c10d._dump_fr_trace_json``), which has no stacks.

| content                                                          | handling                               |
|------------------------------------------------------------------|----------------------------------------|
| ``entries[]``: ``process_group``, ``profiling_name``, ``state``, | read, of versions 1 and 2; ``seq_id``  |
| ``collective_seq_id``, ``p2p_seq_id``, ``is_p2p``, ``retired``,  | of version 1, too                      |
| ``record_id``, ``input_sizes``, ``output_sizes``, their dtypes,  |                                        |
| ``time_*_ns``, ``duration_ms``, ``frames``                       |                                        |
| ``pg_config``: ``name``, ``desc``, ``ranks``                     | read: the members of process groups    |
| a time of 0 or null                                              | unknown, or still to come              |
| ``nccl:coalesced`` and its parts, which have no state of their   | read: the parts get the state of the   |
| own                                                              | coalesced operation                    |
| ``pg_status``, ``nccl_comm_state``, ``thread_*``, ``op_id``,     | ignored                                |
| ``timeout_ms``, ``comm_lib_version``                             |                                        |
| entries that are no objects or name no operation; impossible     | ignored, counted                       |
| times, sizes, states and groups; entries that the recorder has   |                                        |
| overwritten                                                      |                                        |
| a pickle of more than plain data; a dump of an unknown rank      | refused                                |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

import polars as pl

from plait.core.base.codec.json_text import is_list, is_table
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import is_number
from plait.formats.base.recordings import FOREIGN, LATEST, NS, ForeignSpans, axis_of, bytes_of_dtype, members_of

State = Literal["scheduled", "started", "completed"]
STATES: tuple[State, ...] = ("scheduled", "started", "completed")
VERSIONS = ("1", "2")
"""Known major versions of the format (before the dot)."""
DIMENSIONS = 64
"""The largest number of a tensor's dimensions: PyTorch's own limit."""
MOST = 2**53
"""The largest number of bytes, and the largest sequence number."""
FRAMES = 3
"""The number of innermost stack frames that are kept."""
MOST_ENTRIES = 50_000
"""The largest number of entries in a dump; a recorder keeps 2,000 by default."""
MOST_SIZES = 2_000_000
"""The largest number of tensor sizes in all entries of a dump."""
_VERB = re.compile(r"(?:\w+:)?(\w+)(?: (\d+)(->|<-)(\d+))?$")


class DumpGroup(NamedTuple):
    """A process group in a dump. name: its name in PyTorch. label: its description. ranks: members
    in their order; empty if the dump lacks them."""

    name: str
    label: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpEntry:
    """An operation on one rank. Times are nanoseconds since 1970, sizes bytes; None if unknown.

    record: the entry's number. group, label: name and description of the process group. verb: the
    operation. message: True for point-to-point. peer: for a message, the other end's rank within
    the group; None for a collective. sends: True for a send. took: duration in nanoseconds. stack:
    frames, the innermost last."""

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
        """True if the operation is not known to be completed."""
        return self.state != "completed"

    @property
    def batch(self) -> bool:
        """True if the entry is a coalesced operation, whose parts are entries of their own."""
        return self.verb.lower().endswith("coalesced") and self.bytes_in is None and self.bytes_out is None

    @property
    def batch_key(self) -> tuple[str, bool, int | None]:
        """The key shared by a coalesced operation and its parts."""
        return self.group, self.message, self.sequence


@dataclass
class Dump:
    """One rank's dump while it is read. over: ignored input. recorded_rank: the rank in the file.
    version: the format's. groups: process groups by name. sizes: tensors so far. doubts: impossible
    statements on ranks, as ``lists ...``."""

    over: IgnoredInput
    recorded_rank: Any = None
    version: str = ""
    groups: dict[str, DumpGroup] = field(default_factory=dict[str, DumpGroup])
    entries: list[DumpEntry] = field(default_factory=list[DumpEntry])
    sizes: int = 0
    doubts: list[str] = field(default_factory=list[str])

    def add(self, value: Any) -> None:
        """Add one element of the dump's ``entries``. Raises ValueError for too many entries or
        tensors."""
        if len(self.entries) >= MOST_ENTRIES:
            raise ValueError(f"it has more than {MOST_ENTRIES} entries, the most that are read")
        told = [value.get(key) for key in ("input_sizes", "output_sizes")] if is_table(value) else []
        self.sizes += sum(len(one) for one in told if is_list(one))
        if self.sizes > MOST_SIZES:
            raise ValueError(f"it has sizes of more than {MOST_SIZES} tensors, the most that are read")
        found = _entry(value, self.over) if is_table(value) else None
        if found is None:
            self.over.note("entries that are no objects or name no operation")
        else:
            self.entries.append(found)

    def finish(self, header: Mapping[str, Any]) -> None:
        """Read the header, count overwritten entries, and give parts the state of their coalesced
        operation."""
        self.recorded_rank, self.version = header.get("rank"), str(header.get("version"))[:20]
        self.groups = _groups(header.get("pg_config"), self)
        records = [one.record for one in self.entries if one.record is not None]
        if records and (lost := max(records) + 1 - len(set(records))) > 0:
            self.over.note("entries that the recorder had overwritten", f"the first kept is {min(records)}", lost)
        self.entries = _with_states_of_batches(self.entries)

    def unmatchable(self, rank: int) -> list[DumpEntry]:
        """Return open operations that cannot be matched with other ranks: messages with an unknown
        end, coalesced operations without parts in the dump, and collectives without a sequence
        number."""
        parts = {one.batch_key for one in self.entries if not one.batch}
        return [
            one
            for one in self.entries
            if one.open
            and not (one.batch and one.batch_key in parts)
            and (ends_of(one, self, rank) is None if one.message else one.sequence is None)
        ]

    def waiting(self, rank: int) -> int:
        """Return the number of open operations; a coalesced operation counts only if its parts are
        missing."""
        parts = sum(one.open and not one.batch for one in self.entries)
        return parts + sum(one.batch for one in self.unmatchable(rank))

    @property
    def group_ranks(self) -> set[int]:
        """All ranks in the dump's process groups."""
        return {rank for group in self.groups.values() for rank in group.ranks}


def is_dump(header: Mapping[str, Any]) -> bool:
    """True if a JSON object is a flight recorder dump. A rank without operations so far has no
    ``entries``."""
    return "version" in header and any(key in header for key in ("entries", "pg_config", "pg_status"))


def dump_spans(dump: Dump, rank: int) -> ForeignSpans:
    """Return the completed operations with known times as spans: from the discovered start, else
    from enqueuing, to the discovered end."""
    since = min((at for one in dump.entries for at in (one.created, one.started) if at), default=0)
    rows: list[tuple[Any, ...]] = []
    for one in dump.entries:
        start, end = one.started or one.created, one.completed
        if end is None and start is not None and one.took is not None:
            end = start + round(one.took)
        if one.open or one.batch:
            continue
        if start is None or end is None or end < start:
            dump.over.note("completed operations without usable times", one.verb)
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
    """Return a message's sending and receiving rank; None for a collective, and if an end is
    unknown."""
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


def _entry(value: Mapping[str, Any], over: IgnoredInput) -> DumpEntry | None:
    named = _VERB.match(str(value.get("profiling_name") or "")[:200])
    if named is None:
        return None
    verb, mine, arrow, other = _plain(named[1]), named[2], named[3], named[4]
    message = value.get("is_p2p") is True or arrow is not None
    group, label = _group_of(value)
    keys = ("p2p_seq_id", "seq_id") if message else ("collective_seq_id", "seq_id")
    created, started, completed = (
        _time(value, f"time_{when}_ns", over) for when in ("created", "discovered_started", "discovered_completed")
    )
    took = _known(value, "duration_ms", LATEST * 1e3, over)
    return DumpEntry(
        record=_whole(value.get("record_id")), group=group, label=label, verb=verb, message=message,
        peer=int(other[:9]) if mine and other else None, sends=arrow == "->",
        sequence=next((n for key in keys if (n := _whole(value.get(key))) is not None), None),
        state=_state(value, started, completed, over), created=created,
        started=started, completed=completed, took=None if took is None else took * 1e6,
        bytes_in=_bytes(value, "input", over), bytes_out=_bytes(value, "output", over),
        dtype_in=_dtype(value.get("input_dtypes")), dtype_out=_dtype(value.get("output_dtypes")),
        stack=_stack(value.get("frames")),
    )  # fmt: skip


def _plain(verb: str) -> str:
    """Return the plain verb: ``broadcast`` for ``_broadcast_oop``, ``all_gather_base`` for
    ``_all_gather_base``."""
    return verb.strip("_").removesuffix("_oop") or verb


def _state(value: Mapping[str, Any], started: int | None, completed: int | None, over: IgnoredInput) -> State:
    """Return an entry's state. A retired entry is completed, even if the backend (gloo) records no
    state."""
    told = value.get("state")
    if told not in (*STATES, None):
        over.note("unknown states of operations, inferred from their times", str(told)[:40])
    if told == "completed" or completed is not None or value.get("retired") is True:
        return "completed"
    return "started" if told == "started" or started is not None else "scheduled"


def _with_states_of_batches(entries: list[DumpEntry]) -> list[DumpEntry]:
    """Return the entries; parts of a coalesced operation have no state of their own and get its
    state and times."""
    batches = {one.batch_key: one for one in entries if one.batch}
    found: list[DumpEntry] = []
    for one in entries:
        batch = batches.get(one.batch_key)
        if batch is None or one.batch or one.completed is not None:
            found.append(one)
        else:
            found.append(_replaced(one, batch))
    return found


def _replaced(one: DumpEntry, batch: DumpEntry) -> DumpEntry:
    return replace(one, state=batch.state, started=batch.started, completed=batch.completed, took=batch.took)


def _group_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and description of an entry's process group."""
    told = entry.get("process_group")
    if is_list(told) and told:
        return str(told[0])[:200], str(told[-1])[:200]
    name = str(told if told is not None else entry.get("pg_id", ""))[:200]
    return name, name


def _groups(config: Any, dump: Dump) -> dict[str, DumpGroup]:
    """Return the process groups by name; impossible groups are counted and noted as doubts."""
    found: dict[str, DumpGroup] = {}
    for key, one in config.items() if is_table(config) else ():
        ranks = members_of(one.get("ranks")) if is_table(one) else None
        if not is_table(one) or (ranks is None and str(one.get("ranks")).strip() not in ("[]", "None", "")):
            dump.over.note("groups with impossible members", str(key)[:40])
            dump.doubts.append(f"lists members of group {str(key)[:40]} that cannot be")
            continue
        name = str(one.get("name", key))[:200]
        found[name] = DumpGroup(name, str(one.get("desc") or name)[:200], ranks or ())
    return found


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None


def _known(entry: Mapping[str, Any], key: str, most: float, over: IgnoredInput) -> float | None:
    value = entry.get(key)
    if value is not None and not (is_number(value) and 0 <= value <= most):
        over.note("impossible times, taken as unknown", key)
        return None
    return value


def _time(entry: Mapping[str, Any], key: str, over: IgnoredInput) -> int | None:
    """Return nanoseconds since 1970; None for 0, which means unknown."""
    value = _known(entry, key, LATEST * NS, over)
    return int(value) if value else None


def _bytes(entry: Mapping[str, Any], side: str, over: IgnoredInput) -> int | None:
    """Return the bytes of all tensors of a side ("input" or "output"); None if unknown."""
    sizes, types = entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")
    if not is_list(sizes) or not sizes:
        return None
    total = 0
    for index, shape in enumerate(sizes):
        kind = str(types[index]) if is_list(types) and index < len(types) else ""
        item = bytes_of_dtype(kind)
        sound = is_list(shape) and len(shape) <= DIMENSIONS and all(_whole(n) is not None for n in shape)
        total = total + prod(shape) * item if sound and item else MOST + 1
        if total > MOST:
            over.note("impossible sizes, taken as unknown", f"{side}_sizes of record {entry.get('record_id')!s:.20}")
            return None
    return total


def _dtype(types: Any) -> str:
    return "+".join(dict.fromkeys(str(one)[:20] for one in types[:8])) if is_list(types) else ""


def _stack(frames: Any) -> tuple[str, ...]:
    """Return the stack's frames as ``file:line function``, the innermost last."""
    if not is_list(frames):
        return ()
    told = [one for one in frames[:FRAMES] if is_table(one)]
    return tuple(f"{one.get('filename')}:{one.get('line')} {one.get('name')}"[:200] for one in reversed(told))
