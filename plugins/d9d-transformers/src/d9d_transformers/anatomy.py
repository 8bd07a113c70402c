"""Calls of a model's modules in one forward on the meta device, from which the costs of the model are computed.

The calls record which module reads which tensor, so that costs need no list of models: layers with equal calls have
equal costs. Modules of unknown kinds are measured: torch counts their FLOPs, and hooks see the tensors that autograd
saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from d9d_core.errors import BuildError, D9dError
from d9d_core.model import Stage
from d9d_core.traits import TensorStyle
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_nn.attention.core import AttentionCore
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from d9d_transformers.build import build
from d9d_transformers.config import TransformersConfig
from d9d_transformers.experts import RoutedExperts
from d9d_transformers.head import Head
from d9d_transformers.model import TransformersModel
from d9d_transformers.structure import with_parameters

#: Number of positions of the forward: recurrent modules pad their input to chunks, of at most 256 positions.
_POSITIONS = 256
#: Bytes of an element of the activations -> their dtype.
_DTYPES = {2: torch.bfloat16, 4: torch.float32}

#: Kinds of modules. ``other``: the module's cost is measured. ``idle``: it is not called, but another module uses its
#: parameters.
Kind = Literal["linear", "norm", "attention", "experts", "embedding", "other", "idle"]

#: Kinds of parameters, see :class:`d9d_core.cost.Weight`.
ParameterKind = Literal["linear", "embedding", "bank", "other"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a module.

    Attributes:
        name: name within the module.
        shape: shape of the whole parameter.
        kind: kind of the parameter.
    """

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind


