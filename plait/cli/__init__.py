"""The command line: one file per verb, the only place that imports several verbs."""

import atexit
import gc
import sys

SEARCH_AFTER = 100_000
"""The number of new objects after which Python searches for reference cycles. Most objects of a
command live until it ends."""


def run() -> None:
    """Run the command ``plait``. Ctrl-C ends it without a traceback, also while its modules are
    imported."""
    gc.set_threshold(SEARCH_AFTER, 50, 50)
    atexit.register(gc.freeze)  # without it, the ending process searches all objects for cycles: half a second
    try:
        from plait.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
