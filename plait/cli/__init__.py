"""The command line: one file per verb, the only place that imports several verbs."""

import sys


def run() -> None:
    """The command ``plait``. Ctrl-C ends it without a traceback, also while its code is still read."""
    try:
        from plait.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
