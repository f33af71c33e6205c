"""Days, GPU hours, energy and money: against sums done by hand."""

from __future__ import annotations

import pytest

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.search.expense import Expense

CLUSTERS = sorted({file.stem for file in (specs_folder() / "clusters").glob("*.toml")} - {"lab", "h20"})


def spent(cluster: str = "a100-80", **plan: object) -> Expense:
    small = {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "max_sequence": 64, "vocab": 256}
    job = Job.from_dict({
        "model": small, "data": {"sequence_length": 64}, "train": {"global_batch_size": 4}, "strategy": {"tp": 2},
        "cluster": {"preset": cluster}, "plan": plan,
    })  # fmt: skip
    on = Cluster.preset(cluster)
    return Expense.of(Planner(job, on, 256).predict(job), on)


def test_tokens_days_hours_energy_and_money() -> None:
    one = Expense(ranks=64, tokens_per_day=50e9, spread=(0.8, 1.2), tokens=10**12, watts=700.0, price=2.0)
    assert (one.days, one.gpu_hours, one.energy) == (20.0, 20 * 24 * 64, pytest.approx(20 * 24 * 64 * 0.7))
    assert one.description == (
        "It trains on 50B tokens per day. 1T tokens take 20 days (p10-p90: 16-24; without pauses), 30,720 GPU hours "
        "for 61,440 (2 per GPU hour). The devices take 21.5 MWh (at a constant 700 W per device, its TDP, without "
        "hosts, network and cooling)."
    )
    values = one.to_dict()
    assert (values["days_p10"], values["days_p90"]) == pytest.approx((16, 24))
    assert values["cost"] == 61_440


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (10**10, "take 4.8 hours (p10-p90: 3.84-5.76;"), (10**8, "take 2.88 minutes (p10-p90: 2.3-3.46;"),
        (10**6, "take 1.73 seconds (p10-p90: 1.38-2.07;"), (1000, "take 0.00173 seconds"),
    ],
)  # fmt: skip
def test_less_than_a_day_is_in_smaller_units(tokens: int, told: str) -> None:
    assert told in Expense(ranks=64, tokens_per_day=50e9, spread=(0.8, 1.2), tokens=tokens).description


@pytest.mark.parametrize("tokens", [15, "255", 1])
def test_fewer_tokens_than_a_step_has_are_refused(tokens: object) -> None:
    with pytest.raises(JobError, match=r"plan\.tokens: \d+ are fewer than the 256 tokens of one step\. .*\"15T\""):
        spent(tokens=tokens)
    assert spent(tokens=256).days > 0


def test_of_a_strategy() -> None:
    one = spent(tokens="1M", gpu_hour_price=3.0)
    day = one.tokens_per_day
    assert one.tokens == 10**6
    assert one.days == pytest.approx(1e6 / day)
    assert one.to_dict()["cost"] == pytest.approx(1e6 / day * 24 * 2 * 3.0)
    assert one.energy == pytest.approx(1e6 / day * 24 * 2 * 0.4)
    assert one.spread[0] < 1 < one.spread[1]


def test_without_a_number_of_tokens_it_is_of_a_day() -> None:
    assert (one := spent()).description == f"It trains on {one.description.split()[3]} tokens per day."
    assert one.gpu_hours == 48
    assert one.to_dict()["days_p10"] is None
    assert spent(gpu_hour_price=2.0).description.endswith(" tokens per day, for 96 (2 per GPU hour).")


def test_what_no_one_says_is_not_known() -> None:
    one = spent("h20", tokens="1B")
    assert one.energy is None
    assert one.to_dict()["energy_kwh"] is None
    assert one.description.endswith(" Its energy is unknown, since the cluster has no device.power.")
    assert "rank hours" in spent("lab", tokens="1B").description


@pytest.mark.parametrize("name", CLUSTERS)
def test_devices_have_a_power_with_its_source(name: str) -> None:
    power = Cluster.preset(name).device.power
    assert power
    assert 250 <= power.value <= 1500
    assert power.source
