"""Megatron-LM's command lines as jobs: five public recipes, and what a flag means both ways.

Facts of the recipes: Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh,
examples/llama/train_llama3_8b_h100_fp8.sh and examples/mixtral (commit 157006d6 and before;
Mixtral's as in NVIDIA's MLPerf and NeMo recipes, tp 1, ep 8, pp 4 with 8 rounds), Nemotron-4 340B
(arXiv 2406.11704, section
2.3), and Llama 3.1 70B as in Megatron-Bridge's recipe (tp 4, pp 4, cp 2, 5 rounds, on 64 GPUs).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.formats.base.frameworks import FRAMEWORKS
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.shell import arguments
from plait.formats.megatron.flags import FLAGS, ROWS
from plait.formats.megatron.read import parse_megatron
from plait.plan.answer import Planner
from plait.plan.emit import emit
from plait.plan.search.candidate import Answer

GPT3 = """
GPUS=8
NODES=128
ARGS=( --num-layers 96 --hidden-size 12288
  --num-attention-heads 96   # of 128
  --seq-length 2048 --max-position-embeddings 2048 )
torchrun --nproc_per_node $GPUS --nnodes ${NODES} --master_port 6000 pretrain_gpt.py ${ARGS[@]} \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --micro-batch-size 1 \\
  --global-batch-size 1536 --fp16 --lr 6.0e-5 --vocab-file $1 --save $2
"""
LLAMA3 = """
SEQ=8192; DTYPE=fp8
if [[ $DTYPE == fp8 ]]; then
  FP8+=( "--fp8-format hybrid" "--fp8-amax-history-len 1024" "--fp8-param-gather" )
fi
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
  --kv-channels 128 --seq-length $SEQ --max-position-embeddings ${SEQ} --position-embedding-type rope \\
  --rotary-base 1000000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --apply-layernorm-1p \\
  --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 \\
  --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion ${FP8[@]} --tensor-model-parallel-size 1 \\
  --context-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \\
  --overlap-param-gather --vocab-size 128256 --train-samples 1953125000 --mock-data
"""
MIXTRAL = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 --normalization RMSNorm --swiglu
--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --hidden-dropout 0.0
--attention-dropout 0.0 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 8
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1
--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16
--micro-batch-size 1 --global-batch-size 256 --vocab-size 32000
"""
NEMOTRON = """
--num-layers 96 --hidden-size 18432 --ffn-hidden-size 73728 --num-attention-heads 96 --group-query-attention
--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --squared-relu --position-embedding-type rope
--rotary-percent 0.5 --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
--hidden-dropout 0.0 --attention-dropout 0.0 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 12
--num-virtual-stages-per-pipeline-rank 8 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --bf16 --micro-batch-size 1 --global-batch-size 768 --vocab-size 256000
"""
LLAMA70 = """
torchrun --nproc-per-node=8 --nnodes=8 pretrain_gpt.py --num-layers=80 --hidden-size=8192
  --ffn-hidden-size=28672 --num-attention-heads=64 --group-query-attention --num-query-groups=8 --seq-length=8192
  --max-position-embeddings=8192 --position-embedding-type=rope --rotary-base=500000 --use-rope-scaling
  --normalization=RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout=0
  --attention-dropout=0 --tensor-model-parallel-size=4 --pipeline-model-parallel-size=4 --context-parallel-size=2
  --num-virtual-stages-per-pipeline-rank=5 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
  --overlap-param-gather --bf16 --micro-batch-size=1 --global-batch-size=512 --vocab-size=128256 --tp-comm-overlap
""".replace("\n", " ")


def read(text: str) -> ParsedConfig:
    return parse_megatron("recipe.sh", arguments(text))


def predicted(text: str, cluster: str, *more: str) -> Answer:
    told, on = read(text), Cluster.preset(cluster)
    one = told.job(more)
    return Planner(one, on, one.model_spec(1).vocab, configured_framework=told.runs).evaluate()


