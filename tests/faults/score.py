"""How often faults are named right, and what they cost, as a table:

    python -m tests.faults.score [--repeats 20] [--from 0] [--kinds kill,stop,...] [--json FILE]
    python -m tests.faults.score --clean 2000 [--json FILE]

*steps again*: the most that were done again after a failure, *late*: those of them that had been
done while a checkpoint was still being written. Without these it is an interval at most. *ties*:
slow links that were told as the path between two hosts, of which one is right; they are not counted
as right.

With ``--clean`` nothing happens for so many steps, and whatever is named is a false alarm: the
recording is looked at again and again, as far as it had come.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from plait.core.base.text import table as text_table
from plait.core.runs.evidence import FILE
from plait.diagnose.measured.reading import read_run
from plait.diagnose.verdicts.stragglers import verdicts
from tests.faults.trials import KINDS, Run, Trial, trial, undisturbed_in

LOOKS = 20
"""Times that a clean recording is looked at."""


def main() -> int:
    """1 if anything was named wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first repetition")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--clean", type=int, default=0, help="steps of a run to which nothing happens")
    parser.add_argument("--json", type=Path, help="a line of JSON for each trial is added to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plait-faults-") as name:
        folder = Path(name)
        if args.clean:
            alarms = clean(folder, args.clean)
            _keep(args.json, {"clean_steps": args.clean, "alarms": alarms})
            print("\n  ".join([f"{args.clean} clean steps: {len(alarms)} false alarms", *alarms]))
            return bool(alarms)
        found: list[Trial] = []
        kinds = args.kinds.split(",")
        for one in trials(folder, kinds, range(args.first, args.first + args.repeats)):
            found.append(one)
            _keep(args.json, {**one._asdict(), "right": one.right})
            print(f"{'right' if one.right else 'WRONG'}: {one}", file=sys.stderr, flush=True)
    print(table(found))
    return not all(one.right for one in found)


def trials(folder: Path, kinds: Sequence[str], seeds: Sequence[int]) -> Iterator[Trial]:
    """A repetition of every kind, then the next one."""
    undisturbed = undisturbed_in(folder)
    for seed in seeds:
        for kind in kinds:
            yield trial(kind, seed, folder / f"{kind}-{seed}".replace(" ", "-"), undisturbed)


def table(found: Sequence[Trial]) -> str:
    """A row for every kind of fault."""
    heads = ("fault", "right", "named", "same loss", "slowest", "steps again", "late", "ties")
    rows: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(one.kind for one in found):
        own = [one for one in found if one.kind == kind]
        right, named, same, ties = (
            sum(getattr(one, what) for one in own) for what in ("right", "named", "same", "tie")
        )
        slowest = max((one.seconds for one in own if one.seconds is not None), default=None)
        took = "" if slowest is None else f"{slowest:.1f} s"
        again, late = max((one.lost, one.late) for one in own)
        rows.append((kind, f"{right}/{len(own)}", *map(str, (named, same)), took, *map(str, (again, late, ties))))
    lines = text_table(heads, rows, None)
    return "\n".join([*lines, f"{sum(one.right for one in found)} of {len(found)} right"])


def clean(folder: Path, steps: int) -> list[str]:
    """What was named though nothing happened: by the launcher while it ran, and by looks at what
    was recorded."""
    run = Run(folder / "clean", steps=steps, every=500)
    run.train()
    alarms = [one.why for one in run.attempts if one.outcome != "finished"]
    alarms += [f"{path}" for path in run.home.rglob(FILE)]
    recording = read_run(run.home).recording
    last = max(recording.steps)
    for look in range(1, LOOKS + 1):
        so_far = pl.col("step") <= last * look // LOOKS
        tables = {name: getattr(recording, name).filter(so_far) for name in ("rollup", "meetings", "spans")}
        named = verdicts(replace(recording, **tables)).stragglers
        alarms += [f"after {last * look // LOOKS + 1} steps: {one}" for one in named]
    return alarms


def _keep(file: Path | None, line: dict[str, Any]) -> None:
    if file:
        with file.open("a") as end:
            end.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
