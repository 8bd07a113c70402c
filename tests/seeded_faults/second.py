"""Second list of faults: saved state, metrics, samples of a microbatch, updates, and values that ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from d9d_core.tensors import local
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.distributed.positions import ZigzagPositions
from d9d_engine.job import Job
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.clip import Clipper
from d9d_engine.step.executor import Executor
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.tied import Ties
from d9d_moe.router import top_k
from d9d_parallel.context_parallel.forwards import ExchangedHeads
from d9d_parallel.tensor_parallel import forwards
from d9d_pipeline.runtime.transfers import Transfers
from torch import Tensor, nn

from seeded_faults.data import IGNORED
from seeded_faults.seeding import Patch, built, is_last, packs, saved, wrapped

# Saved and restored state.


def saved_place_behind(_job: Job, patch: Patch) -> None:
    """Each save has the position of the first sample."""

    def change(trainer: Any) -> None:
        start = trainer.prefetcher.state()
        trainer.prefetcher.state = lambda: start

    built(patch, change, everywhere=True)


def unsaved_metrics(_job: Job, patch: Patch) -> None:
    """The state of metrics is saved as zeros."""
    tensors = Statistics.tensors
    patch.setattr(Statistics, "tensors", lambda self: {n: torch.zeros_like(t) for n, t in tensors(self).items()})


def unloaded_metrics(_job: Job, patch: Patch) -> None:
    """The state of metrics is not loaded when a run resumes."""
    patch.setattr(Statistics, "load", lambda _self, _known: [])


def metrics_counted_again(_job: Job, patch: Patch) -> None:
    """After a save, one rank still holds its own share of the metrics, which the first rank holds too."""
    tensors = Statistics.tensors

    def kept(self: Any) -> Any:
        own = {name: {key: t.clone() for key, t in metric.state().items()} for name, metric in self._metrics.items()}
        merged = tensors(self)
        if is_last():
            for name, metric in self._metrics.items():
                metric.load_state(own[name])
        return merged

    patch.setattr(Statistics, "tensors", kept)
    # A load would hide it.
    patch.setattr(Statistics, "load", lambda _self, _known: [])


def unloaded_buffers(_job: Job, patch: Patch) -> None:
    """One rank does not load the selection bias of its experts when it resumes."""
    load_into = Checkpoint.load_into

    def partly(self: Any, tensors: Any, scope: str = "", *rest: Any, **more: Any) -> None:
        if is_last():
            tensors = {name: t.clone() if name.endswith("bias") else t for name, t in tensors.items()}
        load_into(self, tensors, scope, *rest, **more)

    patch.setattr(Checkpoint, "load_into", partly)


def crossed_moments(_job: Job, patch: Patch) -> None:
    """One rank loads its second moments from the first ones."""
    load_into = Checkpoint.load_into

    def crossed(self: Any, tensors: Any, scope: str = "", *rest: Any, **more: Any) -> None:
        load_into(self, tensors, scope, *rest, **more)
        if scope == "optimizer/" and is_last():
            for name, tensor in tensors.items():
                first = tensors.get(name.replace("exp_avg_sq", "exp_avg"))
                if name.endswith("exp_avg_sq") and first is not None:
                    local(tensor).copy_(local(first).abs())

    patch.setattr(Checkpoint, "load_into", crossed)


def rounded_save(_job: Job, patch: Patch) -> None:
    """One rank saves its shards rounded to bfloat16."""
    saved(patch, lambda tensor: tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor)


def saved_zeros(_job: Job, patch: Patch) -> None:
    """One rank saves zeros in place of its last row."""

    def without(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or len(tensor) < 2:
            return tensor
        changed = tensor.clone()
        changed[-1] = 0
        return changed

    saved(patch, without)


# Numbers that are logged, and evaluation.


def one_token_more(_job: Job, patch: Patch) -> None:
    """One rank counts one token too many in each microbatch."""
    patch.setattr(CheckedTask, "count", lambda self, microbatch: self._task.count(microbatch) + int(is_last()))


def swapped_terms(_job: Job, patch: Patch) -> None:
    """The means of two loss terms are logged under each other's names."""
    clip = Clipper.clip

    def swapped(self: Any, *given: Any) -> Any:
        result = clip(self, *given)
        return replace(result, terms=dict(zip(result.terms, reversed(result.terms.values()), strict=True)))

    patch.setattr(Clipper, "clip", swapped)