@pytest.mark.parametrize(
    ("text", "cluster", "more", "parameters", "point", "mfu"),
    [
        (GPT3, "a100-80", [], 175e9, {"tp": 8, "pp": 16, "dp": 8, "optim": 1, "num_micro": 192}, (0.40, 0.60)),
        (LLAMA3, "h100", [], 8.0e9, {"cp": 2, "ring": 2, "dp": 4, "optim": 8, "sequence_parallel": 0}, (0.25, 0.60)),
        (MIXTRAL, "h100", ["cluster.ranks=64"], 46.7e9, {"pp": 4, "virtual": 8, "ep": 8, "dp": 16}, (0.25, 0.60)),
        (NEMOTRON, "h100", ["cluster.ranks=1536"], 341e9, {"pp": 12, "virtual": 8, "dp": 16, "optim": 16}, (0.35, 0.5)),
        (LLAMA70, "h100", [], 70.6e9, {"pp": 4, "cp": 2, "virtual": 5, "dp": 2, "optim": 4}, (0.40, 0.60)),
    ],
    ids=["gpt3-175b", "llama3-8b-fp8", "mixtral-8x7b", "nemotron-4-340b", "llama3-70b"],
)  # fmt: skip
def test_a_public_recipe_is_read_checked_and_predicted(
    text: str, cluster: str, more: list[str], parameters: float, point: dict[str, int], mfu: tuple[float, float]
) -> None:
    told, found = read(text), predicted(text, cluster, *more)
    assert told.unknown == []
    assert found.model.num_parameters == pytest.approx(parameters, rel=0.01)
    best = found.best
    assert {name: best.point[name] for name in point} == point
    assert best.memory.fits and best.mfu and mfu[0] < best.mfu < mfu[1]
    assert best.low < best.seconds < best.high


def test_groups_of_micro_batches_that_a_flag_sizes_are_not_held_to_the_usual_size() -> None:
    """Ten micro-batches of four places: refused by Megatron-LM in groups of four, run in groups of
    five."""
    ten = LLAMA70.replace("--global-batch-size=512", "--global-batch-size=20")
    with pytest.raises(JobError, match=r"^strategy\.virtual_stages: Its interleaved schedule takes micro-batches in"):
        predicted(ten, "h100")
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    found = predicted(f"{ten} {flag}=5", "h100")
    assert found.best.point["num_micro"] == 10 and f"{flag} 5" in read(f"{ten} {flag} 5").unmodelled


def test_what_is_said_of_a_recipe() -> None:
    assert read(LLAMA70).unmodelled == ["--tp-comm-overlap"]
    assert read(LLAMA3).job().train.precision == "fp8"
    told = read(LLAMA3.replace("--mock-data", "--frobnicate 3 --mock-data"))
    assert told.unknown == ["--frobnicate 3"] and "NOT UNDERSTOOD in recipe.sh" in told.lines()[0]
    assert {"--train-samples", "--mock-data"} <= set(told.harmless)
    more = read(flags(optimizer="muon", muon_momentum="0.9", fim_rate="0.5", NCCL_ALGO="Ring"))
    assert more.unmodelled == ["--muon-momentum 0.9", "--optimizer muon (counted as Adam)"] and more.unknown == []
    assert more.harmless == ["--fim-rate", "--NCCL-ALGO"]
    assert read(LLAMA3).get("recipe.grad_reduce_in_bf16") is True


def flags(**changed: str | None) -> str:
    """A small command line with flags changed, or left out."""
    plain = {
        "num-layers": "8", "hidden-size": "512", "num-attention-heads": "8", "seq-length": "256",
        "max-position-embeddings": "256", "micro-batch-size": "1", "global-batch-size": "16", "vocab-size": "1024",
        "bf16": "", "nproc-per-node": "8", "nnodes": "1",
    }  # fmt: skip
    plain |= {name.replace("_", "-"): value for name, value in changed.items()}  # type: ignore[misc]
    return " ".join(f"--{name} {value}".strip() for name, value in plain.items() if value is not None)


AWARE = {"use_distributed_optimizer": "", "use_precision_aware_optimizer": ""}


