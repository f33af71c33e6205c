"""Reader of torchtitan's log: configuration, built parallelism and model, and speed of steps.

| line | source (pytorch/torchtitan 00fbaafa, and logs of 2025 and 2026) |
|---|---|
| ``Running with configs: {JSON}``, with ``print_config`` alone | config |
| ``Building device mesh with parallelism: pp=1, dp_replicate=1, ...`` | distributed/parallel_dims.py |
| ``Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]``, until 2025 | the same |
| ``Model llama3 8B size: N total parameters`` | trainer.py |
| ``Applied full activation checkpointing``, ``FullAC`` | distributed/activation_checkpoint.py |
| ``Float8 training active``, ``Swapped to MXFP8Linear layers`` | components/quantization |
| ``Using pipeline schedule 1F1B with 8 microbatches and 2 stages.`` | distributed/pipeline_parallel.py |
| ``Trainer is initialized with local batch size 1, global batch size 8, ...`` | trainer.py |
| ``step: 10  loss: ...  memory: ...  tps: 3,500  tflops: ...  mfu: ...`` | components/metrics.py |
| ``validate step: 10  loss: ...  tps: ...`` | the same; ignored |

``tps`` (``wps`` until 2025) are tokens per second of one device, over all ranks of the job. Lines
on the built state take precedence over the printed configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from plait.core.base.codec.json_text import parse_json
from plait.core.base.ignored_input import IgnoredInput
from plait.formats.base.literals import LiteralSettings
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.step_log import StepLine, add_line
from plait.formats.torchtitan.read import parse_torchtitan

STEP = re.compile(r"(?<!validate )\bstep:\s*(\d{1,15})\s+loss:.*?\b[tw]ps:\s*([\d,]{1,20})")
CONFIG = re.compile(r"Running with (?:configs|args): (\{.*)$")
MESH = re.compile(r"Building device mesh with parallelism: (pp=.*)$")
OLD_MESH = re.compile(r"Building \d-D device mesh with \[(.{1,200}?)\], \[([\d, ]{1,100})\]")
MODEL = re.compile(r"Model (\w+) (\S+) size: ([\d,]{1,20}) total parameters")
AGAIN = re.compile(r"Applied (full|selective|FullAC|SelectiveAC|\w*AC)\b.*activation checkpointing", re.IGNORECASE)
CONVERTED = re.compile(
    r"\b(Float8|MX|NVFP4)\w*(?: \w{1,20}){0,4} training active|Swapped to (Float8|MX|NVFP4)\w* layers(.*)"
)
POLICIES = {"memorybudget": "memory_budget"}
"""Names of recomputation policies that have several words."""
PIPELINE = re.compile(r"Using pipeline schedule (\w+) with (\d{1,9}) microbatches and (\d{1,9}) stages")
TRAINER = re.compile(
    r"(?:Trainer is initialized|Training starts at step \d{1,15},?) with local batch size (\d{1,12}), "
    r"global batch size (\d{1,12}), .*?sequence length (\d{1,12})"
)
DEVICE = re.compile(r"CUDA capacity: (.{1,100}?) with [\d.]+ ?GiB memory")
DEGREES = {
    "pp": "pipeline_parallel_degree", "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree", "cp": "context_parallel_degree", "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree", "etp": "expert_tensor_parallel_degree",
}  # fmt: skip
MOST_CONFIG = 1 << 20
"""The longest printed configuration, in characters."""
READ = {"training", "parallelism", "activation_checkpoint", "compile", "model", "float8"}
"""Tables of the printed configuration that decide a step's time."""


