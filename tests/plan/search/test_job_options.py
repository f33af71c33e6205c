"""What a job says of how its ranks compute, in the planner's models of time and memory."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import StrategyTable
from plait.core.step.columns.shapes import Options, Shapes
from plait.core.step.memory.closed_memory import plait_on
from plait.core.step.memory.memory_options import MatrixBytes
from plait.core.step.memory.pipeline_memory import SizeRow
from plait.core.step.memory.size_rows import size_rows
from plait.core.step.seconds.layer_time import Layer
from plait.plan.answer import Planner
from plait.plan.search.candidate import Candidate
from plait.plan.search.job_options import options_of

STRATEGY = {"tp": 2, "dp": 4, "shard": "zero1", "schedule": "1f1b", "overlap": "async", "slices": {"batch": 1}}


def job(precision: str = "bf16-mixed", *, cluster: str = "gb200", **more: Any) -> Job:
    values: dict[str, Any] = {
        "model": {"preset": "llama3-8b"},
        "data": {"sequence_length": 4096},
        "train": {"global_batch_size": 32, "micro_batch_size": 1, "precision": precision},
        "strategy": STRATEGY,
        "cluster": {"preset": cluster},
    }
    return Job.from_dict(values | more)


def predicted(asked: Job) -> Candidate:
    return Planner(asked, Cluster.preset(asked.cluster.preset), 128256).evaluate().best


@pytest.mark.parametrize(
    ("precision", "cluster", "gathers", "matrices", "quantised"),
    [
        ("fp8", "h100", True, MatrixBytes(2.0, 1.0, 2.0), 0.5),
        ("fp8", "gb200", True, MatrixBytes(1.0, 1.0, 1.0), 0.5),
        ("fp8", "h100", False, MatrixBytes(4.0, 2.0, 4.0), 1.0),
        ("mxfp8", "gb200", True, MatrixBytes(33 / 16, 33 / 32, 33 / 16), 33 / 64),
        ("nvfp4", "gb200", True, MatrixBytes(2 + 9 / 8, 2.0, 2 + 9 / 8), 1.0),
    ],
)
def test_matrices_are_kept_and_gathered_as_the_recipe_has_it(
    precision: str, cluster: str, gathers: bool, matrices: MatrixBytes, quantised: float
) -> None:
    asked = job(precision, cluster=cluster, recipe={"fp8_param_gather": gathers})
    found = options_of(asked, Cluster.preset(cluster).device)
    assert (found.matrices, found.quantised) == (matrices, quantised)


def test_a_job_of_plaits_own_has_plaits_own_options() -> None:
    device = Cluster.preset("gb200").device
    assert options_of(job(), device) == plait_on(device)


def test_layers_products_alone_get_faster_and_their_matrices_smaller() -> None:
    """6.98e9 parameters of matrices, a byte each on Blackwell in fp8; no host is late for four
    sequences."""
    train, strategy = {"global_batch_size": 32, "micro_batch_size": 4}, {**STRATEGY, "tp": 1, "dp": 8}
    bf16, fp8 = (
        predicted(job(train={**train, "precision": name}, strategy=strategy)) for name in ("bf16-mixed", "fp8")
    )
    layers = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    saved = bf16.memory.fullest.estimate.memory.parameters - fp8.memory.fullest.estimate.memory.parameters
    assert saved == pytest.approx(layers, rel=1e-6)
    assert fp8.closed_form == fp8.seconds < bf16.seconds
    cluster = Cluster.preset("gb200")
    sixteen, eight = (cluster.device.peak[name].value for name in ("bf16-mixed", "fp8"))
    told = cluster.efficiency
    products = 6 * 32 * 4096 * layers / 8  # of a rank, whose share of peak is the precision's
    least = products / (sixteen * told.matmul.value) - products / (eight * told.matmul_fp8.value)
    assert bf16.closed_form is not None
    assert bf16.closed_form - fp8.seconds == pytest.approx(least, rel=0.1)


def test_what_is_planned_and_not_trained_is_said_and_refused() -> None:
    asked = job("mxfp8", recipe={"fp8_param_gather": False})
    why = Planner(asked, Cluster.preset("gb200"), 128256).evaluate().why
    said = "Plait plans these in closed form and cannot train with them: "
    said += "train.precision = 'mxfp8', recipe.fp8_param_gather = False."
    assert why[0].startswith(f"{said} Without them, the closed form predicts ")
    with pytest.raises(JobError, match="can be planned for, and not be drawn yet") as refused:
        asked.check_trains(asked.model_spec(128256), "drawn")
    assert refused.value.key == "train.precision"
    other = job(recipe={"exp_avg_dtype": "bf16"})
    with pytest.raises(JobError, match="can be planned for, and not be trained yet") as refused:
        other.check_trains(other.model_spec(128256))
    assert refused.value.key == "recipe.exp_avg_dtype"
    job().check_trains(job().model_spec(128256))


def test_a_model_without_some_of_its_parts_is_planned_and_not_trained() -> None:
    asked = job(model={"preset": "gemma2-9b"})
    why = Planner(asked, Cluster.preset("gb200"), 256000).evaluate().why
    assert why[0].startswith("Planned without norms after sublayers, the capping of scores and logits, GELU")
    with pytest.raises(JobError, match="would be another one if it were trained") as refused:
        asked.check_trains(asked.model_spec(256000))
    assert refused.value.key == "model.without"
    asked.check_trains(asked.model_spec(256000), "drawn")
    described = job(model={"preset": "gemma2-9b", "without": []})
    described.check_trains(described.model_spec(256000))


def test_unequal_places_are_refused_where_lists_are_not_walked() -> None:
    strategy = {**STRATEGY, "pp": 2, "dp": [2, 4], "tp": [4, 2]}
    train = {"global_batch_size": 32, "micro_batch_size": 2, "precision": "fp8"}
    asked = job(strategy=strategy, train=train)
    with pytest.raises(
        JobError, match=r"strategy\.dp: differs between pp ranks; train\.precision needs the same on all"
    ):
        Planner(asked, Cluster.preset("gb200"), 128256).predict(asked)


MOE = {**STRATEGY, "tp": 2, "dp": 4, "ep": 8, "sequence_parallel": True}


def mixtral(strategy: dict[str, Any] = MOE, **recipe: Any) -> Job:
    return job(model={"preset": "mixtral-8x7b"}, strategy=strategy, recipe=recipe, cluster="h200")


def test_whole_experts_are_shared_out_over_tensor_parallel_ranks_too() -> None:
    with pytest.raises(JobError, match=r"8 does not divide the 4 ranks of dp x cp"):
        mixtral()
    whole = mixtral({**MOE, "etp": 1})
    with pytest.raises(JobError, match="need sequence parallelism") as refused:
        mixtral({**MOE, "sequence_parallel": False, "etp": 1})
    assert refused.value.key == "strategy.etp"
    cut = mixtral({**MOE, "ep": 4})
    found = [Planner(one, Cluster.preset("h200"), 32000).memory(one, None) for one in (whole, cut)]  # type: ignore[arg-type]
    states = [one.fullest.estimate.memory for one in found]
    assert states[0].optimizer == states[1].optimizer  # an eighth of the experts' each
    assert states[0].activations < states[1].activations


def test_exchanges_beside_another_micro_batch_keep_it_in_memory() -> None:
    base: dict[str, Any] = {"strategy": {**MOE, "etp": 1}, "moe_token_dispatcher": "deepep"}
    plain, hidden = (mixtral(**base, overlap_moe_expert_parallel_comm=one) for one in (False, True))
    cluster = Cluster.preset("h200")
    one, other = (Planner(each, cluster, 32000).predict(each) for each in (plain, hidden))
    assert other.seconds < one.seconds
    assert other.parts["ep"] < one.parts["ep"] / 2
    assert other.memory.fullest.estimate.memory.activations > 1.5 * one.memory.fullest.estimate.memory.activations


WIDE = {**STRATEGY, "tp": 1, "dp": 4, "pp": 2}
TRAIN = {"global_batch_size": 32, "micro_batch_size": 2, "precision": "bf16-mixed"}


def on_h200(**recipe: Any) -> Candidate:
    asked = job(cluster="h200", strategy=WIDE, train=TRAIN, recipe=recipe)
    return Planner(asked, Cluster.preset("h200"), 128256).predict(asked)


def test_gradients_and_moments_in_fewer_bytes() -> None:
    plain, half = on_h200(), on_h200(grad_reduce_in_bf16=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8")
    memory, other = plain.memory.fullest.estimate.memory, half.memory.fullest.estimate.memory
    assert other.gradients * 2 == pytest.approx(memory.gradients)
    assert other.optimizer * 12 == pytest.approx(memory.optimizer * (4 + 2 + 1), rel=1e-6)
    assert half.parts["dp"] < plain.parts["dp"]
    assert plain.closed_form and half.seconds < plain.closed_form


def test_states_on_the_host_take_its_links_and_its_memory() -> None:
    """Of each number, its gradient in fp32 goes there, its parameter in bf16 comes back, and its
    update moves 28 bytes of the host's memory."""
    plain, away = on_h200(), on_h200(optimizer_offload_fraction=0.75)
    memory, other = plain.memory.fullest.estimate.memory, away.memory.fullest.estimate.memory
    assert other.optimizer == pytest.approx(memory.optimizer / 4)
    device = Cluster.preset("h200").device
    assert device.host_rate and device.host_memory_rate
    moved = memory.optimizer / 12 * 0.75
    each = 6 / device.host_rate.value + 28 / (0.7 * device.host_memory_rate.value)
    assert plain.closed_form
    assert away.seconds - plain.closed_form == pytest.approx(moved * each, rel=0.05)
    with pytest.raises(JobError, match="has no host_rate and no host_memory_rate") as refused:
        options_of(job(recipe={"optimizer_offload_fraction": 0.5}), Cluster.preset("lab").device)
    assert refused.value.key == "recipe.optimizer_offload_fraction"


