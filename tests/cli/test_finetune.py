"""From a file of chats and a Hugging Face folder to a fine-tuned model that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.chats import CHATML, say, tokenizer_folder
from tests.support.command import succeed

pytestmark = pytest.mark.system
SHAPES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
JOB = """
[model]
huggingface = "base"
[data]
text = "chats.jsonl"
rows = "chats"
tokenizer = "base/tokenizer.json"
sequence_length = 64
eval_fraction = 0.1
[train]
init_from = "base"
steps = 40
global_batch_size = 8
micro_batch_size = 0
learning_rate = 1e-2
eval_every = 40
[strategy]
dp = 2
"""


def loss_of(folder: Path, chat: list[dict[str, str]]) -> float:
    """transformers' loss of a chat's answer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt")["input_ids"]
    asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    labels = ids.clone()
    labels[:, : asked.shape[1]] = -100
    with torch.no_grad():
        return float(model(input_ids=ids, labels=labels).loss)


def test_a_newcomer_fine_tunes_in_five_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = tokenizer_folder(tmp_path / "base", CHATML)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES)).save_pretrained(base)  # type: ignore[arg-type]
    chats = [say(f"What is {at}?", f"It is {at}.") for at in range(60)]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    Path("sft.toml").write_text(JOB)
    for command in (
        ["train", "sft.toml", "--dry-run"],
        ["train", "sft.toml"],
        ["diagnose", "runs/sft"],
        ["sample", "runs/sft", "--prompt", "<|im_start|>user\nWhat is 7?<|im_end|>\n", "--tokens", "4"],
        ["export", "runs/sft", "--out", "tuned"],
    ):
        succeed(*command)
    assert (tmp_path / "tuned" / "chat_template.jinja").read_text() == CHATML
    before, after = (loss_of(tmp_path / name, chats[7]) for name in ("base", "tuned"))
    assert after < before - 1
