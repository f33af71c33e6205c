"""Batch ramp-up: the number of sequences of each step of a run.

The rule is Megatron-LM's (``--rampup-batch-size``): the batch begins with ``start`` sequences and
grows by ``increment`` to ``train.global_batch_size``, in equal shares of the first ``samples``
sequences. The batch never changes within a step. So a step's batch and its first sequence follow
from the step's number alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.core.base.codec.data import Count, Section
from plait.core.base.errors import JobError
from plait.core.base.numbers import divisors

if TYPE_CHECKING:
    from plait.core.job.spec import Job

KEY = "train.rampup_batch_size"
MOST_SIZES = 1_000
"""Most batch sizes of a ramp-up."""


class RampupSection(Section):
    """A batch that grows over the first sequences of a run, as Megatron-LM's
    ``--rampup-batch-size``."""

    start: Count
    """Sequences of the first step."""
    increment: Count
    """Sequences by which the batch grows each time, until it is ``global_batch_size``."""
    samples: Count
    """Sequences of the run over which the batch grows; each batch size gets an equal share of
    them."""

    @property
    def shared(self) -> int:
        """Greatest common divisor of all batch sizes: replicas and micro-batches must divide it
        evenly."""
        return math.gcd(self.start, self.increment)


class BatchStretch(NamedTuple):
    """Consecutive steps of one batch size: their first step, the first sequence of that step, and
    the batch size."""

    step: int
    sequence: int
    batch: int


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes of all steps, counted from 0. stretches: in order of steps; the last stretch has
    no end.

    >>> sizes = BatchSizes.of(8, RampupSection(start=2, increment=3, samples=10))
    >>> [sizes.at(step) for step in range(6)], [sizes.before(step) for step in range(6)]
    ([2, 2, 2, 5, 8, 8], [0, 2, 4, 6, 11, 19])
    """

    stretches: tuple[BatchStretch, ...]

    @staticmethod
    def of(batch: int, rampup: RampupSection | None) -> BatchSizes:
        """Return the batch sizes of a run with ``batch`` sequences a step, after the ramp-up if
        there is one."""
        if rampup is None:
            return BatchSizes((BatchStretch(0, 0, batch),))
        return _ramped(rampup.start, rampup.increment, rampup.samples, batch)

    @property
    def ramped(self) -> int:
        """The first step with the whole batch."""
        return self.stretches[-1].step

    def at(self, step: int) -> int:
        """Return the number of sequences of a step."""
        return self._stretch(step).batch

    def before(self, step: int) -> int:
        """Return the number of sequences of all earlier steps."""
        found = self._stretch(step)
        return found.sequence + (step - found.step) * found.batch

    def within(self, sequences: int) -> int:
        """Return the number of first steps that have at most ``sequences`` sequences together."""
        found = next(one for one in reversed(self.stretches) if one.sequence <= sequences)
        return found.step + (sequences - found.sequence) // found.batch

    def steps_for(self, sequences: int) -> int:
        """Return the number of first steps that have at least ``sequences`` sequences together."""
        return self.within(sequences - 1) + 1 if sequences > 0 else 0

    def _stretch(self, step: int) -> BatchStretch:
        return next(one for one in reversed(self.stretches) if one.step <= step)


@lru_cache(maxsize=64)
def _ramped(start: int, increment: int, samples: int, batch: int) -> BatchSizes:
    return BatchSizes(tuple(_stretches(start, increment, samples, batch)))


def _stretches(start: int, increment: int, samples: int, last: int) -> Iterator[BatchStretch]:
    """Yield the steps of each batch size. A size gets no step if steps of earlier sizes already
    cover its share of the sequences."""
    step, seen, count = 0, 0, min(MOST_SIZES, max(0, last - start) // increment)
    for number in range(count):
        batch, until = start + number * increment, -(-samples * (number + 1) // count)
        if seen < until:
            steps = -(-(until - seen) // batch)
            yield BatchStretch(step, seen, batch)
            step, seen = step + steps, seen + steps * batch
    yield BatchStretch(step, seen, last)


def check_rampup(job: Job) -> None:
    """Raise JobError for a ramp-up with a step that the strategy cannot run."""
    rampup, batch, dp = job.train.rampup_batch_size, job.train.global_batch_size, job.degrees[0][0]
    if rampup is None:
        return
    if rampup.start > batch:
        problem = f"{rampup.start} is more than global_batch_size = {batch}"
        raise JobError(problem, key=f"{KEY}.start", changes=[{f"{KEY}.start": batch}, {KEY: None}])
    rise, micro = batch - rampup.start, job.train.micro_batch_size
    if rise % rampup.increment:
        problem = f"from {rampup.start} in steps of {rampup.increment} the batch never becomes {batch}"
        near = [one for one in divisors(rise, rampup.increment) if one % (dp * (micro or 1)) == 0]
        raise JobError(problem, key=f"{KEY}.increment", changes=[{f"{KEY}.increment": one} for one in near])
    if rise // rampup.increment > MOST_SIZES:
        problem = f"{rise // rampup.increment:,} sizes between {rampup.start} and {batch} are more than {MOST_SIZES:,}"
        raise JobError(problem, key=f"{KEY}.increment", fix="Use a larger one")
    _check_micro_batches(rampup, micro, dp, left_open="train.micro_batch_size" in job.open)


def _check_micro_batches(rampup: RampupSection, micro: int, dp: int, *, left_open: bool) -> None:
    """Raise JobError unless every step has whole micro-batches of one size: few at first, more
    later."""
    shared = rampup.shared
    fitting: list[dict[str, Any]] = []
    if shared % dp == 0:
        fitting = [{"train.micro_batch_size": one} for one in reversed(divisors(shared // dp, micro))]
    if not micro and not left_open:
        problem = "the whole batch at once, and a batch that ramps up is so many micro-batches of one size"
        raise JobError(problem, key="train.micro_batch_size", changes=[*fitting, {KEY: None}])
    each = (micro or 1) * dp
    for name in ("start", "increment"):
        value = getattr(rampup, name)
        if value % each:
            below = value // each * each
            changes = [{f"{KEY}.{name}": one} for one in (below, below + each) if one]
            problem = f"{value} sequences are not a multiple of micro_batch_size x dp = {micro or 1} x {dp}"
            raise JobError(problem, key=f"{KEY}.{name}", changes=[*changes, *fitting])
