"""A strategy in the words of other frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.core.base.errors import JobError, nearest
from plait.core.job.spec import Job
from plait.plan.emit_megatron import megatron
from plait.plan.emit_torchtitan import torchtitan
from plait.plan.emit_words import Emitted, Words

FRAMEWORKS: Mapping[str, Callable[[Words], Emitted]] = {"torchtitan": torchtitan, "megatron": megatron}


def check_framework(framework: str) -> None:
    """Raise JobError for a name that ``emit`` does not know."""
    if framework not in FRAMEWORKS:
        raise JobError(
            f"nothing is known of '{framework}'{nearest(framework, FRAMEWORKS)}", key="--show",
            fix=f"Use {' or '.join(FRAMEWORKS)}",
        )  # fmt: skip


def emit(job: Job, framework: str) -> Emitted:
    """A job that leaves nothing open, for ``torchtitan`` or ``megatron``. Raises JobError for other names."""
    check_framework(framework)
    return FRAMEWORKS[framework](Words(job))
