"""Who chose the keys of ``[strategy]``, and the micro-batch: user, planner, timed steps, nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from plait.core.job.left_open import MICRO
from plait.core.job.settings import PLANNABLE, StrategySection
from plait.core.job.spec import Job

By = Literal["given", "searched", "timed", "default"]
"""``given``: it stands in the job. ``searched``: the planner chose it. ``timed``: steps before training do.
``default``: the job has the table and leaves it out."""


def chosen_by(job: Job) -> dict[str, By]:
    """Of every key, with ``[strategy]`` before those of other tables.

    >>> by = chosen_by(Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {"tp": 4, "pp": "auto"}}))
    >>> by["strategy.tp"], by["strategy.pp"], by["strategy.dp"], by["train.micro_batch_size"]
    ('given', 'searched', 'default', 'searched')
    """
    found: dict[str, By] = {}
    keys = [*((f"strategy.{key}", job.strategy, key) for key in StrategySection.model_fields)]
    for key, section, name in (*keys, (MICRO, job.train, MICRO.partition(".")[2])):
        if key in job.open:
            found[key] = "searched"
        elif getattr(section, name) == "auto" or (name == "slack" and job.measures_slack):
            found[key] = "timed"
        else:
            found[key] = "given" if name in section.model_fields_set else "default"
    return found


def told_by(chosen: Mapping[str, By]) -> str:
    """A sentence: which keys whoever chose.

    >>> told_by({"strategy.tp": "given", "strategy.dp": "default", "strategy.pp": "default"})
    'strategy: given tp; default dp, pp'
    """
    by: dict[str, list[str]] = {}
    for key, who in chosen.items():
        by.setdefault(who, []).append(key.removeprefix("strategy."))
    order = ("given", "searched", "timed", "default")
    return "strategy: " + "; ".join(f"{who} {', '.join(by[who])}" for who in order if who in by)


def told_left_out(job: Job) -> str:
    """A sentence on keys of a ``[strategy]`` that the planner could choose and was not asked for; empty where
    there are none.

    >>> told_left_out(Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {"compile": True}}))[:50]
    '[strategy] leaves out tp, dp, pp, schedule, virtua'
    """
    found = chosen_by(job)
    keys = [key for key in PLANNABLE if found[f"strategy.{key}"] == "default"]
    if not keys:
        return ""
    return (
        f"[strategy] leaves out {', '.join(keys)}: each has its default and is not searched; auto leaves it to the "
        "planner"
    )
