"""Initialisation of a model's parameters and buffers, with the same values in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.tensors import is_dtensor, local
from d9d_core.traits import LateInit
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from d9d_engine.step.randomness import derive_seed, generators_kept

__all__ = ["initialise"]

_IN_PLACE = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_, Tensor.random_})
_LIKE = frozenset({torch.empty_like, torch.zeros_like})


def initialise(stage: nn.Module, seed: int, device: torch.device) -> None:
    """Initialise all parameters and buffers of a stage on ``device``; each module's seed derives from its name.

    A sharded parameter is drawn as a full tensor and then sharded, so every layout starts from the same values; at
    most one module's parameters are full tensors at a time.

    Raises:
        BuildError: a module has parameters or buffers, but no ``reset_parameters``, or ranks cannot share the rows of a
            parameter evenly.
    """
    with generators_kept(device), torch.no_grad():
        modules = dict(stage.named_modules())
        seeds = {name: derive_seed(seed, "init", name) for name in modules}
        sharded = {id(parameter) for parameter in stage.parameters() if is_dtensor(parameter)}
        for name, module in modules.items():
            _initialise_module(name, module, seeds[name], device, sharded)


def _initialise_module(name: str, module: nn.Module, seed: int, device: torch.device, sharded: Set[int]) -> None:
    owns = [*module._parameters, *module._buffers]  # noqa: SLF001 - no public list of own tensors includes None
    if isinstance(module, LateInit):
        torch.manual_seed(seed)
        with _full_parameters(module, device, sharded):
            module.reset_parameters()
    elif any(getattr(module, tensor) is not None for tensor in owns):
        kind = type(module).__name__
        raise BuildError(
            f"module '{name}' ({kind}) owns {', '.join(owns)} but has no reset_parameters(); "
            "its memory would stay uninitialised: implement the trait LateInit"
        )


@contextmanager
def _full_parameters(module: nn.Module, device: torch.device, sharded: Set[int]) -> Iterator[None]:
    """Replace the module's DTensors by full tensors inside the block, then copy this rank's shards back.

    Args:
        module: module with the parameters.
        device: device of the full tensors.
        sharded: identities of the stage's DTensors.
    """
    own = module._parameters  # noqa: SLF001 - setattr would register another parameter with FSDP2
    shards: dict[str, Any] = {name: parameter for name, parameter in own.items() if id(parameter) in sharded}
    for name, parameter in shards.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        own[name] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    try:
        yield
        for name, parameter in shards.items():
            from torch.distributed.tensor import distribute_tensor

            drawn = own[name]
            assert drawn is not None
            # Without a source rank, nothing is communicated: all ranks drew the same values.
            part = distribute_tensor(drawn.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
            if local(part).shape != local(parameter).shape:
                raise BuildError(_uneven(module, name, parameter))
            local(parameter).copy_(local(part))
    finally:
        own.update(shards)


def _uneven(module: nn.Module, name: str, parameter: Any) -> str:
    """Error text for a parameter whose shards DTensor and FSDP2 cut differently."""
    over = " x ".join(map(str, parameter.device_mesh.shape))
    least = parameter.device_mesh.size()
    rows = -(-parameter.shape[0] // least) * least
    return (
        f"{type(module).__name__}.{name} has {parameter.shape[0]} rows, which {over} ranks (data parallelism x tp) "
        f"cannot share evenly, and torch's shards of such a tensor contradict each other; choose {rows} rows (for a "
        "vocabulary, model.vocab_size with unused ids), or fewer ranks of dp_shard"
    )


class Undrawn(TorchFunctionMode):
    """Mode that skips drawing values for meta tensors, and creates empty meta tensors directly.

    On the meta device, torch implements these operations in Python, and their first call imports the compiler, which
    takes two seconds.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, unless it would only fill a meta tensor."""
        given = dict(kwargs or {})
        if func in _LIKE and _keeps_layout(args[0], given):
            return torch.empty(args[0].shape, dtype=given.get("dtype") or args[0].dtype, device="meta")
        if func in _IN_PLACE or getattr(func, "__module__", None) == torch.nn.init.__name__:
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **given)


def _keeps_layout(tensor: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether ``empty_like`` of this tensor with these arguments is a contiguous meta tensor of the same shape."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_meta and tensor.is_contiguous()
    default = {"dtype": given.get("dtype"), "memory_format": torch.preserve_format, "requires_grad": False}
    return plain and {**default, **given} == default