def louder_log(_job: Job, patch: Patch) -> None:
    """One rank adds 1 % to the loss that it logs, but not to the loss that it trains on."""
    clip = Clipper.clip

    def louder(self: Any, loss: Any, tokens: Any) -> Any:
        share = 1.01 if is_last() else 1.0
        return clip(self, replace(loss, terms={name: share * term for name, term in loss.terms.items()}), tokens)

    patch.setattr(Clipper, "clip", louder)


def evaluated_without_average(_job: Job, patch: Patch) -> None:
    """Evaluations use the training weights of an optimizer that averages."""
    built(patch, lambda trainer: setattr(trainer.step, "evaluation_weights", nullcontext), everywhere=True)


def evaluated_without_average_on_a_rank(_job: Job, patch: Patch) -> None:
    """One rank evaluates its training weights, the others evaluate averages."""
    built(patch, lambda trainer: setattr(trainer.step, "evaluation_weights", nullcontext))


def evaluated_without_last_targets(_job: Job, patch: Patch) -> None:
    """One rank leaves the last target of each sample out of the evaluation."""

    def change(trainer: Any) -> None:
        prefetcher = trainer.evaluator.sets[0].prefetcher
        take = prefetcher.next

        def taken() -> Any:
            pack = take()
            for microbatch in pack:
                microbatch["targets"][:, -1] = IGNORED
            return pack

        prefetcher.next = taken

    built(patch, change)


# Samples of a microbatch.


def swapped_targets(_job: Job, patch: Patch) -> None:
    """On one rank, two samples of a microbatch have each other's targets."""
    packs(patch, lambda microbatch: microbatch["targets"].copy_(microbatch["targets"].flip(0)))


def first_sample_only(_job: Job, patch: Patch) -> None:
    """One rank trains on the first sample of each microbatch only."""
    packs(patch, lambda microbatch: microbatch["targets"][1:].fill_(IGNORED))


def repeated_sample(_job: Job, patch: Patch) -> None:
    """On one rank, all samples of a microbatch are the first one."""
    packs(patch, lambda m: [tensor.copy_(tensor[:1].expand_as(tensor).clone()) for tensor in m.values()])


def swapped_documents(_job: Job, patch: Patch) -> None:
    """On one rank, two samples of a microbatch have each other's borders of documents."""
    packs(patch, lambda microbatch: microbatch["documents"].copy_(microbatch["documents"].flip(0)))


# Updates.


def frozen_norms(_job: Job, patch: Patch) -> None:
    """One rank never updates the weights of norms."""

    def change(trainer: Any) -> None:
        norms = [p for name, p in trainer.stage.named_parameters() if "norm" in name]
        before = [local(parameter).detach().clone() for parameter in norms]

        def undo(_gate: Tensor) -> None:
            with torch.no_grad():
                for parameter, value in zip(norms, before, strict=True):
                    local(parameter).copy_(value)

        wrapped(trainer.step.optimizer, "step", undo)

    built(patch, change)


def longer_updates_of_norms(_job: Job, patch: Patch) -> None:
    """One rank updates the weights of norms by 20 % more."""
    _updates(patch, "norm", 0.2)


def longer_updates_of_the_head(_job: Job, patch: Patch) -> None:
    """One rank updates the head by 10 % more."""
    _updates(patch, "heads", 0.1)


def _updates(patch: Patch, of: str, more: float) -> None:
    def change(trainer: Any) -> None:
        own = [p for name, p in trainer.stage.named_parameters() if of in name]
        step = trainer.step.optimizer.step

        def further(gate: Tensor) -> None:
            before = [local(parameter).detach().clone() for parameter in own]
            step(gate)
            with torch.no_grad():
                for parameter, value in zip(own, before, strict=True):
                    local(parameter).add_(more * (local(parameter) - value))

        trainer.step.optimizer.step = further

    built(patch, change)


def large_epsilon(_job: Job, patch: Patch) -> None:
    """One rank adds 1e-4 in place of 1e-8 to the roots of second moments."""

    def change(trainer: Any) -> None:
        optimizer = trainer.step.optimizer
        optimizer._config = optimizer._config.model_copy(update={"eps": 1e-4})

    built(patch, change)


