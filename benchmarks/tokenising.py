"""The rate of ``plait data prepare`` beside that of ``tokenizers`` alone, on the same cores and the same
text.

    python benchmarks/tokenising.py --megabytes 1000 --rounds 1 --kill 10

The text is Python's standard library, documents of its files cut into about 4 kB, over and over with a
number in each so that no two are alike; JSON lines on disk. Without a ``tokenizer.json`` one of 32,768 byte
pairs is trained on it. ``tokenizers`` alone encodes the same texts, read into memory before, in lists of
1,000 (``encode_batch_fast``). Both take turns. Seconds of processors stand beside those of the clock: other
work on the machine changes the latter. Memory is the largest sum, seen five times a second, of the
proportional sizes of a preparation and all processes that it started. ``--kill N`` also kills a preparation
N times, at drawn moments, and compares its shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from keeping import finish, make_parser, tell, timed

ALONE = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2])]
import resource, time
def used():
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime
begun, cpu, count = time.monotonic(), used(), 0
for at in range(0, len(texts), 1000):
    count += sum(len(one) for one in tokenizer.encode_batch_fast(texts[at:at + 1000], add_special_tokens=False))
print(json.dumps({"seconds": time.monotonic() - begun, "processor_seconds": used() - cpu, "tokens": count}))
"""


def pieces() -> list[str]:
    """Python's standard library in pieces of 4,000 characters."""
    texts = (file.read_text(errors="replace") for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return [text[at : at + 4000] for text in texts for at in range(0, len(text), 4000)]


def write_text(path: Path, size: int) -> None:
    """JSON lines of so many bytes."""
    parts, rng, written, number = pieces(), random.Random(1), 0, 0
    with open(path, "w") as stream:
        while written < size:
            number += 1
            written += stream.write(json.dumps({"id": number, "text": f"{number} {rng.choice(parts)}"}) + "\n")


def write_tokenizer(path: Path) -> None:
    """Byte pairs in the manner of GPT-2, trained on the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32768, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(pieces(), trainer)
    tokenizer.save(str(path))


def prepare(text: Path, tokenizer: Path, out: Path) -> list[str]:
    """The command."""
    return [sys.executable, "-m", "plait.cli.main", "data", "prepare", str(text), f"tokenizer={tokenizer}",
            "--out", str(out), "--json"]  # fmt: skip


def _resident(root: int) -> int:
    """Proportional size, bytes, of a process and all that it started (proc(5): children, smaps_rollup)."""
    total, waiting = 0, [root]
    while waiting:
        process = Path("/proc", str(waiting.pop()))
        try:
            rows = (process / "smaps_rollup").read_text().splitlines()
            total += sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))
            waiting += (int(one) for file in process.glob("task/*/children") for one in file.read_text().split())
        except OSError:  # ended meanwhile
            continue
    return total


class Started:
    """A preparation that runs; its processes are measured until it has ended."""

    def __init__(self, command: list[str]) -> None:
        self.largest = 0
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while self.process.returncode is None:
            self.largest = max(self.largest, _resident(self.process.pid))
            time.sleep(0.2)

    def wait(self) -> dict[str, float]:
        """Its figures. Raises CalledProcessError."""
        begun = time.monotonic()
        _, status, used = os.wait4(self.process.pid, 0)
        seconds, self.process.returncode = time.monotonic() - begun, os.waitstatus_to_exitcode(status)
        self._watcher.join()
        if self.process.returncode:
            raise subprocess.CalledProcessError(self.process.returncode, self.process.args)
        return {
            "seconds": round(seconds, 2), "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
            "mebibytes": self.largest >> 20,
        }  # fmt: skip

    def is_killed(self, after: float) -> bool:
        """Kill it after so many seconds; whether it still ran."""
        try:
            self.process.wait(after)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._watcher.join()
        return self.process.returncode == -signal.SIGKILL


def shards(folder: Path) -> dict[str, str]:
    """Hashes of a corpus's files."""
    found = dict[str, str]()
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def killed(command: list[str], kills: int, seconds: float) -> dict[str, float]:
    """Prepare, killed so many times at drawn moments, then to its end: kills that hit a running preparation,
    and figures of all starts."""
    rng, hits, largest = random.Random(2), 0, 0
    for number in range(kills):
        started = Started(command)
        hits += started.is_killed(4 + rng.random() * 1.5 * seconds / kills)
        largest = max(largest, started.largest >> 20)
        print(f"kill {number + 1}: {hits} hit", file=sys.stderr, flush=True)
    last = Started(command).wait()
    return {"kills": hits, "mebibytes": max(largest, last["mebibytes"])}


def main() -> int:
    """Measure, and keep what was found."""
    parser = make_parser(__doc__, rounds=3, quick=1)
    parser.add_argument("tokenizer", nargs="?", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--kill", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, tokenizer = folder / "text.jsonl", asked.tokenizer or folder / "tokenizer.json"
        write_text(text, asked.megabytes * 10**6)
        if not asked.tokenizer:
            write_tokenizer(tokenizer)
        rounds = []
        for number in range(asked.rounds):
            ours = Started(prepare(text, tokenizer, folder / f"corpus-{number}")).wait()
            alone = json.loads(timed([sys.executable, "-c", ALONE, str(tokenizer), str(text)]).output)
            rounds.append({"plait": ours, "tokenizers": alone})
            print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
        found: dict[str, Any] = {
            "megabytes": asked.megabytes, "rounds": rounds, "of_tokenizers": {
                key: round(sum(one["tokenizers"][key] for one in rounds) / sum(one["plait"][key] for one in rounds), 3)
                for key in ("seconds", "processor_seconds")
            },
        }  # fmt: skip
        if asked.kill:
            out = folder / "killed"
            whole = max(one["plait"]["seconds"] for one in rounds)
            found["killed"] = killed(prepare(text, tokenizer, out), asked.kill, whole)
            found["same_shards"] = shards(out) == shards(folder / "corpus-0")
        tell(found, asked)
    return 0


if __name__ == "__main__":
    finish(main)
