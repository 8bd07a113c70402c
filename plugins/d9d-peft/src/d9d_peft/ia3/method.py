"""Fine-tuning method ``ia3``. Shapes: O features out, I features in, ``...`` any leading dims."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from d9d_core.config import closest
from d9d_core.errors import BuildError, CheckpointError
from d9d_core.model import TermKind
from d9d_core.tensors import beside
from d9d_core.types import TensorSpec
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.compute import Compute
from d9d_weights.graph.mappers import Identity, Unsqueeze
from d9d_weights.hugging_face.adapter_config import check_adapter_config
from torch import Tensor, nn

from d9d_peft.ia3.config import Ia3Config

#: Name of the child module that holds a layer's scale; the ``peft`` library gives the scale itself this name.
SCALE = "ia3_l"
_WEIGHT, _BIAS, _VECTOR = ".weight", ".bias", f".{SCALE}.weight"
#: Prefix of module names in an adapter file.
_PREFIX = "base_model.model."
#: Number of names listed in an error message.
_SHOWN = 6


class Scale(nn.Module):
    """Scale of (IA)^3: multiplies the last dim by ``weight`` [features], on the device of its layer.

    Args:
        like: tensor whose device and dtype the weight gets.
        features: number of features.
        of_inputs: whether the scale multiplies the input of its layer instead of the output.
    """

    def __init__(self, like: Tensor, features: int, *, of_inputs: bool) -> None:
        super().__init__()
        self.of_inputs, self.off = of_inputs, False
        self.weight = nn.Parameter(like.new_empty(features))

    def reset_parameters(self) -> None:
        """Fill the scale with ones, so that the initial model is unchanged."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., features] to the same shape and dtype."""
        return x if self.off else (x * self.weight).to(x.dtype)


class Ia3:
    """Method (IA)^3: scales activations feature by feature, and trains only the scales."""

    def __init__(self, config: Ia3Config) -> None:
        self._config = config
        # Original class -> subclass with a scale. All layers of one class get the same subclass, to share compiled
        # code.
        self._classes: dict[type, type] = {}

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Add the scales; returns their names, which are the parameters to train.

        Raises:
            BuildError: a pattern matches no linear layer, or a layer matches both ``targets`` and ``feedforward``.
        """
        layers = {name: module for name, module in stage.named_modules() if isinstance(module, nn.Linear)}
        outputs = _select(layers, self._config.targets, "peft.targets")
        inputs = _select(layers, self._config.feedforward, "peft.feedforward")
        if both := sorted(outputs & inputs):
            raise BuildError(f"peft.feedforward: '{both[0]}' is also in peft.targets; a layer can have only one scale")
        for name in sorted(outputs | inputs):
            layer, of_inputs = layers[name], name in inputs
            features = layer.in_features if of_inputs else layer.out_features
            layer.add_module(SCALE, Scale(layer.weight, features, of_inputs=of_inputs))
            own = type(layer)
            if own not in self._classes:
                self._classes[own] = _scaled_class(own)
            layer.__class__ = self._classes[own]
        return frozenset(f"{name}{_VECTOR}" for name in outputs | inputs)

    @torch.no_grad()
    def merge(self, stage: nn.Module) -> None:
        """Multiply the scales into weights and biases. Collective over the ranks that hold shards of them."""
        for layer in [owner for _, owner, _ in _scales(stage)]:
            own = {"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
            for name, merged in _merged(own, layer.ia3_l.weight, layer.ia3_l.of_inputs).items():
                own[name].copy_(merged)
            delattr(layer, SCALE)
            layer.__class__ = layer.ia3_base

    def merger(self, names: Collection[str]) -> Mapper:
        """Mapper that merges tensors of a checkpoint; see :class:`d9d_weights.hugging_face.adapter.MergesTensors`."""
        layers = [name.removesuffix(_VECTOR) for name in names if name.endswith(_VECTOR)]
        patterns = (*self._config.targets, *self._config.feedforward)
        own = [layer for layer in layers if any(_matches(layer, pattern) for pattern in patterns)]
        return Parallel(*(self._fold(layer, f"{layer}{_BIAS}" in names) for layer in own), Identity())

    @contextmanager
    def off(self, stage: nn.Module) -> Iterator[None]:
        """Compute without the scales inside the ``with`` block; see :class:`d9d_core.peft.SwitchesOff`."""
        before = {scale: scale.off for _, _, scale in _scales(stage)}
        for scale in before:
            scale.off = True
        try:
            yield
        finally:
            for scale, value in before.items():
                scale.off = value

    @property
    def init_from(self) -> str | None:
        """Directory or address of the adapter to start from."""
        return self._config.init_from

    def adapter_config(self, stage: nn.Module, published: Mapping[str, str]) -> dict[str, Any]:
        """Contents of ``adapter_config.json``; see :class:`d9d_weights.hugging_face.adapter.AdapterFormat`.

        Raises:
            CheckpointError: the weight of a layer is not one tensor in published files.
        """
        modules = _modules(stage, published)
        inputs = {name for name, _, scale in _scales(stage) if scale.of_inputs}
        return {
            "peft_type": "IA3",
            "target_modules": sorted(modules.values()),
            "feedforward_modules": sorted(modules[name] for name in inputs),
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    def adapter_exporter(self, stage: nn.Module, published: Mapping[str, str]) -> Mapper:
        """Mapper from the scales to the tensors of an adapter file, where they have the shape [O, 1] or [1, I].

        Raises:
            CheckpointError: the weight of a layer is not one tensor in published files.
        """
        modules = _modules(stage, published)
        return Parallel(
            *(
                Unsqueeze(f"{name}{_VECTOR}", 0 if scale.of_inputs else 1, f"{_PREFIX}{modules[name]}.{SCALE}")
                for name, _, scale in _scales(stage)
            )
        )

    def check_adapter(
        self,
        stage: nn.Module,  # noqa: ARG002 - see d9d_weights.hugging_face.adapter.AdapterFormat
        published: Mapping[str, str],  # noqa: ARG002
        config_json: Mapping[str, Any],
        names: Collection[str],
    ) -> None:
        """Check the config of an adapter to start from, and compare it with the names of the adapter's tensors.

        The caller compares these names with the modules that the job selects.

        Raises:
            CheckpointError: the adapter is of another method, has features that this method does not support, or has
                tensors for a module that its config excludes.
        """
        if config_json.get("peft_type") != "IA3":
            raise CheckpointError(
                f"the adapter has peft_type {config_json.get('peft_type')!r}, but the job's peft is 'ia3'; set peft to "
                "the adapter's method"
            )
        check_adapter_config(config_json, names, method="ia3")

    def _fold(self, layer: str, has_bias: bool) -> Mapper:
        of_inputs = any(_matches(layer, pattern) for pattern in self._config.feedforward)
        # A scale of inputs leaves the bias as it is.
        names = {"weight": f"{layer}{_WEIGHT}"} | ({"bias": f"{layer}{_BIAS}"} if has_bias and not of_inputs else {})
        vector = f"{layer}{_VECTOR}"

        def merged(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            own = {leaf: tensors[name] for leaf, name in names.items()}
            return {names[leaf]: made for leaf, made in _merged(own, tensors[vector], of_inputs).items()}

        def shapes(specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
            return {name: specs[name] for name in names.values()}

        return Compute((*names.values(), vector), merged, shapes)


def _scaled_class(base: type) -> type:
    """Make a subclass of a layer's class that applies the scale; compiled code would ignore changes by a hook."""

    class Scaled(base):  # type: ignore[misc]
        ia3_base = base
        ia3_l: Scale

        def tensor_parallel_terms(self) -> Mapping[str, TermKind]:
            return {SCALE: "in_scale" if self.ia3_l.of_inputs else "out_scale"}

        def forward(self, x: Tensor) -> Tensor:
            if self.ia3_l.of_inputs:
                return super().forward(self.ia3_l(x))  # type: ignore[no-any-return]
            return self.ia3_l(super().forward(x))  # type: ignore[no-any-return]

    Scaled.__name__ = Scaled.__qualname__ = f"Scaled{base.__name__}"
    return Scaled


