"""Which other hosts a host of a lab reaches: run on every one as ``python -I -S probe.py HOST PORT
ADDRESS...``.

It listens, prints a line, waits for one, tries to connect to the others, prints the numbers of those that it
reached, and stays until its standard input ends, so that all find all. Standard library only: this file is
run as a script, in a bare interpreter that starts in milliseconds.
"""

from __future__ import annotations

import json
import socket
import sys
import threading

PATIENCE = 1.0
"""Seconds that a connection may take."""


def reached(port: int, addresses: list[str]) -> list[int]:
    """Numbers of the addresses that answer."""
    found: list[int] = []

    def reach(number: int, address: str) -> None:
        try:
            socket.create_connection((address, port), timeout=PATIENCE).close()
        except OSError:
            return
        found.append(number)

    threads = [threading.Thread(target=reach, args=pair, daemon=True) for pair in enumerate(addresses)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return sorted(found)


def main() -> None:
    """Listen, wait for the word, try, tell."""
    own, port, addresses = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with socket.create_server((addresses[own], port), backlog=len(addresses)):
        print("listening", flush=True)
        sys.stdin.readline()
        print(json.dumps(reached(port, addresses)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
