"""Modules of a model that are trained fully in addition to low-rank updates (``modules_to_save``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from d9d_core.errors import BuildError, CheckpointError
from d9d_nn.heads.causal_lm import CausalLMHead
from torch import nn

from d9d_peft.lora.linear import adapted_layers
from d9d_peft.patterns import matches, owners, select

_FIELD = "peft.modules_to_save"


def saved_parameters(stage: nn.Module, patterns: Collection[str]) -> list[str]:
    """Names of the parameters of the modules that match ``modules_to_save``, without LoRA's own parameters.

    Args:
        stage: stage with or without low-rank updates.
        patterns: patterns of module names.
    """
    inside = tuple(f"{name}.lora_" for name, _ in adapted_layers(stage))
    names = [name for name, _ in stage.named_parameters() if not name.startswith(inside)]
    return _matching(names, patterns)


def check_saved(stage: nn.Module, patterns: Collection[str], targets: Collection[str]) -> None:
    """Check ``modules_to_save``, the modules to train fully, before low-rank updates are added to a stage.

    Args:
        stage: stage before updates are added.
        patterns: patterns of names of the modules to train fully.
        targets: names of the layers and expert weights that will get a low-rank update.

    Raises:
        BuildError: a pattern matches no module, or only modules without parameters; a target is inside of a matching
            module; or the parameter of a matching module is also the parameter of another module (tied).
    """
    modules = dict(stage.named_modules())
    for pattern in patterns:
        chosen = select([name for name in modules if name], [pattern], _FIELD, "modules")
        if any(isinstance(modules[name], CausalLMHead) and modules[name].tied for name in chosen):
            raise BuildError(f"{_FIELD}: {_tied(chosen[0])}")
        if not any(next(modules[name].parameters(), None) is not None for name in chosen):
            raise BuildError(f"{_FIELD}: '{chosen[0]}' has no parameters; name another module")
    for target in targets:
        if any(matches(owner, one) for owner in (*owners(target), target) for one in patterns):
            raise BuildError(
                f"{_FIELD}: '{target}' is also in peft.targets, but a module gets an update or is trained fully; add "
                "it to peft.exclude, or choose other modules"
            )
    tied = any(isinstance(module, CausalLMHead) and module.tied for module in modules.values())
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    number = Counter(map(id, parameters.values()))
    for name in _matching(parameters, patterns):
        owner = name.rpartition(".")[0]
        if number[id(parameters[name])] > 1 or (tied and isinstance(modules[owner], nn.Embedding)):
            raise BuildError(f"{_FIELD}: {_tied(owner)}")


def saved_names(stage: nn.Module, patterns: Collection[str], published: Mapping[str, str]) -> dict[str, str]:
    """Names, in published files, of the parameters of ``modules_to_save``, by their names in d9d.

    Raises:
        CheckpointError: published files do not contain such a parameter as one tensor.
    """
    names = {name: published.get(name, "*") for name in saved_parameters(stage, patterns)}
    if other := [name for name, there in names.items() if "*" in there]:
        raise CheckpointError(
            f"published files do not have '{other[0]}' as one tensor, so an adapter file cannot hold it; export the "
            "merged model, or remove its module from peft.modules_to_save"
        )
    return names


def _tied(name: str) -> str:
    return (
        f"embedding and head share the weight of '{name}', but the peft library trains and saves a copy for one of "
        "both; untie them (model.tie_embeddings: false), or train both with 'full_tune' in a 'stack'"
    )


def _matching(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Names of parameters in modules that match a pattern."""
    return [name for name in names if any(matches(owner, one) for owner in owners(name) for one in patterns)]
