"""``python -m plait``: the command line, where the script is not on the path."""

from plait.cli import run

if __name__ == "__main__":
    run()
