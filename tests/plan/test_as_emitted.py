"""Settings that are emitted, read back and predicted as their framework runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.formats.base.frameworks import FRAMEWORKS
from plait.formats.base.rows import Row
from plait.formats.base.shell import Argument, arguments
from plait.formats.megatron.flags import FLAGS
from plait.formats.megatron.read import parse_megatron
from plait.plan.answer import Planner
from plait.plan.emit import WRITERS, as_emitted, compare_predictions, emit, read_back
from plait.plan.search.request import job_at, point_of, search_request
from plait.plan.search.space import enumerate_space
from tests.formats.base.test_frameworks import job
from tests.plan.search.test_request import job as open_job

H100 = Cluster.preset("h100")
ONE = open_job()
SPACE = enumerate_space(search_request(ONE, ONE.model_spec(vocab=257), H100), most=20_000)


def planner(one: Job, cluster: str = "h100") -> Planner:
    return Planner(one, Cluster.preset(cluster), 128256)


def drawn(framework: str, count: int) -> list[Job]:
    """Plans of a framework's space, evenly over it."""
    one = job(framework, "llama3-70b", ranks=64)
    space = enumerate_space(planner(one).request, most=20_000)
    return [job_at(one, space.row(at)) for at in range(0, len(space), len(space) // count)][:count]


@pytest.mark.parametrize("framework", WRITERS)
def test_what_was_planned_for_a_framework_is_read_back_and_predicted_alike(framework: str) -> None:
    """Nothing is unsaid but the tokenizer's vocabulary, and time and memory are equal."""
    for one in drawn(framework, 25):
        found, own = emit(one, framework), planner(one)
        told = read_back(found, framework, one)
        assert told.unknown == told.unmodelled == [], str(one.strategy)
        before, after = own.predict(one), as_emitted(own, found, framework, one)
        degrees = {"overlap": before.point["tp"], "shard_overlap": before.point["dp"] * before.point["cp"]}
        idle = {key for key, ranks in degrees.items() if ranks == 1}  # nothing is sent
        assert {key for key in after.point if after.point[key] != before.point[key]} <= idle, str(found.unsupported)
        assert (after.seconds, after.most_memory) == pytest.approx((before.seconds, before.most_memory))


@given(st.integers(0, len(SPACE) - 1), st.sampled_from(sorted(WRITERS)))
def test_what_was_planned_for_plait_is_read_back(at: int, framework: str) -> None:
    """But for what a framework cannot say, and never against its rules."""
    point = dict(SPACE.row(at))
    one = job_at(ONE, point)
    told = read_back(emit(one, framework), framework, one)
    assert [what for what in told.unknown if not what.startswith("the model ")] == []
    assert set(told.unmodelled) <= {"parallelism.fsdp_reshard_after_forward = always"}
    back = point_of(told.job([f"model.vocab={one.model_spec(257).vocab}"]))
    same = ["pp", "dp", "cp", "tp", "micro", "num_micro"]
    same += ["ring", "optim", "sequence_parallel"] if framework == "megatron" else []
    assert {name: back[name] for name in same} == {name: point[name] for name in same}


FREE = "model.attention_dropout"
"""Written, and not counted."""
WRITTEN = [row for row in FLAGS.rows if row.name and not row.part and row.key != FREE]


@pytest.mark.parametrize("row", WRITTEN, ids=[row.name for row in WRITTEN])
def test_a_flag_that_says_what_a_key_says_is_read_as_it_is_written(row: Row) -> None:
    class Said:
        def value(self, key: str) -> Any:
            return value if key == row.key else None

    plain = not row.default if isinstance(row.default, bool) else 2
    values = row.kind.values() if isinstance(row.kind, Mapping) else [plain]
    value = next(one for one in values if one != row.default)
    (written,) = FLAGS.write(Said()).items()  # type: ignore[arg-type]
    given = [Argument(name, () if said is True else (str(said),)) for name, said in (written,)]
    whole = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --swiglu --num-experts 4 --bf16"
    aware = "--use-distributed-optimizer --use-precision-aware-optimizer"
    told = parse_megatron("a.sh", [*arguments(f"{whole} {aware}"), *given], rules=())
    assert told.get(row.key) == value


def test_what_plait_plans_another_runs_otherwise_and_both_are_said() -> None:
    strategy = {"dp": 4, "tp": 4, "shard": "zero1", "slices": {"batch": 2}, "sequence_parallel": True}
    one = Job.from_dict(job("plait").to_dict() | {"strategy": strategy} | {
        "train": {"global_batch_size": 64, "micro_batch_size": 4, "precision": "bf16-mixed"}
    })  # fmt: skip
    own = planner(one)
    best = own.evaluate().best
    emitted = emit(one, "megatron")
    after = as_emitted(own, emitted, "megatron", one)
    assert own.framework is None and after.seconds != best.seconds and after.most_memory != best.most_memory
    told = compare_predictions(own, best, emitted, "megatron")
    assert told.startswith("Planned for Plait: ") and FRAMEWORKS["megatron"].version in told


def test_what_does_not_fit_as_it_is_emitted_is_said() -> None:
    one = job("megatron", "llama3-70b", 16, tp=8, dp=2, sequence_parallel=True)
    own = planner(one)
    assert compare_predictions(own, own.predict(one), emit(one, "megatron"), "megatron").endswith("which does not fit.")


MIXTRAL = {"tp": 2, "pp": 4, "dp": 8, "ep": 8, "shard": "zero1", "sequence_parallel": True}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
EXPERTS = {"overlap_moe_expert_parallel_comm": True}
OFFLOADED = {"optimizer_offload_fraction": 0.5, "grad_reduce_in_bf16": True}
MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}


@pytest.mark.parametrize(
    ("model", "more", "cluster"),
    [
        ({"preset": "mixtral-8x7b"}, {"strategy": MIXTRAL}, "h100"),
        ({"preset": "mixtral-8x7b"}, {"strategy": MIXTRAL, "recipe": {"moe_token_dispatcher": "deepep"}}, "h100"),
        ({"preset": "mixtral-8x7b"}, {"strategy": MIXTRAL | INTERLEAVED | {"etp": 1}, "recipe": EXPERTS}, "h100"),
        ({"preset": "mixtral-8x7b", "experts": {"count": 8, "per_token": 2, "first_dense": 4}},
         {"strategy": MIXTRAL}, "h100"),
        ({"preset": "qwen3-30b-a3b"},
         {"strategy": MIXTRAL | {"tp": 1, "pp": 2, "dp": 32, "sequence_parallel": False}}, "h100"),
        ({"preset": "llama3-8b"}, {"train": {"precision": "fp8"}}, "b200"),
        ({"preset": "llama3-8b"}, {"train": {"precision": "mxfp8"}}, "b200"),
        ({"preset": "llama3-8b"}, {"recipe": MOMENTS}, "h100"),
        ({"preset": "llama3-8b"}, {"recipe": OFFLOADED}, "gb200"),
    ],
)  # fmt: skip
def test_experts_precisions_and_recipes_are_read_back_by_megatron(
    model: dict[str, Any], more: dict[str, Any], cluster: str
) -> None:
    train = {"global_batch_size": 256, "micro_batch_size": 1, "precision": "bf16-mixed"} | more.get("train", {})
    plain = {"strategy": {"dp": 32, "tp": 2, "shard": "zero1"}} | more
    one = Job.from_dict(job("megatron", ranks=64).to_dict() | plain | {"model": model, "train": train})
    found, own = emit(one, "megatron"), Planner(one, Cluster.preset(cluster), one.model_spec(1).vocab)
    told = read_back(found, "megatron", one)
    assert told.unknown == told.unmodelled == []
    assert told.get("train.precision") == train["precision"]
    recipe = more.get("recipe", {})
    assert {key: told.get(f"recipe.{key}") for key in recipe} == recipe
    before, after = own.predict(one), as_emitted(own, found, "megatron", one)
    assert (after.seconds, after.most_memory) == pytest.approx((before.seconds, before.most_memory))


@pytest.mark.parametrize("preset", sorted(file.stem for file in (specs_folder() / "models").glob("*.toml")))
def test_a_model_s_flags_are_read_as_that_model(preset: str) -> None:
    """Its shapes and its parameters, or what differs is named. The vocabulary is a tokenizer's."""
    values = job("megatron", dp=16).to_dict()
    one = Job.from_dict(values | {"model": {"preset": preset}, "data": {"sequence_length": 512}})
    model = one.model_spec(128)
    found = emit(one, "megatron")
    back = parse_megatron("a.sh", [*arguments(found.text), Argument("padded-vocab-size", (str(model.vocab),))])
    read = Job.from_dict(one.to_dict() | {"model": back.values["model"]}).model_spec(128)
    own, their = model.to_dict(), read.to_dict()
    named = " ".join(found.unsupported)
    differ = {key for key in own.keys() | their.keys() if own.get(key) != their.get(key)}
    said = {"without", "experts"} | ({"family"} if model.levels else set())
    assert {key for key in differ - said if f"model.{key}" not in named} == set()
    assert all(one in named for one in model.without)
    assert back.unknown == back.unmodelled == []
    assert differ & {"family", "parallel_block", "levels"} or read.num_parameters == model.num_parameters


def test_stages_that_embedding_and_head_have_to_themselves_are_emitted() -> None:
    one = job("megatron", "llama3-405b", 128, tp=8, pp=16, schedule="interleaved", virtual_stages=8, shard="zero1")
    assert "--pipeline-model-parallel-layout 'E|(t*1|)*126L'" in emit(one, "megatron").text
    assert point_of(read_back(emit(one, "megatron"), "megatron", one).job())["virtual"] == 8


def test_a_value_that_a_row_cannot_write_is_refused_where_it_is_read() -> None:
    with pytest.raises(JobError, match="'int4' is unknown"):
        parse_megatron("a.sh", arguments("--exp-avg-dtype int4"))
