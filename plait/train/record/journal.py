"""A rank's measured timeline on disk: Parquet parts of a bounded number of steps, written by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from plait.core.timeline import Hidden, OpSpan, Span, Timeline, hidden, spans_of

PART = 50  # steps in one file


class Journal:
    """Keeps the spans of the last ``keep_steps`` steps (0: none) under ``folder``; a full disk costs the
    timeline only."""

    def __init__(self, folder: Path, *, rank: int, plan_hash: str, keep_steps: int) -> None:
        self.folder, self.rank, self.plan_hash = folder, rank, plan_hash
        self.keep = -(-keep_steps // PART)
        self._spans: list[Span] = []
        self._writer = ThreadPoolExecutor(1, "timeline")
        self._pending: Future[None] | None = None
        self._files: deque[Path] = deque()
        if self.keep:
            folder.mkdir(parents=True, exist_ok=True)
            self._files.extend(sorted(folder.glob(f"rank-{rank:05d}-step-*.parquet")))

    def add(self, step: int, recorded: Sequence[OpSpan]) -> Hidden:
        """Take a step's spans; returns its communication."""
        spans = spans_of(step, self.rank, recorded)
        if self.keep:
            self._spans += spans
            if (step + 1) % PART == 0:
                self._flush()
        return hidden(spans)

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._writer.shutdown()

    def _flush(self) -> None:
        if self._spans and (self._pending is None or self._pending.done()):  # never wait for a slow disk
            spans, self._spans = self._spans, []
            self._pending = self._writer.submit(self._write, spans)

    def _write(self, spans: list[Span]) -> None:
        path = self.folder / f"rank-{self.rank:05d}-step-{spans[-1].step + 1:08d}.parquet"
        try:
            Timeline(tuple(spans), self.plan_hash).write_parquet(path)
        except OSError:
            path.unlink(missing_ok=True)
            return
        if path not in self._files:
            self._files.append(path)
        while len(self._files) > self.keep:
            self._files.popleft().unlink(missing_ok=True)
