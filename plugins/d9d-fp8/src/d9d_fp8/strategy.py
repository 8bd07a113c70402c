"""Strategy ``fp8``: linear layers with products in float8 (Micikevicius et al., FP8 Formats for DL)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from d9d_core.errors import BuildError
from d9d_core.model import HasHeads
from d9d_core.strategy import Applied, no_collectives
from d9d_core.topology import Topology
from d9d_core.traits import HasBlocks, TensorParallelizable, TensorStyle, modules_with
from d9d_nn.linear import Linear
from torch import nn

from d9d_fp8.config import Fp8Config
from d9d_fp8.linear import convert, is_converted
from d9d_fp8.recipes import RECIPES

#: Smallest compute capability with products in float8.
_CAPABILITY = (8, 9)
#: Major compute capability, and the first CUDA version, for which cuBLAS supports block scales.
_BLOCKS = (9, (12, 9))
_STORED = (torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 4


class Fp8:
    """Strategy ``fp8``: makes the chosen linear layers compute in float8."""

    def __init__(self, config: Fp8Config) -> None:
        self._config = config
        self._kinds: dict[type, type] = {}

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Convert the chosen layers in place; module tree, parameters and their names do not change.

        Raises:
            BuildError: the device does not support float8, a chosen layer cannot be converted, or no layer can.
        """
        config = self._config
        if not config.emulate:
            check_device(topology.device, config.recipe)
        layers = {name: module for name, module in stage.named_modules() if isinstance(module, nn.Linear)}
        chosen, unmatched = _named(layers, config.modules) if config.modules else (_of_blocks(stage, layers), {})
        parts = _parts(stage, topology.sizes["tp"])
        left: dict[str, list[str]] = {}
        for name in chosen:
            layer = layers[name]
            _check(name, layer)
            if (reason := _obstacle(name, layer, layers, config.recipe, parts.get(name, (1, 1)))) is None:
                convert(layer, self._kinds, config.recipe, emulate=config.emulate)
            elif config.modules:
                raise BuildError(
                    f"strategy 'fp8': 'modules' names '{name}', {reason}; leave it out of the patterns, or choose "
                    "another recipe or sizes"
                )
            else:
                left.setdefault(reason, []).append(name)
        converted = tuple(name for name in chosen if is_converted(layers[name]))
        notes = [f"recipe {config.recipe}{', emulated' if config.emulate else ''}: {len(converted)} linear layers"]
        notes += [f"not converted: {_several(names)}: {reason}" for reason, names in left.items()]
        if others := [name for name in layers if name not in chosen]:
            notes.append(
                f"not converted: {_several(others)}: {'not in modules' if config.modules else 'not in a block'}"
            )
        if left and not converted:
            raise BuildError(f"strategy 'fp8' can convert no linear layer; {'; '.join(notes[1:])}")
        return Applied(modules=converted, unmatched=unmatched, notes=tuple(notes), collectives=no_collectives)


def check_device(device: torch.device, recipe: str) -> None:
    """Raise an error if a device does not support float8 products or the recipe.

    Raises:
        BuildError: the device does not support float8 products or the recipe.
    """
    advice = "set emulate: true to emulate it slowly, or remove the strategy from 'parallel'"
    if device.type != "cuda":
        raise BuildError(f"strategy 'fp8': the device '{device.type}' has no products in float8; {advice}")
    if not torch.cuda.is_available():
        return  # Without a GPU, as on a laptop that checks a cluster's job, assume a suitable one.
    capability = torch.cuda.get_device_capability(device)
    shown = "{}.{}".format(*capability)
    if capability < _CAPABILITY:
        least = "{}.{}".format(*_CAPABILITY)
        raise BuildError(
            f"strategy 'fp8': products in float8 need compute capability {least} or newer, this GPU has {shown}; "
            f"{advice}"
        )
    major, least_cuda = _BLOCKS
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if recipe == "blockwise" and (capability[0] != major or cuda < least_cuda):
        raise BuildError(
            f"strategy 'fp8': the recipe 'blockwise' needs compute capability {major}.x and a torch for CUDA 12.9 or "
            f"newer; this GPU has {shown} and torch is for CUDA {torch.version.cuda}; use the recipe 'rowwise'"
        )


def _named(layers: Mapping[str, nn.Module], patterns: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Layers that match a pattern, and an error message for each pattern that matches no layer."""
    unmatched = {
        pattern: f"strategy 'fp8': the pattern {pattern!r} in 'modules' matches no linear layer; there are: "
        f"{_several(list(layers)) or 'none'}"
        for pattern in patterns
        if not any(_matches(name, pattern) for name in layers)
    }
    return [name for name in layers if any(_matches(name, pattern) for pattern in patterns)], unmatched


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or ("." not in pattern and fnmatchcase(name.rpartition(".")[2], pattern))


def _of_blocks(stage: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    owners = modules_with(stage, HasBlocks).values()
    inside = {id(module) for owner in owners for block in owner.blocks().values() for module in block.modules()}
    return [name for name, layer in layers.items() if id(layer) in inside]


def _check(name: str, layer: nn.Linear) -> None:
    if is_converted(layer):
        raise BuildError(
            f"strategy 'fp8' would convert '{name}' a second time; let the 'modules' patterns of its entries in "
            "'parallel' name different layers"
        )
    if layer.weight.dtype not in _STORED:
        raise BuildError(
            f"strategy 'fp8': the weight of '{name}' is {layer.weight.dtype}, which cannot be quantised to float8; "
            "use a base that is not quantised, and precision.parameters float32 or bfloat16"
        )


def _parts(stage: nn.Module, ranks: int) -> dict[str, tuple[int, int]]:
    """Numbers of shards into which ``tp`` splits each layer's (input, output) features, by layer name."""
    found: dict[str, tuple[int, int]] = {}
    for name, owner in modules_with(stage, TensorParallelizable).items():
        heads = owner.tensor_parallel_heads() if isinstance(owner, HasHeads) else {}
        for child, style in owner.tensor_parallel_plan().items():
            layer = f"{name}.{child}" if name else child
            if style is TensorStyle.COLUMN:
                found[layer] = (1, min(ranks, heads.get(child, ranks)))
            elif style is TensorStyle.ROW:
                found[layer] = (ranks, 1)
    return found


def _obstacle(
    name: str, layer: nn.Linear, layers: Mapping[str, nn.Module], recipe: str, parts: tuple[int, int]
) -> str | None:
    """Reason why a layer cannot be converted, or ``None``."""
    if not isinstance(layer, Linear):
        return f"a {type(layer).__name__}, which is no d9d_nn.linear.Linear"
    if name.rpartition(".")[0] in layers:
        return "which is inside a linear layer, such as a LoRA update"
    divisor = RECIPES[recipe].divisor
    inputs, outputs = layer.in_features // parts[0], layer.out_features // parts[1]
    if inputs % divisor or outputs % divisor:
        where = "" if parts == (1, 1) else " on a rank of tp"
        return (
            f"with {inputs} features in and {outputs} out{where}, which the recipe '{recipe}' needs to be multiples of "
            f"{divisor}"
        )
    return None


def _several(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
