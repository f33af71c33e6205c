"""Answer: what a method gives."""

from __future__ import annotations

from typing import NamedTuple

from plait.place.problem import Cells


class Assignment(NamedTuple):
    """cells: by number. bound: of the score, if the method has proven a better one than the closed form.
    row_spares: pools of the spare nodes of rows. note: for people."""

    cells: Cells
    bound: float = 0.0
    row_spares: tuple[int, ...] = ()
    note: str = ""
