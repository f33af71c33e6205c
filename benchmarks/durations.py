"""Predicted durations of jobs beside four simple predictors, and late jobs of every group, on traces of real
clusters.

    python -m benchmarks.durations TRACES... --save benchmarks/results/durations.json

Of each trace the last tenth, as ``plait queue fit`` tests it: a model of the jobs that had ended before. The
simple predictors are means of these jobs: of all, of a cluster, of a number of GPUs, of both. Nothing of the
method is set by a trace: what it needs to know it learns from the first nine tenths.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.forecast_errors import errors
from benchmarks.keeping import finish, keep, make_parser
from benchmarks.public_traces import read
from plait.place.queue.forecast import SURE, ForecastAccuracy, assess

LEVEL = 0.9
PREDICTORS = ("model", "constant", "group", "gpus", "group_gpus")


def main() -> int:
    """All traces."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("traces", nargs="+", type=Path, help="files")
    parser.add_argument("--columns", help="FIELD=COLUMN,... of tables that no known form fits")
    options = parser.parse_args()
    found = dict[str, object]()
    for file in options.traces:
        trace = read(file, options.columns)
        report, rmse = assess(trace)[1], errors(trace)
        found[file.name] = asdict(report) | {"rmse": rmse, "pairs": pairs(report)}
        if not options.json:
            print(told(file.name, report, rmse["ln seconds"]), flush=True)
    keep({"level": LEVEL, "traces": found}, options)
    return 0


def pairs(report: ForecastAccuracy) -> dict[str, int]:
    """Clusters with a GPU count, of enough jobs: how many there are, how many are kept."""
    own = [one for one in report.groups if one.kind == "group_gpus"]
    return {"groups": len(own), "within": sum(abs(one.late - (1 - LEVEL)) <= SURE for one in own)}


def told(name: str, report: ForecastAccuracy, by: dict[str, float]) -> str:
    """A row of the table in docs/queue.md."""
    all_within = sum(abs(one.late - (1 - LEVEL)) <= SURE for one in report.groups)
    own = pairs(report)
    return (
        f"| {name} | {report.tested:,} | {' | '.join(f'{by[one]:.2f}' for one in PREDICTORS)} | "
        f"{report.late['online']:.1%} | {own['within']} of {own['groups']} | {all_within} of {len(report.groups)} |"
    )


if __name__ == "__main__":
    finish(main)
