"""The matrix of pairs of ranks, and what they send each other: a picture of a placed job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from plait.api.pictures import GREY, check_format, save
from plait.plan.pairs import RankPairs

MOST = 768
"""Cells along a side; of more ranks, neighbours share one."""


def draw_pairs(found: RankPairs, path: Path, *, pods: Sequence[str], each: int, title: str) -> None:
    """pods: the minipod of every node, by node rank; each: ranks of a node. Lines part runs of nodes in one
    minipod. Colours are bytes of a step, by their logarithm. Raises DataError for another ending."""
    check_format(path)
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    side = min(found.ranks, MOST)
    cells = np.zeros((side, side))
    for (one, two), sent in found.sent.items():
        a, b = one * side // found.ranks, two * side // found.ranks
        cells[a, b] += sent
        cells[b, a] += sent
    shown = np.ma.masked_equal(cells, 0)
    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.add_subplot()
    edges = (-0.5, found.ranks - 0.5, found.ranks - 0.5, -0.5)
    image = axes.imshow(shown, norm=LogNorm(), cmap="viridis", interpolation="nearest", extent=edges)
    for number, (one, two) in enumerate(pairwise(pods), 1):
        if one != two:
            for line in (axes.axhline, axes.axvline):
                line(number * each - 0.5, color=GREY, linewidth=0.4)
    axes.set(xlabel="rank", ylabel="rank")
    axes.set_title(f"{title}: {found.silent:.2%} of the pairs of ranks send each other nothing", color=GREY)
    figure.colorbar(image, ax=axes, label="bytes of a step", shrink=0.8)
    save(figure, path)
