"""One rank of ``startup.py``: a rank of a run, which also counts what its start takes.

python startup_ranks.py OUT RUN_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from startup_counts import CountedStore, connections, counting_groups

from plait.core.base.env import RankEnv
from plait.train import rank_run, worker
from plait.train.comm import world
from plait.train.machine.rank_process import run_and_end


def main() -> int:
    """Train; what the first step found already there, and what there was after it, goes to OUT."""
    out, rank = Path(sys.argv.pop(1)), RankEnv.read()
    stores: list[CountedStore] = []
    told: dict[str, Any] = {}
    open_store, train_step = world.open_store, rank_run.train_step

    def counted(*arguments: Any) -> CountedStore:
        stores.append(CountedStore(open_store(*arguments)))
        return stores[-1]

    def figures(groups: list[int]) -> dict[str, Any]:
        return {
            "groups": sorted(groups), "store": stores[0].figures(), "connections": connections(rank.master_port),
        }  # fmt: skip

    with counting_groups() as groups:

        def step(*arguments: Any, **named: Any) -> Any:
            if not told:
                told["before the first step"] = figures(groups)
            result = train_step(*arguments, **named)
            if len(told) == 1:
                told["after it"] = figures(groups)
                draft = out / f"{rank.rank}.draft"
                draft.write_text(json.dumps(told))
                os.replace(draft, out / f"{rank.rank}.json")
            return result

        with mock.patch.object(world, "open_store", counted), mock.patch.object(rank_run, "train_step", step):
            return worker.main()


if __name__ == "__main__":
    run_and_end(main)
