"""What is emitted, read back and predicted as its framework would run it: beside what the plan was predicted
with, which may be Plait's own runtime."""

from __future__ import annotations

import json
from dataclasses import replace

from plait.core.base.errors import PlaitError
from plait.core.base.text import in_bytes, in_seconds
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.candidate import Candidate
from plait.plan.emit_words import Emitted
from plait.plan.frameworks import FRAMEWORKS
from plait.plan.read_deepspeed import deepspeed_told
from plait.plan.read_literals import python_settings
from plait.plan.read_megatron import megatron_told
from plait.plan.read_shell import arguments
from plait.plan.read_torchtitan import torchtitan_told
from plait.plan.told import Told

WHERE = "what is emitted"


def read_back(emitted: Emitted, framework: str, job: Job) -> Told:
    """The settings as their reader has them. job: which they were made of; it gives the model, which a
    framework may have only nearly, the ranks and the cluster, and what programs say
    that DeepSpeed configures. Raises JobError."""
    if framework == "megatron":
        told = megatron_told(WHERE, arguments(emitted.text))
    elif framework == "deepspeed":
        told = deepspeed_told(WHERE, json.loads(emitted.text))
        told.set("data.sequence_length", job.data.sequence_length)
        if job.strategy.pp == 1 and told.get("strategy.recompute") is None:
            told.set("strategy.recompute", _whole(job))
    else:
        told = torchtitan_told(WHERE, python_settings(emitted.text, WHERE), python=True)
    told.values["model"] = dict(job.model)
    told.values["cluster"] = job.cluster.model_dump(exclude_none=True) | {"ranks": job.world_size}
    return told


def _whole(job: Job) -> str:
    """What a model's code computes again where it does so layer by layer."""
    return "full" if job.base_strategy.recompute in ("full", "layer") else "none"


def as_emitted(planner: Planner, emitted: Emitted, framework: str, job: Job) -> Candidate:
    """The prediction of settings that were emitted for a job. Raises PlaitError for what has none."""
    told = read_back(emitted, framework, job)
    if not {"preset", "huggingface"} & job.model.keys():
        told.values["model"].setdefault("vocab", planner.vocab)
    other = replace(planner, job=told.job(), told_framework=told.runs)
    return other.predict(other.job)


def told_both(planner: Planner, best: Candidate, emitted: Emitted, framework: str) -> str:
    """A sentence: what was planned takes, and what the settings take as they would be run."""
    runs, planned = FRAMEWORKS[framework], planner.framework
    before = f"Planned for {planned.version if planned else 'Plait'}: {_figures(best)}"
    try:
        after = as_emitted(planner, emitted, framework, best.job)
    except PlaitError as error:
        return f"{before}. As {runs.version} would run these settings, nothing is predicted: {error}"
    short = "" if after.memory.fits else ", which does not fit"
    return f"{before}. As {runs.version} would run these settings: {_figures(after)}{short}."


def _figures(one: Candidate) -> str:
    usable = in_bytes(one.memory.usable)
    return f"{in_seconds(one.seconds)} a step, {in_bytes(one.most_memory)} of {usable}"