def _scales(stage: nn.Module) -> Iterator[tuple[str, Any, Scale]]:
    """Yield name, layer and scale for each scale of a stage."""
    for name, module in stage.named_modules():
        if isinstance(scale := module._modules.get(SCALE), Scale):  # noqa: SLF001 - getattr also finds attributes that are not children
            yield name, module, scale


def _merged(own: Mapping[str, Tensor], vector: Tensor, of_inputs: bool) -> dict[str, Tensor]:
    """Weight [O, I] and bias [O] multiplied by the scale; computed in float32 or wider."""

    def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        (factor,) = beside(tensor, factor)
        return (tensor.to(wide) * factor.to(wide)).to(tensor.dtype)

    if of_inputs:  # W (l * x) + b
        return {"weight": scaled(own["weight"], vector.unsqueeze(0))}
    return {leaf: scaled(one, vector.unsqueeze(1) if leaf == "weight" else vector) for leaf, one in own.items()}


def _modules(stage: nn.Module, published: Mapping[str, str]) -> dict[str, str]:
    found = {name: published.get(f"{name}{_WEIGHT}", "") for name, _, _ in _scales(stage)}
    if other := [name for name, there in found.items() if not there.endswith(_WEIGHT)]:
        raise CheckpointError(
            f"published files do not have the weight of '{other[0]}' as one tensor, so an adapter file cannot hold "
            "its scale; export the merged model, or choose other layers"
        )
    return {name: there.removesuffix(_WEIGHT) for name, there in found.items()}


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the whole name of a layer, or its last part if the pattern has no dot."""
    return fnmatchcase(name if "." in pattern else name.rpartition(".")[2], pattern)


def _select(names: Collection[str], patterns: Sequence[str], where: str) -> set[str]:
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            near = closest(pattern, last)
            there = ", ".join(last[:_SHOWN]) + (", ..." if len(last) > _SHOWN else "")
            hint = f"did you mean '{near}'?" if near else f"there are: {there or 'none'}"
            raise BuildError(f"{where}: no linear layers match '{pattern}'; {hint}")
    return {name for name in names if any(_matches(name, pattern) for pattern in patterns)}
