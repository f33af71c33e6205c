"""Moves activations and gradients between pipeline stages, whatever meshes they lie on: reshard plans on lanes.

Every channel (from one place of the pipeline to one other) has a lane of its own, so that a transfer waits for nothing but those before
it in the schedule's order. In both directions a stage's residual stream [S, B, H] is cut over dp along B, and along S over tp where
the strategy is sequence-parallel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.core.reshard_plan import ReshardPlan
from plait.core.schedule import Edge, Schedule, Transfer
from plait.train.device import Device
from plait.train.groups import Groups
from plait.train.reshard import Handle, Lane

Channel = tuple[int, int]


class LaneCourier:
    """plans: of every (source stage, target stage) between different places, forward and backward; the same on all ranks."""

    def __init__(self, schedule: Schedule, plans: Mapping[Edge, ReshardPlan], groups: Groups, device: Device, dtype: torch.dtype) -> None:
        self.schedule, self.plans, self.device, self.dtype = schedule, plans, device, dtype
        places = schedule.rank_of
        members = {(places[a], places[b]): [*groups.meshes[places[a]].ranks, *groups.meshes[places[b]].ranks] for a, b in sorted(plans)}
        self._lanes: dict[Channel, Lane] = {}
        for channel, ranks in sorted(members.items()):  # every rank opens every lane: torch makes groups like that
            lane = Lane(device, ranks)
            if groups.place in channel:
                self._lanes[channel] = lane
            else:
                lane.close()
        for (a, b), plan in sorted(plans.items()):
            if (channel := (places[a], places[b])) in self._lanes:
                self._lanes[channel].prepare(plan)
        self.rank = next(iter(self._lanes.values())).rank if self._lanes else 0

    def send(self, transfer: Transfer, tensor: Tensor) -> Handle:
        """Start to send this rank's tile."""
        return self._lane(transfer).start(self._plan(transfer), tensor, None)

    def receive(self, transfer: Transfer) -> tuple[Tensor, Handle]:
        """Post the receive of this rank's tile, in memory of its own."""
        plan = self._plan(transfer)
        shape = plan.destination.tile(self.rank, plan.shape).shape
        tile = torch.empty(shape, dtype=self.dtype, device=self.device.torch_device)
        return tile, self._lane(transfer).start(plan, None, tile)

    def close(self) -> None:
        """End the lanes."""
        for lane in self._lanes.values():
            lane.close()

    def _plan(self, transfer: Transfer) -> ReshardPlan:
        return self.plans[transfer.source, transfer.target]

    def _lane(self, transfer: Transfer) -> Lane:
        return self._lanes[self.schedule.rank_of[transfer.source], self.schedule.rank_of[transfer.target]]
