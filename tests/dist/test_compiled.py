"""With compiled functions between matrix products training is the unsharded computation still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.parallel.strategy import Strategy
from plait.train.model.compiled import compiler
from tests.dist.equality import TOLERANCE, Pool, TensorParallel, assert_equal
from tests.dist.test_equality import MODELS

LONE = [Strategy(compile=True), Strategy(p1=3, recompute="full", compile=True)]
SLICED = [
    Strategy(tp=2, p1=2, compile=True),
    Strategy(tp=2, p1=3, p2=2, sequence_parallel=True, recompute="full", compile=True),
    Strategy(tp=2, overlap="async", recompute="selective", compile=True),
]


@pytest.mark.parametrize("name", MODELS)
def test_the_formulas_equal_the_reference(pool: Pool, name: str) -> None:
    """Run op by op; that they are compiled right is the tests' below."""
    tried = [one for one in [*LONE, *SLICED] if name != "u" or not one.sequence_parallel]
    assert_equal(pool, *(TensorParallel(MODELS[name], one) for one in tried))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own use, inside its compiler
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.contract
def test_compiled_they_equal_the_reference_without_compiling_for_ever(name: str) -> None:
    """Slices of other sizes (4, then 2, then 2 and 1 of 4 sequences) take a second variant, and one
    of a single sequence a third; then nothing is compiled any more."""
    variants = [compiler().variants]
    for strategy in (LONE[0], *(replace(LONE[1], p1=p1) for p1 in (2, 3, 4, 1, 3))):
        case = TensorParallel(MODELS[name], strategy)
        error, what = case.error(0, case.want())
        assert error < TOLERANCE, f"{what} is off by {error:.1e} in {case}"
        variants.append(compiler().variants)
    assert variants[1] > variants[0] and variants[-3] == variants[-1]
