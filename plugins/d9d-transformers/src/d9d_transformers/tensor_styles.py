"""Tensor parallelism of a model of transformers: styles of modules, from its own plan.

transformers names a style for each matrix (``base_model_tp_plan``). Its plan keeps the whole sequence on each rank; d9d
splits the sequence between the matrices, which the styles of all other modules say.
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

from d9d_transformers.structure import Structure

#: Styles of transformers -> d9d's.
_STYLES = {
    "colwise": TensorStyle.COLUMN,
    "rowwise": TensorStyle.ROW,
    "replicated_with_grad_allreduce": TensorStyle.PARTIAL,
}


@dataclass
class Styles:
    """Styles of a model without its head.

    Attributes:
        model: relative name -> style, of modules outside of split ones.
        owners: name of a module with split matrices -> relative name -> style.
        refusal: reason why the model cannot be split; ``None`` if it can.
    """

    model: dict[str, TensorStyle] = field(default_factory=dict)
    owners: dict[str, dict[str, TensorStyle]] = field(default_factory=dict)
    refusal: str | None = None


def styles_of(base: Any, structure: Structure) -> Styles:
    """Styles of all modules with parameters."""
    plan: Mapping[str, str] = base.config.base_model_tp_plan or {}
    found = Styles()
    owned: dict[str, str] = {}
    modules = {
        path: module for path, module in base.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    for path in modules:
        style = _style(plan, path)
        if style is None:
            continue
        if style not in _STYLES:
            found.refusal = f"transformers' plan has the style {style} for {path}, which d9d does not have"
            return found
        owned[path] = style
    owners = {path.rpartition(".")[0] for path, style in owned.items() if style in ("colwise", "rowwise")}
    for path, module in modules.items():
        owner = next((o for o in owners if f"{path}.".startswith(f"{o}.")), None)
        if owner is not None:
            if path not in owned:
                found.refusal = f"transformers' plan has no style for {path}, next to split matrices"
                return found
            found.owners.setdefault(owner, {})[path.removeprefix(f"{owner}.")] = _STYLES[owned[path]]
        elif isinstance(module, nn.Embedding):
            found.model[path] = TensorStyle.VOCAB
        elif path not in structure.before:
            found.model[path] = TensorStyle.SEQUENCE
        else:
            found.refusal = f"{path} runs before the layers, and is not an embedding"
            return found
    unsplit = [path for path in structure.attention if path not in found.owners]
    if unsplit:
        found.refusal = f"transformers' plan does not split {unsplit[0]}"
    return found


def attach_styles(base: Any, structure: Structure, styles: Styles) -> None:
    """Give modules with split matrices their plans, as methods of the instances."""
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
        BuildError: transformers' plan has no style that d9d has for some module.
    """
    if styles.refusal is not None:
        raise BuildError(f"strategy 'tensor_parallel': {styles.refusal}")


def _style(plan: Mapping[str, str], path: str) -> str | None:
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), path):
            return style
    return None
