"""Which layers a pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from plait.core.errors import JobError
from plait.core.strategy import slice_sizes


@dataclass(frozen=True)
class Stage:
    """``num_layers`` layers from ``first_layer``; the first stage also embeds, the last has the final norm, the head and the loss.

    >>> [stage.num_layers for stage in split_layers(7, 3)]
    [3, 2, 2]
    """

    index: int
    num_stages: int
    first_layer: int
    num_layers: int

    @property
    def embeds(self) -> bool:
        """Whether tokens enter here."""
        return self.index == 0

    @property
    def heads(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """Its layers, counted from the model's first."""
        return range(self.first_layer, self.first_layer + self.num_layers)


def split_layers(num_layers: int, num_stages: int, given: Sequence[int] = ()) -> tuple[Stage, ...]:
    """The stages of a model; ``given``: layers of each, otherwise as equal as can be, earlier stages with more."""
    sizes = tuple(given) or slice_sizes(num_layers, num_stages)
    key, fix = "strategy.stage_layers", f"Give {num_stages} numbers whose sum is {num_layers}"
    if len(sizes) != num_stages or sum(sizes) != num_layers:
        raise JobError(f"{list(sizes)} does not divide {num_layers} layers over {num_stages} stages", key=key, fix=fix)
    if min(sizes) < 1:
        raise JobError(f"{num_layers} layers leave one of {num_stages} stages without a layer", key=key if given else "strategy.pp",
                       fix=fix if given else "Use fewer stages")  # fmt: skip
    return tuple(
        Stage(i, num_stages, first, size) for i, (first, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False))
    )
