"""Log-probabilities of tokens, and updates with a weight for each: what policy gradients need.

    torchrun --nproc-per-node=2 examples/token_weights.py job.toml strategy.tp=2

A toy of it: sequences are drawn, a reward says how many of their tokens are even, and the tokens of those
that were better than the mean are made more likely (REINFORCE with a baseline, clipped as PPO does: Schulman
2017, arXiv 1707.06347). Drawing them by the model itself, and sending it the new weights, is another
program's."""

from __future__ import annotations

import sys

import torch

import plait

CLIP = 0.2


def main(job: str, *overrides: str) -> None:
    with plait.Engine(job, overrides) as engine:
        train, sequence, vocab = engine.job.train, engine.job.data.sequence_length, engine.run.part.plan.model.vocab
        chance = torch.Generator().manual_seed(engine.done)
        engine.load()
        while engine.done < train.steps and not engine.stopping:
            tokens = torch.randint(vocab, (train.global_batch_size, sequence + 1), generator=chance)
            answers = tokens[:, 1:].clone()
            answers[:, : sequence // 2] = -100  # the prompt
            reward = (answers % 2 == 0).double().mean(dim=1)
            advantage = (reward - reward.mean())[:, None].expand(-1, sequence)
            before = engine.logprobs(tokens[:, :-1], answers)
            for _ in range(2):  # two updates on the same sequences
                if engine.done == train.steps:
                    break
                ratio = (engine.logprobs(tokens[:, :-1], answers) - before).exp()
                clipped = ((ratio > 1 + CLIP) & (advantage > 0)) | ((ratio < 1 - CLIP) & (advantage < 0))
                weights = torch.where(clipped, 0.0, ratio * advantage)
                engine.step(tokens[:, :-1], answers, weights=weights, divisor=float((answers != -100).sum()))
        after = engine.logprobs(tokens[:, :-1], answers)
        engine.save(wait=True)
        if engine.rank == 0:
            print(f"better sequences became more likely by {float((advantage * (after - before)).sum()):.4g} nats")


if __name__ == "__main__":
    main(*sys.argv[1:])
