"""Live metrics of a host's ranks for Prometheus: sums and last values, a few series for each rank, however
many spans there are.

Names follow Prometheus' rules: seconds, ``_total`` for what only grows, ratios from 0 to 1. What grows counts
from the agent's start.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.record.exposure import Exposure
from plait.core.record.records import Records
from plait.core.record.ring import Header, RecordKind

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from plait.core.job.plan import Plan

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper ends of a step's duration, seconds."""
MEASURED = {
    "loss": ("plait_loss", "Loss of the last step"),
    "eval_loss": ("plait_evaluation_loss", "Loss of the last evaluation"),
    "norm": ("plait_gradient_norm", "Norm of the last step's gradient, before clipping"),
    "learning_rate": ("plait_learning_rate", "Learning rate of the last step"),
    "tokens_per_second": ("plait_tokens_per_second", "Tokens of the last step, of all ranks, over its time"),
    "mfu": ("plait_model_flops_utilization_ratio", "MFU of the last step, of the devices' dense peak"),
}
"""What rank 0 writes of the whole job, by its name in ``metrics.jsonl``."""


class Live:
    """What Prometheus is told of the ranks of the run in ``folder`` that are on this host."""

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
        """Whole steps of a rank."""
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
        """Where a rank is; how many of its records were overwritten before they were read."""
        with self._lock:
            self._headers[header.rank], self._lost[header.rank] = header, lost

    def measured(self, line: Mapping[str, Any]) -> None:
        """What rank 0 has measured in a step. A null, which says that a value is not known, takes the one
        before away."""
        with self._lock:
            for name in MEASURED.keys() & line.keys():
                self._measured.pop(name, None)
                if isinstance(line[name], int | float):
                    self._measured[name] = float(line[name])

    def serve(self, port: int, address: str, say: Callable[[str], None]) -> Callable[[], None]:
        """Answer Prometheus; what ends that. Where the port is taken, that is said."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # type: ignore[arg-type]  (it wants its own class, and calls collect alone)
        try:
            server, thread = start_http_server(port, addr=address, registry=registry)
        except (OSError, OverflowError) as error:
            keys = "run.metrics_port and run.metrics_address"
            say(f"warning: no live metrics at {address}:{port} ({error}); {keys} say where")
            return lambda: None

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close

    def collect(self) -> Iterator[Metric]:
        """What there is now, as Prometheus' library asks for it."""
        with self._lock:
            found = [*self._of_steps(), *self._of_communication(), *self._of_the_job()]
        return iter(found)

    def _of_steps(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        ends, total = [], 0
        for end, count in zip((*map(str, BUCKETS), "+Inf"), self._durations, strict=True):
            total += count
            ends.append((end, total))
        name, what = "plait_step_duration_seconds", "Steps of this host's ranks, by how long they took"
        yield HistogramMetricFamily(name, what, buckets=ends, sum_value=self._duration)
        counted = CounterMetricFamily("plait_steps", "Steps that a rank has done", labels=["rank"])
        under_way = GaugeMetricFamily("plait_step", "Step that a rank is at, from 1", labels=["rank"])
        age = GaugeMetricFamily("plait_step_age_seconds", "Since when it is at it", labels=["rank"])
        lost = CounterMetricFamily(
            "plait_records_lost", "Records that were overwritten before they were read", labels=["rank"]
        )
        now = time.monotonic_ns()
        for rank, header in sorted(self._headers.items()):
            counted.add_metric([str(rank)], self._steps[rank])
            lost.add_metric([str(rank)], self._lost[rank])
            if header.step >= 0 and not header.closed:
                under_way.add_metric([str(rank)], header.step + 1)
                age.add_metric([str(rank)], (now - header.stepped) / 1e9)
        yield from (counted, under_way, age, lost)

    def _of_communication(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        busy = CounterMetricFamily(
            "plait_activity_seconds", "What ranks did, by kind of span; kinds overlap", labels=["rank", "kind"]
        )
        under_way = CounterMetricFamily(
            "plait_communication_seconds", "Communication under way or waited for, by axis; axes overlap",
            labels=["rank", "axis"],
        )  # fmt: skip
        exposed = CounterMetricFamily(
            "plait_exposed_communication_seconds", "Of it, while the rank did nothing else", labels=["rank", "axis"]
        )
        for (rank, kind), seconds in sorted(self._seconds.items()):
            busy.add_metric([str(rank), kind], seconds)
        for (rank, axis), found in sorted(self._exposure.items()):
            under_way.add_metric([str(rank), axis], found.total)
            exposed.add_metric([str(rank), axis], found.exposed)
        hidden = GaugeMetricFamily(
            "plait_hidden_communication_ratio", "Of the last step's communication, what computation hid",
            labels=["rank"],
        )  # fmt: skip
        for rank, ratio in sorted(self._hidden.items()):
            hidden.add_metric([str(rank)], ratio)
        yield from (busy, under_way, exposed, hidden)

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
