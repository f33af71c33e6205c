"""Values of a user's cluster file that must be slips of units are refused; unusual ones are
remarked on."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.plausible import check_units, unit_remarks
from tests.support.command import plait

CLUSTERS = specs_folder() / "clusters"
NETWORK, NVLINK, LATENCY = "value = 50e9", "value = 450e9", "value = 5e-6"
PEAK, MEMORY = "value = 989.4e12", "value = 85.899e9"


def changed(name: str, *changes: tuple[str, str]) -> str:
    """The file of a shipped cluster with changes."""
    text = (CLUSTERS / f"{name}.toml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def cluster(name: str, *changes: tuple[str, str]) -> Cluster:
    return Cluster.from_dict(tomllib.loads(changed(name, *changes)))


def constant(place: str, key: str, value: str) -> tuple[str, str]:
    """A constant more."""
    return place, f'{place}\n{key} = {{ value = {value}, source = "me", date = "2026" }}'


@pytest.mark.parametrize("name", sorted(file.stem for file in CLUSTERS.glob("*.toml")))
def test_shipped_clusters_have_no_remark(name: str) -> None:
    check_units(cluster(name))
    assert unit_remarks(cluster(name)) == []


@pytest.mark.parametrize(
    ("old", "new", "key", "readings"),
    [
        (NETWORK, "400", "tiers.network.rate.value", "400 B/s as written; 400 MB/s would be 400e6; 400 Gbit/s"),
        (NETWORK, "50", "tiers.network.rate.value", "50 B/s as written; 50 GB/s would be 50e9;"),
        (NVLINK, "900", "tiers.nvlink.rate.value", "900 GB/s would be 900e9; 900 Gbit/s would be 112.5e9."),
        (PEAK, "989.4", "device.peak.bf16-mixed.value", "989.4 FLOP/s as written; 989.4 TFLOP/s would be 989.4e12."),
        (PEAK, "989.4e9", "device.peak.bf16-mixed.value", "989.4 GFLOP/s as written; 989.4 TFLOP/s would be 989.4e12."),
        (PEAK, "989.4e15", "device.peak.bf16-mixed.value", "989.4 PFLOP/s as written; 989.4 TFLOP/s"),
        (LATENCY, "5", "tiers.network.latency.value", "5 s as written; 5 us would be 5e-6."),
        (LATENCY, "5e-9", "tiers.network.latency.value", "5 ns as written; 5 us would be 5e-6."),
        (MEMORY, "85.9e12", "device.memory.value", "85.9 TB as written; 85.9 GB would be 85.9e9."),
        (MEMORY, "80", "device.memory.value", "80 B as written; 80 GB would be 80e9."),
        ("value = 3.352e12", "3352", "device.memory_rate.value", "3.352 kB/s as written; 3.352 TB/s would be"),
        ("value = 64e9", "64", "device.host_rate.value", "64 B/s as written; 64 GB/s would be 64e9"),
        ("value = 700", "0.7", "device.power.value", "700 mW as written; 700 W would be 700."),
    ],
)  # fmt: skip
def test_a_slip_of_units_is_refused_with_both_readings(old: str, new: str, key: str, readings: str) -> None:
    with pytest.raises(JobError) as caught:
        check_units(cluster("h100", (old, f"value = {new}")))
    assert caught.value.key == key
    assert readings in str(caught.value)
    meant = cluster("h100", (old, f"value = {new}, outlier = true"))
    check_units(meant)
    assert unit_remarks(meant) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (constant("[overhead]", "context", "1"), "overhead.context.value"),
        (('efficiency = "hopper"', 'efficiency = { like = "hopper", host_layer = '
          '{ value = 120, source = "me", date = "2026" } }'), "efficiency.host_layer.value"),
    ],
)  # fmt: skip
def test_other_constants_are_compared_too(change: tuple[str, str], key: str) -> None:
    with pytest.raises(JobError) as caught:
        check_units(cluster("h100", change))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("name", "changes", "remarks"),
    [
        ("h100", [(NETWORK, "400e9")], ["400 GB/s is unusual; 400 MB/s would be 400e6; 400 Gbit/s would be 50e9."]),
        ("h100", [(NVLINK, "900e9")], ["2 times that of h100-96 (NVIDIA H100 datasheet: 900", "as of both directions"]),
        ("h100", [(PEAK, "1979e12")], ["2 times that of h100 (NVIDIA H100 datasheet), as with sparsity"]),
        ("h100", [(PEAK, "98.94e12")], ["98.94 TFLOP/s is 0.1 times that of h100"]),
        ("v100", [("value = 6.25e9", "50e9")], ["50 GB/s is 8 times that of v100", "as in bits"]),
        ("h100", [("value = 50e9", "50e6")], ["50 MB/s is 0.001 times that of h100"]),
        ("h100", [(MEMORY, "8.6e9"), ("H100-SXM5-80GB", "RTX 3070")], ["device.memory: 8.6 GB is unusual. Shipped"]),
        # real machines: slower networks, smaller devices, whole nodes of processors
        ("h100", [(NETWORK, "1.56e9"), (LATENCY, "50e-6")], []),
        ("a100-80", [("value = 25e9", "12.5e9")], []),
        ("lab", [("value = 80e9", "15e12"), ("value = 2e9", "0.5e12"), ("value = 8e9", "400e9")], []),
        ("lab", [("value = 62.5e6", "1.25e9"), ("value = 80e9", "40e9")], []),
    ],
)  # fmt: skip
def test_unusual_values_are_remarked_on(name: str, changes: list[tuple[str, str]], remarks: list[str]) -> None:
    own = cluster(name, *((old, new if "value" not in old else f"value = {new}") for old, new in changes))
    check_units(own)
    told = unit_remarks(own)
    assert bool(told) == bool(remarks), told
    assert all(remark in told[0] for remark in remarks), told


def test_a_cluster_of_processors_without_its_kind_is_asked_for_it() -> None:
    with pytest.raises(JobError, match=r'or device\.kind = "cpu" where ranks run on processors'):
        check_units(cluster("lab", ('kind = "cpu"\n', "")))


def test_the_command_refuses_and_remarks(tmp_path: Path) -> None:
    file, words = tmp_path / "mine.toml", ["cluster.file=mine.toml", "cluster.ranks=8", "model.preset=gpt3-125m"]
    (tmp_path / "job.toml").write_text('train = { global_batch_size = 64, precision = "bf16-mixed" }')
    file.write_text(changed("h100", (NETWORK, "value = 400")))
    refused = plait("plan", "job.toml", *words, folder=tmp_path)
    assert refused.returncode == 2
    assert "mine.toml: tiers.network.rate.value: 400 B/s as written" in refused.stderr
    assert plait("calibrate", "job.toml", "--cluster", "mine.toml", folder=tmp_path).returncode == 2
    file.write_text(changed("h100", (NETWORK, "value = 400e9")))
    told = plait("plan", "job.toml", *words, folder=tmp_path)
    assert told.returncode == 0
    assert "mine.toml: tiers.network.rate: 400 GB/s is unusual" in told.stderr.replace("\n", " ")
