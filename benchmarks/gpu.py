"""What one GPU makes of Plait's layers: model FLOPs utilisation (MFU) beside transformers' model of the same
weights with torch.compile, and how much of a modelled all-reduce the sliced layers hide.

    python benchmarks/gpu.py [--json] [--rounds 10] [--case gpt3-1.3b --case llama3-8b] [--device cuda]
        [--peak FLOPS] [--tiny] [--save FILE]

``whole``: forward and backward of one micro-batch in bf16 on one device, without an optimizer. Both models
have the same weights, and their losses must agree within 2 %. Plait adds weight gradients up in fp32, as its
runs do; transformers' model keeps them in bf16, which is less work. MFU is that of docs/figures.md, of
``--peak`` or else of the device's dense peak, and null where nobody knows that. Beside it stands the share of
the rate of square products measured here. Llama-3 8B has so few of its layers that they fit beside their
gradients.

``sliced``: one of eight tensor-parallel ranks, the other seven modelled (``modelled_wire.py``). The modelled
link is as slow as makes communication the share of the plain step that is asked for. ``none`` leaves it
out, the limit is the slower of computation and communication alone, hidden = (sync - x) / (sync - none).
Slices are small, so on a GPU steps are captured (``strategy.cuda_graphs``), or the host's time is what is
measured; ``domino, op by op`` shows it.

Without a GPU nothing is measured, unless ``--device cpu`` asks for it; ``--tiny`` shrinks the models until
that takes seconds, which tries the code and says nothing of speed.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from keeping import finish, keep, make_parser
from modelled_wire import ModelledWire
from rich.console import Console
from rich.table import Table
from typical import typical_costs

from plait.core.base.env import specs_folder
from plait.core.cluster.mfu import dense_peak, known_device, mfu
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.train.checkpoint.huggingface import save
from plait.train.comm.wire import NullWire, Wire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import RankDevice
from plait.train.machine.gpu import device_of, own_gpu
from plait.train.model.transformer import Transformer
from plait.train.record.recorder import Recorder
from plait.train.tune.timing import matrix_rate, time_interleaved

TP = 8
SHARES = (0.3, 0.5)
AGREE = 0.02
"""Of the loss: bf16 rounds differently in other orders of sums."""


class Case(NamedTuple):
    """layers: of the model as a whole on one device, and of one tensor-parallel rank."""

    batch: int
    sequence: int
    layers: int
    sliced_layers: int


class Rates(NamedTuple):
    """FLOP/s of the device: its dense peak, None where nobody knows it, and measured of square products."""

    peak_flops: float | None
    matmul_rate: float

    def row(self, spec: ModelSpec, case: Case, took: float) -> dict[str, float | None]:
        """Return figures of a step of ``took`` seconds."""
        work = spec.causal_step_flops(case.sequence, case.batch)
        return {
            "seconds": took, "tokens_per_second": case.batch * case.sequence / took,
            "mfu": mfu(spec, sequence=case.sequence, batch=case.batch, seconds=took, devices=1, peak=self.peak_flops),
            "matmul_rate_share": work / took / self.matmul_rate,
        }  # fmt: skip


CASES = {"gpt3-1.3b": Case(8, 2048, 24, 12), "llama3-8b": Case(4, 2048, 4, 8)}
TINY = Case(4, 32, 2, 2)
SLICED = {
    "none": Strategy(tp=TP, overlap="no-communication"),
    "sync": Strategy(tp=TP, overlap="sync"),
    "async": Strategy(tp=TP, overlap="async"),
    "domino": Strategy(tp=TP, p1=2),
    "domino_p4": Strategy(tp=TP, p1=4),
}


def main() -> int:
    """Measure every case; a table each, and with --json one last line for programs."""
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        Console().print("No GPU is visible to torch: nothing was measured. --device cpu --tiny tries the code.")
        return 0
    device = device_of(own_gpu(options.device, 0, alone=True), shared=options.device == "shared")
    rates = Rates(
        options.peak or dense_peak(known_device(device.name), "bf16-mixed"), matrix_rate(device, torch.bfloat16)
    )
    result: dict[str, Any] = {"device": device.name, "versions": device.versions, **rates._asdict()}
    result["cases"] = {name: measure(name, device, rates, options) for name in options.case or CASES}
    keep(result, options)
    return 0


def measure(name: str, device: RankDevice, rates: Rates, options: argparse.Namespace) -> dict[str, Any]:
    """Both parts of one case."""
    case = TINY if options.tiny else CASES[name]
    spec = shape_of(name, case, tiny=options.tiny)
    found = {"whole": whole(spec, case, device, rates, options.rounds)}
    for share in SHARES:
        found[f"sliced, {share:.0%}"] = sliced(spec, case, device, share, options.rounds)
    if not options.json:
        show(name, found)
    return found


def shape_of(name: str, case: Case, *, tiny: bool) -> ModelSpec:
    """A shipped model with the case's number of layers, without dropout."""
    values = tomllib.loads((specs_folder() / "models" / f"{name}.toml").read_text())
    values |= {"num_layers": case.layers, "max_sequence": case.sequence, "dropout": 0.0}
    if tiny:
        values |= {"hidden": 128, "num_heads": TP, "vocab": 256}
        values |= {key: size for key, size in {"num_kv_heads": TP, "ffn_hidden": 256}.items() if key in values}
    return ModelSpec(**values)


def batch_of(spec: ModelSpec, case: Case) -> MicroBatch:
    """Random tokens, each to predict the one after it; in host memory, as a run's are."""
    tokens = torch.randint(0, spec.vocab, (case.batch, case.sequence), generator=torch.Generator().manual_seed(1))
    return MicroBatch(tokens, tokens.roll(-1, 1), torch.arange(case.batch), 1.0 / tokens.numel(), 0)


