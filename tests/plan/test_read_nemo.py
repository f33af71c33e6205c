"""NeMo 1's YAML: what it says is Megatron-LM's, and what is not understood is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES
from plait.plan.asking import point_of
from plait.plan.read_config import read_configuration
from plait.plan.told import Told

LLAMA = """
name: megatron_llama
trainer: {devices: 8, num_nodes: 2, accelerator: gpu, precision: bf16, logger: False, max_steps: 100}
exp_manager: {name: x, checkpoint_callback_params: {model_parallel_size: "${multiply:${model.a}, ${model.b}}"}}
model:
  mcore_gpt: True
  micro_batch_size: 1
  global_batch_size: 64
  rampup_batch_size: null
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  num_query_groups: null
  hidden_dropout: 0.0
  attention_dropout: 0.0
  normalization: rmsnorm
  layernorm_epsilon: 1e-5
  bias: False
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: False
  tokenizer: {library: sentencepiece, type: null, model: /x.model}
  megatron_amp_O2: True
  activations_checkpoint_granularity: full
  activations_checkpoint_method: uniform
  activations_checkpoint_num_layers: 1
  sequence_parallel: True
  overlap_p2p_comm: True
  data:
    data_prefix: ???
    seq_length: ${model.encoder_seq_length}
    num_workers: 2
  optim:
    name: distributed_fused_adam
    lr: 2e-4
    betas: [0.9, 0.98]
    sched: {name: CosineAnnealing, warmup_steps: 500}
"""


def told(tmp_path: Path, text: str) -> Told:
    file = tmp_path / "nemo.yaml"
    file.write_text(text)
    found = read_configuration(file)
    assert found is not None
    return found


def test_a_file_of_nemo_s_is_read_whole(tmp_path: Path) -> None:
    found = told(tmp_path, LLAMA)
    assert found.framework == "megatron" and found.unknown == found.unmodelled == []
    job = found.job(["model.vocab=32000"])
    assert job.cluster.ranks == 16 and job.train.precision == "bf16-mixed"
    assert job.model_spec(1).num_parameters == 6_738_415_616, "Llama 2 7B has so many"
    point = point_of(job)
    assert (point["pp"], point["dp"], point["tp"], point["virtual"], point["optim"]) == (2, 2, 4, 4, 2)
    assert SCHEDULES[point["schedule"]] == "interleaved" and RECOMPUTES[point["recompute"]] == "full"
    assert point["sequence_parallel"] == 1 and job.data.sequence_length == 4096
    assert {"trainer.logger", "model.data.data_prefix", "exp_manager.name"} & set(found.harmless) == {
        "trainer.logger", "exp_manager.name"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  mcore_gpt: True", "  mcore_gpt: True\n  frobnicates: False", "model.frobnicates = false"),
        ("  mcore_gpt: True", "  mcore_gpt: True\n  frobnicates: 3", "model.frobnicates = 3"),
        ("  mcore_gpt: True", "  mcore_gpt: True\n  deep: {kind: new}", "model.deep.kind = new"),
        ("logger: False", "plugins: many", "trainer.plugins = many"),
        ("activation: fast-swiglu", "activation: soft", "model.activation = soft"),
        ("precision: bf16", "precision: int4", "trainer.precision = int4"),
        ("    lr: 2e-4", "    bucket_cap_mb: 200", "model.optim.bucket_cap_mb = 200"),
        ("  mcore_gpt: True", "  fp32_residual_connection: True", "model.fp32_residual_connection = true"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    found = told(tmp_path, LLAMA.replace(old, new))
    assert found.unknown == [says]
    assert found.lines()[0].endswith(f"not in the prediction: {says}")


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("precision: bf16", "precision: 32", "train.precision", "fp32"),
        ("precision: bf16", "precision: 16-mixed", "train.precision", "bf16-mixed"),
        ("name: distributed_fused_adam", "name: fused_adam", "strategy.shard", "ddp"),
        ("granularity: full\n  activations_checkpoint_method: uniform", "granularity: selective", "strategy.recompute",
         "selective"),
        ("num_query_groups: null", "num_query_groups: 8", "model.num_kv_heads", 8),
        ("share_embeddings_and_output_weights: False", "share_embeddings_and_output_weights: True",
         "model.tied_embeddings", True),
        ("    lr: 2e-4", "    grad_sync_dtype: bf16", "recipe.grad_reduce_in_bf16", True),
        ("name: distributed_fused_adam", "name: mcore_distributed_optim\n    overlap_param_sync: True",
         "strategy.overlap", {"tp": "async", "shard": "both"}),
        ("granularity: full", "granularity: selective", "strategy.recompute", "selective"),
        ("ffn_hidden_size: 11008", "ffn_hidden_size: ${multiply:3, ${.hidden_size}}", "model.ffn_hidden", 12288),
        ("seq_length: ${model.encoder_seq_length}", "seq_length: 2048", "data.sequence_length", 2048),
        ("megatron_amp_O2: True", "fp8: True", "train.precision", "fp8"),
    ],
)  # fmt: skip
def test_each_setting_is_the_job_s(tmp_path: Path, old: str, new: str, key: str, value: object) -> None:
    assert old in LLAMA
    before, found = told(tmp_path, LLAMA).get(key), told(tmp_path, LLAMA.replace(old, new))
    assert found.unknown == [] and found.get(key) == value
    assert value != before or "16-mixed" in new, "as fast and as large as bf16"


def test_other_yaml_is_not_nemo_s(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="none of which says a size of Megatron-LM's"):
        told(tmp_path, "trainer: {devices: 8}\nmodel: {name: x}\n")


def test_weights_in_full_precision_are_remarked_on(tmp_path: Path) -> None:
    found = told(tmp_path, LLAMA.replace("megatron_amp_O2: True", "megatron_amp_O2: False"))
    assert found.unmodelled == ["model.megatron_amp_O2 = false (weights are counted in half precision, too)"]


def test_references_in_a_circle_end(tmp_path: Path) -> None:
    circle = LLAMA.replace(
        "max_position_embeddings: ${.encoder_seq_length}", "max_position_embeddings: ${.hidden_size}"
    )
    text = circle.replace("hidden_size: 4096\n", "hidden_size: ${.max_position_embeddings}\n", 1)
    with pytest.raises(JobError, match="is not a whole number"):
        told(tmp_path, text)


@pytest.mark.parametrize(
    "lines",
    [
        ["x0: 3", *(f"x{at}: ${{multiply:${{.x{at - 1}}}, ${{.x{at - 1}}}}}" for at in range(1, 200))],
        ["x199: ${multiply:${.x199}, ${.x199}}"],
        ["x5000: 3", *(f"x{at}: ${{.x{at + 1}}}" for at in reversed(range(199, 5000)))],
    ],
    ids=["squares of squares", "a product of itself", "a long chain"],
)
def test_hostile_products_and_chains_end(tmp_path: Path, lines: list[str]) -> None:
    own = "".join(f"  {line}\n" for line in lines)
    text = LLAMA.replace("  hidden_size: 4096\n", f"  hidden_size: ${{.x199}}\n{own}")
    with pytest.raises(JobError, match="is not a whole number"):
        told(tmp_path, text)