def rounded_moments(_job: Job, patch: Patch) -> None:
    """One rank rounds first moments to bfloat16 after each step."""
    _state(patch, "exp_avg", lambda tensor: tensor.bfloat16().to(tensor.dtype))


def longer_second_moments(_job: Job, patch: Patch) -> None:
    """One rank's second moments are 5 % too large after each step."""
    _state(patch, "exp_avg_sq", lambda tensor: 1.05 * tensor)


def _state(patch: Patch, slot: str, change: Callable[[Tensor], Tensor]) -> None:
    def changed(trainer: Any) -> None:
        def after(_gate: Tensor) -> None:
            for name, tensor in trainer.step.optimizer.state().items():
                if name.endswith(f"/{slot}") and tensor.device.type != "meta":
                    local(tensor).copy_(change(local(tensor)))

        wrapped(trainer.step.optimizer, "step", after)

    built(patch, changed)


def skipped_step(_job: Job, patch: Patch) -> None:
    """One rank skips its second update."""

    def change(trainer: Any) -> None:
        step = trainer.step.optimizer.step
        calls: list[None] = []

        def but_one(gate: Tensor) -> None:
            calls.append(None)
            if len(calls) != 2:
                step(gate)

        trainer.step.optimizer.step = but_one

    built(patch, change)


def late_gradients(_job: Job, patch: Patch) -> None:
    """One rank updates with the gradients of the step before."""

    def change(trainer: Any) -> None:
        step, earlier = trainer.step.optimizer.step, dict[str, Tensor]()

        def late(gate: Tensor) -> None:
            for name, parameter in trainer.stage.named_parameters():
                own = local(parameter.grad).clone()
                local(parameter.grad).copy_(earlier.get(name, own))
                earlier[name] = own
            step(gate)

        trainer.step.optimizer.step = late

    built(patch, change)


# Gradients.


def rounded_gradients(_job: Job, patch: Patch) -> None:
    """One rank rounds its gradients to bfloat16."""
    _gradients(patch, "", lambda gradient: gradient.bfloat16().to(gradient.dtype))


def noisy_gradients(_job: Job, patch: Patch) -> None:
    """One rank's gradients have random relative errors of 1e-3."""
    _gradients(patch, "", lambda gradient: gradient * (1 + 1e-3 * torch.randn(gradient.shape).to(gradient)))


def reversed_rows(_job: Job, patch: Patch) -> None:
    """One rank's gradient of an output projection has its rows in reverse order."""
    _gradients(patch, "layers.0.attention.o_proj", lambda gradient: gradient.flip(0))


def lost_row(_job: Job, patch: Patch) -> None:
    """One rank's gradient of the head lacks its longest row."""

    def without(gradient: Tensor) -> Tensor:
        lengths = gradient.norm(dim=1, keepdim=True)
        return gradient.masked_fill(lengths == lengths.max(), 0)

    _gradients(patch, "heads", without)


def _gradients(patch: Patch, of: str, change: Callable[[Tensor], Tensor]) -> None:
    def changed(trainer: Any) -> None:
        def after() -> None:
            for name, parameter in trainer.stage.named_parameters():
                if of in name and parameter.grad is not None:
                    local(parameter.grad).copy_(change(local(parameter.grad)))

        wrapped(trainer.step.gradients, "finish", after)

    built(patch, changed)


def heavier_last_microbatch(_job: Job, patch: Patch) -> None:
    """The last microbatch of each rank weighs 2 % more."""
    losses = Executor._loss

    def heavier(self: Any, outputs: Any, microbatch: Any, state: Any) -> Any:
        scale = state.scale
        if microbatch is state.pack[-1]:
            state.scale = {term: 1.02 * factor for term, factor in scale.items()}
        value = losses(self, outputs, microbatch, state)
        state.scale = scale
        return value

    patch.setattr(Executor, "_loss", heavier)


# Experts.


def heavier_experts(_job: Job, patch: Patch) -> None:
    """On one rank, the outputs of experts weigh 1 % more."""
    _routed(patch, lambda weights: weights * 1.01)


