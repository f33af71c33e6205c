"""Plant drawn faults, or those of planted.toml, and look whether a test fails.

python -m tests.mutants N SEED [--folders core,plan] [--tests tests/core] [--near] [--json FILE]
python -m tests.mutants planted
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.mutants.draw import FOLDERS, draw
from tests.mutants.planted import planted
from tests.mutants.run import Outcome, Scope, tried

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Draw, run, report. The status is 0 whatever survives: a person judges whether one is
    equivalent."""
    parser = argparse.ArgumentParser(
        prog="make mutants", description="Plant drawn faults and look whether a test fails."
    )
    parser.add_argument("count", help='faults to draw; "planted": those of planted.toml')
    parser.add_argument("seed", type=int, nargs="?", default=1, help="equal seeds draw equal faults from equal sources")
    parser.add_argument("--folders", default=",".join(FOLDERS), help="folders of plait/ to draw from")
    parser.add_argument("--near", action="store_true", help="unit tests only: quick, and an upper bound of survivors")
    parser.add_argument("--tests", default="tests plait", help="where unit tests are taken from")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest for the run without a fault")
    parser.add_argument("--json", type=Path, help="where to write every outcome")
    asked = parser.parse_args()
    scope = Scope(asked.tests.split(), asked.near, asked.workers)
    if asked.count == "planted":
        mutants = planted(ROOT)
    else:
        mutants = draw(ROOT, int(asked.count), asked.seed, asked.folders.split(","))
    outcomes = list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="plait-mutants-") as folder:
        for outcome in tried(ROOT, Path(folder), mutants, scope):
            outcomes.append(outcome)
            print(outcome.line(ROOT), flush=True)
    killed = sum(one.killed for one in outcomes)
    print(f"{killed} of {len(outcomes)} killed. Survivors may be equivalent: read each.")
    if asked.json:
        asked.json.write_text(json.dumps([one.row(ROOT) for one in outcomes], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
