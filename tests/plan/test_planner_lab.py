"""Runs of a lab, predicted from a profile of its machine."""

from __future__ import annotations

from pathlib import Path

from planner_lab import again, described, work_out

from plait.core.job.spec import Job

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_recorded_runs_are_predicted_from_a_profile() -> None:
    """Of four ranks on two cores: all 22 that were run, and the fastest of them is the one
    chosen."""
    found = work_out(again(RESULTS / "planner-lab-2core.json", RESULTS / "planner-lab-profile.json"))
    assert len(found["rows"]) == 22
    assert found["median_abs_rel_error"] < 0.05
    assert max(abs(row["error"]) for row in found["rows"]) < 0.2
    assert found["chosen_over_best"] < 0.05
    assert found["band_coverage"] > 0.8


def test_who_was_lucky_in_one_round_is_not_the_best_of_another() -> None:
    def rows(*times: tuple[float, ...]) -> list[dict[str, object]]:
        return [{"measured_s": one[0], "rounds_s": list(one), "error": 0.0, "in_band": True} for one in times]

    lucky = rows((1.0, 1.0, 1.0), (0.8, 1.0, 1.1), (1.0, 1.1, 0.8), (1.1, 0.8, 1.0))
    better = rows((1.0, 2.0, 1.0), (0.8, 1.6, 0.8), (0.7, 2.0, 1.0))
    assert work_out(lucky)["chosen_over_best_elsewhere"] < 0.0
    assert abs(work_out(better)["chosen_over_best_elsewhere"] - 0.25) < 1e-9
    assert work_out(rows((1.0,), (0.5,)))["chosen_over_best_elsewhere"] is None


def test_a_strategy_in_words_is_the_strategy() -> None:
    words = (
        "p1=2 pp=2 dp=2 tp=2 schedule=zb-h1 overlap.tp=domino micro_batch_size=4 sequence_parallel=true shard.optim=2"
    )
    values = described(
        Job.from_dict({"model": {"preset": "gpt3-125m"}, "train": {"global_batch_size": 16}}), words
    ).to_dict()
    said = values["strategy"]
    assert (said["pp"], said["tp"], said["schedule"], said["sequence_parallel"]) == (2, 2, "zb-h1", True)
    assert (said["slices"], said["shard"]["optim"]) == ({"batch": 2, "columns": 1}, 2)
    assert values["train"]["micro_batch_size"] == 4
