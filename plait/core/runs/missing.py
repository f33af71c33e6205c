"""What a run could not write: counted, said once when it begins and once when it is over, never a reason to
end."""

from __future__ import annotations

from collections.abc import Callable


class Missing:
    """Steps of which ``what`` (such as ``metrics.jsonl``) is missing; ``warn`` says a line to people."""

    def __init__(self, what: str, warn: Callable[[str], None] = lambda _: None) -> None:
        self.what, self.warn = what, warn
        self.steps = 0
        self._failing = False

    def failed(self, error: OSError, steps: int = 1) -> None:
        """``steps`` of it could not be written."""
        self.steps += steps
        if not self._failing:
            self.warn(f"warning: {self.what} cannot be written ({error.strerror or error}); training goes on without")
        self._failing = True

    def worked(self) -> None:
        """It was written."""
        if self._failing:
            self.warn(f"{self.what} is written again; missing: {self}")
        self._failing = False

    def __str__(self) -> str:
        return f"{self.what} of {self.steps} step{'' if self.steps == 1 else 's'}"
