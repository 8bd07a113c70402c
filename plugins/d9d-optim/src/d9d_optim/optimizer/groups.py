"""Parameter groups: learning rate and weight decay of each parameter."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from d9d_core.errors import BuildError
from torch import Tensor, nn

from d9d_optim.optimizer.config import GroupRule, OptimizerConfig


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that are updated with the same settings.

    Attributes:
        label: name of the group in ``d9d explain``.
        lr_scale: factor on the base learning rate.
        weight_decay: weight decay; decoupled decay multiplies it by the learning rate.
        names: parameter names, in the model's order.
    """

    label: str
    lr_scale: float
    weight_decay: float
    names: tuple[str, ...]


def group_parameters(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> tuple[ParameterGroup, ...]:
    """Assign the trainable parameters to groups; frozen parameters belong to no group.

    A rule makes one group if it sets the weight decay, else two: matrices with the optimizer's decay, other parameters
    without. Parameters that match no rule come first, then the groups of the rules in order. Empty groups are left out.

    Raises:
        BuildError: no parameter is trainable, or a rule applies to no parameter.
    """
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trainable:
        raise BuildError(
            f"optimizer '{config.name}': none of the model's {len(parameters)} parameters is trainable; "
            "unfreeze some (requires_grad), or check what 'peft' froze"
        )
    owner = {name: _first_match(name, config.groups) for name in trainable}
    for index in range(len(config.groups)):
        _check_rule(index, config, owner, frozen=parameters.keys() - trainable.keys())

    groups = []
    for index in (None, *range(len(config.groups))):
        rule = GroupRule(match="*", lr_scale=1.0) if index is None else config.groups[index]
        scale = 1.0 if rule.lr_scale is None else rule.lr_scale
        prefix = "" if index is None else f"groups[{index}] '{rule.match}', "
        names = [name for name in trainable if owner[name] == index]
        if rule.weight_decay is not None:
            parts = [(prefix + "weight_decay set", rule.weight_decay, names)]
        else:
            matrices = [name for name in names if is_matrix(name, trainable[name])]
            rest = [name for name in names if not is_matrix(name, trainable[name])]
            parts = [(prefix + "decay", config.weight_decay, matrices), (prefix + "no decay", 0.0, rest)]
        groups += [ParameterGroup(label, scale, decay, tuple(part)) for label, decay, part in parts if part]
    return tuple(groups)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix or stacked matrices; biases, also of experts [experts, features], are neither."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def _first_match(name: str, rules: Sequence[GroupRule]) -> int | None:
    return next((i for i, rule in enumerate(rules) if fnmatch.fnmatchcase(name, rule.match)), None)


def _check_rule(index: int, config: OptimizerConfig, owner: Mapping[str, int | None], frozen: set[str]) -> None:
    """Raise if a rule applies to no parameter."""
    if index in owner.values():
        return
    pattern = config.groups[index].match
    where = f"optimizer.groups[{index}]: the pattern {pattern!r}"
    taken = [name for name in owner if fnmatch.fnmatchcase(name, pattern)]
    if taken:
        first = owner[taken[0]]
        raise BuildError(
            f"{where} applies to no parameter: earlier groups take all its matches, for example {taken[0]} "
            f"(groups[{first}]); move this group before them"
        )
    still = sorted(name for name in frozen if fnmatch.fnmatchcase(name, pattern))
    if still:
        raise BuildError(f"{where} matches only frozen parameters, for example {still[0]}; remove the group")
    near = difflib.get_close_matches(pattern, list(owner), n=3, cutoff=0.4) or list(owner)[:3]
    raise BuildError(f"{where} matches no parameter; similar names: {', '.join(near)} (* matches any text)")