def test_activations_on_the_host_cost_what_no_layer_hides() -> None:
    plain, half, every = (on_h200(activation_offload_fraction=share) for share in (0.0, 0.5, 1.0))
    sizes = [one.memory.fullest.estimate.memory.activations for one in (plain, half, every)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.1)
    assert sizes[2] < sizes[1] / 2
    assert plain.closed_form
    assert plain.closed_form <= half.seconds < every.seconds


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-6.7b", "qwen3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "row", [{}, {"tp": 4}, {"tp": 4, "sequence_parallel": 1}, {"cp": 4}, {"recompute": 1}, {"recompute": 2}]
)
def test_what_a_layer_keeps_is_about_what_memory_counts(name: str, row: dict[str, int]) -> None:
    model, points = ModelSpec.preset(name, specs_folder() / "models"), StrategyTable.of([{**row, "pp": 2}])
    h100 = Cluster.preset("h100")
    sizes, of = size_rows(model, points, sequence=4096, itemsize=2, options=plait_on(h100.device))
    layer = Layer(Shapes.of(model), points, h100, 4096, "bf16-mixed", Options())
    assert 2 * float(layer.kept[0]) == pytest.approx(SizeRow.of(sizes[of[0]]).kept_layer[0], rel=0.09)


def test_stages_share_embedding_and_head() -> None:
    plain, shared = on_h200(), on_h200(vocabulary_parallel_stages=True)
    words = 128256 * 4096
    layers = 16 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    parameters = shared.memory.fullest.estimate.memory.parameters
    assert parameters == pytest.approx(2 * (layers + 2 * words / 2), rel=1e-3)
    # The last stage has no loss to wait for, and a micro-batch more is alive.
    assert plain.closed_form and shared.seconds < plain.closed_form
    assert shared.memory.fullest.estimate.memory.activations > plain.memory.fullest.estimate.memory.activations


