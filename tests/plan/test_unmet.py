"""What leaves nothing of a strategy space is named, and what is named in its place is enough."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.cluster import Cluster
from plait.core.constraint import Constraint
from plait.core.errors import InfeasiblePlan, JobError
from plait.core.job import Job
from plait.plan.asking import asked_of
from plait.plan.points import SCHEDULES
from plait.plan.search import search
from plait.plan.space import SearchRequest, enumerate_space
from plait.plan.unmet import KEYS, key_of
from tests.plan.test_space import space

COLUMN_OF = {key: name for name, key in KEYS.items()}


def refused(asked: SearchRequest) -> JobError | None:
    try:
        enumerate_space(asked, most=300)
    except JobError as error:
        return error
    return None


def mended(asked: SearchRequest, error: JobError) -> SearchRequest:
    """The request with what the error names in place of what it refuses."""
    fix, constraints, fixed = error.fix or "", list(asked.constraints), dict(asked.fixed)
    if ranks := re.match(r"([\d,]+) (?:or [\d,]+ )?ranks would do", fix):
        many = int(ranks[1].replace(",", ""))
        return replace(asked, ranks=many, domain=min(8, many), constraints=(), fixed={})
    swaps = re.findall(r"'([^']*)' for '([^']*)'", fix)
    if alone := re.match(r"'([^']*)' would do", fix):
        swaps = [(alone[1], error.problem.split("'")[1])]
    for new, old in swaps:
        at = next(at for at, one in enumerate(constraints) if one.text == old)
        constraints[at] = Constraint.parse(new)
    if opened := re.findall(r"(strategy\.[a-z_]+)=auto", fix):
        left = {name: values for name, values in fixed.items() if key_of(name) not in opened}
        return replace(asked, fixed=left)
    told = re.findall(r"([a-z_.]+) = ([\w-]+)(?:,| and| would)", re.sub(r"'[^']*' for '[^']*'", "", fix))
    if auto := re.match(r"([\w-]+) would do, or auto", fix):
        told = [(str(error.key), auto[1])]
    for key, word in told:
        name = COLUMN_OF.get(key, key.rpartition(".")[2])
        fixed[name] = [SCHEDULES.index(word) if name == "schedule" else int(word)]
    assert swaps or told, fix
    return replace(asked, constraints=constraints, fixed=fixed)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (space(16, 16, "tp >= 9"), r"tp can be 1, 2, 4, 8\. 'tp >= 8' would do$"),
        (space(16, 16, "tp = 3"), r"'tp = (2|4)' would do$"),
        (space(16, 16, "pp > 12", "tp <= 2"), r"'pp >= 8' would do$"),
        (space(16, 16, "schedule = gpipe", fixed={"pp": [1]}), r"would do"),
        (space(16, 16, "tp = 8", "pp = 8"), r"would do"),
        (space(16, 16, "tp = 3", "pp = 5"), r"'tp = (2|4)' for 'tp = 3' and 'pp = 4' for 'pp = 5' would do$"),
        (space(17, 16), r"16 or 18 ranks would do$"),
    ],
)
def test_the_nearest_is_named(asked: SearchRequest, words: str) -> None:
    error = refused(asked)
    assert error
    assert re.search(words, f"{error.problem}. {error.fix}")
    assert refused(mended(asked, error)) is None


ONE_F_ONE_B = SCHEDULES.index("1f1b")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (space(16, 16, "tp > 8"), "'tp > 8' leaves no strategy for 16 ranks: tp can be 1, 2, 4, 8. 'tp >= 8' would do"),
        (space(16, 16, "tp < 1"), "'tp < 1' leaves no strategy for 16 ranks: tp can be 1, 2, 4, 8. 'tp <= 1' would do"),
        (space(16, 16, "num_micro_batches > 16"), "'num_micro_batches > 16' leaves no strategy for 16 ranks: "
         "num_micro_batches can be 1, 2, 4, 8, 16. 'num_micro_batches >= 16' would do"),
        (space(1024, 4096, "dp = 7"), "'dp = 7' leaves no strategy for 1,024 ranks: dp can be 4, 8, 16, 32, 64, 128, "
         "..., 1024. 'dp = 8' would do"),
        (space(16, 16, "schedule = gpipe"), "'schedule = gpipe' leaves no strategy for 16 ranks: schedule can be 1f1b, "
         "eager-1f1b, interleaved, zb-h1, zb-h2, zb-v. 'schedule = 1f1b' would do"),
        (space(16, 16, "ulysses = 3"), "'ulysses = 3' leaves no strategy for 16 ranks: ulysses can be 1, 2, 4. "
         "'ulysses = 4' would do"),
        (space(16, 16, "cp = 16", "tp = 2"), "'cp = 16' leaves no strategy for 16 ranks: cp can be 1, 2, 4. 'cp = 4' "
         "would do"),
        (space(16, 16, "tp = 3", fixed={"pp": [5]}), "strategy.pp and 'tp = 3' leave no strategy for 16 ranks with the "
         "rest that the job says. strategy.pp = 4 and 'tp = 4' for 'tp = 3' would do"),
        (space(16, 16, fixed={"pp": [5], "tp": [3]}), "strategy.pp and strategy.tp leave no strategy for 16 ranks with "
         "the rest that the job says. strategy.pp = 4 and strategy.tp = 4 would do"),
        (space(16, 16, "tp > 8", "dp > 16"), "'tp > 8' and 'dp > 16' leave no strategy for 16 ranks with the rest that "
         "the job says. 'tp >= 8' for 'tp > 8' and 'dp >= 2' for 'dp > 16' would do"),
        (space(16, 16, fixed={"micro": [3]}), "3 fits no arrangement of 16 ranks with the rest that the job says. "
         "4 would do, or auto"),
        (space(16, 16, fixed={"optim": [3], "grads": [1], "params": [1]}), "3 fits no arrangement of 16 ranks with the "
         "rest that the job says. 4 would do, or auto"),
        (space(16, 16, fixed={"dp": [1], "tp": [2], "pp": [1], "cp": [1]}), "1 fits no arrangement of 16 ranks with "
         "the rest that the job says. strategy.dp=auto would do, or 8"),
        (space(16, 16, fixed={"dp": [1], "tp": [8], "pp": [1], "cp": [1], "schedule": [ONE_F_ONE_B]}), "1 fits no "
         "arrangement of 16 ranks with the rest that the job says. strategy.dp=auto would do, or 2"),
        (space(23, 16), "23 ranks cannot share 16 sequences of 2,048 tokens of this model. 22 or 24 ranks would do"),
        (space(37, 4), "37 ranks cannot share 4 sequences of 2,048 tokens of this model. 36 or 40 ranks would do"),
    ],
)  # fmt: skip
def test_what_is_said_in_full(asked: SearchRequest, told: str) -> None:
    error = refused(asked)
    assert error
    assert f"{error.problem}. {error.fix}" == told
    assert refused(mended(asked, error)) is None


def test_a_degree_that_is_not_tried_unasked_can_be_said() -> None:
    one = space(16, 16, "cp >= 8")
    error = refused(one)
    assert error
    assert "or say strategy.cp = 8, which is not tried unasked" in str(error.fix)
    assert refused(replace(one, fixed={"cp": [8]})) is None


def test_only_degrees_of_ranks_are_said_not_to_be_tried_unasked() -> None:
    error = refused(space(128, 128, "micro_batch_size >= 65"))
    assert error
    assert error.fix == "'micro_batch_size >= 64' would do"


QUANTITIES = ("tp", "pp", "dp", "cp", "ring", "ulysses", "micro_batch_size", "num_micro_batches", "optim", "params",
              "p1", "virtual_stages", "secondary")  # fmt: skip


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


def test_what_the_job_did_not_say_is_left_open_first() -> None:
    asked = space(128, 128, fixed={"dp": [1], "tp": [2], "cp": [1], "schedule": [2], "virtual": [1]})
    error = refused(asked)
    assert error
    assert error.key == "strategy.dp"
    assert str(error.fix).startswith("strategy.dp=auto would do")
    fixed = {name: values for name, values in asked.fixed.items() if name != "dp"}
    assert refused(replace(asked, fixed=fixed)) is None


@pytest.mark.parametrize("cp", [4, 8])
def test_rings_are_named_as_a_job_says_them(cp: int) -> None:
    # Four heads a rank: not more than four ranks exchange them.
    error = refused(space(8 * cp, 64, fixed={"cp": [cp], "tp": [8], "ring": [3], "pp": [1], "dp": [1]}))
    assert error
    assert error.key == "strategy.cp_kind"
    assert re.match(r'("ulysses"|"ring"|\{ ulysses = \d, ring = \d \}) would do, or auto', str(error.fix)), error.fix


def test_far_too_many_ranks_are_answered_with_the_nearest_that_can_share() -> None:
    asked = space(1_000_003, 1024)
    error = refused(asked)
    assert error
    most = int(re.sub(r"\D", "", str(error.fix)))
    assert most >= 8192
    assert refused(mended(asked, error)) is None


SEVEN_B: dict[str, Any] = {
    "model": {"preset": "llama2-7b", "vocab": 32000}, "data": {"sequence_length": 4096},
    "train": {"global_batch_size": 1024, "precision": "bf16-mixed"}, "cluster": {"preset": "h100", "ranks": 64},
}  # fmt: skip


def searched(job: Job) -> None:
    cluster = Cluster.preset("h100")
    search(asked_of(job, job.model_spec(32000), cluster), cluster, job.train.precision)


def test_what_is_named_fits_into_memory_and_meets_all_constraints() -> None:
    given = ["recompute = full", "memory <= 6 GiB"]
    job = Job.from_dict({**SEVEN_B, "strategy": {"tp": 1}, "plan": {"constraints": given}})
    with pytest.raises(JobError, match="would do") as caught:
        searched(job)
    assert "cp_kind = " not in str(caught.value)
    opened = re.findall(r"(strategy\.[a-z_]+)=auto", str(caught.value.fix))
    assert opened
    searched(job.changed([f"{key}=auto" for key in opened]))


def test_nothing_is_named_where_nothing_fits() -> None:
    given = ["recompute = full", "memory <= 2 GiB"]
    job = Job.from_dict({**SEVEN_B, "strategy": {"tp": 1}, "plan": {"constraints": given}})
    with pytest.raises(JobError, match="does not fit into memory: use more ranks"):
        searched(job)


def test_a_length_that_nothing_divides_is_shortened() -> None:
    length = (1 << 20) + 1
    values = {**SEVEN_B, "data": {"sequence_length": length}, "train": {"global_batch_size": 8,
              "precision": "bf16-mixed"}}  # fmt: skip
    job = Job.from_dict({**values, "model": {**SEVEN_B["model"], "max_sequence": length}})
    with pytest.raises(InfeasiblePlan, match=r"data\.sequence_length = 1048576 would do"):
        searched(job)
    searched(job.changed(["data.sequence_length=1048576"]))
