"""From a profile to a cluster: constants that points were made from are found again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.efficiency import Constant
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.profile import (
    AttentionCore,
    Curve,
    Group,
    Machine,
    MemoryPass,
    ModuleTime,
    Overlap,
    Point,
    Product,
    Profile,
)
from plait.core.job.spec import Job
from plait.core.step.seconds import rates
from plait.plan.calibrate.profiled import NOISE, cluster_from_profile, module_seconds, with_profile
from plait.plan.explain.job_cluster import find_cluster

DATE = "2026-03-04"
SIZES = tuple(4**at << 12 for at in range(9))
NODE, ACROSS = Group(ranks=8, per_node=8, nodes=1), Group(ranks=2, per_node=1, nodes=2, stride=8, at_once=8)
PAIR = Group(ranks=2, per_node=2, nodes=1, at_once=8)
WHOLE = Group(ranks=16, per_node=8, nodes=2)


def changed(cluster: Cluster, **values: float) -> Cluster:
    """Other constants; ``inside_share`` is ``inside.share``."""
    found = cluster.efficiency
    for name, value in values.items():
        constant: Any = Constant(value=value, source="test", date=DATE)
        outer, _, inner = name.partition("_")
        if outer in ("inside", "across"):
            name, constant = outer, getattr(found, outer).model_copy(update={inner: constant})
        found = found.model_copy(update={name: constant})
    return cluster.model_copy(update={"efficiency": found})


def measured(cluster: Cluster, kinds: Sequence[str] = ("all_reduce", "all_gather"), noise: float = 0.0) -> Profile:
    """What a profile of the cluster would be, if the rates were the truth."""
    chance = np.random.default_rng(0)

    def noisy(seconds: Any) -> float:
        return float(seconds) * math.exp(noise * chance.standard_normal())

    def curve(kind: Any, group: Group) -> Curve:
        times = [noisy(rates.collective(cluster, kind, size, group.ranks, group.stride)) for size in SIZES]
        points = tuple(Point(bytes=size, seconds=each) for size, each in zip(SIZES, times, strict=True))
        return Curve(kind=kind, group=group, points=points)

    p = "bf16-mixed"
    shapes = [(m, k, n) for m in (128, 1024, 8192) for k, n in ((256, 1024), (4096, 4096), (4096, 16384))]
    cores: list[AttentionCore] = []
    for tokens in (256, 1024, 4096, 16384):
        for backward in (False, True):
            shape: dict[str, Any] = {"batch": 1, "heads": 16, "queries": tokens, "keys": tokens, "head_size": 128}
            seconds = noisy(rates.attention(cluster, p, rates.AttentionShape(**shape), backward=backward))
            cores.append(AttentionCore(**shape, precision=p, backward=backward, seconds=seconds))
    return Profile(
        machine=Machine(device="X1", kind="cuda", memory=80 << 30, ranks=16, ranks_per_node=8, backend="nccl"),
        date=DATE,
        collectives=tuple(curve(kind, group) for kind in kinds for group in (PAIR, NODE, ACROSS, WHOLE)),
        products=tuple(
            Product(m=m, k=k, n=n, precision=p, seconds=noisy(rates.matmul(cluster, p, m, k, n))) for m, k, n in shapes
        ),
        attention=tuple(cores),
        passes=tuple(MemoryPass(bytes=s, seconds=noisy(rates.memory_bound(cluster, s))) for s in SIZES[4:]),
        overlaps=(
            overlap(1.2, 1.5),
            overlap(1.3, 1.4),
        ),
    )


def overlap(computation: float, communication: float) -> Overlap:
    slow = {"computation": computation, "communication": communication}
    return Overlap(kind="all_reduce", group=NODE, bytes=1 << 20, m=8, k=8, n=8, precision="fp32", **slow)


TRUTH = {
    "matmul": 0.55,
    "matmul_wave": 4e5,
    "matmul_depth": 300.0,
    "matmul_launch": 3e-5,
    "attention_forward": 0.4,
    "attention_backward": 0.35,
    "attention_short": 500.0,
    "attention_launch": 2e-5,
    "memory": 0.6,
    "inside_share": 0.5,
    "inside_latency": 25.0,
    "inside_half": 6e5,
    "across_share": 0.4,
}
SLOW_START = {"across_latency": 4.0, "across_half": 2e6}
"""Two nodes alone do not tell these from each other."""


SHARES = ("matmul", "attention_forward", "attention_backward", "memory", "inside_share", "across_share")
"""Which many points tell of."""


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_constants_are_found_again(noise: float) -> None:
    """Within the errors that they have, shares nearly exactly."""
    cluster = Cluster.preset("h100")
    profile = measured(changed(cluster, **TRUTH, **SLOW_START), noise=noise)
    fitted = with_profile(cluster, profile)
    found = fitted.efficiency
    for name, value in TRUTH.items():
        outer, _, inner = name.partition("_")
        constant = getattr(getattr(found, outer), inner) if outer in ("inside", "across") else getattr(found, name)
        assert abs(math.log(constant.value / value)) < 2 * constant.error, name
        assert (constant.source, constant.date) == (f"profile of {DATE}", DATE)
        if name in SHARES:
            assert constant.value == pytest.approx(value, rel=0.02 + noise), name
            assert 0.4 * noise < constant.error < noise + 0.1, name
    for curve in profile.collectives:
        for point in curve.points:
            again = rates.collective(fitted, curve.kind, point.bytes, curve.group.ranks, curve.group.stride)
            assert float(again) == pytest.approx(point.seconds, rel=5 * noise + 0.03)


def test_what_was_not_measured_stays() -> None:
    cluster = Cluster.preset("a100-80")
    empty = Profile(machine=measured(cluster).machine, date=DATE)
    assert with_profile(cluster, empty) == cluster
    one = Point(bytes=1 << 27, seconds=2 * float(rates.collective(cluster, "all_reduce", 1 << 27, 16, 1)))
    alone = empty.model_copy(update={"collectives": (Curve(kind="all_reduce", group=WHOLE, points=(one,)),)})
    found = with_profile(cluster, alone)
    assert found.efficiency.across.half == cluster.efficiency.across.half, "one bandwidth tells of one constant"
    predicted = float(rates.collective(found, "all_reduce", 1 << 27, 16, 1))
    assert predicted == pytest.approx(one.seconds, rel=0.01)


LAYER: dict[str, Any] = {
    "family": "llama", "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 4096, "vocab": 32000, "batch": 2,
    "sequence": 1024, "precision": "bf16-mixed",
}  # fmt: skip


def modules_of(truth: Cluster, tp: int) -> list[ModuleTime]:
    """What a profile would have of a layer."""
    inside = [(site, phase) for site in ("attn", "mlp", "head") for phase in ("forward", "input gradient")]
    every = [*inside, *((site, "weight gradient") for site in ("attn", "mlp", "head"))]
    every += [("norm", "forward"), ("norm", "input gradient"), ("embed", "forward")]
    empty = [ModuleTime(**LAYER, tp=tp, site=site, phase=phase, seconds=1.0) for site, phase in every]  # type: ignore[arg-type]
    times = module_seconds(truth, empty)
    return [one.model_copy(update={"seconds": float(seconds)}) for one, seconds in zip(empty, times, strict=True)]


def test_modules_tell_what_elementwise_operations_and_the_loss_take() -> None:
    """And that products are slower in a layer than alone."""
    told = {**TRUTH, "elementwise": 4.0, "logit_bytes": 90.0}
    truth = changed(Cluster.preset("h100"), **told)
    slower = changed(Cluster.preset("h100"), **{**told, "matmul": 0.9 * TRUTH["matmul"]})
    profile = measured(truth)
    modules = [*modules_of(slower, 1), *modules_of(slower, 2)]
    found = with_profile(Cluster.preset("h100"), profile.model_copy(update={"modules": tuple(modules)}))
    assert found.efficiency.elementwise.value == pytest.approx(4.0, rel=0.1)
    assert found.efficiency.logit_bytes.value == pytest.approx(90.0, rel=0.1)
    assert 0.9 * TRUTH["matmul"] <= found.efficiency.matmul.value < 0.98 * TRUTH["matmul"]
    seconds = np.array([one.seconds for one in modules])
    assert module_seconds(found, modules).sum() == pytest.approx(seconds.sum(), rel=0.02)
    assert found.efficiency.elementwise.source == f"profile of {DATE}"


def test_a_parallel_block_is_a_module() -> None:
    one = ModuleTime(**LAYER, tp=1, site="block", phase="forward", seconds=1.0)
    both = [one.model_copy(update={"site": site}) for site in ("attn", "mlp")]
    cluster = changed(Cluster.preset("h100"), host_layer=0.0)
    assert module_seconds(cluster, [one])[0] == pytest.approx(module_seconds(cluster, both).sum(), rel=1e-6)


def test_ranks_that_share_cores_do_so_in_the_cluster_that_was_measured() -> None:
    profile = measured(Cluster.preset("h100"))
    shared = profile.model_copy(update={"machine": profile.machine.model_copy(update={"crowd": 2.0})})
    assert (cluster_from_profile(profile).crowd, cluster_from_profile(shared).crowd) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("change", "key"), [({"kind": "cpu"}, "machine.kind"), ({"ranks_per_node": 4}, "machine.ranks_per_node")]
)
def test_a_profile_of_something_else_is_refused(change: dict[str, Any], key: str) -> None:
    cluster = Cluster.preset("h100")
    profile = measured(cluster)
    other = profile.model_copy(update={"machine": profile.machine.model_copy(update=change)})
    with pytest.raises(JobError) as caught:
        with_profile(cluster, other)
    assert caught.value.key == key


def test_the_machine_that_was_measured() -> None:
    truth = changed(Cluster.preset("h100"), **TRUTH)
    profile = measured(truth)
    found = cluster_from_profile(profile)
    assert (found.device.name, found.device.kind, found.device.memory.value) == ("X1", "cuda", 80 << 30)
    assert (found.ranks_per_node, found.nodes) == (8, 2)
    assert [(tier.name, tier.ranks) for tier in found.tiers] == [("node", 8), ("network", 0)]
    for one in profile.products:
        assert float(rates.matmul(found, one.precision, one.m, one.k, one.n)) == pytest.approx(one.seconds, rel=0.05)
    for curve in profile.collectives:
        for point in curve.points:
            again = rates.collective(found, curve.kind, point.bytes, curve.group.ranks, curve.group.stride)
            assert float(again) == pytest.approx(point.seconds, rel=0.15)


def test_logs_alone_do_not_describe_a_machine() -> None:
    profile = measured(Cluster.preset("h100")).model_copy(update={"products": ()})
    with pytest.raises(JobError, match="no matrix products") as caught:
        cluster_from_profile(profile)
    assert caught.value.key == "products"


def test_points_that_scattered_count_less() -> None:
    cluster = Cluster.preset("h100")
    profile = measured(changed(cluster, memory=0.5))
    wrong = MemoryPass(bytes=1 << 30, seconds=50 * profile.passes[-1].seconds)
    found = {
        spread: with_profile(
            cluster,
            profile.model_copy(
                update={"passes": (*profile.passes, *[wrong.model_copy(update={"spread": spread})] * 3)}
            ),
        ).efficiency.memory.value
        for spread in (0.0, 1.5 * NOISE, 3.0)
    }
    off = [abs(value - 0.5) for value in found.values()]
    assert off == sorted(off, reverse=True)
    assert off[0] > off[1] > off[2]
    assert found[3.0] == pytest.approx(0.5, rel=0.02)


def test_a_job_names_the_profile(tmp_path: Path) -> None:
    """Of the preset, or of the machine itself."""
    path = tmp_path / "profile.json"
    profile = measured(changed(Cluster.preset("h100"), **TRUTH))
    profile.write(path)

    def found(preset: str) -> Cluster:
        cluster = {"preset": preset, "profile": str(path)}
        return find_cluster(Job.from_dict({"model": {"preset": "gpt3-125m"}, "cluster": cluster}))

    assert found("h100") == with_profile(Cluster.preset("h100"), profile)
    assert found("here") == cluster_from_profile(profile)
    with pytest.raises(JobError) as caught:
        found("lab")
    assert (caught.value.file, caught.value.key) == (str(path), "machine.kind")
