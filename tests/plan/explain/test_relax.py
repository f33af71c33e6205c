"""What leaves nothing of a strategy space is named, by how much, and what is named in its place is
enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import Constraint
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, StrategyTable
from plait.core.step.schedules import GENERATORS
from plait.plan.explain.relax import KEYS, MOST, SURE, InfeasibilityDiagnosis, key_of
from plait.plan.search.needs import Needs
from plait.plan.search.request import search_request
from plait.plan.search.search import search
from plait.plan.search.space import SearchRequest, enumerate_space
from tests.plan.search.test_space import space

COLUMN_OF = {"train.micro_batch_size": "micro", "strategy.virtual_stages": "virtual", "strategy.cp_comm_type": "ring"}
FULL, GIB = RECOMPUTES.index("full"), 1 << 30
Memory = Callable[[StrategyTable], Any]


def even(gib: float) -> Memory:
    """The same at every point."""
    return lambda points: np.full(len(points), gib)


def relaxing(one: SearchRequest, limit: float = 1, memory: Memory = even(0)) -> InfeasibilityDiagnosis:  # noqa: B008
    """limit, memory: in GiB."""
    return InfeasibilityDiagnosis(one, lambda points: needs(memory(points), limit), limit * GIB)


def needs(memory: Any, limit: float, kept: float = 0.0) -> Needs:
    """limit, memory, kept: in GiB."""
    return Needs(memory * GIB, np.full(len(memory), kept * GIB), limit * GIB)


def refused(asked: SearchRequest, memory: Memory = even(0)) -> JobError | None:  # noqa: B008
    return None if len(enumerate_space(asked, most=300)) else relaxing(asked, memory=memory).no_strategy_error()


def mended(asked: SearchRequest, error: JobError) -> SearchRequest:
    """The request with what the error names in place of what it refuses."""
    fix, constraints, fixed = error.fix or "", list(asked.constraints), dict(asked.fixed)
    if ranks := re.match(r"([\d,]+) (?:or [\d,]+ )?ranks would do", fix):
        many = int(ranks[1].replace(",", ""))
        return replace(asked, ranks=many, domain=min(8, many), constraints=(), fixed={})
    told = fix.partition("; or ")[0]
    swaps = re.findall(r"'([^']*)' in place of '([^']*)'", told)
    for new, old in swaps:
        at = next(at for at, one in enumerate(constraints) if one.text == old)
        constraints[at] = Constraint.parse(new)
    values = re.findall(r"((?:strategy|train)\.[a-z_]+)=([\w-]+|\"\w+\")", re.sub(r"'[^']*'", "", told))
    for key, word in values:
        fixed = {name: one for name, one in fixed.items() if key_of(name) != key}
        name = COLUMN_OF.get(key) or str(key).rpartition(".")[2]
        if word != "auto" and name != "ring":
            fixed[name] = [SCHEDULES.index(word) if name == "schedule" else int(word)]
    assert swaps or values, fix
    return replace(asked, constraints=constraints, fixed=fixed)


ONE_F_ONE_B = SCHEDULES.index("1f1b")
REST = "with the job's other settings"
TRIED = [name for name, one in GENERATORS.items() if one.tried]
WHOLE = [name for name in TRIED if GENERATORS[name].chunks == 1]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (space(16, 16, "tp > 8"), "'tp > 8' leaves no strategy for 16 ranks with the job's other settings: tp can be "
         "1, 2, 4, 8. 'tp >= 8' in place of 'tp > 8' would do"),
        (space(16, 16, "tp < 1"), "tp can be 1, 2, 4, 8. 'tp <= 1' in place of 'tp < 1' would do"),
        (space(16, 16, "tp in 32, 64"), "tp can be 1, 2, 4, 8. 'tp = 8' in place of 'tp in 32, 64' would do"),
        (space(16, 16, "tp = 8", "pp = 8"), f"'tp = 8' and 'pp = 8' leave no strategy for 16 ranks {REST}. 'tp = 2' in "
         "place of 'tp = 8' would do; or 'pp = 2' in place of 'pp = 8' would do"),
        (space(16, 16, "schedule = zb-v", "virtual_stages <= 1", "tp = 1"), f"'schedule = zb-v' and 'virtual_stages <= "
         f"1' leave no strategy for 16 ranks {REST}. 'schedule = {WHOLE[-1]}' in place of 'schedule = zb-v' would do; "
         "or 'virtual_stages <= 2' in place of 'virtual_stages <= 1' would do"),
        (space(1024, 4096, "dp = 7"), "'dp = 7' leaves no strategy for 1,024 ranks with the job's other settings: dp "
         "can be 4, 8, 16, 32, 64, 128, ..., 1024. 'dp = 8' in place of 'dp = 7' would do"),
        (space(16, 16, "schedule = gpipe"), f"schedule can be {', '.join(TRIED)}. "
         "'schedule = 1f1b' in place of 'schedule = gpipe' would do"),
        (space(16, 16, "ulysses = 3"), "ulysses can be 1, 2, 4. 'ulysses = 4' in place of 'ulysses = 3' would do"),
        (space(16, 16, "tp = 3", fixed={"pp": [5]}), "'tp = 3' and strategy.pp=5 leave no strategy for 16 ranks with "
         "the job's other settings. 'tp = 4' in place of 'tp = 3' and strategy.pp=4 would do"),
        (space(16, 16, fixed={"micro": [3]}), "train.micro_batch_size=3 leaves no strategy for 16 ranks with the job's "
         "other settings: it can be 1, 2, 4, 8, 16. train.micro_batch_size=4 or auto would do"),
        (space(16, 16, fixed={"optim": [3], "grads": [1], "params": [1]}), "strategy.shard leaves no strategy for 16 "
         "ranks with the job's other settings. strategy.shard=auto would do"),
        # What the job did not say is relaxed before what it says.
        (space(16, 16, fixed={"dp": [1], "tp": [2], "pp": [1], "cp": [1]}), "strategy.dp=1 leaves no strategy for 16 "
         "ranks with the job's other settings: it can be 8. strategy.dp=8 or auto would do"),
        (space(16, 16, fixed={"dp": [1], "tp": [8], "pp": [1], "cp": [1], "schedule": [ONE_F_ONE_B]}), "strategy.dp=2 "
         "or auto would do"),
        (space(17, 16), "17 ranks cannot share 16 sequences of 2,048 tokens of this model. 16 or 18 ranks would do"),
        (space(37, 4), "36 or 40 ranks would do"),
    ],
)  # fmt: skip
def test_what_is_said_of_an_empty_space(asked: SearchRequest, told: str) -> None:
    error = refused(asked)
    assert error and f"{error.problem}. {error.fix}".endswith(told), error
    assert refused(mended(asked, error)) is None


QUANTITIES = ("tp", "pp", "dp", "cp", "ring", "ulysses", "micro_batch_size", "num_micro_batches", "optim", "params",
              "batch_slices", "virtual_stages", "secondary")  # fmt: skip


@settings(max_examples=40)
@given(
    ranks=st.sampled_from([1, 3, 6, 8, 16]),
    batch=st.sampled_from([5, 12, 16]),
    chosen=st.lists(
        st.tuples(st.sampled_from(QUANTITIES), st.sampled_from(["<", "<=", "=", ">=", ">"]), st.integers(0, 9)),
        min_size=1, max_size=3, unique_by=lambda one: one[0],
    ),
    fixed=st.dictionaries(
        st.sampled_from(["tp", "pp", "dp", "micro"]), st.integers(1, 8).map(lambda n: [n]), max_size=2
    ),
)  # fmt: skip
def test_what_is_named_is_enough(
    ranks: int, batch: int, chosen: Sequence[tuple[str, str, int]], fixed: dict[str, list[int]]
) -> None:
    asked = space(ranks, batch, *(f"{name} {sign} {value}" for name, sign, value in chosen), fixed=fixed)
    if error := refused(asked):
        assert refused(mended(asked, error)) is None, str(error)


@pytest.mark.parametrize("cp", [4, 8])
def test_rings_are_named_as_a_job_says_them(cp: int) -> None:
    # Four heads a rank: not more than four ranks exchange them.
    error = refused(space(8 * cp, 64, fixed={"cp": [cp], "tp": [8], "ring": [3], "pp": [1], "dp": [1]}))
    assert error
    assert error.key == "strategy.cp_comm_type"
    assert re.match(
        r'strategy\.cp_comm_type=("ulysses"|"ring"|\{ ulysses = \d, ring = \d \}) or auto would do', str(error.fix)
    ), error.fix


def test_far_too_many_ranks_are_answered_with_the_nearest_that_can_share() -> None:
    asked = space(1_000_003, 1024)
    error = refused(asked)
    assert error
    most = int(re.sub(r"\D", "", str(error.fix)))
    assert most >= 8192
    assert refused(mended(asked, error)) is None


def test_every_column_has_a_key_of_the_job() -> None:
    assert {key_of(name) for name in KEYS} <= {"train.micro_batch_size"} | {f"strategy.{key}" for key in (
        "virtual_stages", "cp_comm_type", "recompute", "overlap", "slices", "shard", "cuda_graphs")}  # fmt: skip
    assert key_of("tp") == "strategy.tp"


# ---- memory ----


SEVEN_B: dict[str, Any] = {
    "model": {"preset": "llama2-7b", "vocab": 32000}, "data": {"sequence_length": 4096},
    "train": {"global_batch_size": 1024, "precision": "bf16-mixed"}, "cluster": {"preset": "h100", "ranks": 64},
}  # fmt: skip


def searched(job: Job) -> None:
    cluster = Cluster.preset("h100")
    search(search_request(job, job.model_spec(32000), cluster), cluster, job.train.precision)


def changed(job: Job, fix: str) -> Job:
    """The job with what ``KEY=VALUE or auto would do`` says."""
    said = re.findall(r"([a-z]+\.[a-z_]+)=([\w-]+)", fix)
    assert said, fix
    return job.changed([f"{key}={value}" for key, value in said])


def test_what_is_named_fits_into_memory_and_meets_all_constraints() -> None:
    given = ["recompute = full", "memory <= 6 GiB"]
    job = Job.from_dict({**SEVEN_B, "strategy": {"tp": 1}, "plan": {"constraints": given}})
    with pytest.raises(JobError, match="would do") as caught:
        searched(job)
    searched(changed(job, str(caught.value.fix)))


def test_a_length_that_nothing_divides_is_shortened() -> None:
    length = (1 << 20) + 1
    values = {**SEVEN_B, "data": {"sequence_length": length}, "train": {"global_batch_size": 8,
              "precision": "bf16-mixed"}}  # fmt: skip
    job = Job.from_dict({**values, "model": {**SEVEN_B["model"], "max_sequence": length}})
    with pytest.raises(InfeasiblePlan, match=r"data\.sequence_length=1048576 would do"):
        searched(job)
    searched(job.changed(["data.sequence_length=1048576"]))


MODEL = ModelSpec(family="gpt", num_layers=8, hidden=1024, num_heads=16, vocab=32000, max_sequence=8200)
DEEP = ModelSpec(family="gpt", num_layers=64, hidden=1024, num_heads=64, vocab=32000, max_sequence=8200)


def asked(*constraints: str, ranks: int = 4, batch: int = 8, **more: Any) -> SearchRequest:
    sequence, shard = more.pop("sequence", 1024), more.pop("shard", None)
    return SearchRequest(
        model=MODEL, ranks=ranks, domain=min(8, ranks), global_batch=batch, sequence=sequence, fixed=more, shard=shard,
        constraints=tuple(map(Constraint.parse, constraints)),
    )  # fmt: skip


def told(one: SearchRequest, limit: float, memory: Memory) -> str:
    points = enumerate_space(one, most=2_000)
    needed = memory(points)
    return str(relaxing(one, limit, memory).too_large_error(points, int(np.argmin(needed)), needs(needed, limit)))


@pytest.mark.parametrize(
    ("one", "memory", "advice"),
    [
        (asked("tp = 1", "pp <= 2"), lambda p: 2 / p.tp, "'tp = 4' in place of 'tp = 1' would do"),
        (asked("recompute = none"), lambda p: np.where(p.recompute == FULL, 0.5, 2),
         "'recompute = full' in place of 'recompute = none' would do"),
        (asked("ulysses = 1", cp=[4], sequence=8192), lambda p: 2 * p.ring / p.cp,
         "'ulysses = 4' in place of 'ulysses = 1' would do"),
        (asked(shard="zero1"), lambda p: 2 / p.params, "strategy.shard=auto would do"),
        (asked(shard="ddp"), lambda p: 2 / p.params, "strategy.shard=auto would do"),
        (asked(tp=[1], pp=[1]), lambda p: 2 / p.pp, "strategy.pp=4 or auto would do"),
        (asked(recompute=[0], recompute_layers=[-1]), lambda p: np.where(p.recompute == FULL, 0.5, 2),
         "strategy.recompute=auto would do"),
        (asked(micro=[4]), lambda p: p.micro / 2, "train.micro_batch_size=1 or auto would do"),
        (asked("tp = 1", "pp = 1"), lambda p: np.where((p.tp == 2) & (p.pp == 2), 0.5, 3),
         "'tp = 2' in place of 'tp = 1' and 'pp = 2' in place of 'pp = 1' would do"),
        (asked(tp=[1], pp=[1]), lambda p: np.where((p.tp == 2) & (p.pp == 2), 0.5, 3),
         "strategy.pp=2 and strategy.tp=2 would do"),
        (asked(ranks=16, batch=16, sequence=8200), lambda p: 12.5 / p.cp / p.tp,
         "data.sequence_length=8192 would do, which more ranks can share"),
        (asked(), lambda p: 24 / p.ranks,
         "32 ranks would do, 8 times as many; or use a smaller model, shorter sequences"),
        (asked(), lambda p: 4 * 62 / p.ranks, "256 ranks would do, 64 times as many; or use a smaller model, shorter"),
        (asked(), lambda p: 4 * 63 / p.ranks,
         "Use a smaller model, shorter sequences: 64 times as many ranks would not do"),
    ],
)  # fmt: skip
def test_the_nearest_change_is_named(one: SearchRequest, memory: Memory, advice: str) -> None:
    """With which what is asked for takes at most 97 % of what there is."""
    said = told(one, 1, memory)
    assert said.startswith("No strategy fits: the smallest of ")
    assert f" than the 1 GiB there are. {advice}" in said


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        (80, "'memory <= 2.25 GiB' in place of 'memory <= 1 GiB' would do"),
        (2.25, "'memory <= 2.25 GiB' in place of 'memory <= 1 GiB' would do"),
        (2.1, "'memory <= 2.1 GiB' in place of 'memory <= 1 GiB' would do"),
        (2.05, "64 times as many ranks would not do"),
    ],
)
def test_a_limit_that_is_set_too_low_is_raised_as_far_as_there_is_memory(limit: float, advice: str) -> None:
    said = told(asked("memory <= 1 GiB"), limit, even(2))
    assert "needs 2 GiB on a rank (pp=1 dp=4 cp=1 tp=1, micro-batches of 1), 1 GiB more than the 1 GiB allowed" in said
    assert advice in said


def test_the_lowest_of_several_limits_counts() -> None:
    limits = ["memory <= 3 GiB", "memory < 1 GiB", "memory >= 0.5 GiB"]
    assert relaxing(asked(*limits), 80).within(needs(np.array([1.0, 1.1]), 80)).tolist() == [True, False]
    assert relaxing(asked("memory >= 3 GiB"), 2).within(needs(np.array([2.0, 2.1]), 2)).tolist() == [True, False]
    assert not relaxing(asked(), 2).within(needs(np.array([1.5]), 2, kept=0.6)).any()
    assert relaxing(asked("memory <= 3 GiB"), 2).within(needs(np.array([2.0, 2.1]), 2)).tolist() == [True, False]
    assert "'memory <= 2.25 GiB' in place of 'memory < 1 GiB' would do" in told(asked(*limits), 80, even(2))
    both = told(asked("memory <= 1.5 GiB", "memory < 1 GiB"), 80, even(2))
    told_of = [f"'memory <= 2.25 GiB' in place of '{one}'" for one in ("memory <= 1.5 GiB", "memory < 1 GiB")]
    assert f"{told_of[0]} and {told_of[1]} would do" in both


def test_a_limit_that_holds_is_no_condition_to_be_dropped() -> None:
    assert "'tp = 4' in place of 'tp = 1' would do" in told(
        asked("memory <= 1 GiB", "tp = 1"), 1, lambda points: 2 / points.tp
    )


def test_more_memory_than_anything_takes_is_asked_for() -> None:
    said = told(asked("memory >= 3 GiB"), 2, lambda points: 1.9 / points.tp / points.pp)
    assert (
        said.startswith("No strategy meets 'memory >= 3 GiB': those that fit, of ")
        and "need 486.4 MiB to 1.9 GiB on a rank" in said
    )
    assert "'memory >= 471.8 MiB' in place of 'memory >= 3 GiB' would do" in said


@pytest.mark.parametrize(
    ("constraints", "fixed", "memory", "fits"),
    [
        ((), {}, even(0.97), True),
        (("memory <= 0.5 GiB",), {}, even(0.6), False),
        (("memory >= 0.5 GiB",), {}, even(0.4), False),
        (("memory >= 0.5 GiB",), {}, even(0.6), True),
        (("tp = 3",), {}, even(0.1), False),
        ((), {"micro": [4]}, lambda points: points.micro / 4, False),
        ((), {"micro": [2, 4]}, lambda points: points.micro / 4, True),
    ],
)
def test_what_surely_fits(constraints: Sequence[str], fixed: dict[str, Any], memory: Memory, fits: bool) -> None:
    one = asked(*constraints, **fixed)
    assert relaxing(asked(), 1, memory).is_feasible(one) == fits
    assert relaxing(replace(one, ranks=8), 1, memory).is_feasible(one) == fits


def test_what_is_not_frugal_may_fit_all_the_same() -> None:
    """Where recomputation takes more, or a micro-batch of one."""
    assert relaxing(asked(), 1, lambda points: np.where(points.recompute == FULL, 2, 0.5)).is_feasible(asked())
    assert relaxing(asked(), 1, lambda points: np.where(points.micro > 1, 0.5, 2)).is_feasible(asked())
    assert not relaxing(asked(), 1, even(2)).is_feasible(asked())
    # Of a space too large to be listed, what is frugal is found where it is fixed.
    many = asked(ranks=64, batch=4096)
    frugal = relaxing(many, 1, lambda points: np.where((points.recompute == FULL) & (points.micro == 1), 0.5, 2))
    assert frugal.is_feasible(many)


def test_no_sequence_is_named_that_is_much_shorter() -> None:
    """Of 1,100 tokens that 128 ranks cannot share: 1,024 could be, a fourteenth shorter."""
    one = asked(ranks=128, batch=128, sequence=1100, cp=[128])
    space = enumerate_space(replace(one, sequence=8192), most=2_000)
    said = relaxing(one, 1, lambda points: np.where(points.cp == 128, 0.5, 3)).too_large_error(
        space, 0, needs(np.full(len(space), 3.0), 1)
    )
    assert "data.sequence_length" not in str(said)
    flat = told(asked(ranks=16, batch=16, sequence=8200), 1, even(3))
    assert "data.sequence_length" not in flat


def test_a_change_that_does_not_fit_is_passed_over() -> None:
    """Of an empty space: the nearest value that fits is named, not the nearest."""
    one = space(8, 8, fixed={"tp": [3]})
    nearest, error = refused(one), refused(one, lambda points: np.where(points.tp == 1, 0.5, 2))
    assert nearest and str(nearest.fix) == "strategy.tp=4 or auto would do"
    assert error and str(error.fix) == "strategy.tp=1 or auto would do"
    never = refused(one, even(2))
    assert never and "64 times as many ranks would not do" in str(never.fix)


def test_the_most_frugal_of_many_arrangements_is_looked_for_among_some() -> None:
    """A space of more than two thousand points has every second or third of them asked."""
    sizes = list[int]()

    def memory(points: StrategyTable) -> Any:
        sizes.append(len(points))
        return np.full(len(points), 2.0)

    big = replace(asked(ranks=512, batch=512), model=DEEP)
    assert not relaxing(big, 1, memory).is_feasible(big)
    assert max(sizes) <= MOST
    assert 0.9 < SURE < 1
