"""A router with one fault at a time, for the tests of the suite."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Router(nn.Module):
    """The best of softmax scores; with a capacity of one row for each expert."""

    def __init__(self, hidden: int, experts: int, top_k: int, fault: str = "", capacity: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden) / 4)
        self.unsaved = torch.randn(experts)
        self.experts, self.top_k, self.fault, self.capacity, self.lost = experts, top_k, fault, capacity, torch.zeros(1)

    def forward(self, tokens: Tensor, samples: int = 1) -> SimpleNamespace:
        fault = self.fault
        wide = tokens.dtype if fault == "narrow scores" else torch.float32
        with torch.autocast("cpu", enabled=False):
            logits = tokens.to(wide) @ self.weight.to(wide).T
        if fault == "draws noise":
            logits = logits + 0.1 * torch.randn_like(logits)
        if fault == "overflows":
            logits = logits.exp()
        if fault == "state is not saved":
            logits = logits + self.unsaved
        scores = logits.softmax(1)
        if fault == "narrow scores":
            scores = scores.float()
        order = scores.detach().sort(dim=1, descending=True, stable=True).indices
        if fault == "higher expert wins":
            order = self.experts - 1 - scores.detach().flip(1).sort(dim=1, descending=True, stable=True).indices
        indices = order[:, [0] * self.top_k] if fault == "one expert twice" else order[:, : self.top_k]
        weights = scores.gather(1, indices)
        if fault == "equal weights":
            weights = (weights + 1) / (weights + 1).sum(1, keepdim=True)
        if fault == "teaches nothing":
            weights = weights.detach() + 0 * weights
        if fault == "teaches the best expert only":
            weights = torch.cat([weights[:, :1], weights[:, 1:].detach()], 1)
        limit = None
        if self.capacity is not None:
            limit = 1
            first = torch.zeros_like(indices, dtype=torch.bool)
            for expert in range(self.experts):
                found = (indices == expert).nonzero()[: 2 if fault == "exceeds its capacity" else 1]
                first[found[:, 0], found[:, 1]] = True
            indices = indices.masked_fill(~first, self.experts)
            weights = weights if fault == "weighs what it drops" else weights.masked_fill(~first, 0)
            self.lost = (~first).sum() - int(fault == "counts drops wrong")
        counts = torch.stack([(indices == expert).sum() for expert in range(self.experts)])
        if fault == "counts wrong":
            counts = counts + 1
        if fault == "narrow indices":
            indices = indices.int()
        return SimpleNamespace(indices=indices, weights=weights, scores=scores, counts=counts, limit=limit)

    def tallies(self) -> Mapping[str, Tensor]:
        return {"dropped": self.lost}
