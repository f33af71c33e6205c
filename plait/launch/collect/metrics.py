"""Metrics of a run for other tools: live metrics of a host's ranks for Prometheus; rank 0's
``metrics.jsonl`` for TensorBoard and Weights & Biases. The agent of rank 0's host feeds both
loggers, so that neither runs in a rank, slows a step or ends training.

Prometheus gets sums and last values, a few series for each rank, however many spans there are.
Names follow its rules: seconds, ``_total`` for counters, ratios from 0 to 1. Counters start at zero
when the agent starts.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait.core.base.codec.json_text import parse_json
from plait.core.base.codec.toml_text import to_toml
from plait.core.base.numbers import is_number
from plait.core.record.exposure import Exposure
from plait.core.record.records import Records
from plait.core.record.ring import Header, RecordKind

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histogram of step durations, seconds."""
MEASURED = {
    "loss": ("plait_loss", "Loss of the last step"),
    "eval_loss": ("plait_evaluation_loss", "Loss of the last evaluation"),
    "norm": ("plait_gradient_norm", "Norm of the last step's gradient, before clipping"),
    "learning_rate": ("plait_learning_rate", "Learning rate of the last step"),
    "tokens_per_second": ("plait_tokens_per_second", "Tokens of the last step, of all ranks, over its time"),
    "mfu": ("plait_model_flops_utilization_ratio", "MFU of the last step, of the devices' dense peak"),
}
"""Prometheus' name and description of rank 0's metrics of the whole job, by their key in
``metrics.jsonl``."""


