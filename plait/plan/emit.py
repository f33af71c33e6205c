"""A strategy in the words of other frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait.core.base.errors import JobError, nearest
from plait.core.job.spec import Job
from plait.plan.emit_deepspeed import deepspeed
from plait.plan.emit_megatron import megatron
from plait.plan.emit_torchtitan import torchtitan
from plait.plan.emit_words import Emitted, Words

FRAMEWORKS: Mapping[str, Callable[[Words], Emitted]] = {
    "torchtitan": torchtitan, "megatron": megatron, "deepspeed": deepspeed,
}  # fmt: skip


def check_framework(framework: str, others: Sequence[str] = ()) -> None:
    """Raise JobError for a name that ``emit`` does not know. others: what --show takes, too."""
    if framework not in (known := (*others, *FRAMEWORKS)):
        problem = f"nothing is known of '{framework}'{nearest(framework, known)}"
        raise JobError(problem, key="--show", fix=f"Use {' or '.join(known)}")


PROGRAMS = {
    "megatron": "pretrain_gpt.py ARGUMENTS",
    "torchtitan": "-m torchtitan.train --module plait_plan --config planned",
    "deepspeed": "PROGRAM --deepspeed_config ds_config.json",
}
"""What torchrun starts, by framework."""


def emit(job: Job, framework: str, ranks_per_node: int = 0) -> Emitted:
    """A job that leaves nothing open, for a framework of these; with lines that start it, where it
    is told how many ranks a node has. Raises JobError for other names."""
    check_framework(framework)
    words = Words(job)
    found = FRAMEWORKS[framework](words)
    if ranks_per_node:
        found.launch = words.launch(PROGRAMS[framework], ranks_per_node)
    return found


def check_emits(job: Job, framework: str) -> None:
    """Raise JobError for a job of which the framework's settings are not known."""
    model = job.model_spec(vocab=1)
    if framework != "megatron" or job.train.precision == "nvfp4":
        job.check_trains(model, "emitted")
