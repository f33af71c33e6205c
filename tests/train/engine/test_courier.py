"""Which lanes a rank opens, and what goes over them. What they carry:
``tests/train/comm/test_lanes.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from plait.core.cluster.hardware import HERE
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.step.schedule import Transfer
from plait.plan.make import make_plan
from plait.train.engine import courier
from plait.train.engine.courier import LaneCourier, Lanes, Parcel
from plait.train.machine.device import RankDevice

DEVICE = RankDevice(torch.device("cpu"))
SMALL = {"family": "gpt", "num_layers": 4, "hidden": 8, "num_heads": 2, "vocab": 16, "max_sequence": 8}


def planned(**strategy: Any) -> Plan:
    return make_plan(
        Job.from_dict(
            {
                "model": {
                    "family": "gpt",
                    "num_layers": 4,
                    "hidden": 8,
                    "num_heads": 2,
                    "vocab": 16,
                    "max_sequence": 8,
                },
                "data": {"sequence_length": 8},
                "train": {"global_batch_size": 4, "micro_batch_size": 2, "precision": "fp64"},
                "strategy": strategy,
                "run": {"name": "gpt"},
            }
        ),
        HERE,
        vocab=16,
    )


class Under:
    """A job under way."""

    def __init__(self, number: int) -> None:
        self.span, self.over, self.waited = (number, number + 1), False, False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waited = True


class Lane:
    """Notes what it is told."""

    opened: ClassVar[list[Lane]] = []

    def __init__(self, device: RankDevice, ranks: list[int], messages: object) -> None:
        self.device, self.ranks, self.messages = device, ranks, messages
        self.prepared, self.started, self.closed = list[Any](), list[Any](), False
        Lane.opened.append(self)

    def prepare(self, plan: Any) -> None:
        self.prepared.append(plan)

    def start(self, plan: Any, source: Any, destination: Any) -> Under:
        self.started.append((plan, source, destination))
        return Under(len(self.started))

    def close(self) -> None:
        self.closed = True


class Log:
    """Of a rank: gives away the name of what asks."""

    def messages(self, ranks: list[int], name: str) -> tuple[list[int], str]:
        return ranks, name


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Lane]:
    monkeypatch.setattr(courier, "Lane", Lane)
    Lane.opened = []
    return Lane.opened


@pytest.mark.parametrize(
    ("rank", "ranks"),
    [
        (0, [([0, 1, 2, 3], "lane 0-1"), ([2, 3, 0, 1], "lane 1-0")]),
        (3, [([0, 1, 2, 3], "lane 0-1"), ([2, 3, 0, 1], "lane 1-0"),
             ([2, 3, 4, 5], "lane 1-2"), ([4, 5, 2, 3], "lane 2-1")]),
        (5, [([2, 3, 4, 5], "lane 1-2"), ([4, 5, 2, 3], "lane 2-1")]),
    ],
)  # fmt: skip
def test_a_rank_opens_the_lanes_of_its_own_pp_rank(
    rank: int, ranks: list[tuple[list[int], str]], opened: list[Lane]
) -> None:
    plan = planned(pp=3, tp=2)
    lanes = Lanes(plan, rank, DEVICE, Log())  # type: ignore[arg-type]
    assert [(lane.ranks, lane.messages) for lane in opened] == [(each, (each, name)) for each, name in ranks]
    for (_, name), lane in zip(ranks, opened, strict=True):
        a, b = map(int, name.removeprefix("lane ").split("-"))
        assert lanes[a, b] is lane
        wanted = [plans for table in plan.reshards.values() for edge, named in table.items() if edge == (a, b)
                  for plans in named.values()]  # fmt: skip
        assert wanted and lane.prepared == wanted and not lane.closed
    lanes.close()
    assert all(lane.closed for lane in opened)


def test_a_rank_without_a_ring_leaves_no_messages_in_it(opened: list[Lane]) -> None:
    Lanes(planned(pp=2), 0, DEVICE)
    assert [lane.messages for lane in opened] == [None, None]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tiles_go_over_the_lane_of_their_pp_ranks(opened: list[Lane], sequence_parallel: bool) -> None:
    plan = planned(pp=2, tp=2, sequence_parallel=sequence_parallel)
    reshards = plan.reshards[sequence_parallel]
    lanes = Lanes(plan, 1, DEVICE)
    post = LaneCourier(plan.schedule, reshards, lanes)
    there, back = Transfer(0, 1, "F", 0), Transfer(1, 0, "B", 0)
    own = post.tiles(there, receiving=False)
    assert {name: (tuple(tile.shape), tile.dtype) for name, tile in own.items()} == {
        "h": ((4 if sequence_parallel else 8, 2, 8), torch.float64)
    }
    parcel = post.send(there, own)
    assert lanes[0, 1].started == [(reshards[0, 1]["h"], own["h"], None)]  # type: ignore[attr-defined]
    came, coming = post.receive(back)
    assert lanes[1, 0].started == [(reshards[1, 0]["h"], None, came["h"])]  # type: ignore[attr-defined]
    assert came["h"].shape == own["h"].shape
    assert (len(parcel.handles), len(coming.handles)) == (1, 1)


def test_a_parcel_is_there_when_all_of_it_is() -> None:
    handles = [Under(1), Under(5), Under(3)]
    parcel = Parcel(handles)  # type: ignore[arg-type]
    assert parcel.span == (1, 4), "they move one after the other"
    for handle in handles:
        assert not parcel.done()
        handle.over = True
    assert parcel.done()
    parcel.wait()
    assert all(handle.waited for handle in handles)
