"""Plans of resharding, carried out by ranks that are threads: every tile is its part of the tensor, whatever
the layouts. More in ``tests/dist``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from plait.core.reshard_plan import WAYS
from plait.train.comm.lanes import Lane
from tests.dist import resharding
from tests.dist.equality import DEVICE
from tests.dist.test_reshard import problems
from tests.support.threads import threads


@pytest.fixture(autouse=True)
def lanes() -> Iterator[None]:
    """Of each rank its own, by name, and closed in the end."""
    own, opened = threading.local(), list[Lane]()

    def lane(name: str) -> Lane:
        if not hasattr(own, name):
            setattr(own, name, Lane(DEVICE))
            opened.append(getattr(own, name))
        return getattr(own, name)

    with mock.patch.object(resharding, "lane", lane):
        yield
    with mock.patch("torch.distributed.destroy_process_group"):
        for one in opened:
            one.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_layouts_types_and_ways(seed: int) -> None:
    assert problems(threads(4).run(resharding.carry_out, seed, 20, 4, "plain")) == []


def test_both_directions_at_once() -> None:
    assert problems(threads(4).run(resharding.both_ways, 5, 3)) == []


@pytest.mark.parametrize("way", WAYS)
def test_many_chunks_that_are_passed_on(way: str) -> None:
    assert problems(threads(4).run(resharding.large, way)) == []


def test_what_is_not_the_plan_is_refused() -> None:
    resharding.check_refusals(threads(4).run(resharding.refusals))


def test_ranks_with_different_plans_are_told() -> None:
    assert set(threads(4).run(resharding.disagree)) == {
        "Ranks [1] have another resharding plan than rank 0. Make it from equal arguments."
    }
