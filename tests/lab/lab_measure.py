"""How true a lab's links are. This file is the rank, too: it sends a plain TCP stream from the
first rank to the last, or both ways at once, or messages apart."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

BLOCK = bytes(1 << 18)


def receive(connection: socket.socket, result: dict[str, float]) -> None:
    """Count what arrives, from the first byte to the last."""
    buffer, total = bytearray(len(BLOCK)), 0
    total = connection.recv_into(buffer)
    start = time.perf_counter()
    while got := connection.recv_into(buffer):
        total += got
    result.update(bytes=total, seconds=time.perf_counter() - start)


def send(connection: socket.socket, size: int) -> None:
    """Send ``size`` bytes and say that there are no more."""
    left = size
    while left > 0:
        left -= connection.send(BLOCK[:left])
    connection.shutdown(socket.SHUT_WR)


def connect(rank: int, address: str, port: int) -> socket.socket:
    """Rank 0 listens on its address, rank 1 connects to it."""
    if rank == 0:
        with socket.create_server((address, port)) as server:
            return server.accept()[0]
    for _ in range(500):
        try:
            return socket.create_connection((address, port), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise TimeoutError(f"no answer from {address}")


def message_main(size: int) -> None:
    """As a rank: rank 1 sends one message after each pause and waits for the answer of one byte; it
    prints the median seconds."""
    rank, seconds = int(os.environ["RANK"]), []
    connection = connect(rank, os.environ["MASTER_ADDR"], 5000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    for pause in [0.0] * 5 + [0.02] * 11:
        time.sleep(pause)
        start = time.perf_counter()
        if rank == 1:
            connection.sendall(bytes(size))
            connection.recv(1)
            seconds.append(time.perf_counter() - start)
        else:
            connection.recv(size, socket.MSG_WAITALL)
            connection.sendall(b"x")
    if rank == 1:
        print(json.dumps({"goodput": size * 8 / statistics.median(seconds[5:])}))


def rank_main(size: int, mode: str) -> None:
    """As a rank: send (rank 1), receive (rank 0), or both at once; receivers print goodput in bits
    per second."""
    rank = int(os.environ["RANK"])
    connection = connect(rank, os.environ["MASTER_ADDR"], 5000)
    connection.settimeout(None)
    result: dict[str, float] = {}
    sends = mode == "both" or (rank == 1) == (mode == "to0")
    receives = mode == "both" or not sends
    receiver = threading.Thread(target=receive, args=(connection, result))
    if receives:
        receiver.start()
    if sends:
        send(connection, size)
    if receives:
        receiver.join()
        print(json.dumps({"rank": rank, "goodput": result["bytes"] * 8 / result["seconds"], **result}))
    elif connection.recv(1) != b"":
        raise AssertionError("unexpected data")


def goodputs(lab: Any, size: int, mode: str, ranks: tuple[int, int] = (0, 1)) -> list[float]:
    """Bits per second that arrive at the receiving rank, or at both when ``mode`` is ``both``, or
    for messages apart."""
    argv = [sys.executable, str(Path(__file__).resolve()), str(size), mode]
    processes = []
    for number, rank in enumerate(ranks):
        variables = {**lab.environment(rank), "RANK": str(number), "MASTER_ADDR": lab.environment(0)["MASTER_ADDR"]}
        command = lab.rank_command(rank, ["env", *(f"{key}={value}" for key, value in variables.items()), *argv])
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return [json.loads(text)["goodput"] for process in processes if (text := process.communicate(timeout=60)[0])]


if __name__ == "__main__":
    message_main(int(sys.argv[1])) if sys.argv[2] == "message" else rank_main(int(sys.argv[1]), sys.argv[2])
