"""Move activations and gradients between pipeline stages on any meshes: reshard plans executed on
lanes.

Every channel (from one pipeline rank to one other) has its own lane. So a transfer waits only for
earlier transfers in the schedule's order. In both directions a stage's residual stream [S, B, H] is
split over dp along B, and along S over tp if the strategy is sequence-parallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plait.core.job.plan import Plan, Reshards
from plait.core.reshard.plan import ReshardPlan
from plait.core.step.schedule import Schedule, Transfer
from plait.train.comm.background import BackgroundHandle
from plait.train.comm.lanes import Lane
from plait.train.comm.log import Log
from plait.train.machine.device import Mark, RankDevice, torch_dtype

Channel = tuple[int, int]


class Parcel:
    """The tensors of one transfer in flight."""

    def __init__(self, handles: Sequence[BackgroundHandle]) -> None:
        self.handles = handles

    @property
    def span(self) -> tuple[Mark, Mark]:
        """Start of the first tensor's transfer and end of the last's: a lane moves tensors one
        after the other."""
        return self.handles[0].span[0], self.handles[-1].span[1]

    def done(self) -> bool:
        """Return True if this rank's part of the transfer is complete."""
        return all(handle.done() for handle in self.handles)

    def wait(self) -> None:
        """Wait until the transfer is complete."""
        for handle in self.handles:
            handle.wait()


class Lanes:
    """This rank's lanes, prepared for every reshard that its plan may use. All ranks create theirs
    at the same point."""

    def __init__(self, plan: Plan, rank: int, device: RankDevice, log: Log | None = None) -> None:
        self.rank, self.device, self.dtype = rank, device, torch_dtype(plan.workload.precision)
        pp_rank_of, meshes = plan.schedule.rank_of, plan.layout.meshes
        here = plan.layout.pp_rank_of(rank)
        every = [item for reshards in plan.reshards.values() for item in reshards.items()]
        channels = sorted({(pp_rank_of[a], pp_rank_of[b]) for (a, b), _ in every})
        self._lanes: dict[Channel, Lane] = {}
        for channel in channels:  # in the same order on all ranks
            if here in channel:
                ranks = [each for pp_rank in channel for each in meshes[pp_rank].ranks]
                messages = log.messages(ranks, f"lane {channel[0]}-{channel[1]}") if log else None
                self._lanes[channel] = Lane(device, ranks, messages)
        for (a, b), named in sorted(every, key=lambda item: item[0]):
            for reshard in named.values() if (pp_rank_of[a], pp_rank_of[b]) in self._lanes else ():
                self._lanes[pp_rank_of[a], pp_rank_of[b]].prepare(reshard)

    def __getitem__(self, channel: Channel) -> Lane:
        return self._lanes[channel]

    def close(self) -> None:
        """Close all lanes."""
        for lane in self._lanes.values():
            lane.close()


class LaneCourier:
    """Sends and receives tensors between stages. plans: of every tensor from each source stage to
    each target stage on another pipeline rank, forward and backward; the same on all ranks."""

    def __init__(self, schedule: Schedule, plans: Reshards, lanes: Lanes) -> None:
        self.schedule, self.plans, self.lanes = schedule, plans, lanes

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Parcel:
        """Start to send this rank's tiles."""
        lane = self._lane(transfer)
        return Parcel([lane.start(plan, tensors[name], None) for name, plan in self._plans(transfer).items()])

    def receive(self, transfer: Transfer) -> tuple[dict[str, Tensor], Parcel]:
        """Post the receives of this rank's tiles, into new memory."""
        lane, tiles = self._lane(transfer), self.tiles(transfer, receiving=True)
        return tiles, Parcel([lane.start(plan, None, tiles[name]) for name, plan in self._plans(transfer).items()])

    def tiles(self, transfer: Transfer, *, receiving: bool) -> dict[str, Tensor]:
        """Return new memory, not initialised, for the tiles that this rank sends or receives."""
        layouts = {
            name: (plan.destination if receiving else plan.source, plan.shape)
            for name, plan in self._plans(transfer).items()
        }
        lanes = self.lanes
        return {
            name: torch.empty(layout.tile(lanes.rank, shape).shape, dtype=lanes.dtype, device=lanes.device.torch_device)
            for name, (layout, shape) in layouts.items()
        }

    def _plans(self, transfer: Transfer) -> Mapping[str, ReshardPlan]:
        return self.plans[transfer.source, transfer.target]

    def _lane(self, transfer: Transfer) -> Lane:
        return self.lanes[self.schedule.rank_of[transfer.source], self.schedule.rank_of[transfer.target]]
