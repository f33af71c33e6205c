"""With compiled functions between matrix products training is the unsharded computation still."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from tests.dist import compiling
from tests.dist.test_equality import GPT, LLAMA, MODELS, TOLERANCE, U
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]

SLICED = [
    Strategy(tp=2, p1=2, compile=True),
    Strategy(tp=2, p1=3, p2=2, sequence_parallel=True, recompute="full", compile=True),
    Strategy(tp=2, overlap="async", recompute="selective", compile=True),
]


def strategies(tp: int) -> list[Strategy]:
    return SLICED if tp == 2 else [Strategy(compile=True), Strategy(p1=3, recompute="full", compile=True)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [*MODELS, "u"])
def test_the_formulas_equal_the_reference(pool: Pool, name: str, tp: int) -> None:
    """Run op by op; that they are compiled right is the tests' below."""
    spec = U if name == "u" else MODELS[name]
    tried = [one for one in strategies(tp) if name != "u" or not one.sequence_parallel]
    found = [compiling.worst_error(0, spec, tried)] if tp == 1 else pool(2).run(compiling.worst_error, spec, tried)
    for errors in found:
        for (error, what), strategy in zip(errors, tried, strict=True):  # type: ignore[call-overload]
            assert error < TOLERANCE, f"{strategy}: {what} is off by {error:.1e}"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own use, inside its compiler
@pytest.mark.parametrize("spec", [pytest.param(GPT, id="gpt"), pytest.param(LLAMA, id="llama")])
@pytest.mark.contract
def test_compiled_they_equal_the_reference_without_compiling_for_ever(spec: ModelSpec) -> None:
    """Slices of other sizes (4, then 2, then 2 and 1 of 4 sequences) take a second variant, and one of a
    single sequence a third; then nothing is compiled any more."""
    tried = [Strategy(compile=True), *(Strategy(p1=p1, recompute="full", compile=True) for p1 in (2, 3, 4, 1, 3))]
    found = compiling.really(0, spec, tried)
    for (error, what), strategy in zip(found["errors"], tried, strict=True):
        assert error < TOLERANCE, f"{strategy}: {what} is off by {error:.1e}"
    assert found["variants"][0] > 0
    assert found["variants"][-2:] == [0, 0]
