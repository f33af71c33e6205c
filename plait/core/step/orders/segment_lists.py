"""Lists of segment actions: their text form, whether they are legal, and the plain orders.

>>> actions = sync_order(SegmentGraph(num_layers=1, p1=2))
>>> parse(" ".join(map(str, actions))) == actions
True
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import cast

from plait.core.base.errors import ScheduleError
from plait.core.step.attention_ops import KEEPS_GOING
from plait.core.step.seconds.segment_costs import NumberedOps
from plait.core.step.segments import SIGNS, Action, Kind, SegmentGraph, SegmentOp, Site, Verb, needs_table

_VERBS = {sign: verb for verb, sign in SIGNS.items()}
_WORD = re.compile(
    rf"([<>]?)(?:(attn|mlp|block|down|up)(\d+)|(embed|enter|head|leave))\.({'|'.join(Kind)})(\d+)(?:\.(\d+))?"
)


def parse(text: str) -> list[Action]:
    """The actions of a text form. Raises ScheduleError naming the word that is none."""
    actions: list[Action] = []
    for word in text.split():
        match = _WORD.fullmatch(word)
        if not match:
            raise ScheduleError(f"'{word}' is not a segment action; one looks like attn3.F0, >mlp0.R1.1 or <head.C0")
        sign, site, layer, end, kind, at, part = match.groups()
        op = SegmentOp(cast(Site, site or end), int(layer or 0), Kind(kind), int(at), int(part or 0))
        actions.append(Action(cast(Verb, _VERBS[sign]), op))
    return actions


def check(graph: SegmentGraph, actions: Sequence[Action]) -> None:
    """Raise ScheduleError, naming the op, unless ``actions`` runs the whole graph legally.

    Every op once; nothing before what it needs; every collective started after its op, awaited once, and
    awaited before anybody reads its result.
    """
    needs = needs_table(graph)
    done: dict[Verb, set[SegmentOp]] = {"run": set(), "start": set(), "wait": set()}
    for verb, op in actions:
        if op not in needs:
            raise ScheduleError(
                f"{op} does not exist in phase {graph.phase} of {graph.num_layers} layers, "
                f"p1 = {graph.p1}, p2 = {graph.p2}"
            )
        if op in done[verb]:
            raise ScheduleError(f"{Action(verb, op)} stands twice")
        if verb == "run":
            for need in needs[op]:
                if need.op not in done["run"]:
                    raise ScheduleError(f"{op} runs before {need.op}, which it needs")
                if need.collective and need.op not in done["wait"]:
                    raise ScheduleError(f"{op} reads the result of {need.op} before its collective is awaited")
        elif graph.collective(op) is None:
            raise ScheduleError(f"{Action(verb, op)}: {op} has no collective")
        elif op not in done["run" if verb == "start" else "start"]:
            raise ScheduleError(f"{Action(verb, op)} stands before {'the op' if verb == 'start' else 'its start'}")
        done[verb].add(op)
    _check_complete(graph, done)


def _check_complete(graph: SegmentGraph, done: dict[Verb, set[SegmentOp]]) -> None:
    for op in graph.ops():
        if op not in done["run"]:
            raise ScheduleError(f"{op} never runs")
        if graph.collective(op) and op not in done["wait"]:
            raise ScheduleError(f"the collective of {op} is never {'awaited' if op in done['start'] else 'started'}")


def sync_order(graph: SegmentGraph) -> list[Action]:
    """Plain tensor parallelism: every collective is awaited where it starts."""
    actions: list[Action] = []
    for op in graph.ops():
        actions.append(Action("run", op))
        if graph.collective(op):
            actions += [Action("start", op), Action("wait", op)]
    return actions


def async_order(graph: SegmentGraph) -> list[Action]:
    """Megatron-LM's overlap: a backward collective is hidden behind its own sublayer's weight gradients
    only; a ring's next keys and values behind attention to those that are here."""
    return insert_waits(graph, graph.ops(), late=lambda op: op.kind == Kind.FIRST_GRAD or op.kind in KEEPS_GOING)


def fixed_order(graph: SegmentGraph) -> list[Action]:
    """Domino's own interleaving (arXiv 2409.15241, sections 4.1.1 and 4.1.2, figures 7 and 8).

    Slices take turns segment by segment, and a collective is awaited where its result is read. An input's
    gradient comes before the weight's. The backward of a segment's norm comes after all slices, so that a
    slice's reduction travels while the others compute.
    """
    turns = groupby(graph.ops(), key=lambda op: (op.site, op.layer, op.forward))
    return insert_waits(graph, [op for _, each in turns for op in sorted(each, key=_joins)])


def _joins(op: SegmentOp) -> bool:
    return op.kind == Kind.NORM_GRAD


def insert_waits(
    graph: SegmentGraph, order: Iterable[SegmentOp], late: Callable[[SegmentOp], bool] = lambda _: True
) -> list[Action]:
    """Actions for an order of ops.

    A collective starts right after its op. It is awaited just before the first op that reads its result, so
    that it overlaps the computation in between; where ``late`` says no, it is awaited at once. One that
    nobody in this phase reads is awaited at the end of the list.
    """
    numbered = NumberedOps(graph)
    number = {op: i for i, op in enumerate(numbered.ops)}
    return with_waits(numbered, [number[op] for op in order], late)


def with_waits(
    numbered: NumberedOps, order: Iterable[int], late: Callable[[SegmentOp], bool] = lambda _: True
) -> list[Action]:
    """Actions as ``insert_waits`` gives them, for numbers of ops."""
    ops, needs, travels = numbered.ops, numbered.needs, numbered.travels
    pending: dict[int, None] = {}  # started and not awaited, in the order in which they started
    actions: list[Action] = []
    for i in order:
        for source, collective in needs[i]:
            if collective and source in pending:
                del pending[source]
                actions.append(Action("wait", ops[source]))
        actions.append(Action("run", ops[i]))
        if travels[i]:
            actions.append(Action("start", ops[i]))
            if late(ops[i]):
                pending[i] = None
            else:
                actions.append(Action("wait", ops[i]))
    return actions + [Action("wait", ops[source]) for source in pending]
