"""``python -m plait``: the command line, for use without the ``plait`` script on the PATH."""

from plait.cli import run

if __name__ == "__main__":
    run()
