"""What MFU is taken against: a device's FLOPs a second. A machine that was busy while they were measured
would make shares of more than one, which cannot be; such a share is left out, and they are measured anew."""

from __future__ import annotations

from collections.abc import Callable

TIMES = 3
"""How often the peak is measured anew in a start of a run, at most: a machine may stay busy."""


class Peak:
    """The job's peak, or the most that ``measure`` has found, in FLOPs a second. say: hears the first share
    that cannot be. doubted: whether a step was faster, and measuring anew may tell why."""

    def __init__(
        self,
        named: float | None,
        measure: Callable[[], float] = lambda: 0.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._named, self._measure, self._say = named is not None, measure, say
        self.rate = measure() if named is None else named
        self.doubted = False
        self._left, self._said = TIMES, False

    def share(self, reached: float, step: int) -> float | None:
        """Of what step ``step`` reached in FLOPs a second; None where it would be more than all."""
        if reached <= self.rate:
            return reached / self.rate
        self.doubted = not self._named and self._left > 0
        if not self._said:
            self._said = True
            told = f"as of step {step}, which reached {_flops(reached)}"
            self._say(f"MFU is left out where it would be above 100%, {told}: {self._why()}")
        return None

    def again(self) -> None:
        """Measure anew, beside the other ranks; the most that was ever found counts."""
        self._left -= 1
        self.rate, self.doubted = max(self.rate, self._measure()), False

    def _why(self) -> str:
        if self._named:
            return f"run.peak_flops is {_flops(self.rate)}"
        return (
            f"matrix products alone reached {_flops(self.rate)} at the start, as on a machine with other work. The "
            "peak is measured anew; run.peak_flops says what it is"
        )


def _flops(rate: float) -> str:
    return f"{rate:.3g} FLOPs a second"
