"""Numbers within bounds, as types that the codec checks."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from plait.core.base.numbers import LARGEST

Count = Annotated[int, Ge(1), Le(LARGEST)]
Natural = Annotated[int, Ge(0), Le(LARGEST)]
Whole = Annotated[int, Ge(-LARGEST), Le(LARGEST)]
Nanoseconds = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
