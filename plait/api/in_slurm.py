"""A run inside of a Slurm job, as its batch script starts it (``plait.launch.slurm_job``), what finds out why
its ranks hang, and what orders its nodes.

    python -m plait.api.in_slurm RUN_FOLDER
"""

from __future__ import annotations

import sys

from plait.api.ordering import slurm_order
from plait.api.ranks import suspicion_of_plan
from plait.launch.slurm_job import main

if __name__ == "__main__":
    sys.exit(main(suspicion_of_plan, slurm_order))
