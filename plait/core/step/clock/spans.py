"""Spans of a simulated step: what the recorder would write, with the same keys and the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plait.core.parallel.sharding import VECTORS, Unit
from plait.core.parallel.strategy import slice_sizes
from plait.core.record.timeline import OpSpan, Span, SpanKind, Timeline, spans_of
from plait.core.step.clock.course import Course
from plait.core.step.clock.phase import LAST, Label
from plait.core.step.clock.pipeline import Simulation
from plait.core.step.schedule import Op, ends
from plait.core.step.unit_traffic import UnitTraffic
from plait.core.step.units import UnitAction, UnitOp, UnitVerb

_VERBS: Mapping[str, UnitVerb] = {
    "need": "need", "gather": "gather", "publish": "publish", "reduce": "reduce", LAST: "reduce", "settle": "settle",
}  # fmt: skip
_KINDS: Mapping[str, SpanKind] = {"compute": "compute", "comm": "comm", "wait": "wait"}


def timeline(simulation: Simulation, steps: Sequence[int], ranks: Sequence[int] | None) -> Timeline:
    """The spans of ``ranks`` (None: of all) in ``steps``. bytes: of embedding rows, which depend on the
    tokens, at most."""
    whole = simulation.step
    runs = {steady: simulation.run(steady=steady) for steady in {step > 0 for step in steps}}
    found: list[Span] = []
    for place, mesh in enumerate(whole.layout.meshes):
        shares = slice_sizes(whole.workload.micro_batch, mesh.dp)

        known: dict[tuple[bool, int], list[OpSpan]] = {}
        for step in steps:
            for rank in mesh.ranks if ranks is None else set(mesh.ranks).intersection(ranks):
                key = step > 0, shares[mesh.coordinates(rank)["dp"]]
                if key not in known:
                    known[key] = list(_PlaceSpans(simulation, runs[key[0]].courses[place], key[1]).all())
                found += spans_of(step, rank, known[key])
    return Timeline(tuple(found), simulation.key())


class _PlaceSpans:
    """Spans of one rank of a place, which has ``share`` sequences of every micro-batch."""

    def __init__(self, simulation: Simulation, course: Course, share: int) -> None:
        self.step, self.course, self.place, self.share = simulation.step, course, course.place, share
        self.units = self.place.units

    def all(self) -> Iterator[OpSpan]:
        """All spans, unordered."""
        yield from self._inside()
        yield from self._waits()
        yield from self._units()
        for transfer, sends, start, end in self.course.moved:
            send, receive = ends(transfer)
            if sends:
                yield OpSpan(send, "transfer", start, end, self._tile(send))
            else:
                yield OpSpan(receive, "idle", start, end)

    def _inside(self) -> Iterator[OpSpan]:
        """Spans of segment ops and their collectives."""
        for op, start, scale, outcome in self.course.turns:
            if op is None:
                continue
            at = self.place.order[op.stage]
            actions = self.course.lists.of(self.place, at, op.work.phase)
            traffic = self.place.traffic(at, self.share)
            for position, kind, begin, end in outcome.done:
                action = actions[position]
                assert not isinstance(action, UnitAction)
                sent = traffic.sent(action.op) if kind == "comm" else 0
                yield OpSpan(action.op, _KINDS[kind], start + begin * scale, start + end * scale, sent)

    def _waits(self) -> Iterator[OpSpan]:
        """Spans of waits for units."""
        for _, moment, scale, outcome in self.course.turns:
            for label, start, end in outcome.waits:
                yield OpSpan(self._named(label), "wait", moment + start * scale, moment + end * scale)

    def _units(self) -> Iterator[OpSpan]:
        """Spans of units' collectives: one stream, one after the other."""
        sent = [
            (label, moment + at * scale)
            for _, moment, scale, outcome in self.course.turns
            for label, at in outcome.sent
        ]
        ended = [moment + at * scale for moment, scale, several in self.course.ended for at in several]
        before = 0.0
        for (label, started), end in zip(sent, ended, strict=True):
            yield OpSpan(self._named(label), "comm", max(started, before), end, self._sent(label))
            before = end

    def _named(self, label: Label) -> UnitOp:
        verb, number, forward = label
        unit: Unit = VECTORS if verb == "settle" else self.units[number].unit
        return UnitOp(_VERBS[verb], unit, forward)

    def _sent(self, label: Label) -> int:
        verb, number, forward = label
        unit: UnitTraffic = self.units[number]
        match verb:
            case "gather":
                found = unit.gather(forward=forward)
            case "publish":
                found = unit.publish()
            case _:
                found = unit.reduce(last=verb == LAST)
        return sum(one.bytes for one in found)

    def _tile(self, op: Op) -> int:
        return self.step.crossing_bytes(self.place.index, (op.stage, op.peer), self.share)
