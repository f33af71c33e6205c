"""Recordings of other tools, made into a run's folder that ``plait diagnose`` and ``plait timeline`` read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from plait.core.errors import DataError, JobError
from plait.core.files import check_target, explained, replacing
from plait.core.numbers import LARGEST, shown
from plait.core.timeline import SCHEMA_VERSION
from plait.diagnose.tables import MOST_RANKS

NS = 1e9
FOREIGN = {
    "step": pl.Int64, "rank": pl.Int32, "kind": pl.String, "name": pl.String, "seq": pl.Int64, "site": pl.String,
    "start": pl.Float64, "end": pl.Float64, "bytes": pl.Int64, "axis": pl.String, "group": pl.String,
}  # fmt: skip
"""What readers of other formats make. seq: -1 where the format does not count."""
AXES = (
    ("tp", r"tensor|(^|[^a-z])tp"), ("cp", r"context|(^|[^a-z])cp($|[^a-z])"), ("pp", r"pipeline|(^|[^a-z])pp"),
    ("dp", r"data|fsdp|shard|replicate|(^|[^a-z])dp|default_pg"),
)  # fmt: skip
LATEST = 4e9
"""Seconds from 1970, in 2096: nanoseconds between two such times are still whole numbers of 64 bits."""
BACKWARD = r"reduce_?scatter|backward|grad"


def axis_of(label: str) -> str:
    """The axis of a process group by its description: ``TENSOR_MODEL_PARALLEL_GROUP``, ``mesh_dp_shard``.

    >>> axis_of("mesh_dp_shard"), axis_of("TENSOR_MODEL_PARALLEL_GROUP"), axis_of("undefined")
    ('dp', 'tp', 'other')
    """
    return next((axis for axis, words in AXES if re.search(words, label.lower())), "other")


def members_of(ranks: Any) -> str | None:
    """``0,4,8`` of a list of ranks, or of its text; None where it is cut off or none.

    >>> members_of("[4, 0]"), members_of([1, 2]), members_of("[0, 1, ...]")
    ('0,4', '1,2', None)
    """
    text = ",".join(map(str, ranks)) if isinstance(ranks, list) else str(ranks or "")
    inside = text.strip().strip("[]")
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", inside):
        return None
    return ",".join(map(str, sorted(map(int, inside.split(",")))))


def rank_in(name: str) -> int | None:
    """The rank that a file's name tells: ``rank-00003.json``, ``trace_rank_3``, ``rank3_trace.json``,
    ``nccl_trace_3``.

    >>> [rank_in(name) for name in ("rank-00003.json.gz", "rank3_trace.json", "nccl_trace_7", "trace.json")]
    [3, 3, 7, None]
    """
    found = re.search(r"rank[-_]?(\d+)", name) or re.search(r"_(\d+)(?=$|\.)", name)
    return int(found[1]) if found else None


def number(value: Any, what: str, most: float = LARGEST) -> Any:
    """The value. Raises DataError for one that is beyond ``most`` to either side, or not a number.

    >>> number(float("nan"), "ts")
    Traceback (most recent call last):
    plait.core.errors.DataError: ts is nan, which is out of range
    """
    if not abs(value) <= most:  # what is no number is neither less nor more
        raise DataError(f"{what} is {shown(value)}, which is out of range")
    return value


def rank_of(said: Any, named: int | None, unknown: str) -> int:
    """Whose a file is: as it says itself, else as its name does. Raises DataError for what is no rank, and
    ``unknown`` where neither says it."""
    rank = named if said is None else said
    if rank is None:
        raise DataError(f"{unknown}: name the file rank-N... or ..._rank_N...")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < MOST_RANKS:
        raise DataError(f"its rank is {shown(rank)}, which is none")
    return rank


def import_traces(files: Sequence[Path], out: Path, told: Callable[[str], None] = lambda _: None) -> tuple[int, int]:
    """Ranks and spans that were written to ``out``; files that cannot be used are skipped, and ``told``.

    Raises JobError for a folder that holds something else, LaunchError for one that cannot be written,
    DataError where no file could be used.
    """
    cannot, fix = f"{out} cannot be written", "Choose another with --out"
    with explained(cannot, fix=fix):
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken:
        raise JobError(f"{out} exists and is not empty", key="--out", fix="Name a new folder")
    check_target(out / "timeline" / "rank", fix=fix)
    parts: dict[int, tuple[Path, pl.DataFrame]] = {}
    for file in files:
        try:
            part, unfinished = _spans_of(file)
            rank = int(part["rank"][0])
            if rank in parts:
                raise DataError(f"it is of rank {rank}, as is {parts[rank][0]}")
        except DataError as error:
            message = str(error)
            told(message if message.startswith(str(file)) else f"{file} was skipped: {message}")
            continue
        parts[rank] = file, part
        if unfinished:
            told(f"{file}: {unfinished} operations had not ended, and were left out")
    if not parts:
        raise DataError(f"none of {len(files)} files could be used")
    spans = _finished(pl.concat([part for _, part in parts.values()]))
    with explained(cannot, fix=fix):
        _write(spans, out)
    return len(parts), spans.height


def _spans_of(file: Path) -> tuple[pl.DataFrame, int]:
    """Columns ``FOREIGN`` of a file, of one rank, and how many operations had not ended. Raises DataError for
    whatever cannot be used, so that the other files are not lost with it."""
    from plait.diagnose.flight_recorder import dump_spans, is_dump
    from plait.diagnose.kineto import is_kineto, kineto_spans, read_json

    content, unfinished = read_json(file), 0
    try:
        if is_kineto(content):
            spans = kineto_spans(content, rank_in(file.name))
        elif is_dump(content):
            spans, unfinished = dump_spans(content, rank_in(file.name))
        else:
            raise DataError("neither a PyTorch profiler trace nor a flight recorder's dump")
        spans = spans.select(list(FOREIGN)).cast(FOREIGN)  # type: ignore[arg-type]
    except UnicodeEncodeError:
        raise DataError("a name in it holds half a character, which is no text") from None
    except (ArithmeticError, TypeError, ValueError, pl.exceptions.PolarsError) as error:
        # A file of another tool may hold anything anywhere.
        raise DataError(f"a value in it cannot be used: {str(error).partition(chr(10))[0][:200]}") from None
    if not spans.select(pl.all_horizontal(pl.col("start", "end").abs() <= LATEST).all()).item():
        raise DataError(f"it has times more than {LATEST:.0f} seconds from 1970")
    return spans, unfinished


def _write(spans: pl.DataFrame, out: Path) -> None:
    """One file a rank, as a run has them."""
    for (rank,), own in spans.group_by(["rank"], maintain_order=True):
        last = int(own["step"].max() or 0)  # type: ignore[arg-type]
        target = out / "timeline" / f"rank-{int(rank):05d}-step-{last + 1:08d}.parquet"  # type: ignore[arg-type]
        with replacing(target) as partial:
            own.write_parquet(partial, metadata={"plait.timeline.version": SCHEMA_VERSION, "plait.plan": ""})


def _finished(spans: pl.DataFrame) -> pl.DataFrame:
    """With the rest of a timeline's columns, and times from the first of them. Occurrences that were not
    counted are, in each group in the order of their starts."""
    keys = ["step", "rank", "kind", "name", "group"]
    backward = pl.col("name").str.to_lowercase().str.contains(BACKWARD)
    spans = spans.unique(maintain_order=True).sort("rank", "start")
    return spans.with_columns(
        seq=pl.when(pl.col("seq") >= 0).then("seq").otherwise(pl.int_range(pl.len()).over(keys)),
        layer=pl.lit(0, pl.Int64),
        slice=pl.lit(-1, pl.Int64),
        direction=pl.when(backward).then(pl.lit("backward")).otherwise(pl.lit("forward")),
        start=pl.col("start") - pl.col("start").min(),
        end=pl.col("end") - pl.col("start").min(),
    ).with_columns(
        start_ns=(pl.col("start") * NS).round().cast(pl.Int64), end_ns=(pl.col("end") * NS).round().cast(pl.Int64)
    ).select(  # seconds, and the same in whole nanoseconds: whoever reads takes what it knows

        "step", "rank", "kind", "name", "seq", "site", "layer", "slice", "direction", "start", "end", "bytes", "axis",
        "group", "start_ns", "end_ns",
    )  # fmt: skip
