"""Reader of Megatron-LM's log: arguments, vocabulary size and step times.

| line | source (NVIDIA/Megatron-LM, megatron/training, and logs of 2024 and 2025) |
|---|---|
| ``---- arguments ----``, ``  name .... value`` (48 wide), ``end of`` | ``_print_args``, arguments.py |
| ``iteration N/ M | ... elapsed time per iteration (ms): X | ...`` | ``training_log``, training.py |
| ``... | global batch size: B | ...`` | the same |
| ``> padded vocab (size: A) with B dummy tokens (new size: C)`` | the tokenizer's |

Forks write ``X/MEAN`` for the time, and launchers put a rank in brackets before each line. The log
has all arguments, also defaults, so most unknown arguments are defaults and are only counted. An
unknown argument that is True is listed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from plait.core.base.ignored_input import IgnoredInput
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.rows import starts_of
from plait.formats.base.shell import Argument
from plait.formats.base.step_log import StepLine, add_line
from plait.formats.megatron.flags import FLAGS, RENAMED, SWITCHES
from plait.formats.megatron.read import parse_megatron

BEGIN, END = re.compile(r"-{10,} arguments -{10,}"), re.compile(r"-{10,} end of arguments -{10,}")
ARGUMENT = re.compile(r"(?:^|\s)(?:([A-Za-z]\w{0,46}) \.{1,47}|([A-Za-z]\w{47,200}) ) (.*)$")
"""A printed argument; a name of 48 characters or more has no dots."""
STEP = re.compile(r"iteration\s+(\d{1,15})\s*/\s*\d+ ?\|.*?elapsed time per iteration \(ms\):\s*([0-9.eE+]{1,30})")
BATCH = re.compile(r"glob[ae]+l batch size:\s*(\d{1,15})")
PADDED = re.compile(r"> padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d{1,12})\)")
MOST_ARGUMENTS, LONGEST = 5_000, 10_000
"""The largest number of arguments, and of characters in an argument."""

OFF = {"None", "False", "", "[]"}
OWNERS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("moe_", "expert_"), "fp8": ("fp8_",), "fp4": ("fp4_",), "mtp_num_layers": ("mtp_",),
    "recompute_granularity": ("recompute_",), "tp_comm_overlap": ("tp_comm_",), "cpu_offloading": ("cpu_offloading",),
    "optimizer_cpu_offload": ("optimizer_offload",), "first_last_layers_bf16": ("num_layers_at_",),
    "multi_latent_attention": ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "use_precision_aware_optimizer": ("main_grads_dtype", "main_params_dtype", "exp_avg"),
    "cross_entropy_loss_fusion": ("cross_entropy_fusion",), "use_rope_scaling": ("rope_scaling",),
    "external_cuda_graph": ("cuda_graph_scope", "cuda_graph_modules", "cuda_graph_warmup"),
    "window_size": ("window_attn",),
}  # fmt: skip
"""Prefixes of arguments that have no effect, by the argument that is off."""
OTHER_PROGRAMS = (
    "bert_", "biencoder_", "dino_", "ict_", "img_", "indexer_", "inference_", "retro_", "rl_", "retriever_", "vision_",
    "mask_", "mamba_", "encoder_", "decoder_seq", "hybrid_", "muon_", "swin_", "nccl_",
)  # fmt: skip
"""Prefixes of arguments that belong to other models and programs, and do not affect training of a
GPT model."""
NAMES = {"apply_rope_fusion": "rope-fusion", "overlap_p2p_comm": "overlap-p2p-communication", "fp4": "fp4-format",
         "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank"}  # fmt: skip
"""Flags by argument, for flags named otherwise than the argument."""
INVERSE = {"add_bias_linear": "disable-bias-linear", "add_position_embedding": "no-position-embedding"}
"""Flags that turn an argument off, by argument, for flags of another name."""
_FOLLOWS = """
num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank data_parallel_size params_dtype
num_layers_per_stage consumed_train_samples consumed_valid_samples world_size rank local_rank
"""
DERIVED = frozenset(_FOLLOWS.split())
"""Arguments that follow from other arguments, or are read separately."""
_PRESUMED = """
align_grad_reduce barrier_with_L1_time clone_scatter_output_in_embedding data_sharding variable_seq_lengths
deallocate_pipeline_outputs batch_p2p_comm perform_initialization use_mcore_models log_params_norm
"""
DEFAULT_ON = frozenset(_PRESUMED.split())
"""Arguments without a flag that are on by default or have no effect on time."""
VALUES = FLAGS.named.keys() - SWITCHES
"""Known flags with values."""


class MegatronLog:
    """Reader of a log, line by line. arguments: as printed by the last start. lines: the steps.
    padded: size of the padded vocabulary, empty if unknown."""

    framework = "megatron"

    def __init__(self, file: str, over: IgnoredInput) -> None:
        self.file, self.over = file, over
        self.arguments: dict[str, str] = {}
        self.lines: list[StepLine] = []
        self.padded = ""
        self._block: dict[str, str] | None = None

    def add(self, line: str) -> None:
        """Read a line without its launcher's prefix. Raises JobError for an impossible step
        time."""
        if self._block is not None:
            self._in_block(line)
        elif BEGIN.search(line):
            self._block = {}
        elif match := STEP.search(line):
            self._step(line, match[1], match[2])
        elif match := PADDED.search(line):
            self.padded = match[1]

    def _in_block(self, line: str) -> None:
        assert self._block is not None
        if END.search(line):
            if self.arguments and _differ(self.arguments, self._block) and self.lines:
                self.over.note("line(s) of an earlier start with another configuration", count=len(self.lines))
                self.lines.clear()
            self.arguments, self._block = self._block, None
        elif (match := ARGUMENT.search(line)) and len(self._block) < MOST_ARGUMENTS:
            self._block[match[1] or match[2]] = match[3].strip()[:LONGEST]
        elif match := STEP.search(line):
            self.over.note("printed arguments without an end", f"iteration {match[1]}")
            self.arguments, self._block = self._block, None
            self._step(line, match[1], match[2])

    def _step(self, line: str, step: str, milliseconds: str) -> None:
        try:
            seconds = float(milliseconds) / 1e3
        except ValueError:
            self.over.note("line(s) of steps without a time", f"iteration {step}")
            return
        batch = BATCH.search(line)
        add_line(self.lines, StepLine(int(step), seconds, int(batch[1]) if batch else None), self.file)

    def configuration(self) -> ParsedConfig | None:
        """Return the log's configuration; None if the log has no arguments. Raises JobError for a
        contradictory configuration."""
        if not self.arguments:
            return None
        printed = dict(self.arguments)
        if self.padded:
            printed |= {"padded_vocab_size": self.padded, "vocab_size": "None"}
        told = parse_megatron(self.file, list(arguments_of(printed, self.over)), rules=())
        if printed.get("world_size", "").isdigit():
            told.set("cluster.ranks", int(printed["world_size"]))
        return told

    def seconds_of(self, tokens: float) -> list[StepLine]:
        """Return the step times as printed. tokens: ignored."""
        del tokens
        return self.lines


def arguments_of(printed: Mapping[str, str], over: IgnoredInput) -> Iterator[Argument]:
    """Yield the flags of the command line that leads to the printed values. over: counts unknown
    arguments."""
    off = tuple(start for owner, starts in OWNERS.items() if printed.get(owner, "None") in {*OFF, "0"}
                for start in starts)  # fmt: skip
    skipped = _moot(printed)
    for name, text in printed.items():
        if text == "None" or name in DERIVED or name in skipped or name.startswith((*off, *OTHER_PROGRAMS)):
            continue
        flag = NAMES.get(name, name.replace("_", "-"))
        if text == "False" or text == "True":
            yield from _switch(name, flag, on=text == "True")
        elif RENAMED.get(flag, flag) in VALUES:
            yield Argument(flag, _words(text))
        elif flag in FLAGS.unmodelled or starts_of(flag, FLAGS.unmodelled):
            if text not in {*OFF, "0", "none"}:
                yield Argument(flag, _words(text))
        elif not FLAGS.knows(flag):
            over.note("printed argument(s) not understood, most of them defaults", f"{name} = {text[:60]}")


def _moot(printed: Mapping[str, str]) -> set[str]:
    """Return the names of switches that have no effect with the other arguments."""
    found = set[str]()
    if printed.get("virtual_pipeline_model_parallel_size", "None") == "None":
        found.add("overlap_p2p_comm")
    elif printed.get("pipeline_model_parallel_layout", "None") != "None":
        found.add("virtual_pipeline_model_parallel_size")
    if printed.get("sequence_parallel") == "True" or printed.get("tensor_model_parallel_size") == "1":
        found.add("async_tensor_model_parallel_allreduce")
    gated = printed.get("swiglu") == "True"
    if gated or printed.get("add_bias_linear") == "False":
        found.add("bias_gelu_fusion")
    if not gated:
        found.add("bias_swiglu_fusion")
    if printed.get("position_embedding_type") != "rope":
        found.add("apply_rope_fusion")
    return found


def _switch(name: str, flag: str, *, on: bool) -> Iterator[Argument]:
    """Yield the flag that turns a switch on, or the one that turns off a default; none if the
    switch has its default."""
    negative = INVERSE.get(name, f"no-{flag}")
    if FLAGS.knows(negative) and negative not in VALUES:
        if not on:
            yield Argument(negative, ())
    elif on and name not in DEFAULT_ON and flag not in VALUES:
        yield Argument(flag, ())


def _words(text: str) -> tuple[str, ...]:
    """Return the values as on a command line: a list's items, an enumeration's member without its
    class."""
    if text.startswith(("[", "(")):
        try:
            some = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return (text,)
        return tuple(map(str, cast("Sequence[Any]", some))) if isinstance(some, list | tuple) and some else (text,)
    return (re.sub(r"^(?:[A-Z]\w*|torch)\.(\w+)$", r"\1", text),)


def _differ(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """True if two starts have different flags or numbers of ranks."""
    first, second = (list(arguments_of(each, IgnoredInput())) for each in (one, other))
    return first != second or one.get("world_size") != other.get("world_size")
