"""What leaves nothing of a strategy space is named, and what is named in its place is enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.constraint import Constraint
from plait.core.job.spec import Job
from plait.plan.asking import asked_of
from plait.plan.points import SCHEDULES
from plait.plan.search import search
from plait.plan.space import SearchRequest, enumerate_space
from plait.plan.unmet import KEYS, Found, Unmet, column_of, key_of, nothing
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
        (space(128, 128, "num_micro_batches > 128"), "'num_micro_batches > 128' leaves no strategy for 128 ranks: "
         "num_micro_batches can be 1, 2, 4, 8, 16, 32, 64, 128. 'num_micro_batches >= 128' would do"),
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


# ---- where arrangements are what a table says ----


def table(*rows: dict[str, int], ranks: set[int] | None = None) -> Found:
    """Arrangements that there are, of which a request has those that it allows; ranks: of none other."""

    def found(asked: SearchRequest) -> Iterator[dict[str, set[int]]]:
        for row in rows:
            if ranks and asked.ranks not in ranks:
                return
            columns = {column: value for column, value in row.items() if column in asked.fixed}
            held = all(value in asked.fixed[name] for name, value in columns.items())
            if held and all(one.holds(row[column_of(one)]) for one in asked.constraints):
                yield {name: {value} for name, value in row.items()}

    return found


def told(asked: SearchRequest, found: Found, fits: Callable[[SearchRequest], bool] | None = None) -> str:
    error: JobError = nothing(asked, found)
    if fits:
        assert isinstance(error, Unmet)
        error = error.fitting(fits)
    return f"{error.key}: {error.problem}. {error.fix}"


@pytest.mark.parametrize(
    ("ranks", "batch", "there", "near"),
    [
        (1000, 96, {990, 1003}, "990 or 1,003 ranks would do"),
        (1000, 96, {968, 1032}, "968 or 1,032 ranks would do"),
        (1000, 96, {967, 1033, 500}, "500 ranks would do"),  # the half, not the nearest
        (1000, 96, {1033, 62}, "62 ranks would do"),  # a sixteenth, rounded
        (1000, 96, {1033, 200}, "200 ranks would do"),  # a fifth
        (1000, 96, {1033, 8}, "8 ranks would do"),
        (1000, 96, {1033, 768}, "768 ranks would do"),  # 3 x 256
        (1000, 96, {1033, 512, 384}, "512 ranks would do"),  # 1 x 512
        (1000, 96, {1033, 1}, "1 ranks would do"),
        (1000, 96, {1033, 700}, "Use a number of ranks, or of sequences, with more divisors"),
        (3, 2, {2}, "2 ranks would do"),
        (3, 2, {1}, "1 ranks would do"),
        (3, 2, {4}, "4 ranks would do"),
    ],
)
def test_the_nearest_numbers_of_ranks(ranks: int, batch: int, there: set[int], near: str) -> None:
    said = told(space(ranks, batch), table({"tp": 1}, ranks=there))
    assert (
        said == f"cluster.ranks: {ranks:,} ranks cannot share {batch} sequences of 2,048 tokens of this model. {near}"
    )


FEW = table({"tp": 1, "pp": 8, "micro": 1}, {"tp": 2, "pp": 4, "micro": 2}, {"tp": 4, "pp": 2, "micro": 4})


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (space(8, 8, "tp < 1"), "'tp < 1' leaves no strategy for 8 ranks: tp can be 1, 2, 4. 'tp <= 1' would do"),
        (space(8, 8, "tp > 4"), "'tp > 4' leaves no strategy for 8 ranks: tp can be 1, 2, 4. 'tp >= 4' would do"),
        (space(8, 8, "tp = 3"), "'tp = 3' leaves no strategy for 8 ranks: tp can be 1, 2, 4. 'tp = 4' would do"),
        (space(8, 8, "tp in 8, 16"), "'tp in 8, 16' leaves no strategy for 8 ranks: tp can be 1, 2, 4. 'tp = 4' would "
         "do"),
        (space(8, 8, "pp >= 5", "tp >= 2"), "'pp >= 5' leaves no strategy for 8 ranks: pp can be 2, 4. 'pp >= 4' would "
         "do"),
        (space(8, 8, "micro_batch_size = 3"), "'micro_batch_size = 3' leaves no strategy for 8 ranks: micro_batch_size "
         "can be 1, 2, 4. 'micro_batch_size = 4' would do"),
    ],
)  # fmt: skip
def test_one_condition_alone(asked: SearchRequest, says: str) -> None:
    assert told(asked, FEW) == f"plan.constraints: {says}"


REST = "8 ranks with the rest that the job says"


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ({"tp": [8]}, f"strategy.tp: 8 fits no arrangement of {REST}. 4 would do, or auto"),
        ({"micro": [7], "tp": [2]}, f"train.micro_batch_size: 7 fits no arrangement of {REST}. 2 would do, or auto"),
        # What the job did not say is left open first.
        ({"pp": [1], "tp": [4]},
         f"strategy.pp: 1 fits no arrangement of {REST}. strategy.pp=auto would do, or 2"),
        ({"pp": [1], "tp": [1], "micro": [4]},
         "strategy.pp: strategy.pp and strategy.tp as they are leave no strategy for 8 ranks. strategy.pp=auto and "
         "strategy.tp=auto would do"),
        ({"pp": [3], "tp": [3]},
         f"strategy.pp: strategy.pp and strategy.tp leave no strategy for {REST}. strategy.pp = 4 and strategy.tp = 2 "
         "would do"),
    ],
)  # fmt: skip
def test_what_the_job_fixes(fixed: dict[str, list[int]], says: str) -> None:
    assert told(space(8, 8, fixed=fixed), FEW) == says


def test_sharding_that_nobody_asked_for_is_left_open_as_one_key() -> None:
    asked = replace(space(8, 8, fixed={"tp": [4]}), shard="ddp")

    def found(one: SearchRequest) -> Iterator[dict[str, set[int]]]:
        yield from ({"tp": {4}},) if one.shard is None else ()

    said = told(asked, found)
    assert said == f"strategy.shard: ddp fits no arrangement of {REST}. strategy.shard=auto would do"
    assert "cluster.ranks" in told(replace(asked, shard="zero1"), found)


def fitting(**limits: int) -> Callable[[SearchRequest], bool]:
    """Whether values that are fixed are so large at least, or left open."""
    return lambda asked: all(asked.fixed.get(name, [99])[0] >= least for name, least in limits.items())


def test_what_is_named_must_fit_into_memory() -> None:
    asked = space(8, 8, fixed={"tp": [8]})
    assert told(asked, FEW, fitting(tp=4)).endswith(". 4 would do, or auto")
    assert told(asked, FEW, fitting(tp=5)).endswith(". auto would do")
    assert told(asked, FEW, lambda one: not one.fixed).endswith(". auto would do")
    never = told(asked, FEW, lambda _: False)
    assert never.endswith("What would do in their place does not fit into memory: use more ranks, or a smaller model")


def test_a_constraint_is_passed_over_where_what_would_do_does_not_fit() -> None:
    assert told(space(8, 8, "tp = 3"), FEW, lambda one: not one.constraints) == (
        f"plan.constraints: 'tp = 3' leaves no strategy for {REST}. A job without [strategy], and with nothing but "
        "memory in plan.constraints, would do"
    )
    said = space(8, 8, "tp >= 2", fixed={"tp": [1], "pp": [8], "micro": [4]})
    assert told(said, FEW, lambda one: not one.fixed).endswith(". A job without [strategy] would do")
    limited = space(8, 8, "tp = 3", "pp = 3", "memory <= 1 GiB")

    def only_memory(one: SearchRequest) -> bool:
        return [each.quantity for each in one.constraints] == ["memory"]

    there = table({"tp": 1, "pp": 8, "memory": 1}, {"tp": 2, "pp": 4, "memory": 1})
    assert told(limited, there, only_memory).endswith(
        "A job without [strategy], and with nothing but memory in plan.constraints, would do"
    )


@pytest.mark.parametrize(
    ("cp", "rings", "word"),
    [(8, {1}, '"ulysses"'), (8, {8}, '"ring"'), (8, {2}, "{ ulysses = 4, ring = 2 }"), (None, {2}, "")],
)
def test_rings_in_the_words_of_a_job(cp: int | None, rings: set[int], word: str) -> None:
    fixed = {"ring": [3], **({"cp": [cp]} if cp else {})}
    rows = [{"ring": ring, **({"cp": cp} if cp else {})} for ring in rings]
    said = told(space(64, 64, fixed=fixed), table(*rows))
    assert said.startswith("strategy.cp_kind: ")
    assert said.endswith(f". {word} would do, or auto" if word else ". auto would do")
