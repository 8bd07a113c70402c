"""Work of each rank in the dispatcher suite: one step of a layer, through the dispatcher.

A separate module, because every rank imports it.

Shapes: T tokens of a rank, H features, E experts, k experts per token, R rows received by the experts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from d9d_testing.suites.moe.factory import load_factory


@dataclass(frozen=True, slots=True)
class Case:
    """One step of one layer.

    Attributes:
        indices: rank -> experts of its tokens, int64 [T, k].
        experts: E.
        limit: largest number of rows for an expert from one rank; further rows are dropped.
        learns: names of the tensors that require gradients, out of ``tokens``, ``weights`` and ``bank``.
        checkpointed: whether the backward recomputes the forward.
        interleaved: whether another microbatch is dispatched before the outputs of this one are combined.
        name: name for messages.
    """

    indices: list[Tensor]
    experts: int
    limit: int | None = None
    learns: tuple[str, ...] = ("tokens", "weights", "bank")
    checkpointed: bool = False
    interleaved: bool = False
    name: str = ""


def inputs_of(case: Case, rank: int, hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tokens [T, H], weights [T, k], the output's gradient [T, H], and the bank [E, H, H], for one rank."""
    generator = torch.Generator().manual_seed(rank)
    chosen, same = case.indices[rank], torch.Generator().manual_seed(99)
    wide = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(chosen.shape, generator=generator).masked_fill(chosen == case.experts, 0)
    return {
        "tokens": torch.randn(len(chosen), hidden, generator=generator).to(dtype),
        "weights": weights.to(wide),
        "grad": torch.randn(len(chosen), hidden, generator=generator).to(dtype),
        "bank": (torch.randn(case.experts, hidden, hidden, generator=same) / hidden**0.5).to(dtype),
    }


def steps(
    factory: str, cases: list[dict[str, Any]], dtypes: Sequence[str], hidden: int, device: str
) -> dict[str, list[dict[str, Tensor]]]:
    """Run the cases on this rank; return output and gradients by dtype and case. Collective over the world."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    make, group = load_factory(factory), dist.group.WORLD
    found: dict[str, list[dict[str, Tensor]]] = {dtype: [] for dtype in dtypes}
    for dtype, values in ((dtype, values) for dtype in dtypes for values in cases):
        case = Case(**values)
        try:
            found[dtype].append(_step(make(group, case.experts), case, hidden, getattr(torch, dtype), device))
        except Exception as error:
            error.add_note(f"in {dtype}, {case.name or case}")
            raise
    return found


def _step(dispatcher: Any, case: Case, hidden: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    from d9d_moe.router.routing import TopKRouting

    rank, local = dist.get_rank(), case.experts // dist.get_world_size()
    inputs = {name: x.to(device) for name, x in inputs_of(case, rank, hidden, dtype).items()}
    inputs["bank"] = inputs["bank"][rank * local : (rank + 1) * local].clone()
    indices = case.indices[rank].to(device)
    before = {name: x.clone() for name, x in (inputs | {"indices": indices}).items()}
    tokens, weights, bank = (inputs[name].requires_grad_(name in case.learns) for name in ("tokens", "weights", "bank"))

    def layer(tokens: Tensor, weights: Tensor, bank: Tensor) -> Tensor:
        absent = bool((case.indices[rank] == case.experts).any())
        routing = TopKRouting.of(indices, weights, case.experts, case.limit, incomplete=absent)
        sending = dispatcher.dispatch(tokens, routing)
        meanwhile = tokens.sin()
        sent = sending.wait()
        other = None
        if case.interleaved:
            turned = TopKRouting.of(indices.flip(0), weights.flip(0), case.experts, case.limit, incomplete=absent)
            other = dispatcher.dispatch(tokens, turned).wait()
        outputs = _experts(sent, bank)
        mixed: Tensor = dispatcher.combine(outputs, sent.handle).wait()
        if other is not None:
            mixed = mixed + 0 * dispatcher.combine(_experts(other, bank), other.handle).wait()
        assert mixed.dtype == dtype, f"combine returned {mixed.dtype}, the outputs of the experts are {dtype}"
        return mixed + meanwhile

    if case.checkpointed:
        out = checkpoint(layer, tokens, weights, bank, use_reentrant=False)
    else:
        out = layer(tokens, weights, bank)
    if out.requires_grad:
        torch.autograd.backward(out, inputs["grad"])
    for name, tensor in (inputs | {"indices": indices}).items():
        assert torch.equal(tensor.detach(), before[name]), f"the dispatcher has changed {name} in place"
    found = {"out": out.detach()}
    for name in case.learns:
        grad = inputs[name].grad
        assert grad is not None, f"{name} got no gradient on rank {rank}; it must be zeros at least"
        found[name] = grad
    return found


def _experts(sent: Any, bank: Tensor) -> Tensor:
    """``tanh(x @ bank[e])`` for the rows of each expert e of this rank; padding rows give zeros."""
    assert sent.counts.shape == (len(bank),), f"counts {tuple(sent.counts.shape)}, this rank has {len(bank)} experts"
    assert sent.counts.dtype == torch.int64, f"counts are {sent.counts.dtype}, expected torch.int64"
    sizes = sent.counts.tolist()
    spare = len(sent.tokens) - sum(sizes)
    assert spare >= 0, f"counts add up to {sum(sizes)}, but there are {len(sent.tokens)} rows"
    assert sent.spare_rows or not spare, f"{spare} rows are padding, but spare_rows is False"
    *rows, nobody = sent.tokens.split([*sizes, spare])
    parts = [torch.tanh(part @ matrix) for part, matrix in zip(rows, bank.unbind(0), strict=True)]
    return torch.cat([*parts, torch.zeros_like(nobody)])
