"""Refits the constants that ship (specs/efficiency/*.toml of GPUs) to published rows, from their priors
(benchmarks/planner_priors.toml).

    python benchmarks/calibrate_shipped.py [--rows FILE ...]

Prints each constant with the error that is left. The spread of predictions comes from fits that leave each
origin's rows out, which takes minutes. Rows of OOM or without a time are not used.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from planner_fit import FAMILIES, fit, shipped, spreads
from planner_rows import default_files, read_rows

from plait.core.base.env import specs_folder
from plait.core.cluster.efficiency import Constant
from plait.plan.calibrate import FittedConstant

TITLES = {
    "ampere": "A100, A800", "hopper": "H100, H200, H20", "blackwell": "GB200, B200",
    "blackwell-ultra": "GB300, B300", "ada": "L40S",
    "cdna3": "MI300X", "volta": "V100",
}  # fmt: skip


def write(path: Path, title: str, constants: dict[str, Constant]) -> None:
    """As a TOML file, a line a constant."""
    lines = [f"# What of their peaks {title} reach in training. Written by benchmarks/calibrate_shipped.py."]
    for name, constant in constants.items():
        value = json.dumps(constant.value)
        lines.append(f"{name} = {{ value = {value}, error = {constant.error}, date = \"{constant.date}\", "
                     f"source = {json.dumps(constant.source)} }}")  # fmt: skip
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Fit, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", help="CSV files; default: shared/data beside the project")
    told = parser.parse_args()
    read = read_rows(told.rows or default_files())
    rows = [row for row in read.rows if row.seconds and row.stated]
    found = fit(rows)
    spread = {f"all.{name}": FittedConstant(value=value, error=0.1) for name, value in spreads(rows).items()}
    constants = {**found.constants, **spread}
    sources = len({row.source for row in rows})
    source = f"fit to {len(rows)} published steps of {sources} sources"
    date = datetime.now(UTC).date().isoformat()
    for family in FAMILIES:
        write(specs_folder() / "efficiency" / f"{family}.toml", TITLES[family],
              shipped(family, constants, source, date))  # fmt: skip
    for name, constant in constants.items():
        print(f"{name:36} {constant.value:10.4g}  +- {constant.error:.3f}")


if __name__ == "__main__":
    main()
