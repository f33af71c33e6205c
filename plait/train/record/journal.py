"""A rank's measured timeline on disk: Parquet parts of a bounded number of steps, written by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from plait.core.timeline import Hidden, OpSpan, Span, Timeline, hidden, spans_of
from plait.train.record.missing import Missing

PART = 50  # steps in one file


class Journal:
    """Keeps the spans of the last ``keep_steps`` steps (0: none) under ``folder``; a full disk costs the
    timeline only, as ``missing`` counts."""

    def __init__(
        self, folder: Path, *, rank: int, plan_hash: str, keep_steps: int, missing: Missing | None = None
    ) -> None:
        self.folder, self.rank, self.plan_hash = folder, rank, plan_hash
        self.missing = missing or Missing("the timeline")
        self.keep = -(-keep_steps // PART)
        self._spans: list[Span] = []
        self._writer = ThreadPoolExecutor(1, "timeline")
        self._pending: Future[OSError | None] | None = None
        self._written = 0  # steps that the pending write holds
        self._files: deque[Path] = deque()
        if self.keep:
            self._files.extend(sorted(folder.glob(f"rank-{rank:05d}-step-*.parquet")))

    def add(self, step: int, recorded: Sequence[OpSpan]) -> Hidden:
        """Take a step's spans; returns its communication."""
        spans = spans_of(step, self.rank, recorded)
        if self.keep:
            self._spans += spans
            self._settle(wait=False)
            if (step + 1) % PART == 0:
                self._flush()
        return hidden(spans)

    def close(self) -> None:
        """Write what is left."""
        self._settle(wait=True)
        self._flush()
        self._settle(wait=True)
        self._writer.shutdown()

    def _flush(self) -> None:
        self._settle(wait=False)
        if self._spans and self._pending is None:  # never wait for a slow disk
            spans, self._spans = self._spans, []
            self._written = len({span.step for span in spans})
            self._pending = self._writer.submit(self._write, spans)

    def _settle(self, *, wait: bool) -> None:
        """Take note of how the pending write went."""
        if self._pending is not None and (wait or self._pending.done()):
            error, self._pending = self._pending.result(), None
            if error:
                self.missing.failed(error, self._written)
            else:
                self.missing.worked()

    def _write(self, spans: list[Span]) -> OSError | None:
        path = self.folder / f"rank-{self.rank:05d}-step-{spans[-1].step + 1:08d}.parquet"
        try:
            self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone stays gone
            Timeline(tuple(spans), self.plan_hash).write_parquet(path)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return error
        if path not in self._files:
            self._files.append(path)
        while len(self._files) > self.keep:
            with suppress(OSError):
                self._files.popleft().unlink(missing_ok=True)
        return None
