"""Published measurements as inputs of the planner's models: one CSV row -> shapes, a point of the strategy
space, a cluster, and what was measured.

Two formats: ``../shared/data/measurements`` (its README says what the columns mean) and vTrain's ground truth
(github.com/VIA-Research/vTrain, MIT). Throughput in FLOP/s and MFU are never read: they follow from times by
conventions that differ. What a row does not say is either settled here, by one rule for all sources, or the
row is skipped, with a reason.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from planner_measurements import COLUMNS, read_measurement
from planner_row import Bad, Row, Rows, Skipped
from planner_vtrain import VTRAIN_COLUMNS, read_vtrain

from plait.core.base.errors import JobError

DATA = Path(__file__).parents[2] / "shared" / "data"
DEFAULT_FILES = ("measurements/measurements.csv", "vtrain/gt_single.csv", "vtrain/gt_multi.csv")


def read_rows(files: Iterable[Path]) -> Rows:
    """All rows of all files that can be predicted. Raises JobError naming file, line and column of what is
    wrong."""
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    for file in files:
        lines = read_lines(file)
        columns = list(lines[0]) if lines else header(file)
        kind = _format(file, columns)
        for number, values in enumerate(lines, start=2):
            try:
                rows.append(kind(values, file.stem))
            except Skipped as reason:
                skipped[str(reason)] += 1
            except Bad as bad:
                raise in_line(bad, number, file) from None
    return Rows(_named_apart(rows), skipped)


def read_silent(files: Iterable[Path]) -> list[Row]:
    """Dense rows of recipes for Blackwell that print no recomputation, as taking none: its 180 GB and more
    leave room, and recipes name it where they turn it on."""

    def told(values: Mapping[str, str]) -> dict[str, str] | None:
        if not re.match("G?B[23]", values["gpu"]) or values["recompute"]:
            return None
        sp = values["sp"] or str(int(values["tp"] not in ("", "1")))
        return {"recompute": "none", "micro_batch": values["micro_batch"] or "1", "sp": sp}

    return _supposed(files, told)


def read_by_default(files: Iterable[Path]) -> list[Row]:
    """Dense rows of torchtitan's pipelines that print no micro-batch, as of its default, one sequence."""

    def told(values: Mapping[str, str]) -> dict[str, str] | None:
        silent = values["source_id"].startswith("torchtitan") and not values["micro_batch"]
        return {"micro_batch": "1"} if silent else None

    return _supposed(files, told)


def _supposed(files: Iterable[Path], told: Callable[[Mapping[str, str]], dict[str, str] | None]) -> list[Row]:
    """Timed rows with what ``told`` has for what they do not print; nothing is fitted to them with others."""
    rows = list[Row]()
    for file in files:
        for values in read_lines(file) if "arch_type" in header(file) else ():
            if (supposed := told(values)) is not None:
                with suppress(Skipped, Bad):
                    rows.append(replace(read_measurement({**values, **supposed}, file.stem), stated=False))
    return [row for row in rows if row.seconds]


def with_tiers(rows: Sequence[Row], tiers: str) -> list[Row]:
    """The rows on clusters whose collectives over several tiers take the sum, or the slowest."""
    clusters = {id(row.cluster): row.cluster for row in rows}
    for key, one in clusters.items():
        clusters[key] = one.model_copy(update={"efficiency": one.efficiency.model_copy(update={"tiers": tiers})})
    return [replace(row, cluster=clusters[id(row.cluster)]) for row in rows]


def in_line(bad: Bad, number: int, file: Path) -> JobError:
    """Where a value stands that cannot be read."""
    return JobError(f"line {number}: {bad}", file=str(file), key=bad.column)


def _named_apart(rows: Iterable[Row]) -> list[Row]:
    """Rows are told apart by their names: one that comes again is numbered."""
    seen, named = Counter[str](), list[Row]()
    for row in rows:
        seen[row.name] += 1
        named.append(row if seen[row.name] == 1 else replace(row, name=f"{row.name}#{seen[row.name]}"))
    return named


def default_files() -> list[Path]:
    """The measurements beside the project. Raises JobError where they are not."""
    missing = [name for name in DEFAULT_FILES if not (DATA / name).is_file()]
    if missing:
        raise JobError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there",
            file=str(DATA),
            fix="Give measurements by --rows FILE",
        )
    return [DATA / name for name in DEFAULT_FILES]


def read_lines(file: Path) -> list[dict[str, str]]:
    """The lines below the first, by column. Raises JobError where this is no CSV file."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            lines = list(csv.DictReader(opened, restkey="more", restval=None))
    except OSError as error:
        raise JobError(f"cannot be read: {error.strerror}", file=str(file)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"is no CSV file: {error}", file=str(file)) from None
    for number, line in enumerate(lines, start=2):
        if "more" in line or None in line.values():
            raise JobError(f"line {number} has not as many columns as the first", file=str(file))
    return lines


def header(file: Path) -> list[str]:
    """The names of columns; none in an empty file."""
    return next(csv.reader(file.read_text(encoding="utf-8-sig").splitlines()), [])


def _format(file: Path, columns: list[str]) -> Callable[[Mapping[str, str], str], Row]:
    needed, read = (VTRAIN_COLUMNS, read_vtrain) if "# GPUs" in columns else (COLUMNS, read_measurement)
    missing = [name for name in needed if name not in columns]
    if missing:
        raise JobError(
            f"has no column {', '.join(missing[:6])}{' and others' if len(missing) > 6 else ''}",
            file=str(file),
            fix="Use the format of shared/data/measurements, or of vTrain's ground truth",
        )
    return read
