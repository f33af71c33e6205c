"""Constants of efficiency that a cluster's file names or replaces, and overhead that it leaves
out."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.codec.toml_text import read_toml
from plait.core.base.errors import JobError
from plait.core.cluster.efficiency import (
    ON_CPU,
    Constant,
    Efficiency,
    Overhead,
    efficiency_file,
    overhead_values,
    resolve_efficiency,
)

HOPPER: dict[str, Any] = read_toml(efficiency_file("hopper"))
ONE: dict[str, Any] = {"value": 0.25, "source": "me", "date": "2026"}


def test_a_name_stands_for_its_file() -> None:
    assert resolve_efficiency("hopper") == HOPPER
    assert Efficiency.model_validate(HOPPER).matmul.value == HOPPER["matmul"]["value"]


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(JobError, match=r"efficiency: no constants 'hoper' \(did you mean 'hopper'\?\)\. Use .*hopper"):
        resolve_efficiency("hoper")
    with pytest.raises(JobError, match="no constants"):
        resolve_efficiency({"like": "../jobs/x"})


@pytest.mark.parametrize("values", [5, None, ["hopper"], {"matmul": ONE}, {"like": 5}, {"like": ["hopper"]}, {}])
def test_anything_else_stays_as_it_is(values: object) -> None:
    assert resolve_efficiency(values) is values


def test_a_table_replaces_constants_and_single_ones_of_its_tables() -> None:
    found: Any = resolve_efficiency({"like": "hopper", "memory": ONE, "across": {"hop": ONE}, "new": {"a": 1}})
    assert found == {
        **HOPPER, "memory": ONE, "across": {**HOPPER["across"], "hop": ONE}, "new": {"a": 1}
    }  # fmt: skip
    assert "like" not in found


@pytest.mark.parametrize(("key", "value"), [("inside", 5), ("spread", None), ("matmul", {"value": 0.3})])
def test_what_is_no_table_of_links_takes_the_place_of_all(key: str, value: object) -> None:
    """A constant without its origin is not mended with another's: it is refused by its missing
    keys."""
    found: Any = resolve_efficiency({"like": "hopper", key: value})
    assert found[key] == value


def test_on_a_cpu_what_is_left_out_of_overhead_is_a_processs() -> None:
    told = {"context": ONE}
    assert overhead_values(told, cpu=False) is told
    assert overhead_values(told, cpu=True) == {**ON_CPU, **told}
    assert overhead_values(5, cpu=True) == 5
    assert Overhead.model_validate(overhead_values({}, cpu=True)).reserve.value == 0
    assert Overhead.model_validate(overhead_values(told, cpu=True)).context.value == 0.25


def test_what_is_assumed_of_overhead() -> None:
    """Predictions of memory stand on it."""
    assumed = Overhead.model_validate(overhead_values({}, cpu=False))
    told = {name: (one.value, one.error) for name, one in assumed if name != "doubt"}
    assert told == {
        "context": (1e9, 0.5), "communicator": (2e8, 0.5), "slack": (0.1, 0.5), "stuck": (0.03, 0.7),
        "reserve": (0.015, 0.5),
    }  # fmt: skip
    assert {name: one.value for name, one in ON_CPU.items() if isinstance(one, Constant)} == {
        "context": 3e8, "communicator": 1e6, "slack": 0.18, "stuck": 0.18, "reserve": 0.0
    }  # fmt: skip
    assert {one.error for one in ON_CPU.values() if isinstance(one, Constant)} == {0.5}


def test_how_far_memory_may_be_off() -> None:
    """Of a GPU as fitted (benchmarks/planner_memory.py --fit); of processes as measured; a file may
    say."""
    doubts = [Overhead().doubt, Overhead.model_validate(overhead_values({}, cpu=True)).doubt]
    assert [{name: one.value for name, one in doubt} for doubt in doubts] == [
        {"lasting": 0.02, "moving": 0.09, "beside": 1.6}, {"lasting": 0.01, "moving": 0.05, "beside": 0.5},
    ]  # fmt: skip
    measured = {"value": 0.01, "source": "a run", "date": "2026-11"}
    own = Overhead.model_validate(overhead_values({"doubt": {"moving": measured}}, cpu=False)).doubt
    assert (own.moving.value, own.beside.value) == (0.01, 1.6)
