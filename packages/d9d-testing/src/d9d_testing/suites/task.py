"""Conformance suite of tasks: loss sums, their weights, and observations."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.errors import D9dError
from d9d_core.first_pass import TwoPassTask
from d9d_core.task import SeesSteps, StageInputs, StatefulTask
from d9d_core.types import Microbatch
from torch import Tensor

from d9d_testing.suites.support import observations
from d9d_testing.suites.support.component import ComponentSuite, configured, plain_json
from d9d_testing.suites.support.tensors import HostReads, bits, differing
from d9d_testing.tolerances import Tolerance, assert_close_values

_Sums = dict[str, Tensor]


class TaskSuite(ComponentSuite):
    """Conformance suite of tasks (:class:`d9d_core.task.Task`).

    Subclass it and name the task::

        class TestMyTask(TaskSuite):
            target = "my_task"
            observes = ("token_loss", "targets")
            accepts = ({"vocab_size": 8}, {"vocab_size": 8})
            rejects = (({"vocab_size": 8}, {"vocab_size": 9}),)

    By default microbatches have the names of language modelling, and outputs are ``token_loss`` and ``class_logits``.
    For other tensors, override ``microbatch`` and ``outputs``.

    Attributes:
        samples: number of samples that ``microbatch`` can give.
        group: number of consecutive samples that belong together, such as 2 for a task that compares the samples 2 i
            and 2 i + 1 with each other; ``samples`` is a multiple of it. Microbatches are cut between groups only.
        float32_outputs: outputs that models give in float32 in any precision.
        observes: names of the observations; by default any, as long as they never change.
        accepts: fields of a model's config, and facts of data that fit it.
        rejects: pairs of config fields and facts that do not fit.
    """

    kind = "task"

    samples: ClassVar[int] = observations.SAMPLES
    group: ClassVar[int] = 1
    float32_outputs: ClassVar[Sequence[str]] = ("token_loss",)
    observes: ClassVar[Sequence[str] | None] = None
    accepts: ClassVar[tuple[Mapping[str, Any], Mapping[str, Any]]] = ({}, {})
    rejects: ClassVar[Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]] = ()

    # --- for subclasses to override

    def microbatch(self, samples: slice, *, counted: bool = True) -> Mapping[str, Tensor]:
        """Some of ``samples`` samples; equal in every call.

        Args:
            samples: samples to return.
            counted: if ``False``, no sample may count in any loss term that can ignore samples.
        """
        return observations.microbatch(samples, counted=counted)

    def outputs(self, microbatch: Microbatch, scale: Tensor) -> Mapping[str, Tensor]:
        """Outputs of a model's last stage: a function of each sample, times ``scale``, a 0-d parameter."""
        return observations.outputs(microbatch, scale)

    # --- tests

    def test_weights_depend_on_the_microbatch_alone(self) -> None:
        """Each loss term has a weight: a 0-d tensor without a graph, positive if samples count.

        ``weights`` reads no value on the host, and gives equal values after ``losses``.
        """
        task, batch = self.build(), self.whole()
        terms = dict(task.coefficients)
        assert terms, "coefficients is empty; name each loss term and its coefficient"
        assert all(isinstance(c, float | int) for c in terms.values()), f"coefficients {terms} must be numbers"
        with HostReads() as reads:
            weights = dict(task.weights(batch))
        assert not reads.found, f"weights() reads values on the host ({', '.join(reads.found)}); return tensors"
        assert weights.keys() >= terms.keys(), f"weights() lacks {sorted(terms.keys() - weights.keys())}"
        for term, weight in weights.items():
            assert isinstance(weight, Tensor), f"the weight of {term} is {weight!r}; return a 0-d tensor"
            assert weight.ndim == 0, f"the weight of {term} has shape {tuple(weight.shape)}; return a 0-d tensor"
            assert not weight.requires_grad, f"the weight of {term} carries a graph"
            assert weight >= 0, f"the weight of {term} is {weight.item():g}; it must not be negative"
        self.losses(task, batch)
        again = dict(task.weights(batch))
        assert not differing(bits(weights), bits(again)), "weights() gives other values after losses()"
        for term in terms:
            assert weights[term] > 0, f"the weight of {term} is zero although samples count; see microbatch()"

    def test_losses_are_float32_sums_with_a_graph(self) -> None:
        """Losses are finite 0-d float32 tensors with a graph, one per term."""
        task, batch = self.build(), self.whole()
        scale = torch.ones((), requires_grad=True)
        sums = task.losses(self.outputs(batch, scale), batch)
        missing = sorted(task.coefficients.keys() - sums.keys())
        assert not missing, f"losses() lacks the terms {missing} of coefficients"
        for term, value in sums.items():
            form = (value.ndim, value.dtype)
            assert form == (0, torch.float32), f"the loss {term} has {form[0]} dims and {form[1]}; return a 0-d float32"
            assert value.isfinite(), f"the loss {term} is {value.item()}"
        torch.autograd.backward([sums[term] for term in task.coefficients])
        assert scale.grad is not None, "no loss has a graph to the outputs; do not detach them"
        assert scale.grad.isfinite(), "the gradient of the losses is not finite"

    def test_parts_of_a_batch_add_up_to_the_whole(self) -> None:
        """Losses and weights are sums, not means: the loop divides once, by the weight over all ranks."""
        task = self.build()
        expected = self.sums(task, self.whole())
        groups = self.samples // self.group
        assert groups * self.group == self.samples, f"samples = {self.samples} is no multiple of group = {self.group}"
        for cut in (self.group * part for part in (1, groups // 2, groups - 1)):
            parts = [self.sums(task, self.microbatch(part)) for part in (slice(0, cut), slice(cut, self.samples))]
            for name, value in expected.items():
                what = (
                    f"{name} of {cut} and {self.samples - cut} samples added, compared with all at once (sum, no mean)"
                    + (f"; groups are {self.group} neighbouring samples" if self.group > 1 else "")
                )
                assert_close_values(parts[0][name] + parts[1][name], value, what=what)

    def test_a_batch_twice_has_twice_the_sums(self) -> None:
        """A batch with each sample twice has twice the sums, so that step losses do not depend on the batch size."""
        task, batch = self.build(), self.whole()
        double = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
        expected = self.sums(task, batch)
        for name, value in self.sums(task, double).items():
            assert_close_values(value, 2 * expected[name], what=f"{name} of a doubled batch, against twice the sum")

    def test_weights_count_what_losses_sum(self) -> None:
        """The mean loss of copies of one group, some of which do not count, equals the loss of one copy.

        A group of samples with a weight has a loss, and a group without weight has no loss.
        """
        task = self.build()
        groups = [slice(first, first + self.group) for first in range(0, self.samples, self.group)]
        for part in groups:
            self._weight_and_loss_agree(task, part)
        one = next(
            part for part in groups if all(task.weights(self.microbatch(part))[term] > 0 for term in task.coefficients)
        )
        alone = self.means(task, self.microbatch(one))
        parts = [self.microbatch(one, counted=counted) for counted in (True, False, False, True, False)]
        mixed = self.means(task, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        for term, mean in alone.items():
            what = (
                f"the mean of {term} over five equal samples of which two count, compared with one; weights() must "
                "count exactly the samples or positions that losses() sums"
            )
            assert_close_values(mixed[term], mean, what=what)

    def test_what_does_not_count_has_no_loss_and_no_nan(self) -> None:
        """A term of zero weight has zero loss and a zero, finite gradient."""
        task, batch = self.build(), dict(self.microbatch(slice(0, self.samples), counted=False))
        weights = task.weights(batch)
        silent = [term for term in task.coefficients if not weights[term]]
        assert silent, (
            "no term has zero weight although no sample counts; if each sample always counts, override microbatch()"
        )
        scale = torch.ones((), requires_grad=True)
        sums = task.losses(self.outputs(batch, scale), batch)
        for term in task.coefficients:
            value = sums[term].item()
            assert math.isfinite(value), f"the loss {term} is {value} where nothing counts; sum, do not divide"
        for term in silent:
            assert sums[term] == 0, f"{term} has zero weight and a loss of {sums[term].item():g}; it must be zero"
        torch.autograd.backward([sums[term] for term in silent])
        assert scale.grad is None or scale.grad == 0, f"terms of zero weight have a gradient of {scale.grad}"

    def test_inputs_are_what_the_microbatch_has(self) -> None:
        """The first stage gets at least one tensor; no input is given both to the first stage and to all stages.

        The task does not change the microbatch.
        """
        task, batch = self.build(), self.whole()
        before = bits(batch)
        inputs = task.inputs(batch)
        assert isinstance(inputs, StageInputs), f"inputs() returns a {type(inputs).__name__}; return StageInputs"
        assert inputs.first, "inputs() gives the first stage nothing"
        both = sorted(inputs.first.keys() & inputs.shared.keys())
        assert not both, f"inputs() gives {both} to the first stage and to all; name each once"
        for name, tensor in {**inputs.first, **inputs.shared}.items():
            assert isinstance(tensor, Tensor), f"input {name} is a {type(tensor).__name__}; inputs are tensors"
        self.losses(task, batch)
        task.observations(self.outputs(batch, torch.ones(())), batch)
        changed = differing(before, bits(batch))
        assert not changed, f"the task writes into {changed} of the microbatch"

    def test_what_the_record_reads_is_what_the_task_needs(self) -> None:
        """The record's ``reads`` lists exactly the required tensors, because datasets are accepted by this list."""
        spec = configured(self.kind, self.plugin, self.target, self.config)[0]
        batch = self.whole()
        found = {name: batch[name].ndim for name in spec.reads if name in batch}
        assert found == spec.reads, (
            f"the record states that the task reads {spec.reads}, but microbatch() has only {found} of these"
        )
        for name in sorted(spec.reads):
            with pytest.raises((D9dError, KeyError)):  # noqa: PT012 - raised by the first method that reads it
                self._run({other: tensor for other, tensor in batch.items() if other != name}, batch)
                raise AssertionError(f"the task works without {name}, which its record lists in reads; remove it")
        # microbatches of two-pass tasks also need the first pass's tensors
        if spec.reads and not isinstance(self.build(), TwoPassTask):
            self._run({name: batch[name] for name in spec.reads}, batch)

    def test_tokens_are_counted_without_waiting(self) -> None:
        """``count`` does not wait for the device: it uses shapes, or counts on the device if positions are padding."""
        task, batch = self.build(), self.whole()
        shapes = {name: tensor.to("meta") for name, tensor in batch.items()}
        count = task.count(shapes)
        if isinstance(count, Tensor):
            with HostReads() as reads:
                counted = task.count(batch)
            assert not reads.found, f"count() reads values on the host ({', '.join(reads.found)}); return a tensor"
            form = (counted.ndim, counted.dtype.is_floating_point)
            assert form == (0, False), f"count() has {counted.ndim} dims and {counted.dtype}; return 0-d integers"
            count = counted.item()
        else:
            assert type(count) is int, f"count() returns a {type(count).__name__}; return an int, or a 0-d tensor"
            assert count == task.count(batch), "count() depends on values; use shapes alone, or return a tensor"
        assert count > 0, f"count() is {count}"

    def test_sums_are_made_in_float32_whatever_the_outputs_are(self) -> None:
        """Outputs in bfloat16 give the losses of the same numbers in float32, because sums of many samples need it."""
        task, batch = self.build(), self.whole()
        outputs = self.outputs(batch, torch.ones((), requires_grad=True))
        narrow = {
            name: value.bfloat16() if value.is_floating_point() and name not in self.float32_outputs else value
            for name, value in outputs.items()
        }
        wide = {name: value.to(outputs[name].dtype) for name, value in narrow.items()}
        found, expected = (task.losses(given, batch) for given in (narrow, wide))
        for term in task.coefficients:
            what = f"the loss {term} of outputs in bfloat16, against the same numbers in float32 (begin with .float())"
            assert_close_values(
                found[term], expected[term], Tolerance(rtol=1e-4, atol=1e-6, angle=0, norm=0), what=what
            )

    def test_a_resumed_task_continues(self) -> None:
        """A new task with the saved state computes the same; values that follow from the step number need no state."""
        first, batch = self.build(), self.whole()
        stateful, steps = isinstance(first, StatefulTask), isinstance(first, SeesSteps)
        if not stateful and not steps:
            pytest.skip("the task has neither state nor steps")
        state = None
        for step in range(4):
            if stateful and step == 3:
                state = plain_json(first.state(), "state()")
            if steps:
                first.begin_step(step)
            self.sums(first, batch)
        second = self.build()
        if state is not None:
            second.load_state(state)
            again = plain_json(second.state(), "state()")
            assert again == state, f"after load_state({state!r}) the state is {again!r}; load all that state() returns"
        if steps:
            second.begin_step(3)
        self.sums(second, batch)
        for what, of in {"coefficients": lambda task: dict(task.coefficients), "losses": self._numbers}.items():
            found, expected = of(second), of(first)
            assert found == expected, (
                f"{what} of a task that begins at step 3 with the saved state are {found}, of a task that made all "
                f"steps {expected}; compute them from the step that begin_step() gets, or from the saved state"
            )

    def test_nothing_of_a_microbatch_is_kept(self) -> None:
        """Losses and outputs are freed at most two microbatches later, because each holds a forward's activations."""
        task = self.build()
        alive: list[tuple[str, weakref.ref[Tensor]]] = []
        for part in (slice(0, self.group), slice(0, self.samples), slice(0, self.samples)):
            batch = dict(self.microbatch(part))
            outputs = dict(self.outputs(batch, torch.ones((), requires_grad=True)))
            losses = dict(task.losses(outputs, batch))
            observed = dict(task.observations(outputs, batch))
            if len(alive) == 0:
                alive += [(f"the output {name}", weakref.ref(value)) for name, value in outputs.items()]
                alive += [(f"the loss {name}", weakref.ref(value)) for name, value in losses.items()]
            del batch, outputs, losses, observed
        gc.collect()
        kept = [name for name, reference in alive if reference() is not None]
        assert not kept, (
            f"the task keeps {', '.join(kept)} of a microbatch with its graph, two microbatches later; keep detached "
            "numbers at most"
        )

    def test_observations_are_detached_tensors_of_fixed_names(self) -> None:
        """Observations are detached and have the same names in every microbatch, because metrics find them by name."""
        task = self.build()
        names = set()
        for part in (slice(0, self.samples), slice(0, self.group), slice(2 * self.group, 5 * self.group)):
            batch = self.microbatch(part)
            seen = task.observations(self.outputs(batch, torch.ones((), requires_grad=True)), batch)
            names.add(tuple(sorted(seen)))
            for name, value in seen.items():
                assert isinstance(value, Tensor), f"observation {name} is a {type(value).__name__}; observe tensors"
                assert not value.requires_grad, f"observation {name} carries a graph; detach it"
        assert len(names) == 1, f"observations have different names: {sorted(names)}"
        if self.observes is not None:
            (found,) = names
            assert set(found) == set(self.observes), f"observed are {list(found)}, declared {sorted(self.observes)}"

    def test_check_takes_what_fits_and_facts_that_are_unknown(self) -> None:
        """``check`` accepts fitting facts and missing ones, because no facts are known while a job is planned."""
        model, known = self.accepts
        for facts in (known, {}):
            self.build().check(SimpleNamespace(**model), dict(facts))

    def test_check_refuses_what_it_cannot_use(self) -> None:
        """``check`` refuses a model and data that do not fit, before anything is built."""
        if not self.rejects:
            pytest.skip(f"{type(self).__name__}.rejects names no model and data that do not fit")
        for model, known in self.rejects:
            with pytest.raises(D9dError) as refusal:
                self.build().check(SimpleNamespace(**model), dict(known))
            assert str(refusal.value), f"a model with {dict(model)} is refused without a reason"

    def _numbers(self, task: Any) -> dict[str, float]:
        return {name: value.item() for name, value in self.sums(task, self.whole()).items()}

    def _weight_and_loss_agree(self, task: Any, part: slice) -> None:
        batch = self.microbatch(part)
        weights = task.weights(batch)
        found: dict[str, list[float]] = {term: [] for term in task.coefficients}
        for factor in (1.0, -1.0):  # for one of the two factors, a hinge loss may be zero
            sums = task.losses(self.outputs(batch, torch.tensor(factor, requires_grad=True)), batch)
            for term, values in found.items():
                values.append(sums[term].item())
        for term, losses in found.items():
            weight = weights[term].item()
            where = f"{term} of the samples {part.start} to {part.stop - 1}"
            hint = "weights() must count exactly the samples or positions that losses() sums"
            assert weight or not any(losses), f"{where} has no weight, but a loss of {losses[0]:g}; {hint}"
            assert not weight or any(losses), f"{where} has a weight of {weight:g}, but no loss; {hint}"

    def _run(self, batch: Microbatch, whole: Microbatch) -> None:
        """Call each method of a new task on a microbatch, with the outputs of a model for the complete microbatch."""
        task = self.build()
        task.count(batch)
        if isinstance(task, TwoPassTask):
            task.first_inputs(batch)
        task.weights(batch)
        task.inputs(batch)
        outputs = self.outputs(whole, torch.ones((), requires_grad=True))
        task.losses(outputs, batch)
        task.observations(outputs, batch)

    # --- helpers for subclasses

    def whole(self) -> dict[str, Tensor]:
        """Microbatch with all samples."""
        return dict(self.microbatch(slice(0, self.samples)))

    def losses(self, task: Any, batch: Microbatch) -> _Sums:
        """Loss sums of a task by term."""
        sums = task.losses(self.outputs(batch, torch.ones((), requires_grad=True)), batch)
        return {term: sums[term].detach() for term in task.coefficients}

    def sums(self, task: Any, batch: Microbatch) -> _Sums:
        """Loss sums and weights of a task, by their names in messages."""
        weights, losses = task.weights(batch), self.losses(task, batch)
        return {f"the loss {t}": losses[t] for t in losses} | {f"the weight of {t}": weights[t].float() for t in losses}

    def means(self, task: Any, batch: Microbatch) -> _Sums:
        """Loss divided by weight, by term."""
        weights = task.weights(batch)
        return {term: value / weights[term] for term, value in self.losses(task, batch).items()}