@dataclass(frozen=True, slots=True)
class Core:
    """Facts about an attention core.

    Attributes:
        query_heads, key_value_heads: numbers of heads, before tensor parallelism splits them.
        features: number of features of a head.
        window: number of positions that a query attends to; ``None`` for all.
    """

    query_heads: int
    key_value_heads: int
    features: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured cost of a forward, per position.

    Attributes:
        flops: FLOPs of matrix products and convolutions.
        kept: bytes kept for the backward, without the input.
        keeps_input: whether the backward needs the input.
    """

    flops: float = 0.0
    kept: float = 0.0
    keeps_input: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a module in the forward.

    Tensors are numbered within a layer; tensors that share memory have the same number. The layer's input has number 0.

    Attributes:
        path: name of the module within its layer, or within the model if it is outside of layers.
        kind: kind of the module.
        style: tensor-parallel style; ``None`` for a module without a style of its own in a split sub-module of a layer,
            such as attention.
        rows: number of rows of the input per position.
        features, outputs: sizes of the last dimension of input and output.
        reads, writes: numbers of the input tensor and of the output tensor.
        parameters: parameters of the module.
        in_part: whether the module is nested in a sub-module of the layer, such as attention.
        heads: number of heads of the output, if only whole heads can be split.
        core: facts about the core, if the module is attention.
        chosen: number of experts of a token, if the module is a module of experts.
        measured: measured cost, if the module is of another kind.
    """

    path: str
    kind: Kind
    style: TensorStyle | None
    rows: float = 1.0
    features: int = 0
    outputs: int = 0
    reads: int = -1
    writes: int = -1
    parameters: tuple[Parameter, ...] = ()
    in_part: bool = False
    heads: int | None = None
    core: Core | None = None
    chosen: int = 1
    measured: Measured = Measured()


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Calls of a whole model.

    Attributes:
        layers: qualified name of the list of layers.
        kinds: for each kind of layer (layers with equal calls), its calls in order.
        kind: for each layer, the index of its kind in ``kinds``.
        kept: for each kind of layer, bytes per position that it keeps for the backward without ``torch.compile``,
            experts excluded.
        before, after: calls before the layers and after them, without the head.
        head: facts about the head.
        numbers: number of parameter elements, summed over all layers, that one token uses.
        mixers: qualified names of the modules, other than attention, that mix tokens.
        refusal: reason why ``tp`` cannot split the model; ``None`` if it can.
    """

    layers: str
    kinds: tuple[tuple[Call, ...], ...]
    kind: tuple[int, ...]
    kept: tuple[float, ...]
    before: tuple[Call, ...]
    after: tuple[Call, ...]
    head: Head
    numbers: int
    mixers: tuple[str, ...]
    refusal: str | None


def anatomy(config: TransformersConfig, width: int) -> Anatomy:
    """Return the calls of a model, for activations with this number of bytes per element.

    Raises:
        D9dError: d9d cannot train the model, or cannot measure a module.
    """
    found = _anatomy(config.model_dump_json(), width)
    if isinstance(found, D9dError):
        raise found.with_traceback(None)  # a raised error keeps the tracebacks of all raises
    return found


@lru_cache(maxsize=8)  # a plan asks for thousands of layouts; the cache holds numbers, not the model
def _anatomy(config: str, width: int) -> Anatomy | D9dError:
    """Calls of a model, or the error of its examination, which is cached too because it takes as long to find."""
    try:
        with torch.device("meta"):
            model = build(TransformersConfig.model_validate_json(config), Stage())
            return _Examination(model.to(_DTYPES[width])).anatomy()
    except D9dError as error:
        return error.with_traceback(None)  # the traceback would keep the model


class _Examination:
    """Forward of a whole model on the meta device, with hooks on the modules whose calls have a cost.

    Args:
        model: the whole model, not one pipeline stage.
    """

    def __init__(self, model: TransformersModel) -> None:
        self._model, self._structure = model, model.structure
        self._base = model.get_submodule(model.base_name)
        self._calls: dict[str, list[Call]] = {}
        self._numbers: dict[str, dict[int, int]] = {}
        self._given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # layer -> its arguments
        self._before = 0
        self._alive: list[Any] = []  # kept, because new memory could get the id of freed memory

    def anatomy(self) -> Anatomy:
        """Run the forward, and return its calls as an :class:`Anatomy`."""
        hooks = [
            module.register_forward_hook(partial(self._note, path), with_kwargs=True)
            for path, module in self._base.named_modules()
            if self._costs(path, module)
        ]
        layers = [f"{self._structure.layers}.{index}" for index in range(self._structure.count)]
        for layer in layers:
            enter = partial(self._enter, layer)
            hooks.append(self._base.get_submodule(layer).register_forward_pre_hook(enter, with_kwargs=True))
        try:
            with torch.no_grad():
                self._model(tokens=torch.zeros(1, _POSITIONS, dtype=torch.int64))
        finally:
            for hook in hooks:
                hook.remove()
        self._add_idle()
        kinds: dict[tuple[Call, ...], int] = {}
        kind = tuple(kinds.setdefault(tuple(self._calls[layer]), len(kinds)) for layer in layers)
        firsts = [layers[kind.index(number)] for number in range(len(kinds))]
        outside = self._calls.get("", [])
        return Anatomy(
            f"{self._model.base_name}.{self._structure.layers}",
            tuple(kinds),
            kind,
            tuple(self._kept(layer) for layer in firsts),
            tuple(outside[: self._before]),
            tuple(outside[self._before :]),
            self._model.head_facts,
            self._model.layer_numbers,
            tuple(self._model.token_mixers()),
            self._model.styles.refusal,
        )

    def _kept(self, layer: str) -> float:
        """Bytes per position that a layer keeps for the backward, with fused attention and without its experts."""
        module = self._base.get_submodule(layer)
        stubs: dict[nn.Module, Any] = {}
        for inside in module.modules():
            if isinstance(inside, AttentionCore):
                stubs[inside] = fused_attention
            elif isinstance(inside, RoutedExperts):
                stubs[inside] = _mixed
        for inside, stub in stubs.items():
            inside.forward = stub
        try:
            found = _measured(layer, module, *self._given[layer])
        finally:
            for inside in stubs:
                del inside.forward  # the method of the class remains
        own = _first(*self._given[layer]).nbytes / _POSITIONS if found.keeps_input else 0.0
        return found.kept + own

    def _costs(self, path: str, module: nn.Module) -> bool:
        """Whether calls of a module are recorded: it has parameters, or is attention or a norm without parameters."""
        if path in self._structure.mixers:
            return True
        if self._in_mixer(path) or isinstance(module, GroupedSwiGLU):
            return False
        has_parameters = any(True for _ in module.parameters(recurse=False))
        is_leaf = not any(True for _ in module.children())
        return has_parameters or isinstance(module, AttentionCore | RoutedExperts) or (is_leaf and not self._part(path))

    def _in_mixer(self, path: str) -> bool:
        return any(path.startswith(f"{mixer}.") for mixer in self._structure.mixers)

    def _scope(self, path: str) -> tuple[str, str]:
        """Name of a module's layer, and the module's name in it; outside of layers, "" and the qualified name."""
        inside = path.removeprefix(f"{self._structure.layers}.")
        if inside == path:
            return "", f"{self._model.base_name}.{path}"
        index, _, name = inside.partition(".")
        return f"{self._structure.layers}.{index}", name

    def _part(self, path: str) -> bool:
        """Whether a module is nested in a sub-module of a layer, such as ``q_proj`` in a layer's ``self_attn``."""
        layer, name = self._scope(path)
        return bool(layer) and "." in name

    def _enter(self, layer: str, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if layer == f"{self._structure.layers}.0":
            self._before = len(self._calls.get("", []))
        self._given[layer] = args, keywords
        self._number(layer, _first(args, keywords))

    def _number(self, layer: str, tensor: Tensor) -> int:
        """Number of a tensor within a layer; tensors that share memory have the same number."""
        memory = tensor.untyped_storage()
        self._alive.append(memory)
        numbers = self._numbers.setdefault(layer, {})
        return numbers.setdefault(id(memory), len(numbers))

    def _note(self, path: str, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], out: Any) -> None:
        layer, name = self._scope(path)
        given, made = _first(args, keywords), out[0] if isinstance(out, tuple) else out
        kind = self._kind(path, module, given, made)
        if kind is None:
            return
        split = self._model.styles.owners.get(path.rpartition(".")[0])
        known: dict[str, Any] = {}
        if isinstance(module, AttentionCore):
            facts = module.attention.static
            sizes = facts["query_heads"], facts["key_value_heads"], facts["head_dim"], facts["window"]
            known["core"] = Core(*sizes)
        elif isinstance(module, RoutedExperts):
            known["chosen"] = module.chosen
        elif kind == "other":
            known["measured"] = _measured(path, module, args, keywords)
        elif kind == "linear" and split is not None:
            known["heads"] = self._heads(path)
        features = given.shape[-1]
        call = Call(
            path=name,
            kind=kind,
            style=self._style(path),
            rows=given.numel() / features / _POSITIONS if kind != "embedding" else 1.0,
            features=features,
            outputs=made.shape[-1],
            reads=self._number(layer, given),
            writes=self._number(layer, made),
            parameters=_parameters(module, whole=path in self._structure.mixers or kind == "experts"),
            in_part=self._part(path),
            **known,
        )
        self._calls.setdefault(layer, []).append(call)

    def _kind(self, path: str, module: nn.Module, given: Tensor, made: Tensor) -> Kind | None:
        """Kind of a module in the cost model; ``None`` if the cost model does not count its call."""
        own = [parameter.shape for parameter in module.parameters(recurse=False)]
        alike = given.shape == made.shape and given.is_floating_point()
        inside = any(True for child in module.children() for _ in child.parameters())
        if path in self._structure.mixers:
            return "other"
        if isinstance(module, AttentionCore):
            return "attention"
        if isinstance(module, RoutedExperts):
            return "experts"
        if isinstance(module, nn.Linear):
            return "linear"
        if isinstance(module, nn.Embedding):
            return "embedding"
        if alike and not inside and all(shape == given.shape[-1:] for shape in own):
            same = (
                not own and given.untyped_storage() is made.untyped_storage()
            )  # such as dropout without a probability
            return None if same else "norm"
        if not own:
            return None
        return "idle" if inside else "other"

    def _style(self, path: str) -> TensorStyle | None:
        """Tensor-parallel style of a module, or of a module around it.

        ``None`` for a module without a style inside a module that is split.
        """
        styles, around = self._model.styles, path
        while around:
            if around in styles.model:
                return styles.model[around]
            if around in styles.owners:
                return styles.owners[around].get(path.removeprefix(f"{around}."))
            around = around.rpartition(".")[0]
        return TensorStyle.SEQUENCE

    def _heads(self, path: str) -> int | None:
        owner, _, name = path.rpartition(".")
        heads: Any = getattr(self._base.get_submodule(owner), "tensor_parallel_heads", dict)()
        found: int | None = heads.get(name)
        return found

    def _add_idle(self) -> None:
        """Add modules whose parameters are used without a call."""
        noted = {(layer, call.path) for layer, calls in self._calls.items() for call in calls}
        for path in with_parameters(self._base):
            layer, name = self._scope(path)
            module = self._base.get_submodule(path)
            if (layer, name) not in noted and not self._in_mixer(path) and not isinstance(module, GroupedSwiGLU):
                call = Call(name, "idle", self._style(path), parameters=_parameters(module), in_part=self._part(path))
                self._calls.setdefault(layer, []).append(call)


