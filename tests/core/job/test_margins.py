"""Memory that a plan leaves free, as a job says it."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from plait.core.base.errors import JobError
from plait.core.job.constraint import SURE, Margin
from plait.core.job.spec import Job

GIB = 1 << 30
SMALL: dict[str, Any] = {"model": {"preset": "gpt3-125m"}}


@pytest.mark.parametrize(
    ("said", "margin", "kept"),
    [
        ("auto", Margin(confidence=SURE), 2 * NormalDist().inv_cdf(0.9)),
        ("safest", Margin(confidence=SURE, safest=True), 2 * NormalDist().inv_cdf(0.9)),
        ("fastest", Margin(), 0.0),
        (0, Margin(), 0.0),
        (0.05, Margin(share=0.05), 4.0),
        ("4 GiB", Margin(size=4 * GIB), 4 * GIB),
        ("1.5KiB", Margin(size=1536), 1536),
    ],
)
def test_what_a_setting_keeps_free(said: float | str, margin: Margin, kept: float) -> None:
    """Of a memory of 80 bytes that is known to 2."""
    found = Margin.parse(said)
    assert found == margin
    assert found.reserved_bytes(2.0, 80.0) == pytest.approx(kept)
    assert found.reserved_bytes(np.array([2.0, 0.0]), 80.0)[0] == pytest.approx(kept)


@pytest.mark.parametrize("said", [1, 1.5, -0.1, "4", "4 apples", "", "GiB", "most", "-4 GiB"])
def test_what_is_no_margin_is_refused(said: float | str) -> None:
    number = r"a number of at least 0 and below 1 or a text such as auto, safest, fastest or 4 GiB"
    with pytest.raises(JobError, match=rf'a share from 0 to below 1, or bytes as "4 GiB"|{number}') as caught:
        Job.from_dict(SMALL | {"plan": {"memory_margin": said}})
    assert caught.value.key == "plan.memory_margin"


def test_a_margin_on_the_command_line() -> None:
    for text, said in (("0.05", 0.05), ("4 GiB", "4 GiB"), ("safest", "safest"), ("0", 0)):
        assert Job.from_dict(SMALL).changed([f"plan.memory_margin={text}"]).plan.memory_margin == said


def test_margins_say_what_for() -> None:
    assert Margin.parse("auto").reason == "to be 90% sure that it fits"
    assert Margin.parse("2 GiB").reason == "as plan.memory_margin = 2 GiB says"
    assert Margin.parse(0.1).reason == "as plan.memory_margin = 0.1 says"
