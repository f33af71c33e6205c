"""``python -m plait.launch.collect RUN_FOLDER FIRST_RANK RANKS COLLECTED``: the agent of a host's ranks,
until its standard input ends."""

from __future__ import annotations

import sys

from plait.launch.collect.collector import main

if __name__ == "__main__":
    sys.exit(main())
