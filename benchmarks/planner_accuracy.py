"""How far the planner's predictions are from published measurements.

    python benchmarks/planner_accuracy.py [--json] [--rows FILE ...] [--leave-one-out] [--tiers slowest]

By source: absolute relative error of the step time, how many of the measured times lie in the printed band
(aim: 80 %), error of the memory where it is known, how many of the runs that fitted are said to fit, and how
many of those out of memory not to. By job of which many layouts were measured: where the best measured one
stands among the predicted, and what is lost by running the predicted best. Memory as a
risk: what of rows said to fit ran, and of sweeps with rows that ran out of memory, whether the predicted best
ran, with the margin that plans keep and without. Of two groups in which the planner errs by rule: predicted
over measured, less one. --leave-one-out: every source is predicted by constants fitted to all other sources.
--tiers: what collectives over several tiers of links take (``Efficiency.tiers``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from planner_fit import Floats, batches, left_out
from planner_memory import measured as weight
from planner_memory import row_memory
from planner_moe import read_moe
from planner_risk import RISKS, Sizes, doubts_left_out, kept_free, risk
from planner_row import Row
from planner_rows import default_files, read_by_default, read_rows, with_tiers

from plait.core.base.errors import JobError
from plait.plan.search.needs import band

LAYOUTS = 4
"""Of a job, from which on choosing one is a test."""
KEYS = ("rows", "median_abs_rel_error", "mean_abs_rel_error", "p90_abs_rel_error", "band_coverage", "memory_error",
        "fit_right", "oom_right")  # fmt: skip
TIMES = KEYS[:5]
"""Of a step's time alone."""


SIGNED = ("rows", "least", "median", "most")
"""Of a group: predicted over measured, less one."""
GROUPS: Mapping[str, Callable[[Row], bool]] = {
    "A100, 256 ranks or more, at most 2 places": lambda row: (
        row.device.startswith("a100") and row.value("ranks") >= 256 and row.value("pp") <= 2
    ),
    "torchtitan, sequences over 4 or more ranks": lambda row: (
        row.source.startswith("torchtitan") and row.value("cp") >= 4
    ),
}
"""Rows that the planner predicted too fast by rule, at commit 2780b49d."""


@dataclass(frozen=True)
class Predicted:
    """Of every row: seconds and their band; bytes, and whether they fit (0 or 1)."""

    seconds: Floats
    low: Floats
    high: Floats
    memory: Floats
    fits: Floats


def predict_all(rows: Sequence[Row], leave_out: bool) -> Predicted:
    """With shipped constants, or with such as never saw a row's source."""
    columns = {name: np.full(len(rows), np.nan) for name in ("seconds", "low", "high", "memory", "fits")}
    columns["memory"], columns["fits"] = row_memory(rows)
    for own, values in left_out(rows) if leave_out else ((range(len(rows)), {}),):
        for part in batches([rows[at] for at in own]):
            at, total = np.asarray(own)[part.where], part.seconds(values).total
            columns["seconds"][at] = total
            columns["low"][at], columns["high"][at] = band(total, part.columns[1], part.cluster)
    return Predicted(**columns)


def summary(rows: Sequence[Row], predicted: Predicted, which: Sequence[int]) -> dict[str, Any]:
    """The figures of some rows; None where nothing was measured."""
    timed = [at for at in which if rows[at].seconds]
    seconds = np.array([rows[at].seconds for at in timed])
    error = np.abs(predicted.seconds[timed] / seconds - 1) if timed else np.array([])
    covered = [predicted.low[at] <= second <= predicted.high[at] for at, second in zip(timed, seconds, strict=True)]
    weighed = [(predicted.memory[at], known[0]) for at in which if (known := weight(rows[at]))]
    off = [abs(said / known - 1) for said, known in weighed]
    fitted = [bool(predicted.fits[at]) for at in which if not rows[at].oom]
    out = [not predicted.fits[at] for at in which if rows[at].oom]
    figures = (
        len(timed),
        *((np.median(error), np.mean(error), np.quantile(error, 0.9), np.mean(covered)) if timed else (None,) * 4),
        np.median(off) if off else None,
        np.mean(fitted) if fitted else None,
        np.mean(out) if out else None,
    )
    return {key: figure if figure is None or key == "rows" else round(float(figure), 4)
            for key, figure in zip(KEYS, figures, strict=True)}  # fmt: skip


def by_sources(rows: Sequence[Row], predicted: Predicted) -> dict[str, dict[str, Any]]:
    """The figures of every source."""
    found: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        found.setdefault(row.source, []).append(at)
    return {name: summary(rows, predicted, which) for name, which in found.items()}


