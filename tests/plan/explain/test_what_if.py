"""Changed clusters: factors say what they change, and steps follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.explain.what_if import CHANGES, changed_cluster, changed_ranks, parse_changes

H100 = Cluster.preset("h100")


@given(
    st.dictionaries(
        st.sampled_from(sorted(CHANGES.keys() - {"straggler"})), st.sampled_from([0.5, 1.0, 1.25, 2.0, 40.0])
    )
)
def test_changes_read_as_they_are_written(factors: dict[str, float]) -> None:
    assert parse_changes([f"{key}={value:g}x" for key, value in factors.items()]) == factors
    assert parse_changes([f" {key} = {value:g} " for key, value in factors.items()]) == factors


@pytest.mark.parametrize(
    "text", ["nic", "nic=", "nic=fast", "nic=0x", "nic=-1", "=2", "nic=2xx", "nic=" + "9" * 400, "link=0.0000000001"]
)
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a valid change"):
        parse_changes([text])


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"did you mean 'nic'.*links between nodes"):
        parse_changes(["nics=2"])


def test_each_factor_changes_what_it_names_and_nothing_else() -> None:
    rates = [tier.rate.value for tier in H100.tiers]

    def changed(text: str) -> Cluster:
        return changed_cluster(H100, parse_changes([text]))

    assert [tier.rate.value for tier in changed("nic=2x").tiers] == [rates[0], *(2 * rate for rate in rates[1:])]
    assert [tier.rate.value for tier in changed("link=0.5").tiers] == [rate / 2 for rate in rates]
    assert changed("memory=2").device.memory.value == 2 * H100.device.memory.value
    assert changed("compute=2").device.peak["bf16-mixed"].value == 2 * H100.device.peak["bf16-mixed"].value
    assert changed("memory=2").tiers == changed("compute=2").tiers == H100.tiers
    assert changed("nic=2x").device == changed("link=0.5").device == H100.device
    assert changed("compute=2").device.memory == H100.device.memory
    assert changed("memory=2").device.peak == H100.device.peak
    for text in ("nic=1", "gpus=2"):
        assert changed(text) == H100
    assert "2 times that" in changed("nic=2x").tiers[-1].rate.source


def test_a_straggler_is_as_much_slower() -> None:
    late = changed_cluster(H100, parse_changes(["straggler=1.25"]))
    assert late.device.peak["bf16-mixed"].value == pytest.approx(H100.device.peak["bf16-mixed"].value / 1.25)
    assert late.device.memory_rate.value == pytest.approx(H100.device.memory_rate.value / 1.25)
    assert late.tiers == H100.tiers


def test_ranks_are_multiplied_whole() -> None:
    job = Job.from_dict({"model": {"preset": "gpt3-125m"}, "cluster": {"preset": "h100", "ranks": 16}})
    assert changed_ranks(job, H100, {"gpus": 4.0}).cluster.ranks == 64
    assert changed_ranks(job, H100, {}) is job
    with pytest.raises(JobError, match=r"makes 5\.28 ranks"):
        changed_ranks(job, H100, {"gpus": 0.33})


def test_more_ranks_of_a_strategy_need_it_open() -> None:
    fixed = Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {"tp": 2}, "cluster": {"preset": "h100"}})
    with pytest.raises(JobError, match=r"gpus.*2 ranks"):
        changed_ranks(fixed, H100, {"gpus": 2.0})


def test_nothing_is_changed_twice() -> None:
    with pytest.raises(JobError, match="'nic=3': nic is changed twice"):
        parse_changes(["nic=2x", "nic=3"])


def test_more_ranks_than_a_cluster_has_nodes_for() -> None:
    lab = Cluster.preset("lab")
    changed = changed_cluster(lab, {"gpus": 4.0})
    assert (changed.nodes, changed.tiers[-1].ranks) == (0, 0)
    assert changed_cluster(lab, {"gpus": 0.5}).nodes == changed_cluster(lab, {"gpus": 1.0}).nodes == lab.nodes


def test_nodes_of_one_rank_have_links_between_nodes_only() -> None:
    alone = H100.model_copy(update={"ranks_per_node": 1})
    found = changed_cluster(alone, {"nic": 2.0, "link": 3.0})
    assert [tier.rate.value for tier in found.tiers] == [6 * tier.rate.value for tier in H100.tiers]


def test_factors_have_bounds() -> None:
    assert parse_changes(["nic=0.000001", "link=1000000", "straggler=1"]) == {"nic": 1e-6, "link": 1e6, "straggler": 1}
    for text in ("nic=0.0000009", "nic=1000001"):
        with pytest.raises(JobError, match="is not a valid change"):
            parse_changes([text])


def test_no_straggler_is_faster_than_the_others() -> None:
    with pytest.raises(JobError, match=r"--what-if: 'straggler=0\.5'.*at least 1"):
        parse_changes(["straggler=0.5"])
