"""Records of a ring as columns: spans of a timeline, communication that was hidden, sums per kind of op.

Pure functions over NumPy arrays, which serve the running rank, step by step, as well as whoever reads a ring
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.core.ring import Kind, Name, Ring, RingGroup, verb_and_dtype
from plait.core.timeline import Hidden, SpanKind

if TYPE_CHECKING:
    import numpy as np

SPANS: Mapping[Kind, SpanKind] = {
    Kind.COMPUTE: "compute", Kind.WAIT: "wait", Kind.IDLE: "idle", Kind.COLLECTIVE: "comm", Kind.JOB: "comm",
    Kind.TRANSFER: "transfer",
}  # fmt: skip
"""What records are in a timeline, if their names have places."""
AROUND: Mapping[Kind, SpanKind] = {
    Kind.DATA: "data", Kind.OPTIMIZER: "optimizer", Kind.CHECKPOINT: "checkpoint", Kind.EVALUATION: "evaluation",
}  # fmt: skip
"""And without: what a rank does beside its plan's ops."""


def sent_bytes(verb: str, whole: int, size: int) -> int:
    """Bytes each of ``size`` ranks sends for a bandwidth-optimal (ring) collective; whole: bytes of its
    larger tensor."""
    if verb == "rotate":
        return whole
    return whole * (size - 1) // size * (2 if verb == "all_reduce" else 1)


