"""Records of a ring as NumPy columns: spans of a timeline, exposed communication, sums per kind of
op.

The functions are pure. They serve the running rank, step by step, and later readers of a ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from plait.core.record.columns import Coded
from plait.core.record.exposure import AXES, BUSY, ROLES, Exposure, exposures, gaps
from plait.core.record.ring import Name, RecordKind, Ring, RingGroup, verb_and_dtype
from plait.core.record.rollup import BETWEEN, COMMUNICATION, EXPOSED, FILLS, HOST, OPS, PROCESSOR, joined
from plait.core.record.timeline import SpanKind

if TYPE_CHECKING:
    import numpy as np

Bytes = TypeVar("Bytes", int, "np.ndarray")
SPANS: Mapping[RecordKind, SpanKind] = {
    RecordKind.COMPUTE: "compute", RecordKind.WAIT: "wait", RecordKind.IDLE: "idle",
    RecordKind.COLLECTIVE: "comm", RecordKind.JOB: "comm", RecordKind.TRANSFER: "transfer",
}  # fmt: skip
"""Kind of the timeline's span for each record kind that is an op of the plan. Such a record is a
span only if its name has a place (site, layer, slice)."""
OTHER_SPANS: Mapping[RecordKind, SpanKind] = {
    RecordKind.DATA: "data", RecordKind.OPTIMIZER: "optimizer",
    RecordKind.CHECKPOINT: "checkpoint", RecordKind.EVALUATION: "evaluation",
}  # fmt: skip
"""Kind of the timeline's span for each record kind outside of the plan's ops, such as data loading;
it needs no place."""


CP_KINDS = "FAKXDGETSH"
"""Letters of the op kinds of attention (``Kind``) after which ranks of a cp group may
communicate."""
EP_KINDS = tuple("PBVQIDU")
"""Letters of the op kinds of experts (``Kind``) after which ranks of an ep group may communicate."""
AWAITED: Mapping[str, tuple[str, ...]] = {
    "need": ("gather", "publish"), "settle": ("reduce",), "await": ("exchange",),
}  # fmt: skip
"""The first word of the names of sharding's waits, and of the collectives that each waits for.
``need`` waits for collectives of its own unit, ``settle`` for reductions of any unit. Other waits
have the name of their collective."""
UNIT_VERBS = frozenset((*AWAITED, *chain(*AWAITED.values())))
"""The first words of the names of sharding's collectives and waits."""


def sent_bytes(verb: str, whole: Bytes, size: int) -> Bytes:
    """Return the bytes that each of ``size`` ranks sends in a bandwidth-optimal (ring) collective.
    whole: bytes of the collective's larger tensor, or the sum over several."""
    if verb == "rotate":
        return whole
    return whole * (size - 1) // size * (2 if verb == "all_reduce" else 1)


def axis_of(kind: str, name: str) -> str:
    """Return the axis along which a span communicates or waits for communication; empty if it does
    neither.

    >>> axis_of("comm", "gather attn0"), axis_of("wait", "attn0.R0"), axis_of("idle", "0RECV_F0")
    ('dp', 'tp', 'pp')
    >>> axis_of("wait", "attn0.K0"), axis_of("wait", "head.F0"), axis_of("wait", "settle vectors0")
    ('cp', 'tp', 'dp')
    >>> axis_of("comm", "moe3.V0"), axis_of("comm", "moe3.R0")
    ('ep', 'tp')
    """
    if kind in ("idle", "transfer"):
        return "pp"
    if kind in ("comm", "wait"):
        if name.split(" ")[0] in UNIT_VERBS:
            return "dp"
        site, _, kind = name.partition(".")
        if kind[:1] in EP_KINDS and site.startswith("moe"):
            return "ep"
        return "cp" if kind[:1] and kind[0] in CP_KINDS and site.startswith(("attn", "block")) else "tp"
    return ""


