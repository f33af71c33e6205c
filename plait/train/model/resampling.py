"""Where a U-Transformer changes the length of the sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.train.model.basics import WeightModule


class Down(WeightModule):
    """Half as long: two neighbours become one, which stands where the later of them stood, so that nobody
    sees what comes after."""

    def forward(self, h: Tensor) -> Tensor:
        """[S, B, H] -> [S / 2, B, H]: of tokens 2j-1 and 2j."""
        earlier = torch.cat((torch.zeros_like(h[:1]), h[1:-1:2]))
        return F.linear(torch.cat((earlier, h[0::2]), dim=-1), self.weight, self.bias)


class Up(WeightModule):
    """Twice as long: every token is that of the coarse one that ends with it or before it, plus what the down
    path had."""

    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        """[S / 2, B, H] and the skip connection [S, B, H] -> [S, B, H]."""
        return F.linear(h, self.weight, self.bias).repeat_interleave(2, dim=0) + skip
