"""Moves activations and gradients between pipeline stages, whatever meshes they lie on: reshard plans on
lanes.

Every channel (from one place of the pipeline to one other) has a lane of its own, so that a transfer waits
for nothing but those before it in the schedule's order. In both directions a stage's residual stream [S, B,
H] is cut over dp along B, and along S over tp where the strategy is sequence-parallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plait.core.reshard_plan import ReshardPlan
from plait.core.schedule import Edge, Schedule, Transfer
from plait.train.comm.background import Handle
from plait.train.comm.lanes import Lane
from plait.train.engine.groups import Groups
from plait.train.machine.device import Device

Channel = tuple[int, int]


class Parcel:
    """The tensors of one transfer under way."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.handles = handles

    @property
    def span(self) -> tuple[float, float]:
        """From the start of the first to the end of the last."""
        return min(handle.span[0] for handle in self.handles), max(handle.span[1] for handle in self.handles)

    def done(self) -> bool:
        """Whether this rank's part is over."""
        return all(handle.done() for handle in self.handles)

    def wait(self) -> None:
        """Return when it is."""
        for handle in self.handles:
            handle.wait()


class LaneCourier:
    """plans: of every tensor from each source stage to each target stage on another place, forward and
    backward; the same on all ranks."""

    def __init__(
        self,
        schedule: Schedule,
        plans: Mapping[Edge, Mapping[str, ReshardPlan]],
        groups: Groups,
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        self.schedule, self.plans, self.device, self.dtype = schedule, plans, device, dtype
        places = schedule.rank_of
        members = {
            (places[a], places[b]): [*groups.meshes[places[a]].ranks, *groups.meshes[places[b]].ranks]
            for a, b in sorted(plans)
        }
        self._lanes: dict[Channel, Lane] = {}
        for channel, ranks in sorted(members.items()):  # every rank opens every lane: torch makes groups like that
            lane = Lane(device, ranks)
            if groups.place in channel:
                self._lanes[channel] = lane
            else:
                lane.close()
        for (a, b), named in sorted(plans.items()):
            for plan in named.values() if (channel := (places[a], places[b])) in self._lanes else ():
                self._lanes[channel].prepare(plan)
        self.rank = next(iter(self._lanes.values())).rank if self._lanes else 0

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Parcel:
        """Start to send this rank's tiles."""
        lane = self._lane(transfer)
        return Parcel([lane.start(plan, tensors[name], None) for name, plan in self._plans(transfer).items()])

    def receive(self, transfer: Transfer) -> tuple[dict[str, Tensor], Parcel]:
        """Post the receives of this rank's tiles, in memory of their own."""
        lane, tiles = self._lane(transfer), self.tiles(transfer, receiving=True)
        return tiles, Parcel([lane.start(plan, None, tiles[name]) for name, plan in self._plans(transfer).items()])

    def tiles(self, transfer: Transfer, *, receiving: bool) -> dict[str, Tensor]:
        """New memory, not initialised, for what this rank sends or receives."""
        layouts = {
            name: (plan.destination if receiving else plan.source, plan.shape)
            for name, plan in self._plans(transfer).items()
        }
        return {
            name: torch.empty(layout.tile(self.rank, shape).shape, dtype=self.dtype, device=self.device.torch_device)
            for name, (layout, shape) in layouts.items()
        }

    def close(self) -> None:
        """End the lanes."""
        for lane in self._lanes.values():
            lane.close()

    def _plans(self, transfer: Transfer) -> Mapping[str, ReshardPlan]:
        return self.plans[transfer.source, transfer.target]

    def _lane(self, transfer: Transfer) -> Lane:
        return self._lanes[self.schedule.rank_of[transfer.source], self.schedule.rank_of[transfer.target]]