class Live:
    """Live Prometheus metrics of this host's ranks of the run in ``folder``."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self._lock = threading.Lock()
        self._headers: dict[int, Header] = {}
        self._seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._exposure: defaultdict[tuple[int, str], Exposure] = defaultdict(lambda: Exposure(0.0, 0.0))
        self._hidden: dict[int, float] = {}
        self._steps: defaultdict[int, int] = defaultdict(int)
        self._lost: dict[int, int] = {}
        self._durations = [0] * (len(BUCKETS) + 1)
        self._duration = 0.0
        self._measured: dict[str, float] = {}

    def add(self, header: Header, records: Records) -> None:
        """Add the records of whole steps of a rank to the counters. header: of the rank's ring."""
        steps = records.table[records.table["kind"] == RecordKind.STEP]
        with self._lock:
            for kind, seconds in records.seconds().items():
                self._seconds[header.rank, kind] += seconds
            for axis, more in records.exposure_by_axis().items():
                known = self._exposure[header.rank, axis]
                self._exposure[header.rank, axis] = Exposure(known.total + more.total, known.exposed + more.exposed)
            for taken in ((steps["ended"] - steps["started"]) / 1e9).tolist():
                self._durations[bisect_left(BUCKETS, taken)] += 1
                self._duration += taken
            self._steps[header.rank] += len(steps)
            if len(steps):
                last = records.table[records.table["step"] == steps["step"].max()]
                hidden = Records(last, records.names, records.groups).exposure().fraction
                self._hidden[header.rank] = math.nan if hidden is None else hidden

    def at(self, header: Header, lost: int) -> None:
        """Set a rank's present state from its ring's header. lost: number of its records that were
        overwritten before they were read."""
        with self._lock:
            self._headers[header.rank], self._lost[header.rank] = header, lost

    def measured(self, line: Mapping[str, Any]) -> None:
        """Set rank 0's measured values of a step from its line of ``metrics.jsonl``. A null, which
        marks an unknown value, removes the previous value."""
        with self._lock:
            for name in MEASURED.keys() & line.keys():
                self._measured.pop(name, None)
                if isinstance(line[name], int | float):
                    self._measured[name] = float(line[name])

    def serve(self, port: int, address: str, say: Callable[[str], None]) -> Callable[[], None]:
        """Serve the metrics over HTTP; return a function that stops the server. If the port is
        taken, only a warning is given."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # type: ignore[arg-type]  (typed as its own class, but only collect is called)
        try:
            server, thread = start_http_server(port, addr=address, registry=registry)
        except (OSError, OverflowError) as error:
            keys = "run.metrics_port and run.metrics_address"
            say(f"warning: no live metrics at {address}:{port} ({error}); {keys} set the address")
            return lambda: None

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics; prometheus_client's registry calls this."""
        with self._lock:
            found = [*self._of_steps(), *self._of_ranks(), *self._of_the_job()]
        return iter(found)

    def _of_steps(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        ends, total = list[tuple[str, float]](), 0
        for end, count in zip((*map(str, BUCKETS), "+Inf"), self._durations, strict=True):
            total += count
            ends.append((end, total))
        name, what = "plait_step_duration_seconds", "Steps of this host's ranks, by how long they took"
        yield HistogramMetricFamily(name, what, buckets=ends, sum_value=self._duration)

    def _of_ranks(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        ranks, now = self._headers, time.monotonic_ns()
        at = {rank: header for rank, header in ranks.items() if header.step >= 0 and not header.closed}
        rows: list[tuple[Any, str, str, str, Mapping[Any, float]]] = [
            (CounterMetricFamily, "steps", "Steps that a rank has done", "", {k: self._steps[k] for k in ranks}),
            (GaugeMetricFamily, "step", "Step that a rank is at, from 1", "", {k: h.step + 1 for k, h in at.items()}),
            (GaugeMetricFamily, "step_age_seconds", "Seconds since a rank began its step", "",
             {k: (now - h.stepped) / 1e9 for k, h in at.items()}),
            (CounterMetricFamily, "records_lost", "Records that were overwritten before they were read", "",
             self._lost),
            (CounterMetricFamily, "activity_seconds", "What ranks did, by kind of span; kinds overlap", "kind",
             self._seconds),
            (CounterMetricFamily, "communication_seconds",
             "Communication under way or waited for, by axis; axes overlap", "axis",
             {key: found.total for key, found in self._exposure.items()}),
            (CounterMetricFamily, "exposed_communication_seconds",
             "Communication while the rank did nothing else, by axis", "axis",
             {key: found.exposed for key, found in self._exposure.items()}),
            (GaugeMetricFamily, "hidden_communication_ratio",
             "Share of the last step's communication that computation hid", "", self._hidden),
        ]  # fmt: skip
        for kind, name, what, label, values in rows:
            family: Any = kind(f"plait_{name}", what, labels=["rank", label] if label else ["rank"])
            for key, value in sorted(values.items()):
                family.add_metric([str(key[0]), key[1]] if label else [str(key)], value)
            yield family

    def _of_the_job(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        plans = {header.plan for header in self._headers.values()} or {self.plan.key}
        host = next((header.host for header in self._headers.values()), "")
        strategy = self.plan.strategy
        yield InfoMetricFamily(
            "plait_run", "The run",
            value={"run": self.folder.name, "plan": max(plans)[:12], "host": host, "tp": str(strategy.tp)},
        )  # fmt: skip
        for name, (metric, what) in MEASURED.items():
            if name in self._measured:
                yield GaugeMetricFamily(metric, what, value=self._measured[name])


class MetricsTail:
    """Reader of the lines that are added to ``metrics.jsonl``, only complete ones that parse; a
    file that is truncated is followed from its new end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = self._size()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines added since the last call, each as a dictionary."""
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
    """A tool that displays metrics."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values measured in a step, counted from 1."""
        ...

    def close(self) -> None:
        """Finish; no more values follow."""
        ...


class TensorBoard:
    """TensorBoard event files in the run's folder, written by tensorboardX, which needs neither
    TensorBoard nor torch."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._writer: Any = import_module("tensorboardX").SummaryWriter(str(folder / "tensorboard"))
        if plan.job:
            self._writer.add_text("job", f"```toml\n{to_toml(_experiment(plan.job))}```", 0)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values as scalars of the same names."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write the buffered values."""
        self._writer.close()


class WandB:
    """A Weights & Biases run; a resumed run continues the same one. Weights & Biases' own variables
    (WANDB_PROJECT, WANDB_MODE, ...) choose the destination; without a login, the data stay in the
    run's folder, for ``wandb sync``."""

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
        except wandb.Error:  # no login, or the server does not answer
            self._run = wandb.init(**settings, mode="offline")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values as one entry of the run's history."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send the buffered values."""
        self._run.finish()


LOGGER_CLASSES: Mapping[str, Callable[[Path, Plan], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Loggers:
    """The loggers named by ``run.loggers``. A logger that fails is dropped with a warning."""

    def __init__(self, names: Iterable[str], folder: Path, plan: Plan, say: Callable[[str], None]) -> None:
        self._say = say
        self._all: dict[str, Logger] = {}
        for name in names:
            self._try(name, lambda name=name: self._all.__setitem__(name, LOGGER_CLASSES[name](folder, plan)))

    def add(self, line: Mapping[str, Any]) -> None:
        """Pass a line of ``metrics.jsonl`` to every logger."""
        values = {key: float(value) for key, value in line.items() if key != "step" and is_number(value)}
        if isinstance(line.get("step"), int):
            for name, logger in list(self._all.items()):
                self._try(name, lambda logger=logger: logger.add(line["step"], values))

    def close(self) -> None:
        """Close every logger."""
        for name, logger in list(self._all.items()):
            self._try(name, logger.close)

    def _try(self, name: str, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001  (an error of a logger costs that logger only)
            self._all.pop(name, None)
            self._say(f"warning: {name} gets no more metrics: {str(error) or type(error).__name__}")


def _experiment(job: Job) -> dict[str, Any]:
    """Return a job's settings without its cluster manager's sections: their variables and shell
    lines hold passwords, and others can read the logger's pages."""
    return {name: table for name, table in job.to_dict().items() if name not in ("slurm", "kubernetes")}


def _parsed(text: bytes) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return None
