"""Token mixers of a model of transformers other than attention, found by perturbation, not by a list of models.

d9d computes attention, and therefore keeps the documents of a sample apart and supports positions that are split over
ranks. A recurrent or convolutional module of transformers supports neither. Such a module is found in a small model
with the same kinds of layers, whose attention returns the value of each position: if the input of a layer changes at
one position, a module whose output changes at another position mixes tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from d9d_core.errors import BuildError
from torch import Tensor, nn

from d9d_transformers.config import TINY, TransformersConfig
from d9d_transformers.library import OWN_VALUE, base_of, library, native_config, native_model
from d9d_transformers.routers import find_routers
from d9d_transformers.structure import Parts, layer_list

#: Number of positions of the small model's sample, and the position whose input is changed.
_POSITIONS, _CHANGED = 12, 5
_LAYERS = 4
#: Largest difference, relative to the largest output, that counts as rounding: with another routing, grouped products
#: of experts sum in another order.
_ROUNDING = 1e-5
#: Largest number of parameters of the small model; most belong to the vocabulary.
_LARGEST = 100_000_000


def parts_of(config: TransformersConfig) -> Parts:
    """Find facts about the classes of a model's modules by runs of a small model.

    Raises:
        BuildError: the small model cannot be built or run, a token changes results at earlier positions, or a layer
            reads tensors besides the previous layer's hidden states.
    """
    return _parts_of(config.model_dump_json())


@lru_cache(maxsize=8)  # each stage of a model asks
def _parts_of(config: str) -> Parts:
    library().AttentionInterface.register(OWN_VALUE, own_value)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        base = _small(TransformersConfig.model_validate_json(config))
        kind, (name, layers) = type(base).__name__, layer_list(base)
        first, inputs = _outputs(base, layers, {})
        second, _ = _outputs(base, layers, {layer: _changed(hidden) for layer, hidden in inputs.items()})
        routers = find_routers(base, lambda: _outputs(base, layers, {}))
    found, all_classes = set(), {type(part).__name__ for layer in layers for part in (layer, *layer.children())}
    for index, layer in enumerate(layers):
        prefix = f"{name}.{index}"
        for path in [path for path in first if path == prefix or path.startswith(f"{prefix}.")]:
            difference = (first[path] - second[path]).abs().amax((0, 2))
            reached = difference > _ROUNDING * first[path].abs().max()
            if reached[:_CHANGED].any():
                raise BuildError(
                    f"model.config: {path} of {kind} lets tokens change results at earlier positions, so d9d cannot "
                    "train it"
                )
            if reached[_CHANGED + 1 :].any():  # the first such module mixes tokens; later ones may only read its output
                part = path.removeprefix(prefix).removeprefix(".").partition(".")[0]
                found.add(type(layer.get_submodule(part)).__name__)
                break
    return Parts(frozenset(found), frozenset(all_classes - found), _constants(base), routers)


def _constants(base: nn.Module) -> dict[tuple[str, str], float]:
    """Find parameters and buffers whose elements all have the same value, in all modules of a class.

    Maps the class and the tensor's name to this value.
    """
    found: dict[tuple[str, str], set[float]] = {}
    for module in base.modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found.setdefault((type(module).__name__, name), set()).update(torch.unique(tensor)[:2].tolist())
    return {key: numbers.pop() for key, numbers in found.items() if len(numbers) == 1}


def own_value(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function that returns the value of each position: maps [B, K, S, E] to [B, S, N, E]."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


def _small(config: TransformersConfig) -> Any:
    """Build a small model without its head, in float32 on the CPU."""
    sizes = config.sizes()
    small = {name: min(size, TINY[name]) for name, size in sizes.items()}
    config = config.resized(small | {name: min(sizes[name], _LAYERS) for name in sizes if name == "num_hidden_layers"})
    native = native_config(config.config)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in native_model(native, OWN_VALUE).parameters())
    if size > _LARGEST:
        kind = config.model_type
        raise BuildError(
            f"model.config: d9d examines a small {kind} for modules that mix tokens, but the smallest has {size:,} "
            "parameters, too many"
        )
    base: Any = base_of(native_model(native, OWN_VALUE))[1]
    return base.float().eval()


def _changed(hidden: Tensor) -> Tensor:
    """Copy of hidden states [1, S, H] with another value at one position."""
    changed = hidden.clone()
    changed[:, _CHANGED] = torch.randn_like(changed[:, _CHANGED]) * hidden.std()
    return changed


def _outputs(
    base: Any, layers: nn.ModuleList, given: dict[nn.Module, Tensor]
) -> tuple[dict[str, Tensor], dict[nn.Module, Tensor]]:
    """Run a model; return outputs [1, S, H] of all modules by name, in the order in which they end, and layer inputs.

    Args:
        base: model without its head.
        layers: the layers.
        given: hidden states that replace the input of a layer, by layer.
    """
    found: dict[str, Tensor] = {}
    inputs: dict[nn.Module, Tensor] = {}

    def enter(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        hidden, *others = args or (keywords.pop("hidden_states"),)
        inputs[layer] = hidden
        for other in (*others, *keywords.values()):  # for example embeddings, which later pipeline stages lack
            if isinstance(other, Tensor) and other.shape == hidden.shape and other.is_floating_point():
                kind = type(layer).__name__
                raise BuildError(
                    f"model.config: {kind} reads other tensors besides the previous layer's hidden states, so d9d "
                    "cannot train it"
                )
        return (given.get(layer, hidden), *others), keywords

    def leave(path: str, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) and out else out
        if isinstance(out, Tensor) and out.ndim == 3 and out.shape[:2] == (1, _POSITIONS):
            found[path] = out

    hooks = [
        module.register_forward_hook(lambda *values, path=path: leave(path, values[-1]))
        for path, module in base.named_modules()
    ]
    hooks += [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    try:
        positions = torch.arange(_POSITIONS).unsqueeze(0)
        base(input_ids=positions + 3, position_ids=positions, use_cache=False)
    except BuildError:
        raise
    except Exception as error:  # forwards of models raise anything
        text = f"a small {type(base).__name__}, made to find modules that mix tokens, fails: {error}"
        raise BuildError(f"model.config: {text}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return found, inputs
