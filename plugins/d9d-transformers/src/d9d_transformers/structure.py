"""Structure of a model of transformers, found by one forward on the meta device, not by a list of models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.errors import BuildError
from torch import Tensor, nn

from d9d_transformers.attention import DOCUMENTS, AttentionCall
from d9d_transformers.library import ATTENTION, EXAMINED, MASKED
from d9d_transformers.routers import RouterFacts

#: Number of positions of the forward that is examined.
_POSITIONS = 16


@dataclass(frozen=True)
class Structure:
    """Structure of a model without its head: names of its modules by their role.

    Attributes:
        layers: name of the list of layers.
        count: number of layers.
        before: modules with parameters that run before the layers, in order.
        after: modules with parameters that run after the layers, in order.
        outputs: number of values that a layer returns in a tuple, hidden states first; ``None`` for a tensor.
        attention: facts about the calls of each attention module, by name.
        mixers: names of layers, or of their sub-modules, that mix tokens by something other than attention.
    """

    layers: str
    count: int
    before: Sequence[str]
    after: Sequence[str]
    outputs: int | None
    attention: Mapping[str, AttentionCall]
    mixers: Sequence[str]


@dataclass(frozen=True)
class Parts:
    """Facts about the classes of a model's modules.

    Attributes:
        mixers: classes of layers or of their sub-modules that mix tokens by something other than attention; empty for
            most models.
        others: classes of layers or of their sub-modules that do not mix tokens.
        constants: by class and name of a parameter or buffer, the initial value of all its elements, if they are equal.
        routers: facts about routers, by the class of the module that contains the experts, if the router is known.
    """

    mixers: frozenset[str]
    others: frozenset[str]
    constants: Mapping[tuple[str, str], float]
    routers: Mapping[str, RouterFacts]


def examine(base: Any, parts: Parts) -> Structure:
    """Examine a model without its head.

    Args:
        base: module of transformers that maps token ids to hidden states.
        parts: facts about the classes of its modules.

    Raises:
        BuildError: d9d cannot train the model. For example, the model has no list of layers that map a tensor to a
            tensor and run in order, its forward fails on the meta device, the parameters of a module are used without a
            call of the module, or it is unknown whether a sub-module of a layer mixes tokens.
    """
    name, layers = layer_list(base)
    names: dict[nn.Parameter, str] = {}
    for path, parameter in base.named_parameters(remove_duplicate=False):
        if (other := names.setdefault(parameter, path)) != path:
            raise BuildError(f"model.config: {path} and {other} are one parameter, which d9d does not support")
    listed = [f"{name}.{index}" for index in range(len(layers))]
    outside = [path for path in with_parameters(base) if not path.startswith(f"{name}.")]
    order, outputs, attention = _traced(base, [*outside, *listed])
    kinds = {outputs[layer] for layer in listed if layer in outputs}
    if [path for path in order if path in listed] != listed:
        raise BuildError(
            f"model.config: the layers in {name} do not run once each in order, so d9d cannot train the model"
        )
    if len(kinds) > 1:
        raise BuildError(
            f"model.config: the layers in {name} return different numbers of values, so d9d cannot train the model"
        )
    if idle := sorted(set(outside) - set(order)):
        raise BuildError(
            f"model.config: the parameters of {', '.join(idle)} are used outside of their modules, so d9d cannot "
            "train the model"
        )
    mixing = tuple(_mixing(base, listed, parts, attention))
    first, last = order.index(listed[0]), order.index(listed[-1])
    if order[first : last + 1] != listed:
        raise BuildError(
            f"model.config: other modules with parameters run between two layers of {name}; d9d trains only models "
            "whose other modules run before the first layer or after the last"
        )
    before, after = tuple(dict.fromkeys(order[:first])), tuple(order[last + 1 :])
    masked = masked_calls(base) if attention else {}
    return Structure(name, len(layers), before, after, kinds.pop(), masked, mixing)


def _mixing(base: Any, layers: Sequence[str], parts: Parts, attention: Collection[str]) -> Iterator[str]:
    """Yield the names of layers, and of their sub-modules, that mix tokens by something other than attention."""
    for layer in layers:
        module = base.get_submodule(layer)
        for path, part in ((layer, module), *((f"{layer}.{name}", child) for name, child in module.named_children())):
            kind = type(part).__name__
            if kind in parts.mixers:
                yield path
            elif kind not in parts.others and not any(f"{one}.".startswith(f"{path}.") for one in attention):
                text = f"model.config: d9d cannot tell whether {path} ({kind}) mixes documents"
                raise BuildError(f"{text}; the small model that it examines has no {kind}")


def layer_list(base: Any) -> tuple[str, nn.ModuleList]:
    """Name and module of the list of layers.

    Raises:
        BuildError: the model has no list of layers, or several lists.
    """
    count = base.config.num_hidden_layers
    classes = set(base._no_split_modules or ())  # noqa: SLF001 - no public attribute names the layers; a test reads it
    found = [
        (path, module)
        for path, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and {type(m).__name__ for m in module} <= classes
    ]
    if not classes:
        text = f"model.config: {type(base).__name__} names no layer class in _no_split_modules"
        raise BuildError(f"{text}, so d9d cannot find the list of its layers")
    if len(found) != 1:
        lists = f"{len(found)} lists of {count} layers ({', '.join(sorted(classes))})"
        raise BuildError(f"model.config: {type(base).__name__} has {lists}, but d9d needs exactly one list")
    return found[0]


def with_parameters(base: nn.Module) -> list[str]:
    """Names of the modules that have parameters of their own."""
    return [path for path, module in base.named_modules() if any(True for _ in module.parameters(recurse=False))]


def _traced(
    base: Any, watched: Sequence[str]
) -> tuple[list[str], Mapping[str, int | None], Mapping[str, AttentionCall]]:
    """Names of the watched modules in the order of their calls, sizes of returned tuples, and calls of attention.

    Attention is called without masks.
    """
    order: list[str] = []
    outputs: dict[str, int | None] = {}

    def note(path: str, out: Any) -> None:
        order.append(path)
        outputs[path] = len(out) if isinstance(out, tuple) else None
        first, *others = out if isinstance(out, tuple) and out else (out,)
        if not isinstance(first, Tensor) or any(other is not None for other in others):
            raise BuildError(
                f"model.config: {path} returns more than one tensor ({type(out).__name__}), so d9d cannot train the "
                "model"
            )

    hooks = [
        base.get_submodule(path).register_forward_hook(lambda *given, path=path: note(path, given[-1]))
        for path in watched
    ]
    try:
        calls = _calls(base, EXAMINED)
        return order, outputs, calls
    finally:
        for hook in hooks:
            hook.remove()


def masked_calls(base: Any) -> Mapping[str, AttentionCall]:
    """Calls of attention modules with the masks that the model makes."""
    # A padding mask is given, because without one transformers would search for documents in the values of positions.
    ones = torch.ones(1, _POSITIONS, dtype=torch.int64, device="meta").as_subclass(_Ones)
    return _calls(base, MASKED, attention_mask=ones)


class _Ones(Tensor):
    """Mask of ones (no padding) on the meta device, for models that check the values of a mask."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        if function in (torch.all, Tensor.all):
            return torch.ones((), dtype=torch.bool, device="cpu")
        return super().__torch_function__(function, types, args, keywords or {})  # type: ignore[no-untyped-call]


def _calls(base: Any, attention: str, **inputs: Tensor) -> Mapping[str, AttentionCall]:
    """Calls of attention modules in one forward with an attention that records them."""
    calls: dict[nn.Module, AttentionCall] = {}
    tokens = torch.zeros(1, _POSITIONS, dtype=torch.int64, device="meta")
    positions = torch.arange(_POSITIONS, device="meta").unsqueeze(0)
    base.set_attn_implementation(attention)
    try:
        with torch.no_grad():
            base(input_ids=tokens, position_ids=positions, use_cache=False, **inputs, **{DOCUMENTS: calls})
    except BuildError:
        raise
    except Exception as error:  # forwards of models raise anything
        with_masks = " and masks" if inputs else ""
        text = f"model.config: the forward of {type(base).__name__} fails with d9d's attention{with_masks}: {error}"
        raise BuildError(text) from error
    finally:
        base.set_attn_implementation(ATTENTION)
    names = {module: path for path, module in base.named_modules()}
    return {names[module]: call for module, call in calls.items()}