class TorchtitanLog:
    """Reader of a log, line by line. built: settings from lines on the built state. config: the
    printed configuration. tps: pairs of step and tokens per second of a device. parameters: of the
    model, 0 if unknown."""

    framework = "torchtitan"

    def __init__(self, file: str, over: IgnoredInput) -> None:
        self.file, self.over = file, over
        self.built: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.device = ""
        self.tps: list[tuple[int, int]] = []
        self.parameters = 0
        self._text: list[str] | None = None

    def add(self, line: str) -> None:
        """Read a line without its launcher's prefix."""
        if self._text is not None:
            self._continue(line)
        elif match := STEP.search(line):
            self._step(match)
        elif match := CONFIG.search(line):
            self._text = []
            self._continue(match[1])
        else:
            self._built(line)

    def _step(self, match: re.Match[str]) -> None:
        rate = match[2].replace(",", "")
        if not rate or int(rate) == 0:
            self.over.note("line(s) of steps without a time", f"step {match[1]}")
        else:
            self.tps.append((int(match[1]), int(rate)))

    def _continue(self, line: str) -> None:
        """Read a further line of a printed configuration."""
        assert self._text is not None
        self._text.append(line)
        ends = line.rstrip() == "}" or (len(self._text) == 1 and line.rstrip().endswith("}"))
        if ends or sum(map(len, self._text)) > MOST_CONFIG or STEP.search(line):
            text, self._text = "\n".join(self._text), None
            try:
                values = parse_json(text) if ends else None
            except ValueError:
                values = None
            if isinstance(values, dict):
                self.config = cast("dict[str, Any]", values)
            else:
                self.over.note("printed configuration(s) in no whole JSON", "Running with configs")

    def _built(self, line: str) -> None:
        if match := MESH.search(line):
            self._mesh({name: int(value) for name, value in re.findall(r"(\w+)=(\d{1,9})", match[1])})
        elif match := OLD_MESH.search(line):
            sizes = map(int, re.findall(r"\d{1,9}", match[2]))
            self._mesh(
                dict.fromkeys(("pp", "dp_shard", "tp"), 1)
                | dict(zip(re.findall(r"\w+", match[1]), sizes, strict=False))
            )
        elif match := MODEL.search(line):
            self.built |= {"model.name": match[1], "model.flavor": match[2]}
            self.parameters = int(match[3].replace(",", ""))
        elif match := TRAINER.search(line):
            names = ("training.local_batch_size", "training.global_batch_size", "training.seq_len")
            self.built |= dict(zip(names, map(int, match.groups()), strict=True))
        elif match := AGAIN.search(line):
            word = match[1].lower().removesuffix("ac")
            self.built["activation_checkpoint.mode"] = POLICIES.get(word, word)
        elif match := CONVERTED.search(line):
            self.built["model.converters"] = [(match[1] or match[2]).lower()]
            if "float8_all_gather=True" in (match[3] or ""):
                self.built["float8.enable_fsdp_float8_all_gather"] = True
        elif match := PIPELINE.search(line):
            self.built["parallelism.pipeline_parallel_schedule"] = match[1]
            self.built["pipeline"] = (int(match[2]), int(match[3]))
        elif match := DEVICE.search(line):
            self.device = match[1]

    def _printed_settings(self) -> dict[str, Any]:
        """Return the settings of the printed configuration that decide a step's time, by
        ``table.key``."""
        tables: dict[str, Mapping[str, Any]] = {
            name: some for name, some in self.config.items() if name in READ and isinstance(some, Mapping)
        }
        return {
            f"{name}.{key}": value
            for name, some in tables.items()
            for key, value in some.items()
            if value is not None and (not isinstance(value, dict | list) or key == "converters")
        }

    def _mesh(self, degrees: dict[str, int]) -> None:
        """Record the mesh's degrees; older names of data-parallel axes count as shards. degrees: by
        name."""
        inner = degrees.pop("dp_shard_in_ep", 1)
        if inner > 1:
            degrees["ep"] = inner * degrees.get("cp", 1)
        degrees["dp_shard"] = (
            degrees.get("dp_shard", 1) * degrees.pop("dp_shard_mod_ep", 1) * inner * degrees.pop("dp", 1)
        )
        self.built |= {f"parallelism.{DEGREES[name]}": size for name, size in degrees.items() if name in DEGREES}

    def configuration(self) -> ParsedConfig | None:
        """Return the log's configuration; None if no line has the mesh. Raises JobError for
        contradictions."""
        if "parallelism.pipeline_parallel_degree" not in self.built:
            return None
        asked = self._printed_settings()
        for key in asked.keys() & self.built.keys():
            if asked[key] != self.built[key] and asked[key] not in (-1, None):
                self.over.note("setting(s) built otherwise than configured", f"{key} = {asked[key]}")
        built = dict(self.built)
        micro, stages = built.pop("pipeline", (0, 0))
        values = {**asked, **built}
        values.setdefault("activation_checkpoint.mode", "none")
        if micro and values.get("training.local_batch_size"):
            values["parallelism.pipeline_parallel_microbatch_size"] = max(
                1, values["training.local_batch_size"] // micro
            )
        if stages:  # the built stages count; the rule for counting them has changed over time
            values.pop("parallelism.pipeline_parallel_layers_per_stage", None)
        plain = LiteralSettings(values={key: value for key, value in values.items() if "expert" not in key})
        told = parse_torchtitan(self.file, plain, python=False, whole=False)
        pp = told.get("strategy.pp", 1)
        if stages > pp and stages % pp == 0 and told.get("strategy.schedule") == "interleaved":
            told.set("strategy.virtual_stages", stages // pp)
        for key in ("expert_parallel_degree", "expert_tensor_parallel_degree"):
            if values.get(f"parallelism.{key}", 1) > 1:
                told.unmodelled.append(f"parallelism.{key} = {values[f'parallelism.{key}']}")
        return told

    def seconds_of(self, tokens: float) -> list[StepLine]:
        """Return the step times. tokens: each rank's share of a step's tokens. Raises JobError for
        impossible times."""
        found: list[StepLine] = []
        for step, rate in self.tps:
            add_line(found, StepLine(step, tokens / rate), self.file)
        return found
