"""Fine-tunes a model on a text, in a loop of one's own:

    torchrun --nproc-per-node=4 examples/finetune.py job.toml notes.txt train.init_from=FOLDER

The job says what model, which strategy and how many steps; the data are this file's. Run it again to go on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import plait
from plait.train.data.tokenizer import load_tokenizer


class Windows:
    """Batches [B, S + 1] of a text's tokens, in another order every epoch; checkpoints keep where it is."""

    def __init__(self, tokens: Tensor, sequence: int, batch: int) -> None:
        self.rows, self.batch, self.epoch, self.at = tokens.unfold(0, sequence + 1, sequence), batch, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        while self.at + self.batch <= len(order):
            self.at += self.batch
            yield self.rows[order[self.at - self.batch : self.at]]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def main(job: str, text: str, *overrides: str) -> None:
    with plait.Engine(job, overrides, data=text) as engine:
        tokens = torch.tensor(load_tokenizer(engine.job.data.tokenizer).encode(Path(text).read_text()))
        held_out, size = len(tokens) // 10, engine.job.train.global_batch_size
        train, valid = (Windows(part, engine.job.data.sequence_length, size)
                        for part in (tokens[held_out:], tokens[:held_out]))  # fmt: skip
        engine.load(train)
        engine.after.append(lambda engine, metrics: metrics["step"] % 10 or engine.save())
        for batch in engine.batches(train):
            engine.step(batch)
        losses = [engine.evaluate(batch) for batch in valid]
        engine.save(wait=True)
        if engine.rank == 0:
            print(f"validation loss {sum(losses) / max(1, len(losses)):.4f} after {engine.done} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
