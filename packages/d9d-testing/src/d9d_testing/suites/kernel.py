"""Conformance suite of kernels: compares values and gradients of a backend with its op's reference."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.kernel import Decision, OpSignature, OpSlot
from d9d_core.plugin import KernelSpec
from torch import Tensor

from d9d_testing.operators import OperatorCounter
from d9d_testing.suites.support.calls import Call
from d9d_testing.suites.support.component import registry_of
from d9d_testing.suites.support.ops import KNOWN_OPS, Op
from d9d_testing.suites.support.tensors import bits, differing
from d9d_testing.tolerances import TOLERANCES, Tolerance, assert_close_gradients, assert_close_values, tolerance

_Results = dict[str, Tensor]


class KernelSuite:
    """Conformance suite of kernels, the backends of ops (:class:`d9d_core.plugin.KernelSpec`).

    Subclass it and name op and backend::

        class TestMyKernel(KernelSuite):
            target = "rms_norm.my_kernel"
            device = "cuda"

    Calls and shapes are known for the ops of d9d-nn, d9d-moe, d9d-optim and d9d-parallel. For another op, override
    ``op`` (:class:`d9d_testing.suites.support.ops.Op`).

    Attributes:
        target: ``op.name`` of the record.
        plugin: declaration module, or path of a single-file plugin; by default, any installed plugin.
        device: device of the tensors; for ``cuda``, mark the class ``@pytest.mark.gpu`` or skip it without a GPU.
        asked: device in the signatures passed to ``supports``; by default ``device``. Set ``cuda`` for a backend whose
            GPU library is replaced by a stand-in on the CPU.
        dtypes: dtypes of the inputs; dtypes that ``supports`` refuses are skipped, but it must accept at least one.
        gradients: whether the backend has a backward.
        tolerances: tolerances of values and gradients, by dtype; replace them for backends that round more on purpose.
        refused: changes of an accepted signature that ``supports`` must refuse: ``device``, ``dtype`` or static facts.
    """

    pytestmark = pytest.mark.smoke

    target: ClassVar[str]
    plugin: ClassVar[str | None] = None
    device: ClassVar[str] = "cpu"
    asked: ClassVar[str | None] = None
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "float16")
    gradients: ClassVar[bool] = True
    tolerances: ClassVar[Mapping[torch.dtype, Tolerance]] = TOLERANCES
    refused: ClassVar[Sequence[Mapping[str, Any]]] = ({"dtype": "int8"},)

    # --- for subclasses to override

    def op(self) -> Op:
        """Description of the op under test, with example calls as in models."""
        name = self.target.partition(".")[0]
        assert name in KNOWN_OPS, f"override {type(self).__name__}.op with the calls of '{name}'"
        known = KNOWN_OPS[name]
        pytest.importorskip(known.package, reason=f"the reference of '{name}' is in {known.package}")
        return known

    def takes(self, call: Call) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the backend supports a call; override it for limits that a signature cannot express."""
        return True

    def function(self, signature: OpSignature) -> Callable[..., Any]:
        """Function that the backend's record builds."""
        built: Callable[..., Any] = self.spec().build.load()(signature)
        return built

    def operators(self) -> Sequence[str]:
        """Patterns of torch operator names in the backend's record."""
        return self.spec().operators

    # --- tests

    def test_values_are_those_of_the_reference(self) -> None:
        """Values match the reference op in float64, over dtypes and odd shapes.

        The shape and the dtype of an output must equal the shape and the dtype that the reference op returns for inputs
        of the same dtype.
        """
        for where, signature, call in self.accepted():
            with torch.no_grad():
                found, expected = self.run(signature, call)["out"], self.exact(call)["out"]
                plain = self.reference(call)["out"]
            form = (tuple(plain.shape), plain.dtype)
            assert (tuple(found.shape), found.dtype) == form, (
                f"{where}: the output is {tuple(found.shape)} {found.dtype}, the reference's {form[0]} {form[1]}"
            )
            within = self.tolerances[getattr(torch, signature.dtype)]
            scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
            assert_close_values(found, expected, replace(within, atol=within.atol * scale), where)

    def test_gradients_are_those_of_the_reference(self) -> None:
        """Gradients of all differentiable inputs match by angle and norm, also for an expanded output gradient."""
        self.need_gradients()
        for where, signature, call in self.accepted():
            within = self.tolerances[getattr(torch, signature.dtype)]
            for expanded in (False, True):
                found = self.run(signature, call, backward=True, expanded=expanded)
                expected = self.exact(call, backward=True, expanded=expanded)
                for name, gradient in _gradients(expected).items():
                    assert name in found, f"{where}: no gradient of {name}"
                    assert found[name].shape == gradient.shape, f"{where}: gradient of {name}: {found[name].shape}"
                    if not gradient.numel():
                        continue
                    if self.is_rounding(gradient, call):
                        limit = 100 * within.atol * max(1.0, gradient.abs().max().item())
                        assert (found[name] - gradient).abs().max() <= limit, f"{where}: gradient of {name} is not zero"
                        continue
                    what = f"{where}, {'expanded' if expanded else 'random'} gradient: {name}"
                    assert_close_gradients({what: found[name]}, {what: gradient}, within)

    def test_a_frozen_input_has_no_gradient_and_disturbs_no_other(self) -> None:
        """If only one input requires a gradient, only this input gets one: the same as if all inputs required one."""
        self.need_gradients()
        for where, signature, call in self.accepted(first=True):
            everything = self.run(signature, call, backward=True)
            for name in self.differentiable(call):
                found = self.run(signature, call, backward=True, trained=(name,))
                others = [other for other in _gradients(found) if other != name]
                assert not others, f"{where}: only {name} is trained, but there are gradients of {others}"
                assert name in found, f"{where}: only {name} is trained, but it has no gradient"
                assert_close_gradients({name: found[name]}, {name: everything[name]})

    def test_inputs_are_only_read(self) -> None:
        """The backend must not write to its inputs, which are activations and weights of the model."""
        for where, signature, call in self.accepted():
            inputs = {name: tensor.clone() for name, tensor in call.inputs.items()}
            before = bits(inputs)
            self.run(signature, replace(call, inputs=inputs), backward=self.gradients, clone=False)
            changed = differing(before, bits(inputs))
            assert not changed, f"{where}: writes into its inputs {changed}"

    def test_an_output_stays_as_it_is(self) -> None:
        """A later call of the backend must not change the output of an earlier call, which the model still needs."""
        for where, signature, call in self.accepted(first=True):
            first = self.run(signature, call)["out"]
            before = bits({"the output": first})
            inputs = {name: t.roll(1, 0) if t.is_floating_point() else t for name, t in call.inputs.items()}
            again = self.run(signature, replace(call, inputs=inputs))["out"]
            changed = differing(before, bits({"the output": first}))
            assert not changed, (
                f"{where}: a second call changes the output of the first one; allocate each output anew, because "
                "models and autograd keep it"
            )
            del again

    def test_inputs_need_not_be_contiguous(self) -> None:
        """Values and gradients are right for inputs that are views, such as the outputs of a projection."""
        for where, signature, call in self.accepted():
            inputs = {name: _strided(tensor) for name, tensor in call.inputs.items()}
            found = self.run(signature, replace(call, inputs=inputs), backward=self.gradients, clone=False)
            expected = self.run(signature, call, backward=self.gradients)
            for name, tensor in expected.items():
                within = tolerance(found[name], tensor)
                # For other strides, libraries sum in another order: an element near zero may then be off by a fraction
                # of the largest element.
                scale = max(1.0, tensor.abs().max().item()) if tensor.numel() else 1.0
                what = f"{where}, inputs that are not contiguous: {name}"
                assert_close_values(found[name], tensor, replace(within, atol=within.atol * scale), what)

    def test_support_is_decided_with_reasons(self) -> None:
        """``supports`` answers equal signatures equally and gives a reason, which ``d9d explain`` prints."""
        decisions = []
        for _, signature, _ in self.calls():
            first, again = self.decision(signature), self.decision(signature)
            assert isinstance(first, Decision), f"supports() returns a {type(first).__name__}; return a Decision"
            assert first == again, f"supports() answers {first} and then {again} to {signature}"
            assert first.reason.strip(), f"supports() gives no reason for {signature}"
            decisions.append(first)
        accepting = [decision for decision in decisions if decision.accept]
        reasons = sorted({decision.reason for decision in decisions})
        assert accepting, (
            f"supports() refuses everything on {self.asked or self.device} in {', '.join(self.dtypes)}: "
            f"{'; '.join(reasons)}; set device, asked or dtypes of {type(self).__name__}"
        )

    def test_what_it_cannot_compute_is_refused(self) -> None:
        """``supports`` refuses with a reason instead of raising, so that the selector can choose another backend."""
        _, signature, _ = next(iter(self.accepted()))
        for changes in self.refused:
            facts = dict(changes)
            changed = replace(
                signature,
                device=facts.pop("device", signature.device),
                dtype=facts.pop("dtype", signature.dtype),
                static={**signature.static, **facts},
            )
            try:
                decision = self.decision(changed)
            except Exception as error:
                raise AssertionError(f"supports() raises {error!r} for {changed}; return a Decision") from error
            assert not decision.accept, f"supports() accepts {changed}"
            assert decision.reason.strip(), f"supports() refuses {changed} without a reason"

    def test_an_operator_that_it_names_computes_the_output(self) -> None:
        """A torch operator that the record names runs in a call, so that checkpointed blocks can keep its output."""
        patterns = self.operators()
        for where, signature, call in self.accepted(first=True) if patterns else ():
            with OperatorCounter() as counter, torch.no_grad():
                self.run(signature, call)
            named = [name for name in counter.counts if any(fnmatch.fnmatchcase(name, each) for each in patterns)]
            assert named, f"{where}: runs {', '.join(counter.counts)}, none of its record's {', '.join(patterns)}"

    # --- helpers for subclasses

    def spec(self) -> KernelSpec:
        """Record of the kernel under test."""
        spec = registry_of(self.plugin).find("kernel", self.target).spec
        assert isinstance(spec, KernelSpec)
        return spec

    def decision(self, signature: OpSignature) -> Any:
        """Decision of the backend on a signature."""
        return self.spec().supports.load()(signature)

    def calls(self) -> Iterator[tuple[str, OpSignature, Call]]:
        """Yield name, signature and call of each example call of the op, in each dtype of the suite."""
        name = self.target.partition(".")[0]
        for dtype in self.dtypes:
            for call in self.op().calls():
                inputs = {n: _cast(t, getattr(torch, dtype)).to(self.device) for n, t in call.inputs.items()}
                signature = OpSignature(
                    name, self.asked or self.device, dtype, dict(call.static), documents=call.documents
                )
                yield f"{dtype}, {call.name}", signature, replace(call, inputs=inputs)

    def accepted(self, *, first: bool = False) -> Iterator[tuple[str, OpSignature, Call]]:
        """Yield the calls that ``supports`` accepts.

        Args:
            first: yield only one call per dtype.
        """
        found: set[str] = set()
        for where, signature, call in self.calls():
            if not (first and signature.dtype in found) and self.decision(signature).accept and self.takes(call):
                found.add(signature.dtype)
                yield where, signature, call
        assert found, "supports() accepts no call; see test_support_is_decided_with_reasons"

    def need_gradients(self) -> None:
        """Skip the test if the backend has no backward."""
        if not self.gradients:
            pytest.skip(f"{type(self).__name__}.gradients is False")

    def run(self, signature: OpSignature, call: Call, **options: Any) -> _Results:
        """Output of the backend for a call, and with ``backward`` the gradients of its inputs."""
        slot = self.op().slot(call.static)
        slot.bind(self.target.partition(".")[2], self.function(signature))
        return self.compute(slot, call, **options)

    def reference(self, call: Call, **options: Any) -> _Results:
        """Output of the op's reference in the dtype of the call, and with ``backward`` the gradients of its inputs."""
        return self.compute(self.op().slot(call.static), call, **options)

    def exact(self, call: Call, **options: Any) -> _Results:
        """Output of the op's reference in float64, and with ``backward`` the gradients of its inputs."""
        wide = {name: _cast(tensor, torch.float64) for name, tensor in call.inputs.items()}
        return self.reference(replace(call, inputs=wide), **options)

    def compute(
        self,
        slot: OpSlot,
        call: Call,
        *,
        backward: bool = False,
        expanded: bool = False,
        trained: Sequence[str] | None = None,
        clone: bool = True,
    ) -> _Results:
        """Call an op slot; return its output as ``out`` and, with ``backward``, gradients of trained inputs by name."""
        inputs = {name: tensor.detach().clone() if clone else tensor for name, tensor in call.inputs.items()}
        trained = self.differentiable(call) if trained is None else trained
        leaves = {name: inputs[name].detach().requires_grad_() for name in trained if backward}
        out = self.op().invoke(slot, replace(call, inputs={**inputs, **leaves}))
        found = {"out": out.detach()}
        if backward:
            drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
            grad = torch.ones((), dtype=out.dtype).to(out.device).expand_as(out)
            given = grad if expanded else drawn.to(out.device, out.dtype)
            kept = given.clone()
            torch.autograd.backward(out, given)
            assert torch.equal(kept, given), (
                f"{call.name}: the backward writes into the gradient of its output, which other operations read, too"
            )
            found |= {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return found

    def differentiable(self, call: Call) -> list[str]:
        """Names of the floating-point inputs that models differentiate."""
        inputs = call.inputs.items()
        return [name for name, tensor in inputs if tensor.is_floating_point() and name not in call.constants]

    def is_rounding(self, gradient: Tensor, call: Call) -> bool:
        """Whether a float64 gradient consists of rounding errors only, so that its direction is meaningless."""
        largest = max((t.abs().max().item() for t in call.inputs.values() if t.numel()), default=0.0)
        return gradient.abs().max().item() <= 1e-9 * max(1.0, largest)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _gradients(results: _Results) -> _Results:
    return {name: tensor for name, tensor in results.items() if name != "out"}


def _strided(tensor: Tensor) -> Tensor:
    """View with equal values that uses every second element of its memory."""
    wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    wide.fill_(-1)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view