@dataclass(frozen=True)
class Records:
    """The records of one rank, as in ``Ring.table``, and the names and groups that their numbers
    refer to."""

    table: np.ndarray
    names: Mapping[int, Name]
    groups: Mapping[int, RingGroup]

    @staticmethod
    def of(ring: Ring) -> Records:
        """Return the records of a ring."""
        return Records(ring.table, ring.names, ring.groups)

    def spans(self, rank: int) -> dict[str, Any]:
        """Return the columns of ``core.record.timeline.Span`` for all ``timed`` records that are
        spans, sorted by step and start. Times are in ns (``start_ns``, ``end_ns``), texts are
        ``Coded``."""
        import numpy as np

        table = self._of_a_timeline
        table = table[np.lexsort((table["started"], table["step"]))]
        numbers, which = np.unique(table["name"], return_inverse=True)
        names = [self.names.get(int(number), Name("")) for number in numbers]
        places = [name.place for name in names]
        kinds = _kind_numbers()[table["kind"]]

        def texts(values: Iterable[str]) -> Coded:
            every = list(values)
            known = {text: code for code, text in enumerate(dict.fromkeys(every))}
            return Coded(list(known), np.array([known[text] for text in every], np.int32)[which])

        def whole(values: Iterable[int]) -> np.ndarray:
            return np.array(list(values), np.int64)[which]

        name = texts(one.text for one in names)
        return {
            "step": table["step"].astype(np.int64),
            "rank": np.full(len(table), rank, dtype=np.int64),
            "kind": Coded(_WORDS, kinds.astype(np.int32)),
            "name": name,
            "seq": _occurrence(table["step"], name.codes.astype(np.int64) * len(_WORDS) + kinds),
            "site": texts(place.site if place else one.text for place, one in zip(places, names, strict=True)),
            "layer": whole(place.layer if place else -1 for place in places),
            "slice": whole(place.slice if place else -1 for place in places),
            "direction": texts(_direction(one) for one in names),
            "start_ns": table["started"],
            "end_ns": table["ended"],
            "bytes": self.sent(table),
        }

    def exposure(self) -> Exposure:
        """Return the exposure of the communication of all axes together, summed over steps."""
        return self._exposures(by_axis=False).get(AXES[0], Exposure(0.0, 0.0))

    def exposure_by_axis(self) -> dict[str, Exposure]:
        """Return the exposure of each axis that communicates, summed over steps."""
        return self._exposures(by_axis=True)

    def _exposures(self, *, by_axis: bool) -> dict[str, Exposure]:
        found = self._by_step(by_axis=by_axis).sum(axis=0) / 1e9
        return {axis: Exposure(*row) for axis, row in zip(AXES, found.tolist(), strict=False) if row[0] > 0}

    def _by_step(self, *, by_axis: bool) -> np.ndarray:
        """Return [steps, axes, 2]: total and exposed ns, from the first step on."""
        import numpy as np

        table = self._of_a_timeline
        axes = self._axes(table) if by_axis else None
        roles = np.array([ROLES.get(word, BUSY) for word in _WORDS])[_kind_numbers()[table["kind"]]]
        return exposures(self._steps(table), roles, axes, table["started"], table["ended"])

    def _steps(self, table: np.ndarray) -> np.ndarray:
        """Return the step numbers of records, counted from the first step of the timeline."""
        steps = table["step"].astype(int)
        return steps - self._of_a_timeline["step"].min(initial=steps[0] if len(steps) else 0)

    def _axes(self, table: np.ndarray) -> np.ndarray:
        """Return each record's index in ``AXES``; 0 if it has no axis."""
        import numpy as np

        codes, which = np.unique(table["name"].astype(np.int64) << 8 | table["kind"], return_inverse=True)
        names = (
            axis_of(_WORDS[_kind_numbers()[code & 255]], self.names.get(code >> 8, Name("")).text)
            for code in codes.tolist()
        )
        return np.array([AXES.index(name) if name in AXES else 0 for name in names], np.int64)[which]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the timeline's spans by kind; overlapping spans each count in
        full."""
        import numpy as np

        table = self._of_a_timeline
        numbers = _kind_numbers()[table["kind"]]
        sums = np.bincount(numbers, table["ended"] - table["started"], len(_WORDS)) / 1e9
        return {_WORDS[number]: float(sums[number]) for number in np.unique(numbers).tolist()}

    def idle(self) -> float | None:
        """Return the seconds in which a stage waited for other stages; None if there are no such
        waits."""
        waited = self._of_a_timeline
        waited = waited[waited["kind"] == RecordKind.IDLE]
        return self._seconds(waited) if len(waited) else None

    def rolled_up(self, rank: int) -> dict[str, Any]:
        """Return the number (n) and the sum, minimum and maximum ns (sum_ns, min_ns, max_ns) of
        records per step, kind, site and direction.

        Texts are ``Coded``. Besides the timeline's spans, the rows cover collectives and messages
        by the label of their group, and ``processor``: the CPU time that the training thread had in
        the step.
        """
        import numpy as np

        table = self.timed
        codes = (table["name"].astype(np.int64) << 20) | (table["kind"].astype(np.int64) << 16) | table["group"]
        found, which = np.unique(codes, return_inverse=True)
        labels = [self._label(code >> 16 & 15, code >> 20, code & 0xFFFF) for code in found.tolist()]
        texts = sorted(set(labels))
        label = np.array([texts.index(one) for one in labels], dtype=np.int64)
        first = int(table["step"].min()) if len(table) else 0
        of_row = (table["step"].astype(np.int64) - first) * len(texts) + label[which]
        order = np.argsort(of_row, kind="stable")
        begins = np.flatnonzero(np.diff(of_row[order], prepend=-1))
        taken, many = (table["ended"] - table["started"])[order], len(begins)
        steps, at = np.divmod(of_row[order[begins]], max(1, len(texts)))

        def words(place: int) -> Coded:
            known = sorted({text[place] for text in texts})
            return Coded(known, np.array([known.index(text[place]) for text in texts], np.int32)[at])

        found = {
            "step": first + steps, "rank": np.full(many, rank, np.int64),
            "kind": words(0), "site": words(1), "direction": words(2), "n": np.diff(begins, append=len(order)),
            "sum_ns": np.add.reduceat(taken, begins), "min_ns": np.minimum.reduceat(taken, begins),
            "max_ns": np.maximum.reduceat(taken, begins),
        }  # fmt: skip
        whole = table[(table["kind"] == RecordKind.STEP) & (table["bytes"] > 0)]
        had = _sum_rows(
            rank, whole["step"].astype(np.int64), PROCESSOR, "", np.ones(len(whole), np.int64), whole["bytes"]
        )
        return joined([found, had, *self._step_sums(rank)])

    def _step_sums(self, rank: int) -> Iterator[dict[str, Any]]:
        """Yield rows that are not sums of spans: communication, its exposed part, time between
        ops."""
        import numpy as np

        table = self._of_a_timeline
        if not len(table):
            return
        first = int(table["step"].min())

        def rows(kind: str, site: str, there: np.ndarray, n: np.ndarray, ns: np.ndarray) -> dict[str, Any]:
            at = np.flatnonzero(there)
            return _sum_rows(rank, first + at, kind, site, n[at], ns[at].astype(np.int64))

        kinds = _kind_numbers()[table["kind"]]
        is_op, fills = (np.isin(kinds, [_WORDS.index(word) for word in words]) for words in (OPS, FILLS))
        if is_op.any():
            own, steps = table[is_op | fills], self._steps(table)
            found = gaps(self._steps(own), own["started"], own["ended"], is_op[is_op | fills])
            yield rows(HOST, BETWEEN, np.bincount(steps[is_op], minlength=len(found[0])), *found)
        total, by_axis = self._by_step(by_axis=False)[:, 0, 0], self._by_step(by_axis=True)
        one = np.ones(len(total), np.int64)
        yield rows(COMMUNICATION, "", np.bincount(self._steps(table)), one, total)
        for axis, still in zip(AXES, by_axis[:, :, 1].T, strict=False):
            yield rows(EXPOSED, axis, still, one, still)

    @cached_property
    def timed(self) -> np.ndarray:
        """The records of a step with a known duration. Excluded are records that have not ended,
        have failed, or have start 0: earlier versions wrote 0 for collectives that ended out of
        order."""
        return self.table[(self.table["ended"] > 0) & (self.table["started"] > 0) & (self.table["step"] >= 0)]

    @cached_property
    def _of_a_timeline(self) -> np.ndarray:
        """Records with a known duration that are spans of the timeline."""
        import numpy as np

        table = self.timed
        kinds = table["kind"]
        known = [number for number, name in list(self.names.items()) if name.place]
        placed = np.zeros(max(self.names, default=0) + 2, dtype=bool)
        placed[known] = True
        of_it = placed.take(table["name"], mode="clip") & (_kind_numbers() > 0)[kinds] | _is_around()[kinds]
        return table[of_it]

    def _label(self, kind: int, name: int, group: int) -> tuple[str, str, str]:
        """Return kind, site and direction as texts."""
        found = self.names.get(name, Name(""))
        if found.place and (word := SPANS.get(RecordKind(kind))):
            return word, found.place.site, _direction(found)
        where = self.groups[group].label if group in self.groups else ""
        return RecordKind(kind).name.lower(), where, ""

    def sent(self, table: np.ndarray) -> np.ndarray:
        """Return the bytes that this rank sent for each record of ``table``."""
        import numpy as np

        sent = table["bytes"].copy()
        collective = table["kind"] == RecordKind.COLLECTIVE
        calls = (table["call"] & 15).astype(np.int64) << 16 | table["group"]
        for call in np.unique(calls[collective]).tolist():
            rows = collective & (calls == call)
            verb, group = call >> 16, call & 0xFFFF
            size = len(self.groups[group].ranks) if group in self.groups else 1
            sent[rows] = sent_bytes(verb_and_dtype(verb)[0], sent[rows], size)
        return sent

    @staticmethod
    def _seconds(table: np.ndarray) -> float:
        return float((table["ended"] - table["started"]).sum()) / 1e9


def _sum_rows(rank: int, steps: np.ndarray, kind: str, site: str, n: np.ndarray, ns: np.ndarray) -> dict[str, Any]:
    """Return one row of a roll-up for each of ``steps``: the counts ``n`` and the durations
    ``ns``."""
    import numpy as np

    none = np.zeros(len(steps), np.int32)
    texts = {name: Coded([text], none) for name, text in (("kind", kind), ("site", site), ("direction", ""))}
    return {
        "step": steps, "rank": np.full(len(steps), rank, np.int64), **texts, "n": n,
        "sum_ns": ns, "min_ns": ns, "max_ns": ns,
    }  # fmt: skip


def _direction(name: Name) -> str:
    return ("forward" if name.place.forward else "backward") if name.place else ""


_WORDS = ("", *dict.fromkeys((*SPANS.values(), *OTHER_SPANS.values())))


@cache
def _kind_numbers() -> np.ndarray:
    """Return an array from record kinds to indices in ``_WORDS``; index 0 is no span."""
    import numpy as np

    words = [
        SPANS.get(RecordKind(kind)) or OTHER_SPANS.get(RecordKind(kind)) or "" if kind else ""
        for kind in range(max(RecordKind) + 1)
    ]
    return np.array([_WORDS.index(word) for word in words])


@cache
def _is_around() -> np.ndarray:
    """Return an array from record kinds to booleans: True for kinds in ``OTHER_SPANS``."""
    import numpy as np

    return np.isin(np.arange(max(RecordKind) + 1), list(OTHER_SPANS))


def _occurrence(steps: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Return for each row the number of earlier rows with the same step and the same number in
    ``same``."""
    import numpy as np

    order = np.lexsort((np.arange(len(steps)), same, steps))
    first = np.ones(len(order), dtype=bool)
    first[1:] = (steps[order][1:] != steps[order][:-1]) | (same[order][1:] != same[order][:-1])
    at = np.arange(len(order))
    seq = np.empty(len(order), dtype=np.int64)
    seq[order] = at - np.maximum.accumulate(np.where(first, at, 0))
    return seq