@pytest.mark.parametrize(
    ("changed", "key", "value"),
    [
        ({"use_distributed_optimizer": ""}, "strategy.shard", "zero1"),
        ({"use_megatron_fsdp": "", "data_parallel_sharding_strategy": "optim_grads_params"}, "strategy.shard", "fsdp"),
        ({}, "strategy.shard", "ddp"),
        ({"overlap_grad_reduce": ""}, "strategy.overlap", {"tp": "async", "shard": "both"}),
        ({"overlap_grad_reduce": "", "use_distributed_optimizer": ""}, "strategy.overlap",
         {"tp": "async", "shard": "backward"}),
        ({"no_async_tensor_model_parallel_allreduce": ""}, "strategy.overlap", {"tp": "sync", "shard": "none"}),
        ({"recompute_activations": ""}, "strategy.recompute", "selective"),
        ({"recompute_activations": "", "recompute_granularity": "full"}, "strategy.recompute", "selective"),
        ({"use_torch_fsdp2": ""}, "strategy.shard", "fsdp"),
        ({"num_layers": None, "expert_model_parallel_size": "4"}, "strategy.ep", 4),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "1"},
         "strategy.recompute", "full"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "3"},
         "strategy.recompute", {"kind": "full", "layers": 3}),
        ({"swiglu": ""}, "model.ffn_hidden", 1344),
        ({"vocab_size": "1000"}, "model.vocab", 1024),
        ({"vocab_size": "1000", "padded_vocab_size": "1008"}, "model.vocab", 1008),
        ({"num_query_groups": "2"}, "model.num_kv_heads", None),
        ({"pipeline_model_parallel_size": "2", "num_layers_per_virtual_pipeline_stage": "2"},
         "strategy.virtual_stages", 2),
        ({"pipeline_model_parallel_size": "5", "pipeline_model_parallel_layout": "'Et|(tt|)*3tL'"},
         "strategy.virtual_stages", 1),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, "train.precision", "mxfp8"),
        ({"bf16": None}, "train.precision", "fp32"),
        (AWARE | {"exp_avg_dtype": "fp8"}, "recipe.exp_avg_sq_dtype", "fp32"),
        (AWARE | {"main_grads_dtype": "bf16"}, "recipe.grad_reduce_in_bf16", True),
        (AWARE | {"optimizer_cpu_offload": ""}, "recipe.optimizer_offload_fraction", 1.0),
        (AWARE | {"optimizer_cpu_offload": "", "optimizer_offload_fraction": "0.5"},
         "recipe.optimizer_offload_fraction", 0.5),
    ],
)  # fmt: skip
def test_what_flags_mean(changed: dict[str, str | None], key: str, value: Any) -> None:
    assert read(flags(**changed)).get(key) == value


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({}, {}),
        ({"no_overlap_p2p_communication": ""}, {"rounds_hide_transfers": False}),
        ({"attention_backend": "unfused"}, {"fused_attention": False}),
        ({"transformer_impl": "local"}, {"fused_attention": False}),
        ({"transformer_impl": "local", "use_flash_attn": ""}, {}),
        ({"transformer_impl": "transformer_engine"}, {}),
        ({"recompute_granularity": "selective", "recompute_modules": "layernorm"}, {"recompute_attention": False}),
    ],
)  # fmt: skip
def test_what_flags_say_of_memory_and_time(changed: dict[str, str | None], options: dict[str, Any]) -> None:
    told = read(flags(**changed))
    assert told.options == options
    runs = told.runs
    assert runs and all(getattr(runs.options, name) == value for name, value in options.items())


