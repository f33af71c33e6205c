"""The tables of a plan's file, key by key: one that was written or changed by hand is refused by file, key
and value before anything is made of it.

The values that a plan consists of check themselves what they mean together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from pydantic import FailFast, Field, ValidationError, create_model

from plait.core.base.codec.explain import explain
from plait.core.base.codec.section import Count, Natural, Section
from plait.core.reshard.plan import Way

Numbers = Annotated[tuple[Natural, ...], Field(strict=False), FailFast()]
Pair = Annotated[tuple[Count, Count], Field(strict=False)]
Nanoseconds = Annotated[int, Field(ge=0)]


class Degrees(Section):
    """The layout."""

    degrees: Annotated[tuple[Pair, ...], Field(strict=False, min_length=1), FailFast()]
    cp: Count


class ReshardMove(Section):
    """A step of a resharding plan."""

    box: Annotated[tuple[Numbers, Numbers], Field(strict=False)]
    holders: Numbers
    receivers: Numbers
    way: Way
    chains: Annotated[
        tuple[Annotated[tuple[Natural, Numbers], Field(strict=False)], ...], Field(strict=False), FailFast()
    ]
    chunks: Count
    start: Nanoseconds
    duration: Nanoseconds


class Moves(Section):
    """A resharding plan."""

    source: str
    destination: str
    shape: Numbers
    itemsize: Count
    hosts: Numbers
    order: str
    lower_bound: Nanoseconds
    steps: Annotated[tuple[ReshardMove, ...], Field(strict=False), FailFast()]


class Boundaries(Section):
    """Resharding plans, each once, and the number of every edge's, by what crosses it."""

    plans: Annotated[tuple[Moves, ...], Field(strict=False), FailFast()]
    edges: dict[str, dict[str, Natural]]


def table(name: str, kinds: Mapping[str, Any]) -> type[Section]:
    """A table that has all these keys, and no other."""
    needed: Any = {key: (kind, ...) for key, kind in kinds.items()}
    return create_model(name, __base__=Section, **needed)


def table_of(owner: type[Any], **others: Any) -> type[Section]:
    """The table that ``asdict`` makes of a dataclass. others: types of fields that are something else in a
    file."""
    kinds = get_type_hints(owner) | others
    return table(owner.__name__, {one.name: kinds[one.name] for one in fields(owner)})


def list_of(kind: Any) -> Any:
    """The type of a list of these, of which the first that is wrong is told: each takes kilobytes."""
    return Annotated[tuple[kind, ...], Field(strict=False), FailFast()]


def check_tables(values: Mapping[str, Any], whole: type[Section]) -> None:
    """Raise JobError naming the key for values that are not as a table takes them."""
    try:
        whole.model_validate(values)
    except ValidationError as error:
        raise explain(error, whole) from None
