"""What leaves nothing of a strategy space is named, and what is named in its place is enough."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.constraint import Constraint
from plait.core.errors import JobError
from plait.plan.points import SCHEDULES
from plait.plan.space import SearchRequest, enumerate_space
from plait.plan.unmet import KEYS
from tests.plan.test_space import space

COLUMN_OF = {key: name for name, key in KEYS.items()}


def refused(asked: SearchRequest) -> JobError | None:
    try:
        enumerate_space(asked, most=300)
    except JobError as error:
        return error
    return None


def mended(asked: SearchRequest, error: JobError) -> SearchRequest:
    """The request with what the error names in place of what it refuses."""
    fix, constraints, fixed = error.fix or "", list(asked.constraints), dict(asked.fixed)
    if ranks := re.match(r"([\d,]+) (?:or [\d,]+ )?ranks would do", fix):
        many = int(ranks[1].replace(",", ""))
        return replace(asked, ranks=many, domain=min(8, many), constraints=(), fixed={})
    swaps = re.findall(r"'([^']*)' for '([^']*)'", fix)
    if alone := re.match(r"'([^']*)' would do", fix):
        swaps = [(alone[1], error.problem.split("'")[1])]
    for new, old in swaps:
        at = next(at for at, one in enumerate(constraints) if one.text == old)
        constraints[at] = Constraint.parse(new)
    told = re.findall(r"([a-z_.]+) = ([\w-]+)(?:,| and| would)", re.sub(r"'[^']*' for '[^']*'", "", fix))
    if auto := re.match(r"([\w-]+) would do, or auto", fix):
        told = [(str(error.key), auto[1])]
    for key, word in told:
        name = COLUMN_OF.get(key, key.rpartition(".")[2])
        fixed[name] = [SCHEDULES.index(word) if name == "schedule" else int(word)]
    assert swaps or told, fix
    return replace(asked, constraints=constraints, fixed=fixed)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (space(16, 16, "tp >= 9"), r"tp can be 1, 2, 4, 8\. 'tp >= 8' would do$"),
        (space(16, 16, "tp = 3"), r"'tp = (2|4)' would do$"),
        (space(16, 16, "pp > 12", "tp <= 2"), r"'pp >= 8' would do$"),
        (space(16, 16, "schedule = gpipe", fixed={"pp": [1]}), r"would do"),
        (space(16, 16, "tp = 8", "pp = 8"), r"would do"),
        (space(16, 16, "tp = 3", "pp = 5"), r"'tp = (2|4)' for 'tp = 3' and 'pp = 4' for 'pp = 5' would do$"),
        (space(17, 16), r"16 or 18 ranks would do$"),
    ],
)
def test_the_nearest_is_named(asked: SearchRequest, words: str) -> None:
    error = refused(asked)
    assert error
    assert re.search(words, f"{error.problem}. {error.fix}")
    assert refused(mended(asked, error)) is None


def test_a_degree_that_is_not_tried_unasked_can_be_said() -> None:
    one = space(16, 16, "cp >= 8")
    error = refused(one)
    assert error
    assert "or say strategy.cp = 8, which is not tried unasked" in str(error.fix)
    assert refused(replace(one, fixed={"cp": [8]})) is None


QUANTITIES = ("tp", "pp", "dp", "cp", "ring", "ulysses", "micro_batch_size", "num_micro_batches", "optim", "params",
              "p1", "virtual_stages", "secondary")  # fmt: skip


@settings(max_examples=40)
@given(
    ranks=st.sampled_from([1, 3, 6, 8, 16]),
    batch=st.sampled_from([5, 12, 16]),
    chosen=st.lists(
        st.tuples(st.sampled_from(QUANTITIES), st.sampled_from(["<", "<=", "=", ">=", ">"]), st.integers(0, 9)),
        min_size=1, max_size=3, unique_by=lambda one: one[0],
    ),
    fixed=st.dictionaries(
        st.sampled_from(["tp", "pp", "dp", "micro"]), st.integers(1, 8).map(lambda n: [n]), max_size=2
    ),
)  # fmt: skip
def test_what_is_named_is_enough(
    ranks: int, batch: int, chosen: Sequence[tuple[str, str, int]], fixed: dict[str, list[int]]
) -> None:
    asked = space(ranks, batch, *(f"{name} {sign} {value}" for name, sign, value in chosen), fixed=fixed)
    if error := refused(asked):
        assert refused(mended(asked, error)) is None, str(error)
