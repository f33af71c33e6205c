"""``plait reshard``: shows how a tensor is moved from one layout to another, without moving it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from plait.cli import terminal
from plait.cli.commands import AsJson, Draw, Settings
from plait.core.base.codec.data import Example
from plait.core.base.numbers import Count

ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8", "fp8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "fp16", "float16", "bf16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "fp32", "float32"), 4),
    **dict.fromkeys(("int64", "fp64", "float64", "complex64"), 8),
}


@dataclass(frozen=True)
class Layouts:
    """The layouts between which the tensor moves."""

    source: Annotated[
        str, typer.Argument(metavar="FROM", help="Mesh, then R or S and mesh axes a dimension: '(2,4) S0 R R'.")
    ]
    destination: Annotated[
        str, typer.Argument(metavar="TO", help="As FROM; its ranks follow those unless it says: '(2,4)@8 S0 R R'.")
    ]


@dataclass(frozen=True, kw_only=True)
class TensorMove(Settings):
    """Settings for the tensor, the hosts, their network and the communication method."""

    shape: Annotated[str, Example("1024,1024,512"), "Shape of the whole tensor: 1024,1024,512."]
    dtype: Annotated[str, "Type of the tensor's elements."] = "bf16"
    nic: Annotated[str, "Rate of one NIC, each way."] = "10gbit"
    nics_per_host: Annotated[Count, "NICs (rails) of a host, shared out among its ranks in order."] = 1
    latency: Annotated[str, "Time of each message: 50us, 1ms, 0s."] = "50us"
    ranks_per_host: Annotated[Count | None, "Ranks of a host, in order; left out: each row of a mesh is a host."] = None
    way: Annotated[str, "auto, or one for all: send_recv, local_all_gather, global_all_gather, broadcast."] = "auto"


def reshard(
    layouts: Layouts,
    move: TensorMove,
    draw: Draw = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan that moves one tensor between two meshes.

    It has unit tasks, senders, order, way, predicted time against the lower bound, and every NIC's
    use.

    Examples:
        plait reshard "(2,4) R S0 R" "(2,4) S0 R R" shape=1024,1024,512
        plait reshard "(4) S0" "(4)@2 R" shape=999 ranks_per_host=2 --draw move.svg
    """
    from plait.api.resharding import explain_reshard, fabric_of
    from plait.core.base.errors import ReshardError
    from plait.core.base.files import explained
    from plait.core.base.lab_hosts import parse_rate
    from plait.core.reshard.layouts import Reshard, TensorLayout

    first = TensorLayout.parse(layouts.source)
    second = TensorLayout.parse(layouts.destination, first_rank=max(first.ranks) + 1)
    sizes, itemsize, rate = _shape(move.shape), _itemsize(move.dtype), parse_rate(move.nic)
    if rate is None:
        raise ReshardError("nic=unlimited leaves nothing to plan for. Give a rate, such as 10gbit.")
    links = fabric_of(
        first, second, rate=rate / 8, latency=_seconds(move.latency), nics_per_host=move.nics_per_host,
        ranks_per_host=move.ranks_per_host,
    )  # fmt: skip
    way = None if move.way == "auto" else move.way
    found = explain_reshard(Reshard(first, second, sizes, itemsize), links, way)  # type: ignore[arg-type]
    shape = "x".join(map(str, sizes)) or "scalar"
    found = replace(found, title=f"{first} -> {second}, {move.dtype} {shape}, {move.nic}")
    for path in draw or []:
        with explained(f"{path} cannot be written", fix="Choose another with --draw"):
            found.draw(path)
    terminal.answer(found, as_json=as_json)


def _shape(text: str) -> tuple[int, ...]:
    from plait.core.base.errors import ReshardError

    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ReshardError(
            f"shape={text}: whole numbers with commas between them are expected, such as 1024,1024,512."
        ) from None


def _itemsize(dtype: str) -> int:
    from plait.core.base.errors import ReshardError, nearest

    if dtype not in ITEMSIZE:
        raise ReshardError(f"dtype={dtype} is unknown{nearest(dtype, ITEMSIZE)}. Use one of {', '.join(ITEMSIZE)}.")
    return ITEMSIZE[dtype]


def _seconds(text: str) -> float:
    from plait.core.base.errors import ReshardError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s)", text.strip())
    if not match:
        raise ReshardError(f"latency={text}: a number and ns, us, ms or s is expected, such as 50us.")
    return float(match[1]) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
