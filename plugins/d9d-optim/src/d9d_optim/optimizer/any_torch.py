"""Adapter that makes any subclass of ``torch.optim.Optimizer`` an optimizer of jobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from d9d_core.config import closest
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import BuildError, JobError
from d9d_core.tensors import local
from torch import Tensor, nn

from d9d_optim.imports import import_path
from d9d_optim.optimizer.base import Batch, NamedOptimizer, divide, keep_if, zeros
from d9d_optim.optimizer.config import TorchConfig

#: Names of the constructor arguments that this adapter sets; a job may not set them.
_OWN = ("params", "lr", "weight_decay")


class TorchOptimizer(NamedOptimizer):
    """Optimizer that wraps any ``torch.optim.Optimizer`` class: adds the gate and state by name; supports DTensors.

    Torch's classes create their state in the first step, but a checkpoint is loaded before. Each parameter's initial
    state is therefore found by a step with a zero gradient on zeros of the parameter's shape: the first value that the
    class stores in a slot is the slot's initial value. Parameters are passed to the class unchanged, sharded parameters
    as DTensors, so that a class whose update is not elementwise works; its operations may communicate.

    Torch's classes have no gate (a tensor that decides on the device whether a step changes anything), so this adapter
    selects old or new values after each step. During a step, this takes memory for a copy of a group's parameters and
    state.

    State per parameter: the tensors that the class keeps.

    Args:
        config: class, its arguments, learning rate, decay and groups.
        parameters: all parameters of the model by name.

    Raises:
        JobError: the path names no such class, or an argument does not fit.
        BuildError: the class has state that a checkpoint cannot hold or a gate cannot select, its first step makes
            state from the gradient, or a step on zeros fails.
    """

    def __init__(self, config: TorchConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._class = _optimizer_class(config)
        self._arguments = _arguments(self._class, config, self._parameters)
        self._decays = "weight_decay" in _accepted(self._class)
        self._where = f"optimizer 'torch' ({config.target})"
        self._initial: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            self._initial[name] = self._probe(name, parameter)
        self._refuse_late_state()
        here = {name: parameter for name, parameter in self._parameters.items() if not parameter.is_meta}
        self._names = {id(parameter): name for name, parameter in here.items()}
        groups = [[here[name] for name in group.names if name in here] for group in self._groups]
        decays = [group.weight_decay for group in self._groups]
        self._inner = [
            self._made(params, decay, self._arguments) if params else None
            for params, decay in zip(groups, decays, strict=True)
        ]

    def init_state(self) -> None:
        """Set the state of each parameter to the initial state that the torch optimizer creates."""
        self._state = self._initial
        self._initial = {}
        for optimizer in self._inner:
            for parameter in [] if optimizer is None else optimizer.param_groups[0]["params"]:
                optimizer.state[parameter] = dict(self._state[self._names[id(parameter)]])  # type: ignore[union-attr]

    def slots_of(self, name: str) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slots of a parameter's state, under the names that the class uses."""
        return dict.fromkeys(self._materialised()[name], zeros)

    @property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Tensors (slots) of the first parameter's state."""
        return self.slots_of(next(iter(self._parameters)))

    def collectives(self) -> None:
        """Collectives of a step: ``None``, which means unknown; operations of the class on DTensors may communicate."""
        return

    def apply(self, batch: Batch) -> None:
        """Make one step of the class for a group."""
        if batch.divisor is not None:
            divide(batch.grads, batch.divisor)
        self.update(batch)

    def update(self, batch: Batch) -> None:
        """Make one step of the class, then restore old values if the gate is false."""
        states = [self._materialised()[name] for name in batch.names]
        kept = [(p, p.clone()) for p in batch.params]
        kept += [(local(tensor), local(tensor).clone()) for state in states for tensor in state.values()]
        optimizer = next(one for one in self._inner if one and any(p is batch.layouts[0] for p in _params(one)))
        for group in optimizer.param_groups:
            group["lr"] = batch.lr
        with _narrow_gradients(batch.layouts):
            optimizer.step()
        for parameter, state in zip(batch.layouts, states, strict=True):
            present = optimizer.state[parameter]
            for slot, own in state.items():
                if present[slot] is not own:  # the class has made a new tensor
                    local(own).copy_(local(present[slot]))
                    present[slot] = own
        for tensor, before in kept:
            keep_if(~batch.gate, tensor, before)

    def _made(self, params: list[Any], weight_decay: float, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
        decay = {"weight_decay": weight_decay} if self._decays else {}
        try:
            return self._class(params, lr=self._base_lr, **decay, **arguments)
        except FOREIGN_FAILURES as error:
            raise JobError(f"optimizer.arguments: {self._class.__name__} refuses the arguments: {error}") from error

    @property
    def _plain(self) -> dict[str, Any]:
        """Arguments of the class without arguments that require a particular device, such as ``fused``."""
        asks = {"fused", "capturable", "foreach"}.intersection(_accepted(self._class))
        return {**self._arguments, **dict.fromkeys(asks, False)}

    def _refuse_late_state(self) -> None:
        """Raise if the first step of the class gives another result when the state already exists.

        SGD with dampening is an example, because its first step initialises the momentum with the gradient.
        """
        record = _Record()
        results: list[list[Tensor]] = []
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            for prepared in (False, True):
                parameter = nn.Parameter(torch.ones(2, 2))
                optimizer = self._made([parameter], 0.0, self._plain)
                try:
                    if prepared:
                        optimizer.state[parameter] = record
                        parameter.grad = torch.zeros(2, 2)
                        optimizer.step()
                        parameter.data.fill_(1.0)
                        optimizer.state[parameter] = dict(record.first)
                    parameter.grad = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
                    torch.manual_seed(0)  # some classes round stochastically
                    optimizer.step()
                except FOREIGN_FAILURES:
                    return  # the class does not support small matrices or the CPU
                state = sorted(optimizer.state[parameter].items())
                results.append([parameter.detach(), *(value for _, value in state if isinstance(value, Tensor))])
        if not all(map(torch.equal, *results)):
            way_out = "'optimizer: sgd'" if self._class is torch.optim.SGD else "other arguments or another class"
            raise BuildError(
                f"{self._where}: the first step of this class makes state ({', '.join(sorted(record.first))}) from "
                "the gradient, "
                f"but here the state exists before the first step, so results would differ; use {way_out}"
            )

    def _probe(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Find a parameter's initial state by a step on zeros. Collective over its mesh if the class communicates."""
        stand_in = nn.Parameter(torch.zeros_like(parameter))
        stand_in.grad = torch.zeros_like(stand_in)
        # A step on the meta device shows the slots too, if arguments that require a particular device are off.
        optimizer = self._made([stand_in], 0.0, self._plain if parameter.is_meta else self._arguments)
        record = _Record()
        optimizer.state[stand_in] = record
        group_before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        try:
            with torch.enable_grad():
                optimizer.step()
        except FOREIGN_FAILURES as error:
            raise BuildError(f"{self._where}: a step with {name} fails: {error}") from error
        group_after = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        if changed := [key for key in group_after if group_after[key] is not group_before.get(key)]:
            raise BuildError(
                f"{self._where}: this class keeps {', '.join(changed)} in its parameter group, which checkpoints "
                "lack; use "
                "a class whose state consists of tensors per parameter"
            )
        if record.unfit:
            raise BuildError(
                f"{self._where}: its state {', '.join(sorted(record.unfit))} of {name} is not a tensor, so d9d "
                "cannot restore it when a step is skipped; use a class that keeps counts in tensors"
            )
        if parameter.is_meta:
            return {slot: value.to("meta") for slot, value in record.first.items()}
        elsewhere = [slot for slot, value in record.first.items() if value.device != parameter.device]
        if elsewhere:
            raise BuildError(
                f"{self._where}: its state {', '.join(elsewhere)} of {name} is not on {parameter.device}, so each step "
                "would synchronise with the device; set the argument 'fused' or 'capturable' to true, if it has them"
            )
        return record.first


class _Record(dict[str, Any]):
    """State dict of a parameter that also records the first tensor stored in each slot (name).

    Attributes:
        first: copies of these tensors, by slot.
        unfit: slots in which a value other than a tensor or ``None`` was stored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Tensor] = {}
        self.unfit: set[str] = set()

    def __setitem__(self, slot: str, value: Any) -> None:
        super().__setitem__(slot, value)
        if isinstance(value, Tensor):
            self.first.setdefault(slot, value.detach().clone())
        elif value is not None:
            self.unfit.add(slot)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for slot, value in dict(*args, **kwargs).items():
            self[slot] = value

    def setdefault(self, slot: str, default: Any = None) -> Any:
        if slot not in self:
            self[slot] = default
        return self[slot]


@contextmanager
def _narrow_gradients(parameters: list[Tensor]) -> Iterator[None]:
    """Give parameters gradients in their own dtype, as torch's classes expect; restore wider gradients afterwards."""
    wide = [(p, p.grad, p.grad_dtype) for p in parameters if p.grad is not None and p.grad.dtype != p.dtype]
    try:
        for parameter, gradient, _ in wide:
            _set_gradient(parameter, gradient.to(parameter.dtype), parameter.dtype)
        yield
    finally:
        for parameter, gradient, dtype in wide:
            _set_gradient(parameter, gradient, dtype)


def _set_gradient(parameter: Tensor, gradient: Tensor, dtype: torch.dtype | None) -> None:
    parameter.grad = None  # torch refuses a new dtype while there is a gradient
    parameter.grad_dtype = dtype
    parameter.grad = gradient


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _optimizer_class(config: TorchConfig) -> Callable[..., torch.optim.Optimizer]:
    found = import_path("optimizer.target", config.target)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        raise JobError(
            f"optimizer.target: {config.target} is not a subclass of torch.optim.Optimizer, but {_kind(found)}"
        )
    if "lr" not in _accepted(found):
        raise JobError(f"optimizer.target: {config.target} takes no 'lr', so no schedule can set its learning rate")
    step = list(inspect.signature(found.step).parameters.values())[1:]
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in step):
        raise JobError(
            f"optimizer.target: the step of {config.target} needs a closure that recomputes the loss, which a "
            "training step does not have; use a class whose step() needs no arguments"
        )
    return found


def _arguments(
    found: Callable[..., torch.optim.Optimizer], config: TorchConfig, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    accepted = _accepted(found)
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in config.arguments.items()}
    for key in arguments:
        if key in _OWN:
            raise JobError(f"optimizer.arguments.{key}: {key} is a field, not an argument; set optimizer.{key}")
        if key not in accepted and "**" not in accepted:
            near = closest(key, accepted)
            hint = f"did you mean '{near}'?" if near else f"it takes: {', '.join(k for k in accepted if k not in _OWN)}"
            raise JobError(f"optimizer.arguments.{key}: {config.target} takes no such argument; {hint}")
    decays = config.weight_decay or any(rule.weight_decay for rule in config.groups)
    if decays and "weight_decay" not in accepted:
        raise JobError(f"optimizer.weight_decay: {config.target} has no weight decay; remove it")
    if config.state_dtype == "float32":
        raise JobError("optimizer.state_dtype: the class chooses the number format of its state; remove the field")
    on_device = any(parameter.device.type not in ("cpu", "meta") for parameter in parameters.values())
    if on_device and "capturable" in accepted and not arguments.get("fused"):
        arguments.setdefault("capturable", True)  # counts steps on the device, like the gate
    return arguments


def _accepted(found: Any) -> list[str]:
    """Names of the arguments that a class accepts; ``**`` if it accepts arbitrary keyword arguments."""
    parameters = inspect.signature(found).parameters.values()
    return ["**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]


def _kind(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
