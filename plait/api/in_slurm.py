"""A run inside of a Slurm job, as its batch script starts it (``plait.launch.slurm_job``), and what finds out
why its ranks hang.

    python -m plait.api.in_slurm RUN_FOLDER
"""

from __future__ import annotations

import sys

from plait.api.ranks import suspicion_of_plan
from plait.launch.slurm_job import main

if __name__ == "__main__":
    sys.exit(main(suspicion_of_plan))
