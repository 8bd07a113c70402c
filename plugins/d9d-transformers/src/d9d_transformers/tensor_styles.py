"""Tensor parallelism of a model of transformers: styles of modules, from its own plan.

transformers names a style for each matrix (``base_model_tp_plan``). Its plan keeps the whole sequence on each rank; in
d9d, each rank has only its positions of the sequence outside of the split sub-modules of a layer (attention, MLP). A
sub-module has replicated weights if the plan does not split it, or splits it by a style that d9d does not have:
attention then gathers the positions, and other sub-modules compute each position separately.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from d9d_core.errors import BuildError
from d9d_core.traits import TensorStyle
from torch import nn

from d9d_transformers.structure import Structure, with_parameters

#: Style of transformers -> style of d9d.
_STYLES = {
    "colwise": TensorStyle.COLUMN,
    "rowwise": TensorStyle.ROW,
    "replicated_with_grad_allreduce": TensorStyle.PARTIAL,
}


@dataclass
class Styles:
    """Styles of a model without its head.

    Attributes:
        model: styles of the modules that are not inside a module with split matrices, by name.
        owners: for each module with split matrices, the style of each matrix by its name within the module.
        refusal: reason why the model cannot be split; ``None`` if it can.
    """

    model: dict[str, TensorStyle] = field(default_factory=dict)
    owners: dict[str, dict[str, TensorStyle]] = field(default_factory=dict)
    refusal: str | None = None


def styles_of(base: Any, structure: Structure) -> Styles:
    """Find the tensor-parallel styles of all modules with parameters."""
    plan: Mapping[str, str] = base.config.base_model_tp_plan or {}
    found = Styles()
    parts: dict[str, list[str]] = {}
    for path in with_parameters(base):
        if path.startswith(f"{structure.layers}."):
            parts.setdefault(_part(path, structure.layers), []).append(path)
        elif isinstance(base.get_submodule(path), nn.Embedding):
            found.model[path] = TensorStyle.VOCAB
        elif path in structure.after:
            found.model[path] = TensorStyle.SEQUENCE
        else:
            found.refusal = f"{path} runs before the layers, and is not an embedding"
    for part, paths in parts.items():
        is_layer = part.count(".") == structure.layers.count(".") + 1  # parameters of the layer itself
        mixing = (*structure.attention, *structure.mixers)
        attends = not is_layer and any(f"{path}.".startswith(f"{part}.") for path in mixing)
        styles = {path: _STYLES.get(_planned(plan, path)) for path in paths}
        owners = {
            path.rpartition(".")[0] for path, style in styles.items() if style in (TensorStyle.COLUMN, TensorStyle.ROW)
        }
        if None not in styles.values() and len(owners) == 1 and part not in structure.mixers:
            (owner,) = owners
            found.owners[owner] = {path.removeprefix(f"{owner}."): style for path, style in styles.items() if style}
        else:
            found.model[part] = TensorStyle.GATHERED if attends else TensorStyle.SEQUENCE
    return found


def attach_styles(base: Any, structure: Structure, styles: Styles) -> None:
    """Attach to modules with split matrices their tensor-parallel plans, as methods of the instances."""
    for path, plan in styles.owners.items():
        owner = base.get_submodule(path)
        owner.tensor_parallel_plan = partial(dict, plan)
        if (call := structure.attention.get(path)) is not None:
            heads = {
                name: owner.get_submodule(name).out_features // call.head_dim
                for name, style in plan.items()
                if style is TensorStyle.COLUMN
            }
            owner.tensor_parallel_heads = partial(dict, heads)


def check_splittable(styles: Styles) -> None:
    """Raise if the model cannot be split.

    Raises:
        BuildError: a module before the layers is not an embedding.
    """
    if styles.refusal is not None:
        raise BuildError(f"strategy 'tensor_parallel': {styles.refusal}")


def _part(path: str, layers: str) -> str:
    """Name of the sub-module of a layer that contains a module: ``layers.0.mlp`` of ``layers.0.mlp.up_proj``."""
    return ".".join(path.split(".")[: layers.count(".") + 3])


def _planned(plan: Mapping[str, str], path: str) -> str:
    """Style that the plan of transformers has for a module; empty if the plan does not name the module."""
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), path):
            return style
    return ""