U = {"family": "utransformer", "num_layers": 3, "levels": 1, "hidden": 64, "num_heads": 2, "max_sequence": 4096}


@pytest.mark.parametrize(
    ("changed", "key", "why"),
    [
        ({"recipe": {"moe_token_dispatcher": "deepep"}}, "recipe.moe_token_dispatcher", "the model has none"),
        ({"strategy": {"etp": 1}}, "strategy.etp", "the model has none"),
        ({"recipe": {"fp8_param_gather": False}}, "recipe.fp8_param_gather", "train.precision is bf16-mixed"),
        (
            {"model": U, "recipe": {"exp_avg_dtype": "bf16"}},
            "recipe.exp_avg_dtype",
            "is not supported for a utransformer",
        ),
        (
            {"model": U, "train": {**TRAIN, "precision": "fp8"}},
            "train.precision",
            "is not supported for a utransformer",
        ),
    ],
)
def test_a_key_that_says_nothing_is_refused(changed: dict[str, Any], key: str, why: str) -> None:
    with pytest.raises(JobError, match=why) as refused:
        job(**changed)
    assert refused.value.key == key


def test_inputs_of_products_are_kept_quantised() -> None:
    """Of Llama 3 8B in fp8: two normalised streams and the MLP's activation in a byte, attention's
    output in one more; of every layer and token of the one micro-batch."""

    def activations(precision: str, recompute: str) -> int:
        strategy = {**STRATEGY, "tp": 1, "dp": 8, "recompute": recompute}
        asked = job(train={**TRAIN, "micro_batch_size": 4, "precision": precision}, strategy=strategy)
        return predicted(asked).memory.fullest.estimate.memory.activations

    saved = activations("bf16-mixed", "none") - activations("fp8", "none")
    assert saved == pytest.approx(32 * 4 * 4096 * (2 * 4096 + 14336 - 4096), rel=0.02)
    assert activations("bf16-mixed", "full") == pytest.approx(activations("fp8", "full"), rel=0.02)
