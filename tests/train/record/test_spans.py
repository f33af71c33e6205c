"""Spans that real steps record are those that a simulation predicts; ranks as threads. More in
``tests/dist``."""

from __future__ import annotations

import pytest

from tests.dist.test_recording import HERE, compare
from tests.support.threads import threads

SOME = ("one rank", "domino", "async and tied", "zb-h1", "fsdp", "fsdp, nothing hidden", "zero1 in a pipeline")


@pytest.mark.parametrize("name", SOME)
def test_every_recorded_key_is_predicted_and_every_predicted_key_recorded(name: str) -> None:
    compare(threads, HERE[name])  # type: ignore[arg-type]
