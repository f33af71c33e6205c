"""``python -m tests.example_jobs``: write the comments of the shipped jobs anew, after a setting's
meaning has changed, and the table of their plans in docs/start.md, after the planner's numbers
have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer.testing import CliRunner

from plait.api.new_job import examples, with_comments
from plait.cli.main import app
from plait.core.parallel.sharding import Sharding
from tests.support.hugging_face import hugging_face

AS_WRITTEN = ("pipeline", "quickstart")
"""Whose comments are their authors'."""
START = Path(__file__).resolve().parents[1] / "docs" / "start.md"
ROW = re.compile(r"^\| `(?P<job>\w[\w.-]*)` \| (?P<for>[^|]*) \|.*\|$", re.MULTILINE)
"""Of the table: a job, and what it is for, which is its author's; the rest is its plan's."""


def main() -> None:
    """Each in its place."""
    for name, file in examples().items():
        if name not in AS_WRITTEN:
            file.write_text(with_comments(file.read_text()))
    START.write_text(ROW.sub(lambda row: row_of(row["job"], row["for"]), START.read_text()))


def row_of(name: str, meant: str) -> str:
    """A job's line in the table."""
    best = best_of(name)
    seconds, days = f"{best['seconds']:#.3g} s", f"{best['expense']['tokens_per_day'] / 1e9:#.3g}B"
    return f"| `{name}` | {meant} | {strategy_of(best['strategy'])} | {seconds} | {best['mfu']:.0%} | {days} |".replace(
        "%", " %"
    )


def best_of(name: str) -> dict[str, Any]:
    """What ``plait plan`` says of a job's best strategy."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        text = examples()[name].read_text()
        if "\nhuggingface = " in text:
            hugging_face(Path(folder) / "Meta-Llama-3-8B-Instruct")
            (Path(folder) / "chats.jsonl").touch()
            text = text.replace("\ninit_from", "\n#init_from")  # weights of 16 GB
        file.write_text(text)
        done = CliRunner().invoke(app, ["plan", str(file), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["candidates"][0]


def strategy_of(one: dict[str, Any]) -> str:
    """A strategy in words: what is not 1, how states are sharded, what is recomputed."""
    sizes = {key: one[key] for key in ("pp", "dp", "cp", "tp", "ep") if one[key] > 1}
    words = [f"{key} {size}" + f" ({one['cp_comm_type']})" * (key == "cp") for key, size in sizes.items()]
    shard = Sharding(**one["shard"])
    ranks = one["dp"] * one["cp"]
    names = [name for name in ("ddp", "zero1", "zero2", "zero3") if Sharding.named(name, ranks) == shard]
    words += names[:1] or [f"shard {shard.params},{shard.grads},{shard.optim}"]
    return ", ".join([*words, *([f"{one['recompute']} recomputation"] if one["recompute"] != "none" else [])])


if __name__ == "__main__":
    main()
