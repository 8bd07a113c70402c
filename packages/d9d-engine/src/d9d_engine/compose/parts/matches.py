"""Checks of entries of ``parallel`` for parts of a model: they act on different modules, and compute in one dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import torch
from d9d_core.config import PartConfig
from d9d_core.errors import BuildError
from d9d_core.job_file.job import Precision
from d9d_core.job_file.resolve import Part
from d9d_core.registry.capabilities import Chosen
from d9d_core.strategy import Applied, is_inside, matched_modules
from torch import nn


def check_matches(model: nn.Module, strategies: Sequence[Part]) -> None:
    """Check that no module is matched by two entries of one strategy, or of strategies that exclude each other.

    Args:
        model: full model.
        strategies: entries with their configs, in order of application.

    Raises:
        BuildError: two entries act on one module; the text names both entries and the module.
    """
    for one, other in combinations(strategies, 2):
        (first, before), (second, after) = one, other
        if not (isinstance(before, PartConfig) and isinstance(after, PartConfig)):
            continue
        names = first.spec.name, second.spec.name
        if names[0] != names[1] and f"strategy:{names[1]}" not in first.spec.conflicts:
            continue
        common = next(
            _common(list(matched_modules(model, before.match)), list(matched_modules(model, after.match))), None
        )
        if common is not None:
            raise BuildError(
                f"{first.where} ({names[0]}) and {second.where} ({names[1]}) both act on "
                f"{common or 'the whole model'}; give each entry different modules by 'match'"
            )


def format_of_compute(
    precision: Precision, stages: Iterable[nn.Module], applied: Iterable[tuple[Chosen, Applied]]
) -> str:
    """Number format in which forward and backward compute, for which kernels are chosen, such as ``bfloat16``.

    Args:
        precision: formats that the job names.
        stages: stages of this rank, after all strategies.
        applied: strategies and their effects.

    Raises:
        BuildError: a strategy converts the parameters of a part of the model, and no other strategy converts the rest
            to the same dtype.
    """
    if precision.autocast is not None:
        return precision.autocast
    converting = [(chosen, outcome) for chosen, outcome in applied if outcome.compute_dtype is not None]
    if not converting:
        return precision.parameters
    if any(chosen.of_part for chosen, _ in converting):
        placed = [(chosen.where, outcome) for chosen, outcome in converting]
        check_conversions(stages, placed, "precision.autocast")
    return _name(converting[-1][1].compute_dtype)


def check_conversions(stages: Iterable[nn.Module], applied: Iterable[tuple[str, Applied]], otherwise: str) -> None:
    """Check that the strategies which convert parameters for the forward convert all parameters, to one dtype.

    Args:
        stages: stages of this rank, after all strategies.
        applied: places of the strategies, for messages, and their effects.
        otherwise: setting of autocast, for messages.

    Raises:
        BuildError: a strategy converts the parameters of a part of the model, and no other strategy converts the rest
            to the same dtype.
    """
    converting = [(place, outcome) for place, outcome in applied if outcome.compute_dtype is not None]
    if not converting:
        return
    last, compute = converting[-1][0], converting[-1][1].compute_dtype
    for stage in stages:
        for name, parameter in stage.named_parameters():
            formats = {outcome.compute_dtype for _, outcome in converting if is_inside(name, outcome.modules)}
            if (formats or {parameter.dtype}) != {compute}:
                raise BuildError(
                    f"{last}: compute_dtype is {_name(compute)}, but '{name}' is computed in another format, and "
                    "kernels are chosen for one; match all modules by entries with the same compute_dtype, or set "
                    f"{otherwise} instead"
                )


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _common(these: Sequence[str], those: Sequence[str]) -> Iterator[str]:
    """Names in either list that are also in the other list, or inside a module of the other list."""
    yield from (name for name in those if is_inside(name, these))
    yield from (name for name in these if is_inside(name, those))
