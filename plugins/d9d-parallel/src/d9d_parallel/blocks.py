"""Search for the repeated blocks of a stage, and for its large head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from d9d_core.extend import BuildError, HasBlocks, HasOps, modules_with
from torch import nn

#: Part of the largest block's parameters from which on a head is large.
_LARGE = 1 / 4


def find_blocks(stage: nn.Module, strategy: str) -> dict[str, nn.Module]:
    """Blocks of all modules with the trait ``HasBlocks``, by qualified name, each block once.

    Args:
        stage: stage whose modules are searched.
        strategy: name of the strategy, for the error.

    Raises:
        BuildError: there is none.
    """
    owners = modules_with(stage, HasBlocks)
    # A model may pass on the blocks of its backbone, so two owners may name the same module.
    members = {id(block) for owner in owners.values() for block in owner.blocks().values()}
    blocks = {name: module for name, module in stage.named_modules() if id(module) in members}
    if blocks:
        return blocks
    if owners:
        names = ", ".join(f"'{name}' ({type(owner).__name__})" for name, owner in owners.items())
        raise BuildError(
            f"strategy '{strategy}' found no block: {names} has none in this stage; "
            "give the model layers, or remove the strategy from 'parallel'"
        )
    raise BuildError(
        f"strategy '{strategy}' needs model trait 'blocks', which no module of {type(stage).__name__} has; "
        "implement d9d_core.traits.HasBlocks in the model, or remove the strategy from 'parallel'"
    )


def find_head(stage: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Only large module outside of blocks that computes with ops and has parameters of its own, by qualified name.

    Such as the output projection with its loss; one that is tied to the embedding has no weight of its own. Of several,
    none: a task may let each run on some of the ranks.

    Args:
        stage: its modules are searched.
        blocks: of the stage, by qualified name.
    """
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    around = {id(module) for module in stage.modules() if any(id(part) in inside for part in module.modules())}
    holders = Counter(id(parameter) for _, parameter in stage.named_parameters(remove_duplicate=False))
    least = _LARGE * max(_numbers(block) for block in blocks.values())
    found: dict[str, nn.Module] = {}
    for name, module in modules_with(stage, HasOps).items():
        assert isinstance(module, nn.Module)
        own = [*module.parameters()]
        nested = any(name.startswith(f"{other}.") for other in found)
        if id(module) in around or nested or not own or any(holders[id(parameter)] > 1 for parameter in own):
            continue
        if _numbers(module) >= least:
            found[name] = module
    return found if len(found) == 1 else {}


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