@dataclass(frozen=True)
class Records:
    """Records of one rank, as in ``Ring.table``, and what their numbers stand for."""

    table: np.ndarray
    names: Mapping[int, Name]
    groups: Mapping[int, RingGroup]

    @staticmethod
    def of(ring: Ring) -> Records:
        """Those of a ring."""
        return Records(ring.table, ring.names, ring.groups)

    def spans(self, rank: int) -> dict[str, np.ndarray]:
        """The columns of ``plait.core.timeline.Span``, times in ns (``start_ns``, ``end_ns``), in order of
        steps and starts. What has not ended, has failed, or belongs to no step is left out."""
        import numpy as np

        table, kinds = self._of_a_timeline()
        order = np.lexsort((table["started"], table["step"]))
        table, kinds = table[order], kinds[order]
        numbers, which = np.unique(table["name"], return_inverse=True)
        names = [self.names.get(int(number), Name("")) for number in numbers]
        places = [name.place for name in names]

        def each(values: Iterable[Any], kind: Any) -> np.ndarray:
            return np.array(list(values), dtype=kind)[which] if len(names) else np.array([], dtype=kind)

        texts = each((name.text for name in names), str)
        return {
            "step": table["step"].astype(np.int64),
            "rank": np.full(len(table), rank, dtype=np.int64),
            "kind": kinds,
            "name": texts,
            "seq": _occurrence(table["step"], kinds, texts),
            "site": each((place.site if place else name.text for place, name in zip(places, names, strict=True)), str),
            "layer": each((place.layer if place else -1 for place in places), np.int64),
            "slice": each((place.slice if place else -1 for place in places), np.int64),
            "direction": each((_direction(name) for name in names), str),
            "start_ns": table["started"],
            "end_ns": table["ended"],
            "bytes": self.sent(table),
        }

    def hidden(self) -> Hidden:
        """Communication of the ops of a plan, as ``plait.core.timeline.hidden`` has it of one rank's step."""
        import numpy as np

        table, kinds = self._of_a_timeline()
        travel = np.sort(table[kinds == "comm"][["started", "ended"]], order="started")
        ended = np.maximum.accumulate(travel["ended"]) if len(travel) else travel["ended"]
        busy = np.maximum(0, travel["ended"][1:] - np.maximum(travel["started"][1:], ended[:-1])).sum()
        total = busy + (travel["ended"][:1] - travel["started"][:1]).sum()
        return Hidden(float(total) / 1e9, self._seconds(table[kinds == "wait"]))

    def idle(self) -> float | None:
        """Seconds in which a stage waited for others; None where none ever waits."""
        table, kinds = self._of_a_timeline()
        waited = table[kinds == "idle"]
        return self._seconds(waited) if len(waited) else None

    def rolled_up(self, rank: int) -> dict[str, np.ndarray]:
        """Per step, kind, site and direction: how many (n), and the sum, least and most ns (sum_ns, min_ns,
        max_ns). Beside what is in the timeline, collectives and messages by the label of their group."""
        import numpy as np

        table = self.table[(self.table["ended"] > 0) & (self.table["step"] >= 0) & (self.table["started"] > 0)]
        codes = (table["name"].astype(np.int64) << 20) | (table["kind"].astype(np.int64) << 16) | table["group"]
        found, which = np.unique(codes, return_inverse=True)
        labels = [self._label(code >> 16 & 15, code >> 20, code & 0xFFFF) for code in found.tolist()]
        texts = sorted(set(labels))
        label = np.array([texts.index(one) for one in labels], dtype=np.int64)
        first = int(table["step"].min()) if len(table) else 0
        of_row = (table["step"].astype(np.int64) - first) * len(texts) + label[which]
        rows, of = np.unique(of_row, return_inverse=True)
        taken, many = table["ended"] - table["started"], len(rows)
        least, most = np.full(many, np.iinfo(np.int64).max), np.zeros(many, np.int64)
        total = np.zeros(many, np.int64)
        np.add.at(total, of, taken)
        np.minimum.at(least, of, taken)
        np.maximum.at(most, of, taken)
        kind, site, direction = (np.array([texts[at % len(texts)][i] for at in rows], dtype=str) for i in range(3))
        return {
            "step": first + rows // max(1, len(texts)), "rank": np.full(many, rank, np.int64),
            "kind": kind, "site": site, "direction": direction, "n": np.bincount(of, minlength=many),
            "sum_ns": total, "min_ns": least, "max_ns": most,
        }  # fmt: skip

    def _of_a_timeline(self) -> tuple[np.ndarray, np.ndarray]:
        """The records that are spans, and their kinds in words."""
        import numpy as np

        table = self.table[(self.table["ended"] > 0) & (self.table["step"] >= 0)]
        placed = np.array([number for number, name in list(self.names.items()) if name.place], dtype=np.int64)
        words = np.array(["", *(SPANS.get(kind) or AROUND.get(kind) or "" for kind in Kind)])
        kinds, has_place = words[table["kind"]], np.isin(table["name"], placed)
        wanted = (kinds != "") & (has_place | np.isin(table["kind"], list(AROUND)))
        return table[wanted], kinds[wanted]

    def _label(self, kind: int, name: int, group: int) -> tuple[str, str, str]:
        """Kind, site and direction in words."""
        found = self.names.get(name, Name(""))
        if found.place and (word := SPANS.get(Kind(kind))):
            return word, found.place.site, _direction(found)
        where = self.groups[group].label if group in self.groups else ""
        return Kind(kind).name.lower(), where, ""

    def sent(self, table: np.ndarray) -> np.ndarray:
        """Bytes that this rank sent."""
        import numpy as np

        sent = table["bytes"].copy()
        calls = np.stack([table["call"] & 15, table["group"]])[:, table["kind"] == Kind.COLLECTIVE]
        for verb, group in set(zip(*calls.tolist(), strict=True)):
            rows = (table["kind"] == Kind.COLLECTIVE) & (table["call"] & 15 == verb) & (table["group"] == group)
            size = len(self.groups[group].ranks) if group in self.groups else 1
            verb_name, _ = verb_and_dtype(verb)
            sent[rows] = [sent_bytes(verb_name, whole, size) for whole in sent[rows].tolist()]
        return sent

    @staticmethod
    def _seconds(table: np.ndarray) -> float:
        return float((table["ended"] - table["started"]).sum()) / 1e9


def _direction(name: Name) -> str:
    return ("forward" if name.place.forward else "backward") if name.place else ""


def _occurrence(steps: np.ndarray, kinds: np.ndarray, names: np.ndarray) -> np.ndarray:
    """How often each row's step, kind and name came before."""
    import numpy as np

    _, kind = np.unique(kinds, return_inverse=True)
    _, name = np.unique(names, return_inverse=True)
    order = np.lexsort((np.arange(len(steps)), name, kind, steps))
    ordered = np.stack([steps[order], kind[order], name[order]])
    first = np.ones(len(order), dtype=bool)
    first[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    at = np.arange(len(order))
    seq = np.empty(len(order), dtype=np.int64)
    seq[order] = at - np.maximum.accumulate(np.where(first, at, 0))
    return seq
