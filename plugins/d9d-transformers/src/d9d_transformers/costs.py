"""Costs of models of transformers, from the calls of their modules, not from a list of models.

Traffic and kept bytes are computed for fused code, as in :mod:`d9d_nn.costs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from d9d_core.cost import BlockCost, Exchange, OpCost, Share, StageCost, Weight
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_core.traits import TensorStyle
from d9d_moe.costs import Dispatch, dispatch, grouped_swiglu, permutation
from d9d_nn.costs import attention, embedding, linear, linear_cross_entropy, rms_norm, rotated_heads, rotation, silu_mul
from d9d_nn.decoder.config import keys_of

from d9d_transformers.anatomy import Anatomy, Call, anatomy
from d9d_transformers.config import TransformersConfig
from d9d_transformers.stages import layers_of

#: Tensor-parallel style -> dimension of a weight that it splits.
_CUTS = {TensorStyle.COLUMN: 0, TensorStyle.ROW: 1, TensorStyle.VOCAB: 0}


def stage_cost(config: TransformersConfig, stage: Stage, share: Share) -> StageCost:
    """Cost of a pipeline stage of a model of transformers.

    Raises:
        BuildError: d9d cannot train the model, or the ranks cannot share the stage.
        CheckpointError: transformers refuses the config.
    """
    model = anatomy(config, share.width)
    _check(model, share)
    layers = layers_of(len(model.kind), model.numbers, model.head, stage)
    blocks: list[BlockCost] = []
    if stage.is_first:
        blocks.append(_outside("embedding", model.before, share))
    for kind in dict.fromkeys(model.kind[index] for index in layers):
        alike = [index for index in layers if model.kind[index] == kind]
        names = tuple(f"{model.layers}.{index}" for index in alike)
        blocks.append(replace(_layer(model, kind, share), count=len(alike), names=names))
    if stage.is_last:
        blocks.append(_head(model, stage, share))
    return StageCost(tuple(blocks), 0.0 if stage.is_last else _state(model, share))


def _check(model: Anatomy, share: Share) -> None:
    """Check that the model can be split over the ranks of ``tp``, ``cp`` and ``ep``.

    Raises:
        BuildError: the model cannot be split over these ranks.
    """
    tp, cp, ep = share.tensor, share.context, share.experts
    if share.length % (tp * cp):
        raise BuildError(f"mesh.tp x mesh.cp = {tp} x {cp} does not divide the {share.length} positions of a sample")
    if tp > 1 and model.refusal is not None:
        raise BuildError(f"mesh.tp is {tp}, but {model.refusal}")
    if cp > 1 and model.mixers:
        raise BuildError(f"mesh.cp is {cp}, but {model.mixers[0]} mixes tokens and needs whole samples; remove mesh.cp")
    calls = [call for kind in model.kinds for call in kind]
    if ep > 1 and not any(call.kind == "experts" for call in calls):
        raise BuildError(f"mesh.ep is {ep}, but the model has no experts that can be split; remove mesh.ep")
    for call in calls:
        if call.kind == "experts" and (count := _experts(call)) % ep:
            raise BuildError(f"mesh.ep is {ep}, which does not divide {count} experts; choose a divisor")
    for call in sorted(calls, key=lambda call: call.core is None):  # attention first: an error about heads is clearer
        _check_split(call, tp)


def _check_split(call: Call, tp: int) -> None:
    """Check that ``tp`` divides the heads or features of a module.

    Raises:
        BuildError: ``tp`` does not divide them.
    """
    if call.core is not None and call.style is None:
        heads, pairs = call.core.query_heads, call.core.key_value_heads
        if heads % tp:
            raise BuildError(
                f"mesh.tp is {tp}, which does not divide the {heads} query heads of the model; choose a divisor"
            )
        if pairs % tp and tp % pairs:
            raise BuildError(
                f"mesh.tp is {tp}, neither a divisor nor a multiple of the {pairs} key and value heads; choose one"
            )
    split = {TensorStyle.COLUMN: call.outputs, TensorStyle.ROW: call.features}.get(call.style) if call.style else None
    if split is not None and split % tp and not _is_repeated(call, tp):
        raise BuildError(f"mesh.tp is {tp}, which does not divide {split} features of {call.path}; choose a divisor")


def _is_repeated(call: Call, tp: int) -> bool:
    """Whether every rank holds the whole weight of a module, and computes one of its heads."""
    return call.heads is not None and call.heads < tp


def _experts(call: Call) -> int:
    return call.parameters[0].shape[0]


def _state(model: Anatomy, share: Share) -> float:
    """Bytes of the residual stream of this rank, which holds S / tp positions of each sample."""
    return share.width * share.tokens / share.tensor * model.head.features


def _layer(model: Anatomy, kind: int, share: Share) -> BlockCost:
    """Cost of one layer of a kind, from the calls of its modules."""
    found, state = _Ops(share, model.kinds[kind]), _state(model, share)
    exchanges, backward = _exchanges(model.kinds[kind], model.head.features, share)
    return BlockCost(
        "layer with experts" if found.expert_numbers else "layer",
        (*found.ops, *_unfused(model, kind, share)),
        found.numbers,
        found.expert_numbers,
        state,
        3 * state + found.workspace,
        exchanges,
        backward,
    )


def _unfused(model: Anatomy, kind: int, share: Share) -> Iterator[OpCost]:
    """Cost of the intermediate tensors that transformers' norms and rotations write in eager mode; none if compiled."""
    if share.compiled:
        return
    whole = replace(share, tensor=1, context=1, experts=1)
    fused = _Ops(whole, model.kinds[kind])
    kept = model.kept[kind] - (sum(op.kept for op in fused.ops) - fused.kept_by_experts) / whole.tokens
    if kept > 0:
        size = kept * share.tokens / share.tensor
        yield OpCost("unfused kernels", "memory", traffic=2 * size, backward_traffic=2 * size, kept=size)


