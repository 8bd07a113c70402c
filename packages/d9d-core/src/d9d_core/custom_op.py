"""Custom operators of torch with little host time per call, for kernels that the compiler must not trace.

:func:`torch.library.custom_op` runs several Python functions for each call, also in a compiled graph, which needs none
of their work. :class:`CustomOp` registers the kernel itself and keeps autograd out of the operator. Start here::

    import torch
    from d9d_core.custom_op import CustomOp
    from torch import Tensor

    @CustomOp.define("my_plugin::double")
    def double(x: Tensor) -> Tensor:
        return x + x  # a call of a kernel

    @double.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    double.register_autograd(lambda ctx, grad: (2 * grad,))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["CustomOp"]

_R = TypeVar("_R")
_S = TypeVar("_S")
#: Ending of the name of the operator that Dynamo sees.
_WITH_GRADIENTS = "_with_gradients"


class CustomOp(Generic[_R]):
    """Operator of torch whose kernel is a Python function, opaque to ``torch.compile``; called like the function.

    Differences from :func:`torch.library.custom_op`, which needs about twice the host time per call:

    - The kernel must not write its arguments: only ``custom_op`` announces writes to autograd.
    - Outputs must not share memory with arguments or with each other. This is not checked in each call;
      :func:`torch.library.opcheck` of :attr:`overload` checks it.
    - Only calls of this object compute gradients, not calls of ``torch.ops``, and not under transforms of
      ``torch.func``.

    Eager calls that need gradients go through an autograd function. Calls that Dynamo traces go through a second
    operator, opaque to Dynamo, which AOTAutograd decomposes into the autograd function. So the graph of a compiled
    block, like selective checkpointing, contains :attr:`overload` and the operators of the gradient formula.

    Args:
        name: ``namespace::name``; each can be registered once per process.
        function: kernel for all devices. Its annotations give the operator's schema, see
            :func:`torch.library.infer_schema`.

    Attributes:
        overload: operator of torch, without autograd.
        differentiable: operator that computes gradients too, which Dynamo sees.
    """

    def __init__(self, name: str, function: Callable[..., _R]) -> None:
        self._namespace, _, self._name = name.partition("::")
        self._schema: str = torch.library.infer_schema(function, mutates_args=())
        self._library: Any = torch.library.Library(self._namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        self.overload = self._register(self._name, function, "CompositeExplicitAutograd")
        self._in_grad_mode: Callable[..., Any] = self._refuse_gradients
        self.differentiable = self._register(self._name + _WITH_GRADIENTS, self._call, "CompositeImplicitAutograd")
        update_wrapper(self, function)

    @staticmethod
    def define(name: str) -> Callable[[Callable[..., _S]], CustomOp[_S]]:
        """Decorator that makes a function the kernel of an operator, see :class:`CustomOp`."""
        return lambda function: CustomOp(name, function)

    def __call__(self, *args: Any, **kwargs: Any) -> _R:
        """Call the operator; in grad mode with the gradient formula."""
        call = self.differentiable if torch.compiler.is_dynamo_compiling() else self._call
        return cast("_R", call(*args, **kwargs))

    def __deepcopy__(self, _memo: dict[int, Any]) -> CustomOp[_R]:
        """Return the object itself, as a copy of a function is the function: modules that hold kernels are copied."""
        return self

    def register_fake(self, function: Callable[..., _R]) -> Callable[..., _R]:
        """Register the function that makes outputs of the right shapes, dtypes and strides for fake tensors."""
        torch.library.register_fake(f"{self._namespace}::{self._name}", function, lib=self._library)
        return function

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Register the gradient formula, with the signature of :func:`torch.library.register_autograd`.

        Args:
            backward: computes the gradients of the arguments, ``None`` for arguments without one, from ``ctx`` and the
                gradients of the outputs.
            setup_context: called with the keywords ``ctx``, ``inputs`` and ``output`` after a forward.

        Raises:
            TypeError: an argument is a list of tensors or has a default; autograd functions do not support these.
        """
        arguments = self._schema.partition(" -> ")[0].strip("()").split(", ")
        for argument in arguments:
            if "Tensor[]" in argument or "=" in argument:
                raise TypeError(
                    f"{self.overload}: argument '{argument}' is a list of tensors or has a default; an operator with "
                    "register_autograd needs tensors or plain values, each of which is given"
                )
        apply, names = _autograd_function(self.overload, backward, setup_context).apply, [*map(_name, arguments)]

        def with_gradients(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:
                return apply(*args)
            if kwargs.keys() != set(names[len(args) :]):
                return self.overload(*args, **kwargs)  # torch's error names the wrong or missing argument
            return apply(*args, *(kwargs[name] for name in names[len(args) :]))

        self._in_grad_mode = with_gradients

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        call = self._in_grad_mode if torch.is_grad_enabled() else self.overload
        return call(*args, **kwargs)

    def _refuse_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator in grad mode without a gradient formula: a backward through its outputs is an error."""
        with torch.no_grad():
            output = self.overload(*args, **kwargs)
        needed = [tensor for tensor in _tensors((*args, *kwargs.values())) if tensor.requires_grad]
        if not needed:
            return output
        found = _NoFormula.apply(str(self.overload), needed[0], *_tensors((output,)))
        return found[0] if isinstance(output, Tensor) else found

    def _register(self, name: str, function: Callable[..., Any], key: str) -> OpOverload:
        self._library.define(name + self._schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._library.impl(name, function, key)
        overload: OpOverload = getattr(getattr(torch.ops, self._namespace), name).default
        return overload


class _NoFormula(torch.autograd.Function):
    """Autograd function whose backward is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, _needed: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        raise RuntimeError(f"{ctx.name} has no gradient formula; call register_autograd, or do not differentiate it")


def _name(argument: str) -> str:
    """Name of an argument of a schema, such as ``x`` of ``Tensor x``."""
    return argument.rpartition(" ")[2]


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    """Tensors among arguments or outputs, also in their lists and tuples."""
    flat = (item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,)))
    return [item for item in flat if isinstance(item, Tensor)]


def _autograd_function(
    overload: OpOverload, backward: Callable[..., Any], setup_context: Callable[..., None] | None
) -> type[torch.autograd.Function]:
    """Autograd function whose forward calls an operator."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = overload(*args)
        if setup_context is not None:
            setup_context(ctx=ctx, inputs=args, output=output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"GradientsOf_{overload}".replace(".", "_"), (torch.autograd.Function,), methods)
