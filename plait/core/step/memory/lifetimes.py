"""The table of tensors, read for one stage: what each op makes there, and how many steps read it after
that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeAlias

from plait.core.step.ops import AGAIN_KINDS, FORWARD_KINDS, Branch, Kind, branches_of
from plait.core.step.segments import LAYERS, SegmentGraph, SegmentOp, Site
from plait.core.step.tensors import BRANCH_OWN, BranchStep, tensor_steps

Owner: TypeAlias = int
"""Whose a tensor is: ``OWN``, the segment's; ``BEFORE``, that of the one before; ``DOWN``, an up's down's."""
OWN, BEFORE, DOWN = range(3)
Name: TypeAlias = tuple[Owner, str]
Event: TypeAlias = tuple[Kind, int, bool]
"""An op's kind and part; whether it is the beginning of its collective."""
OTHER_END: Mapping[Site, Site] = {"down": "up", "up": "down"}
"""Of a skip connection."""


_JOINS, _BACK = frozenset((Kind.NORM,)), frozenset((Kind.NORM_AGAIN, Kind.NORM_GRAD))
_REST = frozenset(Kind) - FORWARD_KINDS - AGAIN_KINDS


class Made(NamedTuple):
    """A tensor that a step makes. size: its name among sizes. crosses: it is there until the phase ends, too.
    readers: steps that read it."""

    name: Name
    size: str
    crosses: bool
    readers: int = 0


class TensorUse(NamedTuple):
    """A row of the table, for one op: its work, then what it makes, then what it reads or drops."""

    event: Event
    branch: Branch
    work: str
    makes: tuple[Made, ...]
    reads: tuple[Name, ...]
    drops: tuple[Name, ...]


class _Readers(NamedTuple):
    """Of the tensors of a segment: the names that there are; and how many steps read what a step makes, by
    (whose step, its number, name)."""

    names: Set[str]
    of: Mapping[tuple[Owner, int, str], int]


Program: TypeAlias = Mapping[Event, tuple[TensorUse, ...]]


@cache
def _known() -> dict[object, Program]:
    return {}