def _times(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Of sources that say nothing of recomputation, so that neither memory nor what fits can be compared."""
    if not rows:
        return {}
    found = by_sources(rows, predict_all(rows, leave_out=False))
    return {name: {key: figures[key] for key in TIMES} for name, figures in found.items()}


def choice(rows: Sequence[Row], predicted: Predicted) -> dict[str, Any]:
    """Over jobs of which ``LAYOUTS`` or more layouts were measured: the share whose best is among the ten,
    and among the third, that are predicted best; and how much slower than the best the predicted best is."""
    jobs: dict[tuple[Any, ...], list[int]] = {}
    for at, row in enumerate(rows):
        if row.seconds:
            jobs.setdefault((row.source, *row.job), []).append(at)
    found: dict[str, list[tuple[bool, bool, float]]] = {}
    for job, at in jobs.items():
        if len(at) < LAYOUTS:
            continue
        measured = np.array([rows[i].seconds for i in at])
        ordered = measured[np.argsort(predicted.seconds[at], kind="stable")]
        near = [bool(ordered[:first].min() <= measured.min()) for first in (10, max(1, len(at) // 3))]
        found.setdefault(str(job[0]), []).append((near[0], near[1], float(ordered[0] / measured.min() - 1)))
    every = [entry for entries in found.values() for entry in entries]
    return {name: _choices(entries) for name, entries in {"overall": every, **found}.items() if entries}


def memory_risks(rows: Sequence[Row], predicted: Predicted, leave_out: bool) -> dict[str, dict[str, Any]]:
    """Figures of ``RISKS`` by the median of predicted memory, and with the margin that plans keep; of all
    sources, and of each with rows that ran out of memory."""
    ended = [at for at, row in enumerate(rows) if row.told.get("outcome")]
    some, seconds = [rows[at] for at in ended], predicted.seconds[ended]
    sizes = Sizes.of(some)
    kept = kept_free(sizes, doubts_left_out(sizes) if leave_out else None)
    found: dict[str, dict[str, Any]] = {}
    for name in ("", *dict.fromkeys(row.source for row in some if row.oom)):
        which = [at for at, row in enumerate(some) if not name or row.source == name]
        for words, margin in (("by the median", 0 * kept), ("with the margin", kept)):
            fits = (sizes.kinds.sum(axis=0) + margin <= sizes.limit)[which]
            found[f"{name or 'all'}, {words}"] = risk([some[at] for at in which], seconds[which], fits)
    return found


def by_group(rows: Sequence[Row], predicted: Predicted) -> dict[str, dict[str, Any]]:
    """Figures of ``SIGNED``, of every group that has rows."""
    found: dict[str, dict[str, Any]] = {}
    for name, belongs in GROUPS.items():
        off = [predicted.seconds[at] / row.seconds - 1 for at, row in enumerate(rows) if row.seconds and belongs(row)]
        if off:
            figures = (round(float(np.quantile(off, share)), 4) for share in (0, 0.5, 1))
            found[name] = dict(zip(SIGNED, (len(off), *figures), strict=True))
    return found


CHOICE = ("jobs", "best_in_top_10", "best_in_top_third", "mean_loss", "worst_loss", "within_5_percent")


def _choices(entries: Sequence[tuple[bool, bool, float]]) -> dict[str, Any]:
    tops, thirds, lost = (np.array(column, dtype=np.float64) for column in zip(*entries, strict=True))
    figures = (tops.mean(), thirds.mean(), lost.mean(), lost.max(), np.mean(lost <= 0.05))
    return {"jobs": len(entries), **{name: round(float(x), 4) for name, x in zip(CHOICE[1:], figures, strict=True)}}


def dense_pretraining(row: Row) -> bool:
    """What the aims are about: all that is known, on A100 and H100."""
    return row.full and row.device.startswith(("a100", "h100"))


def table(figures: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Plain text, a source a line."""
    width = max(len(name) for name in figures)
    lines = [f"{'':{width}}  " + "  ".join(f"{column[:10]:>10}" for column in columns)]
    for name, values in figures.items():
        cells = [_cell(values.get(column)) for column in columns]
        lines.append(f"{name:{width}}  " + "  ".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{100 * value:.1f} %"


def main() -> int:
    """Print the tables; with --json one line for programs after them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rows", type=Path, nargs="+", help="CSV files; default: shared/data beside the project")
    parser.add_argument("--leave-one-out", action="store_true", help="predict each source without having seen it")
    parser.add_argument("--tiers", choices=("sum", "slowest"), default="sum", help="of collectives over several tiers")
    told = parser.parse_args()
    try:
        files = told.rows or default_files()
        read, experts = read_rows(files), read_moe(files)
    except JobError as error:
        print(error, file=sys.stderr)
        return 2
    rows = read.rows
    every = with_tiers([*rows, *read_by_default(files)], told.tiers)
    predicted = predict_all(every, told.leave_one_out)
    sources = by_sources(rows, predicted)
    overall = summary(rows, predicted, range(len(rows)))
    aimed = summary(rows, predicted, [at for at, row in enumerate(rows) if dense_pretraining(row)])
    chosen = choice(rows, predicted)
    print("rows skipped:", ", ".join(f"{count} ({reason})" for reason, count in Counter(read.skipped).most_common()))
    print(table({**sources, "full, A100 and H100": aimed, "overall": overall}, KEYS))
    risks = memory_risks(rows, predicted, told.leave_one_out)
    print("\nmemory as a risk: rows that say how they ended, and sweeps with rows that ran out of memory")
    print(table(risks, RISKS))
    if chosen:
        print("\nchoice among measured layouts of one job")
        print(table(chosen, CHOICE))
    groups = by_group(every, predicted)
    if groups:
        print("\ngroups in which the planner errs by rule: predicted over measured, less one")
        print(table(groups, SIGNED))
    unfitted = _times(with_tiers(experts.rows, told.tiers))
    if unfitted:
        print("\nmixture of experts: nothing is fitted to these, and they are in no figure above; skipped:",
              ", ".join(f"{count} ({reason})" for reason, count in experts.skipped.most_common()))  # fmt: skip
        print(table(unfitted, TIMES))
    if told.json:
        line = {"experts": unfitted, "overall": overall, "aimed": aimed, "sources": sources, "choice": chosen,
                "risk": risks, "groups": groups, "left_out": told.leave_one_out, "tiers": told.tiers,
                "skipped": dict(read.skipped)}  # fmt: skip
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
