"""What a user may write to describe a lab, and what a bad description is answered with."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.base.lab_hosts import format_rate, name, parse_rate
from plait.lab import LabSpec

rates = st.one_of(st.none(), st.integers(10**6, 8 * 10**11))
specs = st.builds(
    lambda pods, each, ranks, nic, mtu, segment, core, nics: LabSpec(
        pods * each, ranks, nic, mtu, segment, pods, core if pods > 1 else "unlimited", nics
    ),
    st.integers(1, 20),
    st.integers(1, 50),
    st.integers(1, 1024),
    rates.map(format_rate),
    st.integers(576, 65535),
    st.integers(65536, 524280),
    rates.map(format_rate),
    st.integers(1, 16),
)


@given(rates)
def test_a_rate_survives_its_text(rate: int | None) -> None:
    assert parse_rate(format_rate(rate)) == rate


@given(specs)
def test_a_spec_survives_its_text(spec: LabSpec) -> None:
    assert LabSpec.parse(str(spec)) == spec


@given(st.text())
def test_any_text_is_a_spec_or_a_job_error(text: str) -> None:
    with contextlib.suppress(JobError):
        assert LabSpec.parse(str(LabSpec.parse(text))) == LabSpec.parse(text)


@given(specs)
def test_ranks_fill_one_host_after_the_other(spec: LabSpec) -> None:
    ranks = {0, spec.world_size // 2, spec.world_size - 1}
    assert all(spec.host_of(rank) == rank // spec.ranks_per_host < spec.hosts for rank in ranks)


@pytest.mark.parametrize(
    "text, spec",
    [
        ("2x1@1gbit", LabSpec(2, 1, "1gbit", 9000)),
        ("4x2", LabSpec(4, 2, "1gbit", 9000)),
        ("1x8@unlimited,mtu=1500", LabSpec(1, 8, "unlimited", 1500)),
        ("2x1@1gbit,mtu=1500,segment=262144", LabSpec(2, 1, "1gbit", 1500, 262144)),
        ("4x1@1gbit,2pods@300mbit", LabSpec(4, 1, "1gbit", pods=2, core="300mbit")),
        ("4x8@100gbit,2pods@1gbit,nics=8,mtu=1500", LabSpec(4, 8, "100gbit", 1500, pods=2, core="1gbit", nics=8)),
        ("4x1,4pods,mtu=1500", LabSpec(4, 1, "1gbit", 1500, pods=4)),
        (" 2x1@2.5GBIT ", LabSpec(2, 1, "2.5gbit", 9000)),
    ],
)
def test_examples(text: str, spec: LabSpec) -> None:
    assert LabSpec.parse(text) == spec


@pytest.mark.parametrize(
    "rate", ["", "fast", "1", "1gbps", "1gb", "-1gbit", "0mbit", "0.1mbit", "900gbit", "1e3mbit", "١gbit"]
)
def test_a_bad_rate_is_one_clear_paragraph(rate: str) -> None:
    with pytest.raises(JobError, match="rate") as caught:
        LabSpec(nic=rate)
    assert repr(rate) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"hosts": 0},
        {"hosts": -1},
        {"ranks_per_host": 0},
        {"hosts": 5000},
        {"mtu": 100},
        {"mtu": 70000},
        {"segment": 1500},
        {"pods": 0},
        {"pods": 3},
    ],
)
def test_a_bad_number_is_named(values: dict[str, int]) -> None:
    with pytest.raises(JobError) as caught:
        LabSpec(**values)  # type: ignore[arg-type]
    ((key, value),) = values.items()
    assert f"{key} = {value}" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["4x1@1gbit,3pods@300mbit", "4x1,0pods", "2x1,1pods@1gbit", "4x1,2pods@fast", "4x1,2pods@"]
)
def test_bad_minipods_are_one_clear_paragraph(text: str) -> None:
    with pytest.raises(JobError) as caught:
        LabSpec.parse(text)
    assert "\n" not in str(caught.value)


@given(specs.filter(lambda spec: spec.hosts <= 100))
def test_the_topology_has_every_host_in_its_minipod(spec: LabSpec) -> None:
    topology = spec.as_topology
    assert [node.name for node in topology.nodes] == [name(host) for host in range(spec.hosts)]
    pods = topology.minipods()
    assert {f"pod{spec.pod_of(host)}": spec.hosts // spec.pods for host in range(spec.hosts)} == {
        pod: len(nodes) for pod, nodes in pods.items()
    }
    assert all(node.hardware.gpus == spec.ranks_per_host for node in topology.nodes)
