"""How gradients are added up on a GPU, as far as that can be tried without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.core.parallel.strategy import Strategy
from plait.train.engine.gradients import Gradients
from plait.train.model.transformer import Transformer
from tests.support.models import llama


class Called(torch.overrides.TorchFunctionMode):
    """Every tensor says that it is on a GPU, and what is called is noted; ``out_dtype`` is a GPU's
    alone."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is Tensor.is_cuda:
            return True
        self.names.append(func.__name__)
        wanted = (kwargs or {}).pop("out_dtype", None)
        return func(*(each.to(wanted) for each in args)) if wanted else func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def gradients() -> Gradients:
    with torch.no_grad():
        model = Transformer(llama(num_layers=1), Strategy(), dtype=torch.bfloat16)
        return Gradients(model)


def test_products_are_not_rounded_before_they_are_added(gradients: Gradients) -> None:
    weight = gradients.model.named["layers.0.mlp.row.weight"]
    generator = torch.Generator().manual_seed(0)
    out, inputs = (torch.randn(64, size, generator=generator).bfloat16() for size in weight.shape)
    gradients.zero()
    with Called() as called:
        gradients.add_product(weight, out, inputs)
    exact = out.float().t() @ inputs.float()
    assert torch.equal(gradients.named["layers.0.mlp.row.weight"], exact)
    assert not torch.equal(exact, (out.t() @ inputs).float()), "rounding would show"
    assert "mm" in called.names


def test_rows_are_added_in_one_order(gradients: Gradients) -> None:
    weight = gradients.model.named["embedding.weight"]
    rows, found = torch.tensor([3, 1, 3]), torch.ones(3, weight.shape[1], dtype=torch.bfloat16)
    gradients.zero()
    with Called() as called:
        gradients.add_rows(weight, rows, found)
    assert gradients.named["embedding.weight"][:4, 0].tolist() == [0, 1, 0, 2]
    assert "index_add_" not in called.names, "atomics add in any order"


def test_the_norm_takes_a_few_kernels(gradients: Gradients) -> None:
    gradients.flat.copy_(torch.arange(len(gradients.flat)) % 7)
    one_by_one = gradients.norm_square()
    with Called() as called:
        at_once = gradients.norm_square()
    torch.testing.assert_close(at_once, one_by_one)
    assert "vector_norm" not in " ".join(called.names)