def _outside(name: str, calls: Sequence[Call], share: Share) -> BlockCost:
    """Cost of modules outside of layers."""
    found = _Ops(share, calls)
    ahead, back = _exchanges(calls, calls[-1].outputs if calls else 0, share)
    ops = tuple(found.ops)
    return BlockCost(name, ops, found.numbers, exchanges=ahead, backward_exchanges=back, is_block=False)


def _head(model: Anatomy, stage: Stage, share: Share) -> BlockCost:
    """Cost of the modules after the layers, and of the head."""
    block, head = _outside("norm and heads", model.after, share), model.head
    words = -(-head.vocabulary // share.tensor)
    owner = head.embedding if head.tied else head.name
    weights = (Weight(f"{owner}.weight", (words, head.features), "head", 0),)
    ops, workspace = linear_cross_entropy(
        share.tokens, head.features, words, share.width, share.memory, weights=weights
    )
    size = share.width * share.tokens * head.features
    return replace(
        block,
        ops=(*block.ops, *ops),
        # A tied head on another stage than the embedding has its own copy of the weight.
        parameters=block.parameters + (0 if head.tied and stage.is_first else words * head.features),
        workspace=workspace,
        exchanges=(Exchange("all_gather", "tp", size),) if share.tensor > 1 else (),
        backward_exchanges=(Exchange("reduce_scatter", "tp", size),) if share.tensor > 1 else (),
    )


def _exchanges(calls: Sequence[Call], features: int, share: Share) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Collectives of forward and backward: of hidden states over ``tp``, and of tokens over ``ep``."""
    ahead: list[Exchange] = []
    back: list[Exchange] = []
    size = share.width * share.tokens * features
    sites: set[str] = set()
    for call in calls:
        if call.kind == "experts":
            sent = _dispatch(call, share)
            ahead, back = [*ahead, *sent.exchanges], [*back, *sent.backward_exchanges]
        site = _site(call)
        if share.tensor == 1 or site is None or site in sites:
            continue
        sites.add(site)
        gathers = call.style in (TensorStyle.COLUMN, TensorStyle.GATHERED)
        gather, scatter = Exchange("all_gather", "tp", size), Exchange("reduce_scatter", "tp", size)
        ahead.append(gather if gathers else scatter)
        back.append(scatter if gathers else gather)
    return tuple(ahead), tuple(back)


def _site(call: Call) -> str | None:
    """Name of the module that exchanges hidden states over ``tp`` for a call.

    The column-wise layers of a module share one exchange, and so do the gathered modules inside one sub-module of a
    layer.
    """
    if call.style is TensorStyle.COLUMN:
        return call.path.rpartition(".")[0]
    if call.style is TensorStyle.GATHERED:
        return call.path.partition(".")[0]
    return call.path if call.style in (TensorStyle.ROW, TensorStyle.VOCAB) else None


def _dispatch(call: Call, share: Share) -> Dispatch:
    """Cost of sending tokens to experts on other ranks."""
    tokens = share.tokens / share.tensor
    return dispatch(tokens, _experts(call), call.chosen, call.features, share.experts, share.width)


class _Ops:
    """Ops of the calls of a layer, or outside of layers, on one rank.

    Args:
        share: sizes of the rank's part of the work.
        calls: calls in the order of the forward.

    Attributes:
        ops: the ops.
        workspace: bytes at the peak of a feed-forward layer's backward, without hidden states.
        numbers, expert_numbers: numbers of parameter elements outside of experts, and of experts.
        kept_by_experts: bytes that experts keep for the backward.
    """

    def __init__(self, share: Share, calls: Sequence[Call]) -> None:
        self.ops: list[OpCost] = []
        self.workspace, self.numbers, self.expert_numbers = 0.0, 0, 0
        self.kept_by_experts = 0.0
        self._share = share
        self._kept: set[int] = set()  # numbers of the tensors that earlier ops keep for the backward
        self._made: set[int] = set()  # numbers of the tensors that earlier calls returned
        self._pending = 0.0  # output features of the last linear layers, which an activation may read
        self._normed = 0.0  # number of features per position that norms of queries and keys have written so far
        for group in _grouped(calls):
            self._add(group)
            self._made |= {call.writes for call in group}

    def _add(self, group: Sequence[Call]) -> None:
        call = group[0]
        if call.kind == "linear":
            self._linear(group)
        elif call.kind == "norm":
            self._norm(call)
        elif call.kind == "attention":
            self._attention(call)
        elif call.kind == "experts":
            self._experts(call)
        elif call.kind == "embedding":
            weights, rows = self._weights(call), self._tokens(call)
            self.ops.append(embedding(rows, weights[0].shape[0], call.outputs, self._share.width, weights=weights))
        elif call.kind == "other":
            self._other(call)
        else:
            self.ops.append(OpCost(call.path, "memory", weights=self._weights(call)))

    def _tokens(self, call: Call) -> float:
        """Number of positions that a module computes on this rank."""
        return self._share.tokens / (self._share.tensor if call.style is TensorStyle.SEQUENCE else 1)

    def _keeps(self, call: Call) -> bool:
        """Whether a call keeps its input for the backward: true only for the first call that reads a tensor."""
        first = call.reads not in self._kept
        self._kept.add(call.reads)
        return first

    def _linear(self, group: Sequence[Call]) -> None:
        """Add linear layers that share an input, and before them the activation that makes this input."""
        call, tp, width = group[0], self._share.tensor, self._share.width
        rows = self._tokens(call) * call.rows
        features = call.features // tp if call.style is TensorStyle.ROW else call.features
        if call.reads and call.reads not in self._made and self._pending:
            self._activation(rows, features)
            self._kept.add(call.reads)
        outputs = sum(self._outputs(one) for one in group)
        weights = tuple(weight for one in group for weight in self._weights(one))
        name = ", ".join(one.path.rpartition(".")[2] for one in group)
        self.ops.append(linear(name, rows, features, outputs, width, keeps_input=self._keeps(call), weights=weights))
        self._pending = outputs

    def _outputs(self, call: Call) -> int:
        """Features of a linear layer's output on this rank."""
        if call.style is not TensorStyle.COLUMN:
            return call.outputs
        return call.outputs // (
            call.heads if call.heads and _is_repeated(call, self._share.tensor) else self._share.tensor
        )

    def _activation(self, rows: float, inside: int) -> None:
        """Add an activation between linear layers; it is gated if it reads twice as many features as it writes."""
        width, compiled, read = self._share.width, self._share.compiled, self._pending
        self.workspace = max(self.workspace, width * rows * read)
        if read >= 2 * inside:
            self.ops.append(silu_mul(rows, inside, width, compiled=compiled))
            return
        size = width * rows * inside
        extra = 0.0 if compiled else size  # a compiler computes the output again in the backward
        self.ops.append(OpCost("activation", "memory", traffic=2 * size, backward_traffic=4 * size, kept=size + extra))

    def _norm(self, call: Call) -> None:
        """Add a norm of hidden states with the residual addition before it, or of other features, such as heads."""
        rows, width, weights = self._tokens(call) * self._rows(call), self._share.width, self._weights(call)
        self._kept.add(call.reads)
        name = call.path.rpartition(".")[2]
        if call.in_part or call.reads in self._made:
            self.ops.append(replace(rotated_heads(rows, 1, call.features, width, weights=weights), name=name))
            self._normed += call.rows * call.features
        else:
            self.ops.append(rms_norm(name, rows, call.features, width, weights=weights))
        self._pending = 0.0

    def _rows(self, call: Call) -> float:
        """Rows per position on this rank; norms in split attention have a row for each head."""
        return max(call.rows / self._share.tensor, 1.0) if call.style is TensorStyle.PARTIAL else call.rows

    def _attention(self, call: Call) -> None:
        """Add attention and, unless norms of queries and keys include it, the rotation before it."""
        core, width, rows = call.core, self._share.width, self._tokens(call)
        assert core is not None
        split = self._share.tensor if call.style is None else 1
        queries = core.query_heads / split
        # With fewer key and value heads than ranks, several ranks compute the same head.
        pairs = max(core.key_value_heads / split, 1)
        whole = (core.query_heads + core.key_value_heads) * core.features
        if call.reads not in self._made and self._normed < whole:
            self.ops.append(rotation(rows, queries + pairs, core.features, width))
        keys = keys_of(core.window, self._share.length)
        self.ops.append(attention(rows, keys, queries, pairs, core.features, width))
        self._kept.add(call.writes)
        self._pending = self._normed = 0.0

    def _experts(self, call: Call) -> None:
        """Add experts, and the copies of tokens to the rows of experts."""
        share, width, hidden = self._share, self._share.width, call.features
        own, count, inside = self._tokens(call), _experts(call), call.parameters[0].shape[2]
        rows, sent = own * call.chosen, _dispatch(call, share)
        weights = self._weights(call)
        if self._keeps(call):
            self.ops.append(OpCost("tokens", "memory", kept=width * own * hidden))
        ops = [
            permutation(own, rows, hidden, width),
            *grouped_swiglu(
                rows, hidden, inside, count / share.experts, width, compiled=share.compiled, weights=weights
            ),
            *sent.ops,
        ]
        self.ops += ops
        self.kept_by_experts += sum(op.kept for op in ops)
        # Workspace at the peak: the experts' outputs and their gradients, gate and up, and the exchanged tokens.
        self.workspace = max(self.workspace, 2 * width * rows * (hidden + inside) + sent.workspace)

    def _other(self, call: Call) -> None:
        """Add a module of another kind, with its measured cost."""
        rows, width, found = self._tokens(call), self._share.width, call.measured
        weights = self._weights(call)
        # Three dimensions also occur in convolutions; modules with convolutions have linear layers, too.
        grouped = any(len(weight.shape) == 3 for weight in weights) and not any(w.kind == "linear" for w in weights)
        kept = found.kept * rows
        self.workspace = max(self.workspace, kept)
        if found.keeps_input and self._keeps(call):
            kept += width * rows * call.features
        traffic = width * (rows * (call.features + call.outputs) + sum(weight.numbers for weight in weights))
        flops = found.flops * rows
        self.ops.append(
            OpCost(
                call.path,
                "grouped_product" if grouped else "product",
                flops,
                2 * flops,
                traffic + found.kept * rows,
                2 * (traffic + found.kept * rows),
                kept,
                rows,
                weights,
            )
        )

    def _weights(self, call: Call) -> tuple[Weight, ...]:
        """Weights of a module on this rank; also adds them to the numbers of parameters."""
        found = []
        for parameter in call.parameters:
            shape, cut = list(parameter.shape), self._cut(call, parameter.shape)
            if parameter.kind == "bank":
                shape[0] //= self._share.experts
            elif cut is not None:
                shape[cut] = -(-shape[cut] // self._share.tensor)
            name = f"{call.path}.{parameter.name}" if call.path else parameter.name
            found.append(Weight(name, tuple(shape), parameter.kind, cut))
            if parameter.kind == "bank":
                self.expert_numbers += found[-1].numbers
            else:
                self.numbers += found[-1].numbers
        return tuple(found)

    def _cut(self, call: Call, shape: tuple[int, ...]) -> int | None:
        """Dimension of a parameter that ``tp`` splits; the bias of a row-wise layer is replicated."""
        cut = _CUTS.get(call.style) if call.style is not None else None
        return None if cut is None or cut >= len(shape) or _is_repeated(call, self._share.tensor) else cut


def _grouped(calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
    """Group calls in order: linear layers with the same input together, because fused code reads the input once."""
    groups: dict[tuple[int, TensorStyle | None], list[Call]] = {}
    for call in calls:
        if call.kind == "linear":
            groups.setdefault((call.reads, call.style), []).append(call)
    for call in calls:
        if call.kind != "linear":
            yield [call]
        elif group := groups.pop((call.reads, call.style), None):
            yield group
