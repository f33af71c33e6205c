"""Fine-tuning on chats is transformers' own model trained on each chat alone, with its own masks of
answers: no packing, no padding, no parallelism there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.train.data.corpus import Corpus
from plait.train.data.sequences import Batches, Packed
from plait.train.data.sets import prepare_corpus
from tests.dist.equality import Pool, assert_equal, trained
from tests.dist.pipelining import Planned
from tests.support import drawn
from tests.support.chats import MARKED, say, tokenizer_folder
from tests.support.models import llama, mistral
from tests.support.peers import Peer

SEQUENCE, PACKED = 288, 12
SHAPE: dict[str, Any] = {"vocab": 320, "max_sequence": SEQUENCE, "head_size": 4}
MODELS = {"llama": llama(**SHAPE), "mistral": mistral(**SHAPE | {"window": 20})}


@dataclass(frozen=True)
class Data:
    """A file of chats, the folder of its tokenizer, its corpus; as a job names them."""

    folder: Path
    chats: tuple[Any, ...]

    def job(self, spec: ModelSpec, **strategy: Any) -> Job:
        """Whose step has every chat once."""
        micro = strategy.pop("micro", 0)
        values = {key: value for key, value in spec.to_dict().items() if value is not None}
        return Job.from_dict({
            "model": values,
            "data": {
                "text": [str(self.folder / "chats.jsonl")], "rows": "chats", "sequence_length": SEQUENCE,
                "tokenizer": str(self.folder / "tokenizer.json"), "eval_fraction": 0.0,
            },
            "train": {"global_batch_size": PACKED, "micro_batch_size": micro, "precision": "fp64", "eval_every": 0},
            "strategy": strategy,
        })  # fmt: skip


def chat(number: int) -> list[dict[str, str]]:
    """Answers of very different lengths."""
    answers = ["yes", "It is what it is. " * (number % 5), "é🙂", "well, " * (number * number % 11)]
    turns = [
        text for at in range(1 + number % 3) for text in (f"Is {number} + {at}?", answers[(number + at) % 4] + ".")
    ]
    return say(*turns)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """As many chats as fill ``PACKED`` sequences."""
    folder = tokenizer_folder(tmp_path_factory.mktemp("chats"), MARKED)
    for count in range(10, 200):
        chats = tuple(chat(number) for number in range(count))
        text = "".join(json.dumps({"messages": one}) + "\n" for one in chats)
        (folder / "chats.jsonl").write_text(text)
        found = Data(folder, chats)
        prepare_corpus(found.job(MODELS["llama"]).data, folder / "corpus", lambda _: None)
        batches = Batches(Corpus.open(folder / "corpus" / "text"), "train", sequence=SEQUENCE, masks=True)
        assert isinstance(batches.view, Packed) and not batches.view.cut
        if batches.windows == PACKED:
            return found
    raise AssertionError("no number of chats fills so many sequences")


@pytest.fixture(scope="module", params=MODELS)
def wanted(request: pytest.FixtureRequest, data: Data) -> tuple[ModelSpec, dict[str, Any]]:
    """A model, and what transformers makes of it."""
    spec = MODELS[request.param]
    return spec, expected(data, spec)


def expected(data: Data, spec: ModelSpec) -> dict[str, Any]:
    """transformers, chat after chat: a mean over all tokens of answers."""
    tokenizer, peer = transformers.AutoTokenizer.from_pretrained(data.folder), Peer(spec)
    given = [tokenizer.apply_chat_template(one, return_dict=True, return_assistant_tokens_mask=True)
             for one in data.chats]  # fmt: skip
    count = sum(sum(one["assistant_masks"][1:]) for one in given)

    def loss(_: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for one in given:
            ids, mask = torch.tensor(one["input_ids"]), torch.tensor(one["assistant_masks"], dtype=torch.bool)
            labels = ids.masked_fill(~mask, -100)[1:]
            with mock.patch.object(torch, "float32", torch.float64):
                logits = peer.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return total / count

    return trained(peer, loss)


STRATEGIES: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": {"tp": 2, "micro": 6},
    "sequence parallel, slices": {"tp": 2, "sequence_parallel": True, "slices": {"batch": 2, "columns": 2}},
    "pp": {"pp": 2, "micro": 3},
    "dp": {"dp": 3, "shard": "zero3", "micro": 2},
    "ulysses": {"cp": 2, "cp_comm_type": "ulysses", "recompute": "full"},
    "ring, slices": {"cp": 2, "cp_comm_type": "ring", "slices": {"batch": 3, "columns": 1}},
    "ring, dp": {"cp": 2, "cp_comm_type": "ring", "dp": 2, "shard": "zero1", "micro": 3},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chats_are_trained_on_as_transformers_does(
    pool: Pool, data: Data, wanted: tuple[ModelSpec, dict[str, Any]], strategy: str
) -> None:
    spec, want = wanted
    plan = drawn.plan_of(data.job(spec, **STRATEGIES[strategy]))
    assert_equal(pool, Planned(plan, folder=data.folder / "corpus", given=want))
