"""Search for the repeated blocks of a stage."""

from __future__ import annotations

from d9d_core.errors import BuildError
from d9d_core.traits import HasBlocks, modules_with
from torch import nn


def blocks_of(stage: nn.Module) -> dict[str, nn.Module]:
    """Blocks of all modules with the trait ``HasBlocks``, by qualified name, each block once."""
    owners = modules_with(stage, HasBlocks)
    # A model may return its backbone's blocks, so model and backbone may both return the same block.
    members = {id(block) for owner in owners.values() for block in owner.blocks().values()}
    return {name: module for name, module in stage.named_modules() if id(module) in members}


def find_blocks(stage: nn.Module, strategy: str) -> dict[str, nn.Module]:
    """Blocks of a stage, for a strategy that cannot be applied without blocks.

    Args:
        stage: stage whose modules are searched.
        strategy: name of the strategy, for the error.

    Raises:
        BuildError: the stage has no blocks.
    """
    if blocks := blocks_of(stage):
        return blocks
    if owners := modules_with(stage, HasBlocks):
        names = ", ".join(f"'{name}' ({type(owner).__name__})" for name, owner in owners.items())
        raise BuildError(
            f"strategy '{strategy}' found no block: {names} has none in this stage; "
            "use fewer stages or more layers, or remove the strategy from 'parallel'"
        )
    raise BuildError(
        f"strategy '{strategy}' needs model trait 'blocks', which no module of {type(stage).__name__} has; "
        "implement d9d_core.traits.HasBlocks in the model, or remove the strategy from 'parallel'"
    )
