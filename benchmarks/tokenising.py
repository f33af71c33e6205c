"""The rate of ``plait data prepare`` beside that of ``tokenizers`` alone, on the same cores and the same
text.

    python benchmarks/tokenising.py tokenizer.json --megabytes 100 --rounds 3

The text is Python's standard library, documents of its files cut into about 4 kB, over and over with a
number in each so that no two are alike; JSON lines on disk. ``tokenizers`` alone encodes the same texts,
read into memory before, in lists of 1,000 (``encode_batch_fast``). Both take turns. Seconds of processors
stand beside those of the clock: other work on the machine changes the latter. ``--kill N`` also kills a
preparation N times and compares its shards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

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


def write_text(path: Path, size: int) -> None:
    """JSON lines of so many bytes."""
    pieces = [
        text[at : at + 4000]
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        for text in [file.read_text(errors="replace")]
        for at in range(0, len(text), 4000)
    ]
    rng, written = random.Random(1), 0
    with open(path, "w") as stream:
        number = 0
        while written < size:
            number += 1
            written += stream.write(json.dumps({"id": number, "text": f"{number} {rng.choice(pieces)}"}) + "\n")


def prepare(text: Path, tokenizer: str, out: Path) -> list[str]:
    """The command."""
    return [sys.executable, "-m", "plait.cli.main", "data", "prepare", str(text), "--tokenizer", tokenizer, "--out",
            str(out), "--json"]  # fmt: skip


def measured(command: list[str]) -> dict[str, float]:
    """Seconds of the clock and of processors, and the largest memory, of a command."""
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, command
    return {
        "seconds": time.monotonic() - begun, "processor_seconds": used.ru_utime + used.ru_stime,
        "mebibytes": used.ru_maxrss / 1024,
    }  # fmt: skip


def shards(folder: Path) -> dict[str, str]:
    """Hashes of a corpus's files."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def killed(text: Path, tokenizer: str, out: Path, kills: int, seconds: float) -> int:
    """Prepare, killed so many times at drawn moments; how many kills hit a running preparation."""
    rng, hits = random.Random(2), 0
    for _ in range(kills):
        process = subprocess.Popen(prepare(text, tokenizer, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(2 + rng.random() * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            hits += 1
    subprocess.run(prepare(text, tokenizer, out), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return hits


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kill", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.jsonl"
        write_text(text, asked.megabytes * 10**6)
        rounds = []
        for number in range(asked.rounds):
            out = folder / f"corpus-{number}"
            ours = measured(prepare(text, asked.tokenizer, out))
            alone = json.loads(
                subprocess.run(
                    [sys.executable, "-c", ALONE, asked.tokenizer, text], check=True, capture_output=True, text=True
                ).stdout
            )
            rounds.append({"plait": ours, "tokenizers": alone})
            print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
        found: dict[str, object] = {
            "megabytes": asked.megabytes, "cores": os.cpu_count(), "rounds": rounds,
            "load": os.getloadavg()[0], "of_tokenizers": {
                key: sum(one["tokenizers"][key] for one in rounds) / sum(one["plait"][key] for one in rounds)
                for key in ("seconds", "processor_seconds")
            },
        }  # fmt: skip
        if asked.kill:
            whole = max(one["plait"]["seconds"] for one in rounds)
            hits = killed(text, asked.tokenizer, folder / "killed", asked.kill, whole / 4)
            found["kills"] = hits
            found["same_shards"] = shards(folder / "killed") == shards(folder / "corpus-0")
        print(json.dumps(found))


if __name__ == "__main__":
    main()
