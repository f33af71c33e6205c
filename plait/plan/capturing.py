"""CUDA graphs, which no search tries unasked: they need shapes that stay and memory of their own. Where small
steps wait for the host they make a plan several times as fast, so the best strategy is predicted once more
with them; only what was found so is told."""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.base.errors import PlaitError
from plait.core.base.text import in_seconds
from plait.core.step.columns.points import Points
from plait.plan.answer import Planner
from plait.plan.candidate import Candidate
from plait.plan.divisors import Hint

GRAPHS = "strategy.cuda_graphs"
WORTH = 0.03
"""Of a step that they take away, as a share: less is not told."""


@dataclass(frozen=True)
class CapturedHint(Hint):
    """What the best strategy gains by CUDA graphs. given: false, or "auto"; nearby: true."""

    @property
    def told(self) -> str:
        """In a sentence."""
        auto = " (auto: steps are timed with and without before training)" if self.given == "auto" else ""
        return (
            f"CUDA graphs would take the host's time away: with {GRAPHS}=true this plan takes "
            f"{in_seconds(self.seconds_nearby)} in place of {in_seconds(self.seconds)}{auto}; "
            "planned with it, another may take less."
        )


def captured_hints(planner: Planner, best: Candidate) -> list[Hint]:
    """Of a plan for GPUs that Plait runs, whose job does not say whether to capture. Predicted is only what
    gains in closed form."""
    section = planner.job.strategy
    said = "cuda_graphs" in section.model_fields_set and section.cuda_graphs != "auto"
    if said or planner.closed or planner.cluster.device.kind != "cuda" or not _may_gain(planner, best):
        return []
    try:
        one = planner.predict(best.job.changed([f"{GRAPHS}=true"]))
    except PlaitError:  # a rule, such as of sharding that gathers weights in memory that does not stay
        return []
    if not one.memory.safe or one.seconds > (1 - WORTH) * best.seconds:
        return []
    more = one.tokens_per_second / best.tokens_per_second - 1
    return [CapturedHint(GRAPHS, section.cuda_graphs, True, best.seconds, one.seconds, more)]


def _may_gain(planner: Planner, best: Candidate) -> bool:
    """Whether the closed form, where there is one, has a step take less with graphs."""
    plain, graphed = planner.closed_seconds(best.job, Points.of([best.point, {**best.point, "graphs": 1}])).total
    return len(set(best.job.degrees)) > 1 or bool(graphed <= (1 - WORTH / 2) * plain)
