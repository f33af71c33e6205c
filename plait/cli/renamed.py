"""Commands and options of earlier versions, options of other frameworks, and what they are called here.

Nothing answers to such a name. Whoever writes one is told the one to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plait.core.base.errors import JobError

COMMANDS = {
    "schedule show": "plait schedule NAME",
    "reshard explain": "plait reshard",
    "report": "plait view RUN --save FILE",
    "timeline": "plait diagnose RUN --timeline",
    "profile": "plait measure machine",
    "profile placement": "plait measure placement",
    "plan check": "plait plan JOB --evaluate",
    "cluster up": "plait lab slurm up",
    "cluster down": "plait lab slurm down",
    "cluster list": "plait lab slurm list",
    "cluster env": "plait lab slurm env",
    "cluster cut": "plait lab slurm cut",
    "cluster heal": "plait lab slurm heal",
    "cluster reserve": "plait reserve",
    "cluster": "plait lab slurm, or plait reserve",
}
"""By the words after ``plait``."""


def _settings(names: str, section: str = "") -> dict[str, str]:
    """Options that are settings now: ``KEY=VALUE`` behind the command's arguments."""
    return {f"--{name}": f"{section}{name.replace('-', '_')}=VALUE" for name in names.split()}


OPTIONS = {
    "job": {"--reference": "plait job KEY, or plait job for all settings"},
    "plan": {
        "--check": "--evaluate",
        "--picture": "--draw",
        "--explain": "--show details",
        "--emit": "--show FRAMEWORK",
        "--compare": "plait plan A.json B.json",
        "--clusters": "plait plan without a job",
        "--safest": "plan.memory_margin=safest",
        "--fastest": "plan.memory_margin=fastest",
    },
    "place": _settings(
        "format states tolerate level alpha affinity by unit method spares avoid gpu forbid preempt gpus-per-node "
        "flows network limit move-price",
        "place.",
    )
    | {"--beta": "place.alpha=VALUE, which is 1 - beta"},
    "queue replay": _settings(
        "nodes reserve announce planned-for replan policy overlay load window gpus-per-node minipod zone topology late "
        "checkpoint level"
    ),
    "schedule": _settings("pp micro-batches virtual-stages slack skip costs transfer mode")
    | {
        "--stages": "pp=VALUE",
        "--chunks": "virtual_stages=VALUE",
        **dict.fromkeys(("--forward", "--input-gradient", "--weight-gradient"), "costs=F,I,W"),
    },
    "reshard": _settings("dtype nic nics-per-host latency ranks-per-host order way") | {"--strategy": "way=VALUE"},
    "measure machine": {"--ranks": "--world-size"},
    "measure placement": _settings("nodes-per-minipod world-size seconds rounds seed")
    | {"--ranks": "world_size=VALUE"},
    "topology": _settings("format name levels states tolerate"),
    "topology show": _settings("format name levels states tolerate"),
    "topology generate": _settings(
        "minipods nodes nodes-per-leaf uneven busy down seed gpus-per-node nics-per-node uplinks"
    )
    | {"--leaf-nodes": "nodes_per_leaf=VALUE", "--gpus": "gpus_per_node=VALUE", "--nics": "nics_per_node=VALUE"},
    "lab run": {
        "--hosts": "HOSTSxRANKS@RATE, such as 2x1@1gbit",
        "--ranks-per-host": "HOSTSxRANKS@RATE, such as 2x4@1gbit",
        "--nic": "HOSTSxRANKS@RATE, such as 2x1@1gbit",
        "--pods": "a part of the lab, as in 4x1@1gbit,2pods@300mbit",
        "--core": "a part of the lab, as in 4x1@1gbit,2pods@300mbit",
        "--mtu": "a part of the lab, as in 2x1@1gbit,mtu=1500",
        "--segment": "a part of the lab, as in 2x1@1gbit,segment=262144",
    },
    "lab cut": {"--lab": "--name"},
    "lab heal": {"--lab": "--name"},
    "lab slow": {"--lab": "--name"},
}
"""By command."""
SET = ("train", "plan")
"""Commands that take a job's settings, which other frameworks have as options."""
PASSES_ON = {"lab run"}
"""Commands whose last words are another command's."""


def refuse_old_words(words: Sequence[str]) -> None:
    """Raise JobError for a command or an option that an earlier version knew, with the name it has now.
    words: what stands after ``plait``.

    >>> refuse_old_words(["schedule", "show", "1f1b"])
    Traceback (most recent call last):
    plait.core.base.errors.JobError: plait schedule show: is called plait schedule NAME now.
    """
    for command in _commands(words):
        if command in COMMANDS:
            raise JobError(f"is called {COMMANDS[command]} now", key=f"plait {command}")
        before = ""
        for word in words[command.count(" ") + 1 :]:
            option = word.partition("=")[0]
            if option == "--" or (
                command in PASSES_ON and not word.startswith("-") and before and not before.startswith("-")
            ):
                return
            before = word
            if option in OPTIONS.get(command, {}):
                raise JobError(f"is called {OPTIONS[command][option]} now", key=f"plait {command}: {option}")
            if command in SET and option.startswith("--"):
                _refuse_peers(command, option)


def _refuse_peers(command: str, option: str) -> None:
    from plait.core.job.reference import key_of  # what a job takes is slow to load

    if own := key_of(option):
        raise JobError(
            f"is {own} of a job here", key=f"plait {command}: {option}", fix=f"Write {own}=VALUE behind the job"
        )


def _commands(words: Sequence[str]) -> Iterator[str]:
    """What may be the command: as many words as it can have, the longest first."""
    for count in (2, 1):
        if len(words) >= count:
            yield " ".join(words[:count])
