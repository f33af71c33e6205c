"""How much timing of candidates a run can pay for: what it costs is to be less than what it can save.

All that hiding communication can save is the time that a plain step spends in communication, in every step
that is left. Timing costs a plain step or so for every candidate and round. A run of a few steps, or one that
hardly communicates, is over sooner without.
"""

from __future__ import annotations

from dataclasses import dataclass

ROUNDS = 3
"""Timed rounds of all candidates, where they can be paid for; the lowest median wins."""
WARM_UP = 1
"""Rounds before, that are not counted."""
SHARE = 0.5
"""Of the most that can be saved, what timing may cost: hiding saves some two thirds of it, and seldom all."""


COMPILED = 0.25
"""Of a step, what compiling is taken to save at most: what lies between matrix products is seldom more."""
COMPILING = 40.0
"""Seconds that compiling a model takes where nothing is in the compiler's cache, on a CPU."""


def worth_compiling(step_seconds: float, steps_left: int) -> str:
    """Why compiling, and timing steps with and without, cannot pay in the steps that are left; empty if it
    may.

    >>> worth_compiling(0.1, 400)
    'not tried: it can save at most 10 s of this run, and takes some 40 s itself'
    >>> worth_compiling(2.0, 400)
    ''
    """
    saves = COMPILED * step_seconds * max(steps_left, 0)
    if SHARE * saves >= COMPILING:
        return ""
    return f"not tried: it can save at most {saves:.0f} s of this run, and takes some {COMPILING:.0f} s itself"


@dataclass(frozen=True)
class Timing:
    """How many candidates to time, and in how many rounds; 0 and 0: none, the plain order is kept."""

    candidates: int
    rounds: int
    of: int
    """Candidates there are."""
    saves: float
    """Seconds that hiding can save at most, over the steps that are left."""
    costs: float
    """Seconds that timing of all candidates in all rounds would take."""

    def __str__(self) -> str:
        """One line for people where not everything is timed."""
        gain = f"hiding communication can save at most {self.saves:.1f} s of this run"
        if not self.candidates:
            return f"nothing is timed before training: {gain}, timing {self.of} candidates takes {self.costs:.1f} s"
        return f"timing {self.candidates} of {self.of} candidates, rounds: {self.rounds}; {gain}"


def affordable(
    step_seconds: float,
    exposed_seconds: float,
    steps_left: int,
    candidates: int,
    *,
    rounds: int = ROUNDS,
    beside: float = 0.0,
) -> Timing:
    """What of ``candidates`` times ``rounds`` to time.

    step_seconds: a plain step's, measured. exposed_seconds: what of it is communication that overlaps no
    computation. beside: seconds that a candidate takes besides its steps: its order has to be found. Rounds
    are given up first, down to one, then candidates: give them in the order in which they are expected to be
    fast. One candidate alone has nothing to be compared with.

    >>> affordable(0.1, 0.03, 10_000, 8)
    Timing(candidates=8, rounds=3, of=8, saves=300.0, costs=3.2)
    >>> str(affordable(0.1, 0.03, 40, 8))
    'timing 2 of 8 candidates, rounds: 1; hiding communication can save at most 1.2 s of this run'
    """
    saves = min(exposed_seconds, step_seconds) * max(steps_left, 0)

    def each(tried: int) -> float:
        return beside + (tried + WARM_UP) * step_seconds

    fit = [tried for tried in range(rounds, 0, -1) if candidates * each(tried) <= SHARE * saves]
    count = 0 if saves <= 0 else candidates if fit else int(SHARE * saves / each(1))
    costs = candidates * each(rounds)
    if count < 2:
        return Timing(0, 0, candidates, saves, costs)
    return Timing(count, fit[0] if fit else 1, candidates, saves, costs)
