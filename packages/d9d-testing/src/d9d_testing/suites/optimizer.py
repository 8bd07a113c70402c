"""Conformance suite of optimizers: gate, state, layouts, resume and learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.optimizer import AveragesWeights, DividesGradients
from torch import Tensor, nn

from d9d_testing.suites.support import optimizer_ranks
from d9d_testing.suites.support.component import ComponentSuite, plain_json
from d9d_testing.suites.support.optimizer_ranks import draw_parameters, set_gradients, stepped
from d9d_testing.suites.support.tensors import HostReads, bits, differing, facts, overlapping
from d9d_testing.tolerances import assert_close_values
from d9d_testing.world import World

_SHAPES: Mapping[str, Sequence[int]] = {
    "embed.weight": (7, 5),
    "layer.weight": (5, 5),
    "layer.bias": (5,),
    "norm.weight": (5,),
    "head.weight": (1, 5),  # of two ranks, one has no row of the head
}


class OptimizerSuite(ComponentSuite):
    """Conformance suite of optimizers (:class:`d9d_core.optimizer.Optimizer`).

    Subclass it and name the optimizer::

        class TestMyOptimizer(OptimizerSuite):
            target = "my_optimizer"
            config = {"lr": 0.1}

    Attributes:
        shapes: name -> shape of the parameters; in a world of two ranks, some are sharded: by default also unevenly,
            and one with an empty shard.
        dtypes: dtypes of the parameters.
        device: device of the parameters.
        linear_in_lr: whether the first update is proportional to the learning rate; ``False`` for optimizers whose
            state depends on the learning rate.
    """

    kind = "optimizer"

    shapes: ClassVar[Mapping[str, Sequence[int]]] = _SHAPES
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16")
    device: ClassVar[str] = "cpu"
    linear_in_lr: ClassVar[bool] = True

    # --- the gate

    def test_a_closed_gate_changes_no_bit(self) -> None:
        """A step with a closed gate changes neither parameters nor state, for any gradients."""
        for dtype in self.dtypes:
            for value in (float("nan"), float("inf"), 1.0):
                parameters, optimizer = self.made(dtype)
                for updates in (0, 1):
                    for parameter in parameters.values():
                        parameter.grad = torch.full_like(parameter, value)
                    before = bits(parameters) | bits(optimizer.state())
                    optimizer.step(self.gate(open_=False))
                    changed = differing(before, bits(parameters) | bits(optimizer.state()))
                    assert not changed, (
                        f"{dtype}, gradients of {value}, after {updates} updates: a step whose gate is false changes "
                        f"{changed}; choose between old and new with torch.where(gate, new, old), as 0 * NaN is NaN"
                    )
                    stepped(optimizer, parameters, [updates], self.device)

    def test_a_refused_step_leaves_no_trace(self) -> None:
        """After a step with a closed gate, later updates are the same as in a run without that step."""
        for dtype in self.dtypes:
            plain, one = self.made(dtype)
            interrupted, other = self.made(dtype)
            for step in range(3):
                set_gradients(interrupted, 50 + step)
                other.step(self.gate(open_=False))
                stepped(one, plain, [step], self.device)
                stepped(other, interrupted, [step], self.device)
            changed = differing(bits(plain) | bits(one.state()), bits(interrupted) | bits(other.state()))
            assert not changed, (
                f"{dtype}: steps whose gate was false change later updates of {changed}; count steps in a tensor of "
                "the state that the gate protects"
            )

    def test_an_open_gate_updates_every_parameter(self) -> None:
        """If the gate is true, a step updates every parameter that has a gradient, in place and in its own dtype."""
        for dtype in self.dtypes:
            parameters, optimizer = self.made(dtype)
            places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
            moved_ever: set[str] = set()
            for step in (0, 1):  # both are compared, because the second step may revert the first
                before = bits(parameters)
                stepped(optimizer, parameters, [step], self.device)
                moved_ever |= set(differing(before, bits(parameters)))
            idle = sorted(parameters.keys() - moved_ever)
            assert not idle, f"{dtype}: two updates with gradients did not change {idle}"
            moved = [name for name, parameter in parameters.items() if parameter.data_ptr() != places[name]]
            assert not moved, f"{dtype}: {moved} have new memory; update parameters in place"
            assert all(str(p.dtype) == f"torch.{dtype}" for p in parameters.values()), f"{dtype}: a dtype changed"

    def test_a_parameter_without_a_gradient_is_left_alone(self) -> None:
        """A parameter without a gradient, and its state, do not change."""
        parameters, optimizer = self.made(self.dtypes[0])
        stepped(optimizer, parameters, [0], self.device)
        lonely = next(iter(parameters))
        set_gradients(parameters, 1)
        parameters[lonely].grad = None
        before = bits(parameters) | bits(optimizer.state())
        optimizer.step(self.gate())
        changed = differing(before, bits(parameters) | bits(optimizer.state()))
        wrong = [name for name in changed if name == lonely or name.startswith(f"{lonely}/")]
        assert not wrong, f"{lonely} has no gradient, but {wrong} changed; skip parameters whose grad is None"
        assert changed, "with one gradient missing, nothing is updated at all"

    def test_a_step_never_waits_for_the_device(self) -> None:
        """``step(gate)`` reads the gate, a bool tensor, on the device only, so the host does not wait for it."""
        parameters, optimizer = self.made(self.dtypes[0])
        set_gradients(parameters, 0)
        gate = self.gate()
        with HostReads() as reads:
            optimizer.step(gate)
        assert not reads.found, (
            f"step() reads values on the host ({', '.join(sorted(set(reads.found)))}): no bool(gate), item() or if "
            "on a tensor; use torch.where"
        )

    # --- state

    def test_state_is_complete_and_named_from_the_start(self) -> None:
        """State is named ``<parameter>/<slot>``; names, shapes and dtypes never change after ``init_state()``.

        Initial state does not depend on random numbers, and no two tensors share memory.
        """
        for dtype in self.dtypes:
            parameters, optimizer = self.made(dtype)
            start = facts(optimizer.state())
            strange = [name for name in start if "/" not in name or name.rpartition("/")[0] not in parameters]
            assert not strange, f"{dtype}: state {strange} must be named '<parameter name>/<slot>' for checkpoints"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(17)
                twin = self.made(dtype)[1].state()
            assert facts(twin) == start, f"{dtype}: two optimizers of the same parameters name their state differently"
            drawn = differing(bits(optimizer.state()), bits(twin))
            assert not drawn, (
                f"{dtype}: the initial state of {drawn} depends on the process's random numbers, so ranks start "
                "differently; seed a generator by the parameter's name"
            )
            shared = overlapping(optimizer.state())
            assert not shared, (
                f"{dtype}: {shared[0]} and {shared[1]} are in the same memory, so updates of one parameter change the "
                "state of another; allocate a tensor for each"
            )
            stepped(optimizer, parameters, [0, 1], self.device)
            later = facts(optimizer.state())
            assert later == start, (
                f"{dtype}: state after two steps differs from state after init_state(): only after "
                f"init_state() {sorted(start.items() - later.items())}, only after two steps "
                f"{sorted(later.items() - start.items())}; create "
                "all state in init_state(), because a checkpoint is loaded into it"
            )

    def test_a_resumed_optimizer_continues_bit_for_bit(self) -> None:
        """A new optimizer continues after the saved state was copied into its tensors; nothing else is saved."""
        for dtype in self.dtypes:
            parameters, optimizer = self.made(dtype)
            stepped(optimizer, parameters, [0, 1], self.device)
            resumed = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
            successor = self.build(resumed)
            successor.init_state()
            saved = {name: tensor.detach().clone() for name, tensor in optimizer.state().items()}
            with torch.no_grad():
                for name, tensor in successor.state().items():
                    tensor.copy_(saved[name])
            loaded = differing(bits(saved), bits(successor.state()))
            assert not loaded, f"{dtype}: copying into state() does not change {loaded}; return the tensors themselves"
            for step in (2, 3):
                stepped(optimizer, parameters, [step], self.device)
                stepped(successor, resumed, [step], self.device)
            changed = differing(bits(parameters) | bits(optimizer.state()), bits(resumed) | bits(successor.state()))
            assert not changed, (
                f"{dtype}: a resumed optimizer computes different {changed}; state() lacks something it remembers"
            )

    # --- learning rate

    def test_the_learning_rate_factor_multiplies_the_base_rate(self) -> None:
        """The learning-rate factor applies to every group and replaces earlier ones; zero changes no parameter."""
        steps = {factor: self.first_update(factor) for factor in (1.0, 0.5, 0.0)}
        moved = [name for name, update in steps[0.0].items() if update.any()]
        assert not moved, f"with a learning-rate factor of 0, {moved} move; multiply every group's rate by the factor"
        if self.linear_in_lr:
            for name, update in steps[1.0].items():
                what = f"the update of {name} with a learning-rate factor of 0.5, against half of that with 1"
                assert_close_values(steps[0.5][name], update / 2, what=what)
        _, optimizer = self.made(self.dtypes[0])
        base = optimizer.lr
        assert isinstance(base, float), f"lr is a {type(base).__name__}; it must be a float, for logging"
        for factor in (0.5, 0.25, 1.0):
            optimizer.set_lr_factor(factor)
            assert abs(optimizer.lr - factor * base) <= 1e-12 * base, (
                f"lr is {optimizer.lr:g} with a factor of {factor:g}, the base rate is {base:g}; a factor replaces the "
                "previous one, it does not multiply it"
            )

    def test_describe_is_plain_data_about_every_parameter(self) -> None:
        """``describe`` returns JSON values that name every parameter, for ``d9d explain``."""
        parameters, optimizer = self.made(self.dtypes[0])
        described = plain_json(optimizer.describe(), "describe()")
        assert isinstance(described, dict), f"describe() gives {described!r}; return group -> settings and names"
        assert described, "describe() is empty; return group -> settings and parameter names"
        named = _words(described)
        missing = [name for name in parameters if name not in named]
        assert not missing, f"describe() lacks {missing}; list the parameters of each group"

    # --- optional protocols

    def test_gradients_divided_in_the_step_count_as_if_divided_before(self) -> None:
        """Gradients that an optimizer divides inside the step give the same update as gradients divided before it.

        ``divide_gradients`` affects the next step only.
        """
        for dtype in self.dtypes:
            plain, one = self.made(dtype)
            divided, other = self.made(dtype)
            divides = isinstance(other, DividesGradients)
            if not divides:
                pytest.skip("the optimizer does not divide gradients")
            divisor = torch.tensor(3.0, device=self.device)
            for step in (0, 1):
                set_gradients(plain, step)
                set_gradients(divided, step)
                if step == 0:
                    torch._foreach_div_([p.grad for p in plain.values() if p.grad is not None], divisor)
                    other.divide_gradients(divisor)
                one.step(self.gate())
                other.step(self.gate())
            changed = differing(bits(plain) | bits(one.state()), bits(divided) | bits(other.state()))
            assert not changed, (
                f"{dtype}: gradients that are divided in the step give other {changed} than gradients divided before; "
                "divide each in its own dtype, in that step alone"
            )

    def test_evaluation_weights_are_there_inside_of_their_block_alone(self) -> None:
        """Inside ``evaluation_weights()``, if the optimizer has it, every parameter differs from its training values.

        After an exception in its block, parameters and state are restored bit for bit.
        """
        for dtype in self.dtypes:
            parameters, optimizer = self.made(dtype)
            averages = isinstance(optimizer, AveragesWeights)
            if not averages:
                pytest.skip("the optimizer does not average weights")
            stepped(optimizer, parameters, [0, 1, 2], self.device)
            before = bits(parameters) | bits(optimizer.state())
            with suppress(_EarlyEndError), optimizer.evaluation_weights():
                idle = sorted(parameters.keys() - set(differing(before, bits(parameters))))
                raise _EarlyEndError
            assert not idle, f"{dtype}: inside evaluation_weights(), {idle} have their training values"
            changed = differing(before, bits(parameters) | bits(optimizer.state()))
            assert not changed, (
                f"{dtype}: evaluation_weights() does not restore {changed} bit for bit; keep a copy, and restore it "
                "in a finally block"
            )

    # --- layouts

    def test_parameters_of_other_ranks_have_meta_state_and_change_nothing(self) -> None:
        """Parameters of other pipeline stages are on the meta device; their state is too, and updates ignore them."""
        for dtype in self.dtypes:
            whole, one = self.made(dtype)
            here = draw_parameters(self.shapes, dtype, self.device)
            away = list(here)[::2]
            for name in away:
                here[name] = nn.Parameter(here[name].to("meta"))
            other = self.build(here)
            other.init_state()
            assert facts(other.state()) == facts(one.state()), f"{dtype}: state differs if parameters are on meta"
            wrong = [n for n, t in other.state().items() if n.rpartition("/")[0] in away and not t.is_meta]
            assert not wrong, f"{dtype}: {wrong} are not on the meta device, as their parameters are; use zeros_like"
            for step in (0, 1):
                for optimizer, parameters in ((one, whole), (other, here)):
                    set_gradients(parameters, step)
                    for name in away:
                        parameters[name].grad = None
                    optimizer.step(self.gate())
            mine = {name: whole[name] for name in here if name not in away}
            changed = differing(bits(mine), bits(here))
            assert not changed, f"{dtype}: with parameters of other ranks on the meta device, {changed} differ"

    def test_sharded_parameters_are_updated_as_whole_ones(self) -> None:
        """Updates of DTensors over two ranks, sharded or replicated, match updates of plain tensors.

        Shards may be uneven or empty. State has the same names, full shapes, dtypes and initial values; a closed gate
        changes nothing.
        """
        for dtype in self.dtypes:
            results = World(2).run(
                optimizer_ranks.sharded_steps, self.address(), {k: list(v) for k, v in self.shapes.items()}, dtype
            )
            for rank, result in enumerate(results):
                where = f"{dtype}, rank {rank} of 2"
                assert not result["refused"], f"{where}: a closed gate changes {result['refused']}"
                # Drawn on the CPU, as on the ranks, because generators of other devices draw other gradients.
                whole = draw_parameters(self.shapes, dtype)
                optimizer = self.build(whole)
                optimizer.init_state()
                expected = facts({**whole, **optimizer.state()})
                assert result["facts"] == {name: [list(s), d] for name, (s, d) in expected.items()}, (
                    f"{where}: state of DTensors must have the names, full shapes and dtypes of plain state"
                )
                start = {name: tensor.detach().clone() for name, tensor in optimizer.state().items()}
                other = differing(bits(start), bits(result["start"]))
                assert not other, (
                    f"{where}: the initial state of {other} differs from the state in this process; it must not "
                    "depend on the process, such as on its random numbers, its id, or hash() of a text"
                )
                stepped(optimizer, whole, [0, 1], "cpu")
                for name, tensor in whole.items():
                    assert_close_values(result["parameters"][name], tensor.detach().cpu(), what=f"{where}: {name}")

    # --- helpers for subclasses

    def made(self, dtype: str) -> tuple[dict[str, nn.Parameter], Any]:
        """Parameters, and an optimizer with initialised state."""
        parameters = draw_parameters(self.shapes, dtype, self.device)
        optimizer = self.build(parameters)
        optimizer.init_state()
        return parameters, optimizer

    def gate(self, *, open_: bool = True) -> Tensor:
        """Gate of a step (0-d bool tensor) on the device under test."""
        return torch.tensor(open_, device=self.device)

    def first_update(self, factor: float) -> dict[str, Tensor]:
        """Parameter -> change by the first step."""
        parameters, optimizer = self.made("float32" if "float32" in self.dtypes else self.dtypes[0])
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        optimizer.set_lr_factor(0.3)
        optimizer.set_lr_factor(factor)
        stepped(optimizer, parameters, [0], self.device)
        return {name: parameter.detach() - before[name] for name, parameter in parameters.items()}


class _EarlyEndError(Exception):
    """Raised to end a block early."""


def _words(value: Any) -> set[str]:
    """All strings in nested lists and mappings, keys included."""
    if isinstance(value, str):
        return {value}
    walk: Callable[[Any], list[Any]] = lambda v: [*v, *v.values()] if isinstance(v, dict) else list(v)  # noqa: E731
    return set().union(*map(_words, walk(value))) if isinstance(value, dict | list) else set()
