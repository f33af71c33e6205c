"""The command line: one file per verb, the only place that imports several verbs."""

import atexit
import gc
import sys

SEARCH_AFTER = 100_000
"""New objects after which Python looks for cycles. Most of what a command makes stays to its end."""


def run() -> None:
    """The command ``plait``. Ctrl-C ends it without a traceback, also while its code is still read."""
    gc.set_threshold(SEARCH_AFTER, 50, 50)
    atexit.register(gc.freeze)  # a process that ends would look for cycles among all that it has: half a second
    try:
        from plait.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