# ---- the model as a whole, beside transformers' ----


def whole(spec: ModelSpec, case: Case, device: RankDevice, rates: Rates, rounds: int) -> dict[str, Any]:
    """Seconds, tokens a second and utilisation of each."""
    batch = batch_of(spec, case)
    model = Transformer(spec, Strategy(), dtype=torch.bfloat16, device=device.torch_device)
    gradients = Gradients(model)

    def ours(strategy: Strategy) -> Callable[[], torch.Tensor]:
        load = Load(case.batch, case.sequence)
        executor = make_executor(model, strategy, NullWire(), load, RankContext(device), gradients=gradients)

        def run() -> torch.Tensor:
            gradients.zero()
            return executor.run(batch)

        return run

    peer = peer_of(model, device)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "plait": ours(Strategy()), "transformers": peer_step(peer, batch, device),
        "transformers compiled": peer_step(cast("torch.nn.Module", torch.compile(peer)), batch, device),
    }  # fmt: skip
    if device.captures:
        runs["plait captured"] = ours(Strategy(cuda_graphs=True))
    _warm(list(runs.values()))
    losses = {name: float(run().detach()) for name, run in runs.items()}
    if max(losses.values()) > min(losses.values()) * (1 + AGREE):
        raise SystemExit(f"not the same model: losses {losses}")
    seconds = dict(zip(runs, time_interleaved(list(runs.values()), device, rounds=rounds), strict=True))
    rows = {name: rates.row(spec, case, took) for name, took in seconds.items()}
    return {"losses": losses, "rows": rows, "compiled_over_plait": seconds["transformers compiled"] / seconds["plait"]}


def peer_of(model: Transformer, device: RankDevice) -> torch.nn.Module:
    """transformers' model of the same weights."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model")
        peer = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return torch.nn.Module.to(peer, device.torch_device).train()


def peer_step(peer: torch.nn.Module, batch: MicroBatch, device: RankDevice) -> Callable[[], torch.Tensor]:
    """Forward and backward of the same batch."""
    tokens, targets = device.upload([batch.tokens, batch.targets])

    def run() -> torch.Tensor:
        logits = peer(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        peer.zero_grad()
        return loss

    return run


# ---- one tensor-parallel rank, beside a modelled link ----


def sliced(spec: ModelSpec, case: Case, device: RankDevice, share: float, rounds: int) -> dict[str, Any]:
    """Seconds of every order, and what of the communication each hides."""
    spec = replace(spec, num_layers=case.sliced_layers)
    batch, load = batch_of(spec, case), Load(case.batch, case.sequence)
    model = Transformer(spec, SLICED["sync"], dtype=torch.bfloat16, device=device.torch_device)
    gradients, recorder = Gradients(model), Recorder(device)
    wire = ModelledWire(device, TP, lambda nbytes: 0.0)

    def step(strategy: Strategy, costs: Any = None, over: Wire = wire, record: bool = False) -> Callable[[], object]:
        load_with = replace(load, costs=costs)
        here = RankContext(device, recorder if record else None)
        executor = make_executor(model, strategy, over, load_with, here, gradients=gradients)

        def run() -> None:
            gradients.zero()
            executor.run(batch)

        return run

    strategies = {name: replace(one, cuda_graphs=device.captures) for name, one in SLICED.items()}
    if device.captures:
        strategies["domino, op by op"] = SLICED["domino"]
    alone = [step(strategies["none"])]
    _warm(alone)
    (computing,) = time_interleaved(alone, device, rounds=3)
    wire.sent = 0
    step(SLICED["sync"])()
    communicating = computing * share / (1 - share)
    rate = communicating / wire.sent
    wire.seconds = lambda nbytes: nbytes * rate
    plain = step(SLICED["sync"], over=recorder.over(wire, range(TP), "tp"), record=True)
    costs = typical_costs(plain, recorder)
    runs = [step(strategy, costs) for strategy in strategies.values()]
    _warm(runs)
    seconds = dict(zip(strategies, time_interleaved(runs, device, rounds=rounds), strict=True))
    limit = max(seconds["none"], communicating)
    return {"seconds": seconds, "communication": communicating, "rows": _hidden(seconds, limit)}


def _warm(runs: Sequence[Callable[[], object]]) -> None:
    """A step of each that runs op by op, and one that is captured."""
    for run in (*runs, *runs):
        run()


def _hidden(seconds: Mapping[str, float], limit: float) -> dict[str, dict[str, float]]:
    exposed = seconds["sync"] - seconds["none"]
    return {
        name: {
            "seconds": took, "times_as_fast_as_sync": seconds["sync"] / took, "of_limit": limit / took,
            "hidden": (seconds["sync"] - took) / exposed if exposed > 0 else 0.0,
        }
        for name, took in seconds.items()
    }  # fmt: skip


def show(name: str, found: Mapping[str, Any]) -> None:
    """A table for each part."""
    for part, values in found.items():
        rows: dict[str, dict[str, float | None]] = values["rows"]
        table = Table("", *next(iter(rows.values())), title=f"{name}: {part}")
        for label, row in rows.items():
            table.add_row(label, *("-" if value is None else f"{value:.4g}" for value in row.values()))
        Console().print(table)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=10, cases=CASES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument("--peak", type=float, help="the device's dense FLOPs a second in bf16")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU runs in seconds")
    return parser.parse_args()


if __name__ == "__main__":
    finish(main)
