"""Refits the constants that ship (specs/efficiency/*.toml of GPUs) to published rows, from their priors
(benchmarks/planner_priors.toml).

    python benchmarks/calibrate_shipped.py [--rows FILE ...]

Prints each constant with the error that is left. The spread of predictions comes from fits that leave each
origin's rows out, which takes minutes. Rows of OOM or without a time are not used. Blackwell's own constants
are then fitted to rows that print no recomputation, with those of all GPUs as found.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from planner_fit import FAMILIES, family_of, fit, shipped, spreads
from planner_row import Row
from planner_rows import default_files, read_rows, read_silent

from plait.core.base.env import specs_folder
from plait.core.cluster.efficiency import Constant
from plait.plan.calibrate.fit import FittedConstant

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


def _said(rows: Sequence[Row]) -> str:
    return f"fit to {len(rows)} published steps of {len({row.source for row in rows})} sources"


def main() -> None:
    """Fit, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", help="CSV files; default: shared/data beside the project")
    told = parser.parse_args()
    files = told.rows or default_files()
    rows = [row for row in read_rows(files).rows if row.seconds and row.stated]
    found = fit(rows)
    spread = {f"all.{name}": FittedConstant(value=value, error=0.1) for name, value in spreads(rows).items()}
    everywhere = {name: known for name, known in found.constants.items() if name.startswith("all.")}
    silent = read_silent(files)
    of_silent = {family_of(row.device) for row in silent}
    second = {name: known for name, known in fit(silent, held=everywhere).constants.items()
              if name.partition(".")[0] in of_silent}  # fmt: skip
    constants = {**found.constants, **second, **spread}
    source, of_second = _said(rows), f"{_said(silent)} that print no recomputation, none taken"
    date = datetime.now(UTC).date().isoformat()
    for family in FAMILIES:
        sources = {"all": source, family: of_second if family in of_silent else source}
        write(specs_folder() / "efficiency" / f"{family}.toml", TITLES[family],
              shipped(family, constants, sources, date))  # fmt: skip
    for name, constant in constants.items():
        print(f"{name:36} {constant.value:10.4g}  +- {constant.error:.3f}")


if __name__ == "__main__":
    main()
