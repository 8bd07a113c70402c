"""Costs of the fine-tuning methods on one weight, from their configs alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from d9d_core.config import PluginConfig
from d9d_core.cost import AdapterCost, Share, Weight

from d9d_peft.config import ALL_LINEAR, DoraConfig, FullTuneConfig, LoraConfig, LowRankConfig, StackConfig
from d9d_peft.ia3.config import Ia3Config
from d9d_peft.patterns import matches, owners

Inner = Callable[[PluginConfig, str, Weight, float, Share], AdapterCost]


def lora(config: LoraConfig, name: str, weight: Weight, rows: float, share: Share) -> AdapterCost:
    """Cost of ``lora``: two small products in addition to the product with the weight, and the sum of the outputs.

    Weights of ``modules_to_save`` are trained without additional ops.
    """
    if _is_target(config, name, weight):
        return _term(config, _rank(config, name, weight), weight, rows, share)
    return _saved(config, name)


def dora(config: DoraConfig, name: str, weight: Weight, rows: float, share: Share) -> AdapterCost:
    """Cost of ``dora``: the cost of ``lora``, the norms of the weight's rows, and a product with magnitudes."""
    if weight.kind != "linear" or not _is_target(config, name, weight):
        return _saved(config, name)
    outputs, features = weight.shape
    size, rank = share.width * rows * outputs, _rank(config, name, weight)
    norms = 2.0 * outputs * features * rank
    scaled = AdapterCost(
        parameters=outputs,
        flops=norms,
        traffic=2 * share.width * outputs * features + 2 * size,
        backward_traffic=4 * size,
        kept=size,  # the unscaled output, for the gradient of the magnitudes
    )
    return _term(config, rank, weight, rows, share) + scaled


def ia3(config: Ia3Config, name: str, weight: Weight, rows: float, share: Share) -> AdapterCost:
    """Cost of ``ia3``: scaling of a linear layer's input or output, which is kept for the backward."""
    layer = _layer(name)
    if weight.kind != "linear":
        return AdapterCost()
    outputs, features = weight.shape
    for patterns, scaled in ((config.targets, outputs), (config.feedforward, features)):
        if _some(layer, patterns):
            size = share.width * rows * scaled
            return AdapterCost(parameters=scaled, traffic=2 * size, backward_traffic=5 * size, kept=size)
    return AdapterCost()


def full_tune(config: FullTuneConfig, name: str, weight: Weight, rows: float, share: Share) -> AdapterCost:  # noqa: ARG001
    """Cost of ``full_tune``: no additional ops; the matching weights are trained."""
    return AdapterCost(trains=any(_some(owner, config.match) for owner in (*owners(name), name)))


def stack(config: StackConfig, name: str, weight: Weight, rows: float, share: Share, inner: Inner) -> AdapterCost:
    """Cost of ``stack``: the sum of the costs of its methods."""
    return sum((inner(method, name, weight, rows, share) for method in config.methods), AdapterCost())


def _saved(config: LowRankConfig, name: str) -> AdapterCost:
    return AdapterCost(trains=any(_some(owner, config.modules_to_save) for owner in owners(name)))


def _rank(config: LowRankConfig, name: str, weight: Weight) -> int:
    return config.rank_of(_target(name, weight))


def _term(config: LowRankConfig, rank: int, weight: Weight, rows: float, share: Share) -> AdapterCost:
    """Cost of a low-rank update of a matrix, or of each of the stacked matrices of experts (a bank)."""
    # Embeddings and heads are [vocabulary, features]; an embedding looks rows up instead of multiplying.
    *stacked, one, other = weight.shape
    number = stacked[0] if stacked else 1
    # A bank is [experts, in, out].
    features, outputs = (one, other) if weight.kind == "bank" else (other, one)
    ranked, each = rank * (features + outputs), share.width * rows
    flops = 0.0 if weight.kind == "embedding" else 2 * rows * ranked
    # If compiled, scaling and addition are one pass over the output, and the sum of the input's gradients is one pass.
    passes, sums = (4, 3) if share.compiled else (6, 5)
    dropped = each * features + rows * features if config.dropout else 0.0  # bytes of the dropped-out inputs and mask
    # The head multiplies by the weight extended by B, so its backward also computes a gradient of the whole weight.
    of_sum = 2 * rows * weight.numbers if weight.kind == "head" else 0.0
    return AdapterCost(
        parameters=number * ranked,
        flops=flops,
        backward_flops=2 * flops + of_sum,
        traffic=each * (features + passes * outputs) + 2 * dropped,
        backward_traffic=each * (sums * features + 4 * outputs) + dropped,
        kept=each * rank + dropped,
    )


def _is_target(config: LowRankConfig, name: str, weight: Weight) -> bool:
    """Whether a weight gets a low-rank update."""
    if weight.kind == "other":
        return False
    layer = _target(name, weight)
    wanted = (weight.kind == "linear" and ALL_LINEAR in config.targets) or _some(layer, config.targets)
    return wanted and not _some(layer, config.exclude)


def _target(name: str, weight: Weight) -> str:
    """Name by which patterns select a weight: of stacked expert weights their own name, else the layer's name."""
    return name if weight.kind == "bank" else _layer(name)


def _layer(name: str) -> str:
    """Name of the layer that has a weight."""
    return name.removesuffix(".weight")


def _some(name: str, patterns: Sequence[str] | Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)
