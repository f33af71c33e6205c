"""Metrics for other tools: TensorBoard, Weights & Biases. They are fed from the run's ``metrics.jsonl``, by
the agent of rank 0's host, so that no tool of theirs runs in a rank, slows a step or ends training.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait.core.base.codec.json_text import parse_json
from plait.core.base.codec.toml_text import to_toml
from plait.core.base.numbers import is_number

if TYPE_CHECKING:
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job


class Tail:
    """Lines that are added to ``metrics.jsonl`` from now on, whole and readable ones; a file that is cut back
    is followed from its new end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = self._size()

    def lines(self) -> list[dict[str, Any]]:
        """Those since the last time."""
        size = self._size()
        if size <= self._at:
            self._at = size
            return []
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                read = file.read(size - self._at)
        except OSError:
            return []
        whole = read[: read.rfind(b"\n") + 1]
        self._at += len(whole)
        return [line for text in whole.splitlines() if isinstance(line := _parsed(text), dict)]

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


class Logger(Protocol):
    """A tool that shows metrics."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """What was measured in a step, counted from 1."""
        ...

    def close(self) -> None:
        """There is no more."""
        ...


class TensorBoard:
    """Event files in the run's folder; written by tensorboardX, which needs neither TensorBoard nor torch."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._writer: Any = import_module("tensorboardX").SummaryWriter(str(folder / "tensorboard"))
        if plan.job:
            self._writer.add_text("job", f"```toml\n{to_toml(_experiment(plan.job))}```", 0)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """As scalars of their names."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, the same one each time the run goes on. Its own variables (WANDB_PROJECT,
    WANDB_MODE, ...) say where to; without a login it is kept in the run's folder, for ``wandb sync``."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        wandb: Any = import_module("wandb")
        number = folder / "wandb" / "run-id"
        if not number.is_file():
            number.parent.mkdir(exist_ok=True)
            number.write_text(secrets.token_hex(4))
        settings = {
            "name": folder.name, "dir": str(folder), "id": number.read_text().strip(), "resume": "allow",
            "config": _experiment(plan.job) if plan.job else {},
        }  # fmt: skip
        try:
            self._run: Any = wandb.init(**settings)
        except wandb.Error:  # no login, or nobody answers
            self._run = wandb.init(**settings, mode="offline")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """As one entry of the run's history."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


KINDS: Mapping[str, Callable[[Path, Plan], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Loggers:
    """Those that ``run.loggers`` names. One that fails is left out from then on, which is said."""

    def __init__(self, names: Iterable[str], folder: Path, plan: Plan, say: Callable[[str], None]) -> None:
        self._say = say
        self._all: dict[str, Logger] = {}
        for name in names:
            self._try(name, lambda name=name: self._all.__setitem__(name, KINDS[name](folder, plan)))

    def add(self, line: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        values = {key: float(value) for key, value in line.items() if key != "step" and is_number(value)}
        if isinstance(line.get("step"), int):
            for name, logger in list(self._all.items()):
                self._try(name, lambda logger=logger: logger.add(line["step"], values))

    def close(self) -> None:
        """There is no more."""
        for name, logger in list(self._all.items()):
            self._try(name, logger.close)

    def _try(self, name: str, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001  (whatever another tool raises costs that tool only)
            self._all.pop(name, None)
            self._say(f"warning: {name} gets no more metrics: {str(error) or type(error).__name__}")


def _experiment(job: Job) -> dict[str, Any]:
    """A job without what a cluster manager is told: variables and shell lines hold passwords, and others see
    what a tool shows."""
    return {name: table for name, table in job.to_dict().items() if name not in ("slurm", "kubernetes")}


def _parsed(text: bytes) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return None
