"""Structure of a model of transformers, found by one forward on the meta device, not by a list of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.errors import BuildError
from torch import Tensor, nn

from d9d_transformers.attention import DOCUMENTS, AttentionCall, CallRecorder

#: Number of positions of the forward that is examined.
_POSITIONS = 16


@dataclass(frozen=True)
class Structure:
    """Parts of a model without its head, by name.

    Attributes:
        layers: name of the list of layers.
        count: number of layers.
        before: modules with parameters that run before the layers, in order.
        after: modules with parameters that run after the layers, in order.
        attention: attention modules -> facts about their calls.
    """

    layers: str
    count: int
    before: Sequence[str]
    after: Sequence[str]
    attention: Mapping[str, AttentionCall]


def examine(base: Any) -> Structure:
    """Examine a model without its head.

    Args:
        base: module of transformers that maps token ids to hidden states.

    Raises:
        BuildError: d9d cannot train the model: it has no list of layers that map a tensor to a tensor, its forward
            fails on the meta device, a layer mixes tokens by something other than attention, or the parameters of a
            module are used without a call of the module.
    """
    name, layers = _layer_list(base)
    listed = [f"{name}.{index}" for index in range(len(layers))]
    outside = [path for path in with_parameters(base) if not path.startswith(f"{name}.")]
    order, attention = _traced(base, [*outside, *listed])
    if [path for path in order if path in listed] != listed:
        raise BuildError(f"model.config: the layers in {name} do not run once each, in order")
    if idle := sorted(set(outside) - set(order)):
        raise BuildError(f"model.config: the parameters of {', '.join(idle)} are used outside of their modules")
    for layer in listed:
        if not any(path.startswith(f"{layer}.") for path in attention):
            kind = type(base.get_submodule(layer)).__name__
            raise BuildError(
                f"model.config: {layer} ({kind}) does not call transformers' attention, so documents in one sample "
                "cannot be kept apart"
            )
    first, last = order.index(listed[0]), order.index(listed[-1])
    if order[first : last + 1] != listed:
        raise BuildError(f"model.config: modules with parameters run between the layers in {name}")
    return Structure(name, len(layers), tuple(dict.fromkeys(order[:first])), tuple(order[last + 1 :]), attention)


def _layer_list(base: Any) -> tuple[str, nn.ModuleList]:
    """Name and module of the list of layers."""
    count = base.config.num_hidden_layers
    classes = set(base._no_split_modules or ())  # noqa: SLF001 - no public attribute names the layers; a test reads it
    found = [
        (path, module)
        for path, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and {type(m).__name__ for m in module} <= classes
    ]
    if len(found) != 1:
        lists = f"{len(found)} lists of {count} layers ({', '.join(sorted(classes)) or 'of no class'})"
        raise BuildError(f"model.config: {type(base).__name__} has {lists}, not one")
    return found[0]


def with_parameters(base: nn.Module) -> list[str]:
    """Names of the modules that have parameters of their own."""
    return [path for path, module in base.named_modules() if any(True for _ in module.parameters(recurse=False))]


def _traced(base: Any, watched: Sequence[str]) -> tuple[list[str], Mapping[str, AttentionCall]]:
    """Calls of the watched modules in order, and of attention modules, in one forward."""
    order: list[str] = []
    recorder = CallRecorder()

    def note(path: str, out: Any) -> None:
        order.append(path)
        if not isinstance(out, Tensor):
            raise BuildError(f"model.config: {path} returns {type(out).__name__}, not a tensor")

    hooks = [
        base.get_submodule(path).register_forward_hook(lambda *given, path=path: note(path, given[-1]))
        for path in watched
    ]
    tokens = torch.zeros(1, _POSITIONS, dtype=torch.int64, device="meta")
    positions = torch.arange(_POSITIONS, device="meta").unsqueeze(0)
    try:
        with torch.no_grad():
            base(input_ids=tokens, position_ids=positions, use_cache=False, **{DOCUMENTS: recorder})
    except BuildError:
        raise
    except Exception as error:  # forwards of models raise anything
        text = f"model.config: the forward of {type(base).__name__} fails with d9d's attention: {error}"
        raise BuildError(text) from error
    finally:
        for hook in hooks:
            hook.remove()
    names = {module: path for path, module in base.named_modules()}
    return order, {names[module]: call for module, call in recorder.calls.items()}
