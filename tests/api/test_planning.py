"""Planning by values: jobs, plans and labs in, answers and plans out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from plait.api import job_check
from plait.api.places import place_of
from plait.api.planning import compare_plans, measure_plans, plan_job, predict_plan
from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.base.text import in_seconds
from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES
from plait.plan.search.fits import AvailableMemory

JOB = """
[model]
family = "gpt"
num_layers = 2
hidden = 32
num_heads = 2
max_sequence = 64
[data]
text = "python-stdlib"
sequence_length = 64
[train]
steps = 5
global_batch_size = 4
"""
SLOWEST = Path(__file__).parents[2] / "benchmarks/papers/jobs/h100-slowest.toml"
SETTINGS = ("cluster.preset=h100", "cluster.ranks=8")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


@pytest.fixture
def table(job: Path) -> Path:
    """The job with a strategy, whose keys have their defaults."""
    job.write_text(f"{JOB}[strategy]\n")
    return job


def test_a_jobs_best_strategy_becomes_a_plan_that_is_predicted_alike(job: Path) -> None:
    asked = plan_job(job, SETTINGS)
    best = asked.answer().best
    plan = asked.plan(best)
    assert plan.layout.world_size == 8
    plan.write(job.with_name("plan.json"))
    again = predict_plan(job.with_name("plan.json")).candidate
    assert again.seconds == pytest.approx(best.seconds, rel=1e-12)


def test_streams_that_no_number_knows_are_said_to_be_unknown(table: Path) -> None:
    asked = [
        *SETTINGS,
        "strategy.tp=2",
        "strategy.dp=4",
        "strategy.slices.batch=2",
        "strategy.slices.columns=1",
        "train.micro_batch_size=2",
        "train.global_batch_size=16",
    ]
    plain = plan_job(table, asked).answer(evaluate=True)
    found = plan_job(table, [*asked, "strategy.streams=2"]).answer(evaluate=True)
    assert found.best.seconds == plain.best.seconds
    assert "Not modelled: strategy.streams = 2:" in found.text()
    assert "Not modelled" not in plain.text()
    masked = plan_job(table, [*asked, 'data.documents="mask"']).answer(evaluate=True)
    (left_out,) = masked.to_dict()["not_modelled"]
    assert "attention over whole sequences" in left_out
    assert left_out in masked.text()
    assert "not_modelled" not in plain.to_dict()


def test_compiling_is_said_to_be_in_no_prediction(table: Path) -> None:
    asked = [*SETTINGS, "strategy.dp=8", "train.global_batch_size=16", "train.micro_batch_size=2"]
    plain, found = (plan_job(table, [*asked, *more]).answer(evaluate=True) for more in ([], ["strategy.compile=true"]))
    assert found.best.seconds == plain.best.seconds
    (left_out,) = found.to_dict()["not_modelled"]
    assert left_out.startswith("Not modelled: strategy.compile = true:") and left_out in found.text()
    assert "not_modelled" not in plain.to_dict()


def test_a_plan_is_checked_as_it_stands(table: Path) -> None:
    asked = plan_job(table, [*SETTINGS, "strategy.tp=2", "strategy.dp=4", "train.global_batch_size=8"])
    plan = asked.plan(asked.answer(evaluate=True).best)
    file = table.with_name("plan.json")
    plan.write(file)
    of_plan = plan_job(file)
    assert of_plan.input_plan is not None
    assert of_plan.plan(of_plan.answer().best).key == plan.key
    with pytest.raises(JobError, match="would change the plan"):
        plan_job(file, ["strategy.tp=1"])


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1}', "# a line\n{", ""])
def test_a_json_that_is_nothing_of_ours_is_refused_as_that(tmp_path: Path, text: str) -> None:
    file, settings = tmp_path / "some.json", ["strategy.tp=1"] * (len(text) % 2)
    file.write_text(text)
    with pytest.raises(JobError, match=r"plan.*or.*configuration") as caught:
        plan_job(file, settings)
    assert caught.value.file == str(file) and "DeepSpeed" in str(caught.value.fix)
    file.unlink()
    with pytest.raises(JobError, match="No such file"):
        plan_job(file, settings)


def test_a_lab_stands_for_this_machine(job: Path) -> None:
    asked = plan_job(job, (), place_of("lab:2x2@1gbit"))
    assert asked.answer().best.job.world_size == 4


def test_changes_are_of_the_cluster_alone(job: Path) -> None:
    asked, as_it_is = plan_job(job, SETTINGS, changes=["compute=2x"]), plan_job(job, SETTINGS)
    assert asked.factors == {"compute": 2.0}
    assert asked.planner.cluster != as_it_is.planner.cluster


def test_what_if_is_told_beside_the_cluster_as_it_is(job: Path) -> None:
    found = plan_job(job, SETTINGS, changes=["compute=2x", "nic=0.5"]).answer()
    as_it_is = plan_job(job, SETTINGS).answer().best
    assert found.what_if and found.what_if.before and found.what_if.before.seconds == as_it_is.seconds
    line = found.text().splitlines()[1]
    assert line.startswith("What if there were 2 times the peaks of the device, 0.5 times the rate of links between")
    assert f"in place of {in_seconds(as_it_is.seconds)}," in line
    assert found.to_dict()["unchanged"]["seconds"] == as_it_is.seconds
    assert "What if" not in plan_job(job, SETTINGS).answer().text()


def test_a_slow_node_uses_less_of_the_devices(job: Path) -> None:
    as_it_is = plan_job(job, SETTINGS).answer().best
    slow = plan_job(job, SETTINGS, changes=["straggler=10"]).answer().best
    assert as_it_is.mfu and slow.mfu == pytest.approx(as_it_is.mfu * as_it_is.seconds / slow.seconds)


def test_settings_beside_evaluate_are_all_of_a_strategy(job: Path) -> None:
    given = ["cluster.preset=h100", "cluster.ranks=2", "strategy.tp=2", "train.micro_batch_size=1"]
    alone = plan_job(job, given, evaluate=True).answer()
    assert alone.to_dict()["searched"] == 1 and alone.best.point["tp"] == 2 and alone.best.point["p1"] == 1
    searched = plan_job(job, given)
    found = searched.answer()
    assert all(one.point["tp"] == 2 for one in found.candidates) and found.to_dict()["searched"] > 1
    with pytest.raises(JobError, match=r"left to the planner, and so are pp, schedule, .*A \[strategy\] in the job"):
        searched.answer(evaluate=True)


def test_what_fits_only_if_things_were_other_is_said_so(table: Path) -> None:
    small = [*SETTINGS, "strategy.dp=8", "train.global_batch_size=8", "model.hidden=8192", "model.num_layers=40"]
    found = plan_job(table, small, changes=["memory=16x"]).answer(evaluate=True)
    assert found.what_if and found.what_if.before is None
    assert found.to_dict()["unchanged"] is None
    assert "then this can be planned, and nothing can as things are" in found.text()


def refusal(job: Path, words: list[str], *changes: str, evaluate: bool = True) -> str:
    with pytest.raises((InfeasiblePlan, JobError)) as caught:
        plan_job(job, words, changes=changes).answer(evaluate=evaluate)
    return str(caught.value)


def test_a_refusal_that_comes_of_a_change_names_the_change(table: Path) -> None:
    one = [*SETTINGS, "strategy.dp=8", "train.global_batch_size=8"]
    said = refusal(table, one, "nic=2x", "memory=0.001x")
    assert said.startswith("If there were 0.001 times the memory of the device (--what-if): The strategy does not fit")
    assert "As things are" not in said
    large = [*one, "model.hidden=8192", "model.num_layers=40"]
    still = refusal(table, large, "memory=1.5x")
    assert still.startswith("If there were 1.5 times the memory of the device (--what-if): The strategy does not fit")
    assert still.endswith(" As things are, nothing can be planned either.")
    assert refusal(table, large, "nic=2x") == refusal(table, large), "the change has no part in it"


def test_ranks_that_are_only_supposed_are_refused_as_such(job: Path) -> None:
    few = "train.global_batch_size=8"
    said = refusal(job, [*SETTINGS, few], "gpus=0.875", evaluate=False)
    assert said.startswith("cluster.ranks: if there were 0.875 times the ranks (--what-if): 7 ranks cannot share 8 ")
    assert "As things are" not in said
    still = refusal(job, ["cluster.preset=h100", "cluster.ranks=7", few], "gpus=2x", evaluate=False)
    assert "(--what-if): 14 ranks cannot share" in still
    assert still.endswith("As things are, nothing can be planned either.")


def test_strategies_that_differ_look_different(job: Path) -> None:
    """By a column that is not shown otherwise, where all shown ones are equal."""
    found = plan_job(job, [*SETTINGS, "plan.top=2"]).answer()
    one, other = found.candidates
    alike = replace(one, point={**one.point, "tp": 2, "p1": 1, "p2": 1})
    sliced = replace(alike, point={**alike.point, "p1": 4})
    told = replace(found, answer=replace(found.answer, candidates=(alike, sliced))).text()
    assert "slices" in told and "batch 4" in told
    apart = replace(sliced, point={**sliced.point, "pp": 3})
    assert "slices" not in replace(found, answer=replace(found.answer, candidates=(alike, apart))).text()
    assert other.point != one.point


SEARCHED = (
    "pp", "dp", "cp", "ring", "tp", "ep", "micro", "virtual", "recompute_layers", "params", "grads", "optim",
    "secondary", "p1", "p2", "sequence_parallel", "schedule", "recompute", "overlap", "shard_overlap",
)  # fmt: skip


def test_no_column_of_a_space_is_hidden_in_the_table(job: Path) -> None:
    """Rows differ in the settings that they show, whichever column their strategies differ in."""
    found = plan_job(job, [*SETTINGS, "plan.top=1"]).answer()
    wide = {"pp": 4, "dp": 8, "cp": 8, "tp": 4, "ring": 2, "ep": 1, "virtual": 2, "params": 1, "grads": 2, "optim": 8,
            "schedule": SCHEDULES.index("interleaved"), "recompute": RECOMPUTES.index("full"),
            "recompute_layers": 3}  # fmt: skip
    one = replace(found.best, point={**found.best.point, **wide})
    for name in SEARCHED:
        number = one.point[name] + (-1 if name in ("recompute", "overlap", "shard_overlap") else 1)
        other = replace(one, point={**one.point, name: number})
        table = replace(found, answer=replace(found.answer, candidates=(one, other))).text()
        first, second = (line.split(maxsplit=1)[1] for line in table.splitlines() if line.startswith(("1  ", "2  ")))
        assert first != second, name


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_a_drawn_job_look_different(job: Path, seed: int) -> None:
    drawn = Random(seed)
    ranks, layers = drawn.choice([4, 8, 16]), drawn.choice([4, 6, 8])
    asked = [
        "cluster.preset=a100-80", f"cluster.ranks={ranks}", f"model.num_layers={layers}", "model.num_heads=8",
        f"model.hidden={drawn.choice([512, 1024])}", f"train.global_batch_size={drawn.choice([8, 16, 32])}",
        "plan.top=20", "plan.points=20_000",
    ]  # fmt: skip
    if drawn.random() < 0.5:
        asked.append("plan.constraints=['tp >= 2', 'dp <= 2']")
    found = plan_job(job, [*SETTINGS, *asked]).answer()
    _, shown = found._settings()  # pyright: ignore[reportPrivateUsage]
    rows = [tuple(told(one) for _, told in shown) for one in found.candidates]
    assert len(rows) > 1
    assert len(set(rows)) == len(rows)


def test_a_space_that_is_as_coarse_as_it_can_be_is_said(job: Path) -> None:
    few = plan_job(job, [*SETTINGS, "plan.points=1"]).answer().text()
    assert "plan.points = 1: the coarsest space has more, and " in few
    assert "the coarsest space" not in plan_job(job, SETTINGS).answer().text()


def test_a_worse_cluster_takes_so_many_times_as_long(job: Path) -> None:
    found = plan_job(job, SETTINGS, changes=["compute=0.001"]).answer()
    assert found.text().splitlines()[1].endswith(" times as long.")


def test_jobs_that_differ_are_compared_by_what_they_are(job: Path, tmp_path: Path) -> None:
    for name, hidden, every in (("one", 32, 100), ("other", 64, 500)):
        more = [f"model.hidden={hidden}", "plan.top=1", f"train.eval_every={every}", f"train.checkpoint_every={every}"]
        asked = plan_job(job, [*SETTINGS, *more])
        asked.plan(asked.answer().best).write(tmp_path / f"{name}.json")
    told = compare_plans(tmp_path / "one.json", tmp_path / "other.json").text().splitlines()
    assert (
        told[0] == "The jobs differ (parameters, model.hidden): a step of one is not the work of a step of the other."
    )
    assert [line.split()[0] for line in told[4:6]] == ["parameters", "model.hidden"]


def test_a_vocabulary_that_is_not_the_presets_is_said(job: Path) -> None:
    job.write_text('[model]\npreset = "gpt3-125m"\n' + JOB[JOB.index("[data]") :])
    asked = plan_job(job, SETTINGS)
    assert asked.planner.model.vocab > 50_000
    assert "byte tokenizer" in asked.note


def test_measured_candidates_are_beside_their_predictions_and_the_fastest_is_chosen(job: Path) -> None:
    found = plan_job(job, [*SETTINGS, "plan.top=2"]).answer()
    measured = replace(found, measured={0: 2.0, 1: 1.0})
    assert measured.best is found.candidates[1]
    assert [line.split()[-1] for line in measured.text().splitlines()[-2:]] == [
        f"{found.candidates[0].seconds / 2:.2f}", "chosen",
    ]  # fmt: skip
    values = measured.to_dict()
    assert (values["chosen"], [one["measured"] for one in values["candidates"]]) == (1, [2.0, 1.0])
    assert "chosen" not in found.to_dict()


def test_plans_that_do_not_fit_this_machine_are_not_measured(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plan_job(job, ["cluster.preset=h100", "cluster.ranks=1", "run.device=cpu", "train.precision=fp32"])
    monkeypatch.setattr(job_check, "room_of", lambda plan, place: AvailableMemory(shared=1 << 10))
    with pytest.raises(InfeasiblePlan, match="1 KiB are available"):
        next(measure_plans([asked.plan(asked.answer().best)], place_of("local")))


def test_two_plans_differ_in_their_settings_and_their_seconds(table: Path, tmp_path: Path) -> None:
    for name, tp in (("a", 1), ("b", 2)):
        degrees = [f"strategy.tp={tp}", f"strategy.dp={8 // tp}", "train.global_batch_size=8"]
        asked = plan_job(table, [*SETTINGS, *degrees])
        asked.plan(asked.answer(evaluate=True).best).write(tmp_path / f"{name}.json")
    found = compare_plans(tmp_path / "a.json", tmp_path / "b.json")
    text = found.text()
    assert ["tp", "1", "2"] in [line.split() for line in text.splitlines()]
    ratio = found.second.candidate.seconds / found.first.candidate.seconds
    (line,) = (line for line in text.splitlines() if line.startswith("a step"))
    assert line.split()[-1] == f"{ratio:.2f}"
    assert found.to_dict()["differences"]["tp"] == ["1", "2"]
    same = compare_plans(tmp_path / "a.json", tmp_path / "a.json").text()
    assert "Nothing: both have the same strategy, ranks and cluster." in same


@pytest.mark.parametrize("key", ["cluster.file", "cluster.profile", "place.network", "place.affinity"])
def test_a_file_that_is_not_there_is_refused_with_its_key(table: Path, key: str) -> None:
    """Also one that nothing would read, since ranks are placed nowhere."""
    with pytest.raises(JobError, match=rf"^{key}: there is no file '.*absent\.toml'\. Check the path"):
        plan_job(table, [*SETTINGS, "strategy.dp=4", "strategy.tp=2", f"{key}=absent.toml"])


def test_a_plan_s_placement_names_files_that_are_there(table: Path) -> None:
    asked = plan_job(table, [*SETTINGS, "strategy.dp=4", "strategy.tp=2"])
    file = table.with_name("plan.json")
    asked.plan(asked.answer(evaluate=True).best).write(file)
    with pytest.raises(JobError, match=r"^place\.network: there is no file"):
        plan_job(file, ["place.network=absent.toml"])


def test_a_network_on_which_nothing_is_placed_is_said_to_be_unused(table: Path) -> None:
    network = table.with_name("net.toml")
    network.write_text("")
    asked = plan_job(table, [*SETTINGS, "strategy.dp=4", "strategy.tp=2", f"place.network={network}"])
    assert "place.network is not used" in asked.note and "place.topology" in asked.note
    lies = [f"place.network={network}", "place.topology=lab:2x4@1gbit,2pods@1gbit"]
    assert "not used" not in plan_job(table, [*SETTINGS, "strategy.dp=4", "strategy.tp=2", *lies]).note
    assert "not used" not in plan_job(table, [*SETTINGS, "strategy.dp=4", "strategy.tp=2"]).note


def test_a_schedule_in_a_file_has_the_file_s_name(table: Path) -> None:
    """And not that of the known one that stands for it in points."""
    mine = table.with_name("mine.txt")
    mine.write_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n")
    settings = ["cluster.preset=h100", "strategy.pp=2", "train.global_batch_size=2", "train.micro_batch_size=1"]
    files = []
    for name, schedule in (("first.json", "1f1b"), ("second.json", str(mine))):
        asked = plan_job(table, [*settings, f"strategy.schedule={schedule}", "plan.constraints=['schedule = 1f1b']"])
        found = asked.answer(evaluate=True)
        asked.plan(found.best).write(table.with_name(name))
        files.append(table.with_name(name))
    assert "schedule mine.txt" in found.text() and "schedule 1f1b" not in found.text()
    assert "'schedule = 1f1b' is not met (mine.txt)" in found.text()
    both = compare_plans(*files)
    assert both.to_dict()["differences"]["schedule"] == ["1f1b", "mine.txt"]
    assert "Nothing: both have the same strategy" not in both.text()


def test_the_papers_fixed_order_is_simulated_as_it_is_and_never_chosen_unasked(job: Path) -> None:
    """Four nodes, where reductions take longer than what hides them: the searched order hides
    more."""
    job.write_text('[model]\npreset = "gpt3-6.7b"\n[strategy]\n')
    asked = [
        *("cluster.preset=h100", "data.sequence_length=1024", "train.precision=bf16-mixed"),
        *("train.global_batch_size=32", "train.micro_batch_size=32", "strategy.tp=32", "plan.memory_margin=fastest"),
        *("strategy.slices.batch=2", "strategy.slices.columns=1"),
    ]
    found = {
        name: plan_job(job, [*asked, f"strategy.overlap={name}"]).answer(evaluate=name != "auto")
        for name in ("sync", "fixed", "domino", "auto")
    }
    seconds = {name: one.best.seconds for name, one in found.items()}
    assert seconds["domino"] < 0.97 * seconds["fixed"] < 0.97 * 0.85 * seconds["sync"]
    assert ("priced as the searched one" in found["fixed"].text()) and found["auto"].best.seconds == seconds["domino"]
    assert all("priced as" not in found[name].text() for name in ("sync", "domino", "auto"))
    assert found["auto"].best.readable["overlap.tp"] == "domino"


def test_where_the_slowest_tier_counts_the_closed_form_and_the_simulation_have_it_so(job: Path) -> None:
    """The page's cluster is the shipped one but for this; over four nodes reductions take less."""
    job.write_text('[model]\npreset = "gpt3-6.7b"\n[strategy]\noverlap = "sync"\n')
    asked = (
        *("data.sequence_length=1024", "train.precision=bf16-mixed", "train.global_batch_size=8"),
        *("train.micro_batch_size=8", "strategy.tp=32", "strategy.slices.batch=1", "strategy.slices.columns=1"),
    )
    shipped, slowest = Cluster.preset("h100"), Cluster.read(SLOWEST)
    plain = slowest.model_copy(update={"efficiency": slowest.efficiency.model_copy(update={"tiers": "sum"})})
    assert plain == shipped and slowest != shipped
    both = [
        plan_job(job, [*asked, where]).answer(evaluate=True).best
        for where in ("cluster.preset=h100", f"cluster.file={SLOWEST}")
    ]
    for one in both:
        assert one.closed_form == pytest.approx(one.seconds, rel=0.02)
    assert both[1].seconds < 0.85 * both[0].seconds