def _first(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor:
    """First tensor among the arguments of a call."""
    return next(value for value in (*args, *keywords.values()) if isinstance(value, Tensor))


def _parameters(module: nn.Module, *, whole: bool = False) -> tuple[Parameter, ...]:
    """Parameters of a module, and with ``whole`` also of the modules inside it."""
    found = []
    for name, parameter in module.named_parameters(recurse=whole):
        owner = module.get_submodule(name.rpartition(".")[0])
        kind: ParameterKind = "other"
        if isinstance(owner, GroupedSwiGLU):
            kind = "bank"
        elif name.rpartition(".")[2] == "weight":
            kind = (
                "linear" if isinstance(owner, nn.Linear) else "embedding" if isinstance(owner, nn.Embedding) else kind
            )
        found.append(Parameter(name, tuple(parameter.shape), kind))
    return tuple(found)


class _Attention(torch.autograd.Function):
    """Attention that keeps as much memory as a fused kernel: its inputs, its output and a number per query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, torch.empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Any:
        raise NotImplementedError("only the kept tensors of a forward are measured")


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Replace an attention core on the meta device, and keep as much memory as a fused kernel."""
    out: Tensor = _Attention.apply(query, key, value)
    return out


def _mixed(tokens: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(tokens).requires_grad_()


def _measured(path: str, module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Measured:
    """Run a module once more, with gradients, and measure its cost.

    Raises:
        BuildError: the forward of the module fails.
    """
    given = tuple(_leaf(value) for value in args), {name: _leaf(value) for name, value in keywords.items()}
    # Inputs, parameters and buffers exist without this module's backward, so their memory is not counted.
    anyway = [*_tensors(given), *module.parameters(), *module.buffers()]
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        saved[id(memory)] = memory
        return tensor

    # torch.ops has no public name for grouped products, and the counter has no formula for them.
    formulas = {torch.ops.aten._grouped_mm: _grouped_flops}  # noqa: SLF001
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    try:
        with torch.enable_grad(), saving, counter:
            module.forward(*given[0], **given[1])  # a call would run the hooks of the examination
    except Exception as error:  # forwards of models raise anything
        raise BuildError(f"model.config: the cost of {path} cannot be measured: {error}") from error
    known = {id(memory): memory for memory in (tensor.untyped_storage() for tensor in anyway)}
    kept = sum(memory.nbytes() for key, memory in saved.items() if key not in known)
    first = _first(*given).untyped_storage()
    return Measured(counter.get_total_flops() / _POSITIONS, kept / _POSITIONS, id(first) in saved)


def _leaf(value: Any) -> Any:
    """Copy of an argument that requires a gradient, if the argument is a floating-point tensor."""
    is_hidden = isinstance(value, Tensor) and value.is_floating_point()
    return torch.empty_like(value).requires_grad_() if is_hidden else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _grouped_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    """FLOPs of grouped products [rows, in] @ [groups, in, out], for which torch's counter has no formula."""
    rows, inner = left[-2:]
    return 2 * rows * inner * right[-1]