@pytest.mark.parametrize(("file", "tp"), [("8", 2), ("1", 8), (None, 4), ("2", 2)])
def test_sizes_are_rounded_up_by_the_tp_that_is_planned(file: str | None, tp: int) -> None:
    shapes: dict[str, str | None] = {"vocab_size": "50257", "position_embedding_type": "rope"}
    told = read(flags(**shapes, tensor_model_parallel_size=file))
    wanted = read(flags(**shapes, tensor_model_parallel_size=str(tp))).job().model
    assert wanted["vocab"] == -(-50257 // (128 * tp)) * 128 * tp and wanted["ffn_hidden"] % tp == 0
    for _ in range(2):
        assert told.job([f"strategy.tp={tp}"]).model == wanted
    other = told.job([f"strategy.tp={tp}", "model.vocab=50300"]).model
    assert other == wanted | {"vocab": 50300}
    assert told.job(["strategy.tp=auto", "strategy.dp=auto"]).model == told.values["model"]


@pytest.mark.parametrize(("file", "tp", "parallel"), [("1", 2, True), ("8", 1, False), ("8", 2, True)])
def test_sequences_are_shared_out_where_the_planned_tp_is_more_than_one(file: str, tp: int, parallel: bool) -> None:
    told = read(flags(sequence_parallel="", tensor_model_parallel_size=file))
    assert told.job([f"strategy.tp={tp}"]).strategy.sequence_parallel is parallel


def test_products_in_four_bits_are_read() -> None:
    told = read(flags(fp4_format="e2m1", fp4_recipe="nvfp4", fp4_param_gather="", use_distributed_optimizer=""))
    found = told.job(["cluster.preset=b200"])
    assert found.train.precision == "nvfp4" and (told.unknown, told.unmodelled) == ([], ["--fp4-param-gather"])
    assert read(flags(fp4_format="e2m1", fp4_recipe="own")).unmodelled == ["--fp4-recipe own (counted as nvfp4)"]


def test_latent_attention() -> None:
    latent: dict[str, str | None] = {"multi_latent_attention": "", "qk_layernorm": "", "kv_lora_rank": "512"}
    told = read(flags(**latent, q_lora_rank="96", v_head_dim="32", qk_head_dim="32"))
    model = told.job().model_spec(1)
    assert (model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim, model.head_size) == (96, 512, 64, 32)
    assert not told.unmodelled
    assert "without --q-lora-rank (counted as heads" in read(flags(**latent)).unmodelled[0]
    assert read(flags(**latent, q_lora_rank="96")).get("model.head_size") == 128
    assert "--qk-head-dim 128 (counted as 64)" in read(flags(**latent, q_lora_rank="96", v_head_dim="64")).unmodelled


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "4"},
         "--recompute-num-layers 4 (inputs of all layers"),
        ({"use_tp_pp_dp_mapping": ""}, "Known, and not in the prediction: --use-tp-pp-dp-mapping"),
        ({"fp8_format": "e4m3", "fp8_recipe": "blockwise"}, "--fp8-recipe blockwise (counted as one scale a tensor)"),
        ({"num_query_groups": "2"}, "--num-query-groups counts beside --group-query-attention alone"),
        ({"pipeline_model_parallel_size": "4", "decoder_first_pipeline_num_layers": "1",
          "decoder_last_pipeline_num_layers": "3"}, "Stages of unequal length"),
    ],
)  # fmt: skip
def test_what_is_predicted_otherwise_than_flags_say_is_named(changed: dict[str, str | None], said: str) -> None:
    assert said in " ".join(read(flags(**changed)).lines())


def test_every_flag_is_of_one_kind() -> None:
    assert len(FLAGS.named) == sum(bool(row.name) for row in ROWS)
    assert not FLAGS.unmodelled.keys() & FLAGS.harmless


def test_a_ramp_of_the_batch_both_ways() -> None:
    told = read(flags(global_batch_size="256", rampup_batch_size="32 32 1000"))
    ramp = told.job().train.rampup_batch_size
    assert ramp and (ramp.start, ramp.increment, ramp.samples) == (32, 32, 1000)
    assert any("a step of the full batch" in line for line in told.lines())
    back = read(emit(told.job(), "megatron").text).job(["cluster.ranks=8", "model.vocab=1024"])
    assert back.train.rampup_batch_size == ramp


def test_a_ramp_that_megatron_rounds_or_does_not_have() -> None:
    told = read(flags(global_batch_size="256", rampup_batch_size="4 4 1000", decrease_batch_size_if_needed=""))
    assert told.job().train.rampup_batch_size is None and "--decrease-batch-size-if-needed" in told.unmodelled
    assert read(flags(global_batch_size="256", rampup_batch_size="256 1 9")).job().train.rampup_batch_size is None
    with pytest.raises(JobError, match="4 sequences are not a multiple"):
        read(flags(global_batch_size="256", rampup_batch_size="4 4 1000")).job()


def test_a_file_is_read(tmp_path: Path) -> None:
    from plait.api.planning import plan_job

    file = tmp_path / "gpt3.sh"
    file.write_text(GPT3)
    asked = plan_job(file, ["cluster.preset=a100-80"])
    found = asked.answer()
    assert found.answer.framework == FRAMEWORKS["megatron"].version and len(found.candidates) == 1
    assert asked.to_dict()["read"]["not_understood"] == []
    assert asked.planner.job.run.name == "gpt3"


def test_what_a_search_keeps_is_no_part_of_the_file_s_own_strategy() -> None:
    told = read(flags(tensor_model_parallel_size="2"))
    more = ["cluster.preset=h100", "strategy=auto", "strategy.tp=4", "train.micro_batch_size=2"]
    assert told.job(more).strategy.tp == 4
    own = told.file_job(more)
    assert (own.strategy.tp, own.strategy.dp, own.train.micro_batch_size) == (2, 4, 1)