class StageTensors:
    """Of all segments of a stage. dropped: the model has dropout; within: norms within attention."""

    def __init__(self, graph: SegmentGraph, *, dropped: bool, within: bool) -> None:
        self.graph, self.dropped, self.within = replace(graph, phase="step"), dropped, within
        self._rows: dict[int, list[TensorUse]] = {}

    def program(self, place: int) -> Program:
        """Steps of every op of a segment. Segments whose neighbours are alike have the same."""
        graph, known = self.graph, _known()
        around = graph.segments[max(0, place - 1) : place + 2]
        alike = [(site, graph.again(site, layer), self._apart(site, layer)) for site, layer in around]
        facts = graph.p2, graph.sequence_parallel, graph.communicates, graph.attention, graph.recompute
        key = place == 0, tuple(alike), facts, self.dropped, self.within
        if key not in known:
            known[key] = self._program(place)
        return known[key]

    def _program(self, place: int) -> Program:
        owners = self._readers(place), self._readers(place - 1) if place else _Readers(set(), {})
        found = dict[Event, tuple[TensorUse, ...]]()
        for number, step in enumerate(self._steps(place)):
            # What crosses to a down is read by no step of this stage; else the down's norm reads it.
            counted = (
                made._replace(readers=not made.crosses if owner == DOWN else owners[owner].of[owner, number, name])
                for made in step.makes
                for owner, name in [made.name]
            )
            makes = tuple(made for made in counted if made.readers or made.crosses)
            reads = tuple((owner, name) for owner, told in step.reads for name in _first(told, owners[owner].names))
            found[step.event] = (*found.get(step.event, ()), step._replace(makes=makes, reads=reads))
        return found

    def _readers(self, place: int) -> _Readers:
        """While a slice alone runs the segment's forward, the next one's norm, what of it runs again, the
        next one's norm again and its gradient, and the segment's backward."""
        site, layer = self.graph.segments[place]
        own = [(OWN, number, step) for number, step in enumerate(self._steps(place))]
        after = [(BEFORE, number, step) for number, step in enumerate(self._steps(place + 1))]
        line = [one for part, kinds in ((own, FORWARD_KINDS), (after, _JOINS), (own, AGAIN_KINDS), (after, _BACK),
                (own, _REST)) for one in part if one[2].event[0] in kinds]  # fmt: skip
        names = {name for owner, _, step in line for (of, name), *_ in step.makes if of == owner}
        if site == "down" and not self._apart(site, layer):
            names.add("g_skip")  # the up makes it
        count, last = dict[tuple[Owner, int, str], int](), dict[str, tuple[Owner, int, str]]()
        for owner, number, step in line:
            read = [name for of, told in (*step.reads, *step.drops) if of == owner for name in _first(told, names)]
            for name in read:
                if name in last:
                    count[last[name]] += 1
            for name in (name for (of, name), *_ in step.makes if of == owner):
                last[name] = owner, number, name
                count[last[name]] = 0
        return _Readers(names, count)

    # ---- rows ----

    def _steps(self, place: int) -> list[TensorUse]:
        """Of all ops of a segment, in the order in which one slice alone would run them. Readers are not
        counted yet; of names ``a|b`` that are read, it is not known which there is."""
        if place not in self._rows:
            self._rows[place] = list(self._told(place)) if place < len(self.graph.segments) else []
        return self._rows[place]

    def _told(self, place: int) -> Iterator[TensorUse]:
        (site, layer), graph = self.graph.segments[place], self.graph
        chain = [(kind, part) for kind in graph.kinds(site, layer) for part in range(graph.parts(site, kind))]
        if shared := graph.shared(site):
            chain = shared.sorted(chain)
        of_segment = self._about_segment(place)
        of_branch = {branch: of_segment | self._about_branch(site, branch) for branch in ("", *branches_of(site))}
        for kind, part in chain:
            of_part = _about_part(part, graph.parts(site, kind))
            sends = graph.collective(SegmentOp(site, layer, kind, 0, part)) is not None
            for sent in (False, True)[: 1 + sends]:
                for one in tensor_steps(site, kind, sent=sent, selective=graph.recompute == "selective"):
                    if kind == Kind.WEIGHT_GRAD and one.number != part // 2:
                        continue
                    about = of_branch[one.branch]
                    if all((word in about or word in of_part) == holds for word, holds in one.when):
                        yield self._step((kind, part, sent), one)

    def _step(self, event: Event, one: BranchStep) -> TensorUse:
        ring, (_, part, _) = self.graph.attention.ring if self.graph.attention else 1, event
        numbers = {"part": part, "before": part - 1, "next": part + 1, "end": ring - 1, "near": ring - 2}

        def named(word: str) -> Name:
            owner = BEFORE if word[0] == "<" else DOWN if word.startswith("down.") else OWN
            name = word.removeprefix("<").removeprefix("down.").format_map(numbers)
            return owner, f"{name}{one.number}" if name in BRANCH_OWN else name

        def made(word: str) -> Made:
            told, _, size = word.partition("=")
            name = told.removesuffix("!")
            return Made(named(name), size or name, crosses=name != told)

        row = one.row
        return TensorUse(
            event, one.branch, row.work, tuple(map(made, row.makes.split())), tuple(map(named, row.reads.split())),
            tuple(map(named, row.drops.split())),
        )  # fmt: skip

    # ---- words of ``tensors.Word`` that hold ----

    def _about_segment(self, place: int) -> set[str]:
        graph, (site, layer) = self.graph, self.graph.segments[place]
        before, level = graph.segments[place - 1] if place else ("", 0)
        return _true(
            normed=site in (*LAYERS, "head"), joins=before in (*LAYERS, "embed"), looked_up=before == "embed",
            embeds=site == "embed", dropped=self.dropped, leaves=site == "leave",
            ends=site == "leave" or before == "enter", apart=self._apart(site, layer),
            scattered=graph.sequence_parallel, again=Kind.CORE_AGAIN in graph.again(site, layer), within=self.within,
            twice=Kind.SECOND_AGAIN in graph.again(site, layer), rejoins=graph.rejoins(site, layer),
            anew=before == "mlp" and graph.rejoins(before, level),
        )  # fmt: skip

    def _about_branch(self, site: Site, branch: Branch) -> set[str]:
        shared = self.graph.shared(site) if branch == "attn" else None
        if shared is None:
            return {"alone"}
        return _true(shared=True, exchanged=shared.ulysses > 1, ring=shared.ring > 1)

    def _apart(self, site: Site, layer: int) -> bool:
        return site in OTHER_END and (OTHER_END[site], layer) not in self.graph.places


@cache
def _about_part(part: int, parts: int) -> set[str]:
    return _true(
        of_second=part % 2 == 0, of_first=part % 2 == 1, first=part == 0, last=part == parts - 1,
        middle=0 < part < parts - 1, later=part > 1, next_to_last=part == parts - 2,
    )  # fmt: skip


def _true(**words: bool) -> set[str]:
    return {word for word, holds in words.items() if holds}


def _first(told: str, names: Set[str]) -> list[str]:
    """Of ``a|b``, what there is."""
    return [name for name in told.split("|") if name in names][:1]
