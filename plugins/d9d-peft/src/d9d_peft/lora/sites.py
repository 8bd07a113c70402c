"""Sites of a model: modules and stacked expert weights (banks) to which LoRA can add a low-rank update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from d9d_core.errors import BuildError
from d9d_core.traits import HasBanks, modules_with
from d9d_nn.heads.causal_lm import CausalLMHead
from torch import Tensor, nn

from d9d_peft.lora.banks import GroupedTerm
from d9d_peft.lora.linear import Adapted, AdaptedLinear, adapt, adapted_layers, is_adapted
from d9d_peft.lora.vocabulary import AdaptedEmbedding, AdaptedHead


class Sizes(NamedTuple):
    """Rank, scale and dropout of low-rank updates."""

    rank: int
    scale: float
    dropout: float


class Site(NamedTuple):
    """Module, or stacked expert weight, that can get a low-rank update.

    Attributes:
        weight: weight to update; its last two dims are a matrix.
        is_linear: whether the site is a linear layer.
        has_term: whether the site has a low-rank update already.
        add: function that adds an update of given sizes.
    """

    weight: Tensor
    is_linear: bool
    has_term: bool
    add: Callable[[Sizes], None]


def sites_of(stage: nn.Module, linear: type[Adapted] = AdaptedLinear) -> dict[str, Site]:
    """Find the sites of a stage by name, linear layers first; the updates' own layers are left out.

    Args:
        stage: stage with or without adapted modules.
        linear: mixin of an adapted linear layer.
    """
    kinds: dict[type, type] = {}
    inside = tuple(f"{name}." for name, _ in adapted_layers(stage))
    modules = {name: module for name, module in stage.named_modules() if not name.startswith(inside)}
    tied = any(isinstance(module, CausalLMHead) and module.tied for module in modules.values())
    found: dict[str, Site] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            found[name] = _site(module, module.weight, partial(_adapt, module, kinds, linear), is_linear=True)
    if linear is not AdaptedLinear:
        return found
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            if tied:
                add = partial(_refuse_tied, name)
            elif type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale"):
                add = partial(_adapt, module, kinds, AdaptedEmbedding)
            else:
                add = partial(_refuse_own_forward, name, module)
            found[name] = _site(module, module.weight, add)
        elif isinstance(module, CausalLMHead) and module.weight is not None:
            found[name] = _site(module, module.weight, partial(_adapt, module, kinds, AdaptedHead))
    for name, owner in modules_with(stage, HasBanks).items():
        for bank, weight in owner.banks().items():
            has_term = bank in owner.bank_terms()
            found[f"{name}.{bank}"] = Site(
                weight, False, has_term, partial(_add_to_bank, owner.bank_terms(), bank, weight)
            )
    return found


def _site(module: nn.Module, weight: Tensor, add: Callable[[Sizes], None], *, is_linear: bool = False) -> Site:
    return Site(weight, is_linear, is_adapted(module), add)


def _adapt(module: nn.Module, kinds: dict[type, type], how: type[Adapted], sizes: Sizes) -> None:
    adapt(module, kinds, how, rank=sizes.rank, scale=sizes.scale, dropout=sizes.dropout)


def _add_to_bank(terms: nn.ModuleDict, bank: str, weight: Tensor, sizes: Sizes) -> None:
    terms[bank] = GroupedTerm(weight, *sizes)


def _refuse_own_forward(name: str, module: nn.Module, _: Sizes) -> None:
    raise BuildError(
        f"peft.targets: the embedding '{name}' is a {type(module).__name__}, whose own forward may change the rows, "
        "so an update of its output would differ from the merged weight; exclude it"
    )


def _refuse_tied(name: str, _: Sizes) -> None:
    raise BuildError(
        f"peft.targets: the weight of '{name}' is also the weight of a tied head, which would ignore the update; "
        "exclude it, or untie them (model.tie_embeddings: false)"
    )