def swapped_experts(_job: Job, patch: Patch) -> None:
    """On one rank, the first and the second choice of a token have each other's weight."""
    _routed(patch, lambda weights: weights.flip(-1))


def _routed(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    forward = top_k.TopKRouter.forward

    def changed(self: Any, *given: Any, **named: Any) -> Any:
        routing = forward(self, *given, **named)
        if is_last():
            routing.weights = change(routing.weights)
        return routing

    patch.setattr(top_k.TopKRouter, "forward", changed)


# Tensor parallelism.


def head_of_the_neighbour(_job: Job, patch: Patch) -> None:
    """Each rank computes another key/value head than its own, if there are fewer heads than ranks."""
    patch.setattr(forwards.OwnHeads, "__call__", _other_head)


def _other_head(self: Any, weight: Tensor) -> Tensor:
    chosen = self.ranks.rank * self.heads // self.ranks.size
    return forwards.local_of(weight).chunk(self.heads)[(chosen + 1) % self.heads]  # type: ignore[no-any-return]


def vocabulary_off_by_one(_job: Job, patch: Patch) -> None:
    """The first rank believes that its share of the vocabulary begins one token later."""
    make = forwards.EmbeddingForward.__init__

    def later(self: Any, module: nn.Embedding, first: int, vocabulary: int, ranks: Any) -> None:
        make(self, module, first + int(not is_last()), vocabulary, ranks)

    patch.setattr(forwards.EmbeddingForward, "__init__", later)


def swapped_positions(_job: Job, patch: Patch) -> None:
    """Gathered positions are in the order of the ranks from the last to the first."""
    gather = forwards.gather

    def swapped(tensor: Tensor, ranks: Any, dim: int = 1, **more: Any) -> Tensor:
        return torch.cat(gather(tensor, ranks, dim=dim, **more).chunk(ranks.size, dim)[::-1], dim)

    patch.setattr(forwards, "gather", swapped)


def unsummed_features(_job: Job, patch: Patch) -> None:
    """The products of row-wise layers are not summed over ranks."""
    scatter = forwards.scatter_sum

    def own(tensor: Tensor, ranks: Any, dim: int = 1) -> Tensor:
        scatter(tensor, ranks, dim=dim)
        return tensor.chunk(ranks.size, dim)[ranks.rank] * ranks.size

    patch.setattr(forwards, "scatter_sum", own)


# Context parallelism.


def chunks_in_order(_job: Job, patch: Patch) -> None:
    """Ranks take contiguous positions of samples, but attend as if they had their zigzag chunks."""

    def contiguous(self: ZigzagPositions, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.ranks, dim=1)[self.rank]

    patch.setattr(ZigzagPositions, "own", contiguous)


def heads_in_reverse(_job: Job, patch: Patch) -> None:
    """Exchanged heads return in the reverse order."""
    call = ExchangedHeads.__call__
    patch.setattr(ExchangedHeads, "__call__", lambda self, *given, **more: call(self, *given, **more).flip(2))


# Pipelines.


def swapped_boundary_gradients(_job: Job, patch: Patch) -> None:
    """The first two microbatches are swapped when their gradients are sent to the previous stage."""
    send = Transfers._send_gradient

    def swapped(self: Transfers, action: Any, state: Any) -> None:
        if action.microbatch != 0:
            send(self, action, state)
        if action.microbatch == 1:
            send(self, replace(action, microbatch=0), state)

    patch.setattr(Transfers, "_send_gradient", swapped)


def rounded_boundary(_job: Job, patch: Patch) -> None:
    """Hidden states are rounded to bfloat16 when they are sent to the next stage."""
    send = Transfers._send

    def rounded(self: Transfers, tensors: Sequence[Tensor], to: int, state: Any) -> None:
        send(self, [tensor.bfloat16().to(tensor.dtype) for tensor in tensors], to, state)

    patch.setattr(Transfers, "_send", rounded)


def half_a_tie(_job: Job, patch: Patch) -> None:
    """The summed gradient of a tied embedding is halved on one rank."""
    reduce = Ties.reduce

    def halved(self: Any) -> None:
        reduce(self)
        if is_last():
            for tie in self.ties:
                local(tie.first.grad).mul_(0.5)

    patch.setattr(Ties, "reduce", halved)
