"""``plait plan``: from a job to the strategies that would run it fastest, and a plan that ranks obey."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plait.core.cluster import Cluster
    from plait.core.job import Job
    from plait.plan.answer import Answer, Candidate, Planner


def plan(
    job: Annotated[Path | None, typer.Argument(help="The job file (TOML).")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="SECTION.KEY=VALUE, in place of the file's: cluster.ranks=128.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the plan goes: plan.json beside the job if not given.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Predict the job's own strategy instead of searching.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Also show where the step goes, and the memory.")] = False,
    what_if: Annotated[
        list[str] | None, typer.Option(help="RATE=FACTORx, as in nic=2x, link=0.5, compute=2, memory=2; or gpus=4x.")
    ] = None,
    clusters: Annotated[bool, typer.Option("--clusters", help="List the clusters that ship.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose how to run a job: parallel degrees, sharding, schedule, slices, recomputation.

    What the job's [strategy] says is kept; what it leaves out, or calls auto, is searched. [cluster] says for
    what, [plan] what to respect. plait train obeys the plan that is written.

    Example: plait plan job.toml cluster.preset=h100-sxm cluster.ranks=128
    """
    from plait.core.errors import JobError

    if clusters:
        _list_clusters(as_json)
        return
    if job is None:
        raise JobError("no job is given", fix="Write plait plan JOB.toml, or plait plan --clusters")
    planner, notes = _planner(job, overrides or [], what_if or [])
    found = planner.answer(searched=not check)
    target = out or job.with_name("plan.json")
    if not what_if:
        _write(planner, found, target)
    if as_json:
        from plait.cli import terminal

        terminal.say(json.dumps(found.to_dict() | {"plan": None if what_if else str(target), "what_if": notes}))
        return
    _show(planner, found, explain)
    if not what_if:
        from plait.cli import terminal

        terminal.text(f"the first is written to {target}; plait train {target} obeys it")


def _planner(file: Path, overrides: list[str], changes: list[str]) -> tuple[Planner, dict[str, float]]:
    from plait.core.job import Job
    from plait.plan.answer import Planner
    from plait.plan.what_if import changed_cluster, changed_ranks, parse_changes
    from plait.plan.where import find_cluster
    from plait.train.data.tokenizer import load_tokenizer

    job = Job.read(file, overrides).named(file.stem)
    factors = parse_changes(changes)
    cluster = changed_cluster(find_cluster(job), factors)
    planner = Planner(changed_ranks(job, cluster, factors), cluster, load_tokenizer(job.data.tokenizer).vocab)
    return planner, factors


def _write(planner: Planner, found: Answer, target: Path) -> None:
    from plait.core.errors import LaunchError

    try:
        planner.plan(found.best.job).write(target)
    except OSError as error:
        raise LaunchError(
            f"{target} cannot be written: {error.strerror or error}. Choose another with --out."
        ) from None


def _list_clusters(as_json: bool) -> None:
    from plait.cli import terminal
    from plait.core.cluster import Cluster
    from plait.core.env import specs_folder
    from plait.plan.fits import in_words

    names = sorted(file.stem for file in (specs_folder() / "clusters").glob("*.toml"))
    found = {name: Cluster.preset(name) for name in names}
    if as_json:
        terminal.say(json.dumps({name: cluster.model_dump(mode="json") for name, cluster in found.items()}))
        return
    rows = [
        (name, each.device.name, in_words(int(each.device.memory.value)), str(each.ranks_per_node), _links(each))
        for name, each in found.items()
    ]
    terminal.table(("preset", "device", "memory", "a node", "links, each way"), rows)


def _links(cluster: Cluster) -> str:
    return ", ".join(f"{tier.name} {tier.rate.value / 1e9:.4g} GB/s" for tier in cluster.tiers)


def _show(planner: Planner, found: Answer, explain: bool) -> None:
    from plait.cli import terminal

    model = found.model
    terminal.text(
        f"{model.num_parameters:,} parameters on {found.ranks:,} ranks of {found.cluster.name}: {found.searched:,} "
        "strategies compared"
    )
    terminal.say("")
    header = (
        "",
        "pp dp cp tp",
        "micro",
        "schedule",
        "shard p,g,o",
        "recompute",
        "slices",
        "step",
        "p10-p90",
        "tokens/s",
        "MFU",
        "memory",
    )
    terminal.table(header, [_row(number, one) for number, one in enumerate(found.candidates, 1)])
    terminal.say("")
    for line in found.why:
        terminal.text(line)
    if explain:
        _explain(found.best)


def _row(number: int, one: Candidate) -> tuple[str, ...]:
    from plait.plan.answer import readable, words
    from plait.plan.fits import in_words

    point, names = one.point, readable(one.point)
    schedule = names.get("schedule", "-") + (
        f" x{point['virtual']}" if point["virtual"] > 1 and point["pp"] > 1 else ""
    )
    again = names["recompute"] + (f" {point['recompute_layers']}" if point["recompute_layers"] >= 0 else "")
    shard = ",".join(names[key] for key in ("params", "grads", "optim")) + (
        f"+{point['secondary']}" if point["secondary"] else ""
    )
    slices = f"{point['p1']}x{point['p2']}" + (" sp" if point["sequence_parallel"] else "")
    return (
        str(number), f"{point['pp']} {point['dp']} {point['cp']} {point['tp']}", f"{point['micro']}x{point['num_micro']}",
        schedule, shard, again, slices if point["tp"] > 1 else "-", words(one.seconds), f"{words(one.low)}-{words(one.high)}",
        f"{one.tokens_per_second:,.0f}", f"{one.mfu:.0%}", in_words(one.most_memory),
    )  # fmt: skip


def _explain(best: Candidate) -> None:
    from plait.cli import terminal
    from plait.plan.answer import PARTS, words

    terminal.say("")
    terminal.title("Where the step goes, on the mean rank")
    rows = [(PARTS[name], words(each), f"{each / best.seconds:.1%}") for name, each in best.parts.items() if each]
    terminal.table(("part", "seconds", "of the step"), rows)
    terminal.text(f"MFU {best.mfu:.1%} with all attention scores counted, {best.mfu_causal:.1%} with the causal half")
    terminal.say("")
    terminal.title("What fills a rank's memory")
    header, *places = best.memory.rows()
    terminal.table(header, places)


def planned(job: Job, vocab: int) -> Job:
    """The job with what it leaves open chosen, for ``plait train``."""
    from plait.plan.answer import Planner
    from plait.plan.where import find_cluster

    return Planner(job, find_cluster(job), vocab).answer().best.job
