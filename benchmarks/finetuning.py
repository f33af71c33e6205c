"""Seconds of a newcomer's way: a JSONL file of chats and a Hugging Face folder become a fine-tuned model that
transformers loads, in the five commands of docs/finetune.md, from a folder that holds nothing else.

    python benchmarks/finetuning.py

The model is a Llama of 1.2 million parameters that transformers has made, with a tokenizer of 2,000 byte
pairs and a ChatML template; 300 chats on what numbers are. Before and after, transformers says the loss of
an answer that no chat holds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keeping import finish, make_parser, tell

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SPECIAL = ("</s>", "<|im_start|>", "<|im_end|>")
JOB = """
[model]
huggingface = "base"
[data]
text = "chats.jsonl"
rows = "chats"
tokenizer = "base/tokenizer.json"
sequence_length = 128
eval_fraction = 0.1
[train]
init_from = "base"
steps = 60
global_batch_size = 8
learning_rate = 3e-3
eval_every = 60
[strategy]
dp = 2
"""
COMMANDS = {
    "dry run": ("train", "sft.toml", "--dry-run"),
    "train": ("train", "sft.toml"),
    "diagnose": ("diagnose", "runs/sft", "--timeline"),
    "sample": ("sample", "runs/sft", "--prompt", "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n", "--tokens", "8"),
    "export": ("export", "runs/sft", "--out", "tuned"),
}


def chat(one: int, other: int) -> list[dict[str, str]]:
    """A question and its answer."""
    content = (f"What is {one} + {other}?", f"{one} and {other} are {one + other}.")
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), content, strict=True)]


def write_inputs(folder: Path) -> None:
    """Chats, a folder of a model, a job."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chats = [chat(at % 17, at % 23) for at in range(300) if (at % 17, at % 23) != (3, 4)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    (folder / "sft.toml").write_text(JOB)
    base, library = folder / "base", Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator((message["content"] for one in chats for message in one), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="</s>", chat_template=CHATML)
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(base)


def loss_of(folder: Path) -> float:
    """transformers' loss of an answer that no chat holds."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked, whole = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_tensors="pt")["input_ids"]
        for messages, prompt in ((chat(3, 4)[:1], True), (chat(3, 4), False))
    )
    labels = whole.clone()
    labels[:, : asked.shape[1]] = -100
    with torch.no_grad():
        return round(float(model(input_ids=whole, labels=labels).loss), 3)


def main() -> int:
    """Go the way, and keep its seconds."""
    asked = make_parser(__doc__, rounds=1).parse_args()
    script = shutil.which("plait", path=str(Path(sys.executable).parent))
    assert script, "plait is not installed beside this Python"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        before, seconds = loss_of(folder / "base"), dict[str, float]()
        for what, arguments in COMMANDS.items():
            begun = time.monotonic()
            done = subprocess.run(
                [script, *arguments], check=False, cwd=folder, capture_output=True, text=True, env=_plain()
            )
            seconds[what] = round(time.monotonic() - begun, 1)
            print(f"plait {' '.join(arguments)!r}: {seconds[what]} s\n{done.stdout}{done.stderr}", file=sys.stderr)
            done.check_returncode()
        found: dict[str, Any] = {
            "seconds": seconds, "whole": round(sum(seconds.values()), 1), "loss_before": before,
            "loss_after": loss_of(folder / "tuned"),
        }  # fmt: skip
    tell(found, asked)
    return int(found["loss_after"] > before)


def _plain() -> dict[str, str]:
    """The environment, without a way to the source tree."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


if __name__ == "__main__":
    finish(main)
