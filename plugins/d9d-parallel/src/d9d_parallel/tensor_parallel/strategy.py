"""Strategy ``tensor_parallel``, with sequence parallelism.

Shoeybi et al. 2019, "Megatron-LM", section 3: matrices of attention and feed-forward are split by columns, then rows.
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2: between
attention and feed-forward each rank holds S / tp positions, so that norms and the residual stream are split too;
instead of an all-reduce, there is an all-gather before and a reduce-scatter after attention and feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from d9d_core.errors import BuildError
from d9d_core.model import (
    ComputesInputs,
    HasHeads,
    HasLinearTerms,
    LendsProduct,
    SeesSequence,
    SharesInputs,
    SplitsFeatures,
    SplitsSequence,
    SplitsVocabulary,
    TermKind,
    VocabularyShare,
)
from d9d_core.strategy import (
    Applied,
    CommunicatesAlone,
    GradientOwner,
    is_inside,
    matched_modules,
    unmatched_patterns,
)
from d9d_core.topology import Topology
from d9d_core.traits import TensorParallelizable, TensorStyle, modules_with
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from d9d_parallel.ranks import Ranks
from d9d_parallel.tensor_parallel.async_forwards import AsyncColumns, Column, HandedProduct, RowProduct
from d9d_parallel.tensor_parallel.async_products import AsyncProducts
from d9d_parallel.tensor_parallel.collectives import OwnPositions, RankSum
from d9d_parallel.tensor_parallel.communication import Exchange, Site, TensorCommunication, Way
from d9d_parallel.tensor_parallel.config import TensorParallelConfig
from d9d_parallel.tensor_parallel.forwards import (
    EmbeddingForward,
    GatheredSequence,
    LocalShards,
    OwnHeads,
    OwnHeadsForward,
    OwnTokens,
    RowForward,
    WholeSequence,
    local_of,
    shard,
)
from d9d_parallel.tensor_parallel.symmetric_memory import is_expected, is_simulated, is_usable

#: Tensor-parallel style of a layer -> dimension of its weight [out, in] that is sharded.
_SPLIT = {TensorStyle.COLUMN: 0, TensorStyle.ROW: 1, TensorStyle.VOCAB: 0}


class TensorParallel:
    """Strategy of tensor parallelism: splits matrices over ``tp`` according to the model's plans."""

    def __init__(self, config: TensorParallelConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Turn weights into DTensors and replace forwards, in place. Collective over all ranks.

        Raises:
            BuildError: the strategy was applied already; the stage lacks ``split_sequence()``; a parameter has no
                style, or several modules share one that would be split; heads can be neither divided over the ranks nor
                repeated; the ranks do not divide the features of a layer; or a module of style ``VOCAB`` or a matched
                module cannot be split.
        """
        group = topology.group("dense", "tp")
        assert group is not None  # a topology with a mesh has this group
        if any(isinstance(one, DTensor) and "tp" in _names_of(one.device_mesh) for one in stage.parameters()):
            raise BuildError(
                f"strategy '{self._config.name}' stands twice in 'parallel', but it also splits the sequence outside "
                "of the layers that it matches; give all patterns in the field 'match' of one entry"
            )
        numbers = topology.grid("dense").group(topology.rank, ["tp"])
        communication = TensorCommunication(stage, numbers)
        ranks = Ranks(group)
        products = None
        if self._config.asynchronous:
            alone = topology.sizes["pp"] == 1  # with a pipeline, overlapped forwards and backwards run on other streams
            products = AsyncProducts(ranks, symmetric=is_usable(ranks, topology.device), in_graphs=alone)
        # Simulated ranks cannot use symmetric memory, but the listed collectives are of the job that will run.
        fuses = products is not None and (
            is_expected(numbers, topology.device) if is_simulated(ranks) else products.symmetric
        )
        parts = matched_modules(stage, self._config.match)
        mesh = topology.mesh("dense", "tp")
        split = _Split(mesh, ranks, self._config.name, communication, products, parts, fuses=fuses)
        if not isinstance(stage, SplitsSequence):
            raise BuildError(
                f"strategy '{self._config.name}' splits positions between layers, but {type(stage).__name__} lacks "
                "split_sequence(); see d9d_core.model.SplitsSequence"
            )
        shared = _shared(stage)
        stage.split_sequence(split.ranks.size)
        for name, owner in modules_with(stage, TensorParallelizable).items():
            split.children(name, owner)
        split.check_parts()
        split.check(stage, shared)
        return Applied(
            modules=tuple(split.changed),
            gradients=tuple(split.gradients(stage)),
            unmatched=unmatched_patterns(stage, self._config.match, self._config.name),
            sequence_ranks=split.ranks.size,
            notes=tuple(split.notes),
            collectives=communication,
        )


class _Split:
    """Builder that splits one stage, module by module.

    Args:
        mesh: mesh of ``tp``.
        ranks: ranks of the mesh.
        strategy: name of the strategy, for error messages.
        communication: collects the collectives of the split modules.
        products: object that overlaps matrix products with the exchange of positions; ``None`` for no overlap.
        parts: modules to split, by qualified name; other modules stay whole on every rank. By default all modules.
        fuses: whether ``products`` are listed as calls of symmetric memory instead of all-to-alls.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        ranks: Ranks,
        strategy: str,
        communication: TensorCommunication,
        products: AsyncProducts | None = None,
        parts: Mapping[str, nn.Module] | None = None,
        *,
        fuses: bool = False,
    ) -> None:
        self.mesh, self.ranks, self.products = mesh, ranks, products
        self.communication = communication
        self.notes: list[str] = []
        self.styles: dict[str, TensorStyle] = {}
        self.changed: list[str] = []
        self._strategy, self._fuses = strategy, fuses
        self._parts = {"": None} if parts is None else parts
        self._whole: set[str] = set()

    def children(self, name: str, owner: nn.Module) -> None:
        assert isinstance(owner, TensorParallelizable)
        plan = owner.tensor_parallel_plan()
        if self._stays_whole(name, owner, columns=TensorStyle.COLUMN in plan.values()):
            return
        heads = owner.tensor_parallel_heads() if isinstance(owner, HasHeads) else {}
        computed = owner.computed_inputs() if isinstance(owner, ComputesInputs) else ()
        for child_name, style in plan.items():
            child, whole = owner.get_submodule(child_name), _join(name, child_name)
            self.styles[whole] = style
            self._record(whole)
            if style is TensorStyle.COLUMN:
                self._columns(whole, child, heads.get(child_name))
            elif style is TensorStyle.ROW:
                self._rows(whole, child)
            elif style is TensorStyle.VOCAB:
                self._vocabulary(whole, child)
            elif style is TensorStyle.HEADS:
                self._heads(whole, child, heads.get(child_name))
            elif style is TensorStyle.SEQUENCE and isinstance(child, SeesSequence):
                child.see_sequence(OwnPositions(self.ranks))
                self._alone(whole, child)
            elif style is TensorStyle.WHOLE:
                _replace(child, WholeSequence(child, self.ranks, summed=False))
                self._site(whole, "all_gather", None, None)
            elif style is TensorStyle.GATHERED:
                _replace(child, GatheredSequence(child, self.ranks))
                self._site(whole, "all_gather", "reduce_scatter", None)
                self.notes.append(f"{whole} is whole on every rank: its model does not say how to split it")
        if columns := [child for child, style in plan.items() if style is TensorStyle.COLUMN]:
            reading = [child for child in columns if child not in computed]
            lent = [column for child in reading if (column := self._lent(owner, child, heads.get(child))) is not None]
            if lent and self.products is not None:
                _replace(owner, AsyncColumns(owner, lent, self.products))
            else:
                _replace(owner, WholeSequence(owner, self.ranks, summed=True))
            self._record(name)
            features = owner.get_submodule(reading[0]).get_parameter("weight").shape[1] if reading else None
            # Gradients of gathered rows from other readers, such as LoRA matrices, are added part by part, in turns.
            alone = len(lent) == len(columns) and not any(_terms("", column.layer, "in") for column in lent)
            fused: tuple[Way, ...] = ("forward", "backward") if alone else ("forward",)
            self._site(name, "all_gather", "reduce_scatter", features, in_turns=bool(lent), fused=fused)

    def _record(self, name: str) -> None:
        if is_inside(name, self._parts):
            self.changed.append(name)

    def _stays_whole(self, name: str, owner: nn.Module, *, columns: bool) -> bool:
        """Whether no pattern matches a module with column-wise layers; each rank then computes all its features."""
        if name and is_inside(name, self._whole):
            return True
        if not columns or is_inside(name, self._parts):
            return False
        _replace(owner, GatheredSequence(owner, self.ranks))
        self.styles[name] = TensorStyle.GATHERED
        self._whole.add(name)
        self._site(name, "all_gather", "reduce_scatter", None)
        return True

    def _leave_vocabulary_whole(self, name: str, child: nn.Module) -> None:
        """Keep the whole weight of an embedding or a head that no pattern matches on every rank."""
        self._whole.add(name)
        if isinstance(child, nn.Embedding):
            _replace(child, OwnTokens(child, OwnPositions(self.ranks)))
            self.styles[name] = TensorStyle.SEQUENCE
            return
        _replace(child, WholeSequence(child, self.ranks, summed=False))
        self.styles[name] = TensorStyle.WHOLE
        self._site(name, "all_gather", None, None)

    def _lent(self, owner: nn.Module, child_name: str, heads: int | None) -> Column | None:
        """Let ``owner`` compute the product of a column-wise layer while rows are gathered; ``None`` if impossible."""
        child = owner.get_submodule(child_name)
        if self.products is None or not isinstance(child, LendsProduct) or _terms("", child, "in_scale"):
            return None
        handed = HandedProduct()
        if not child.lend_product(handed):
            return None
        repeated = heads is not None and heads < self.ranks.size
        return Column(child, OwnHeads(heads, self.ranks) if repeated and heads else local_of, handed)

    def _scatters(self, child: nn.Module) -> bool:
        """Let a row-wise layer's product be summed over ranks while its parts are sent; false if not possible."""
        if self.products is None or not isinstance(child, LendsProduct):
            return False
        return child.lend_product(RowProduct(child, self.products))

    def _columns(self, name: str, child: nn.Module, heads: int | None) -> None:
        size = self.ranks.size
        if heads is not None and heads % size and size % heads:
            raise BuildError(
                f"strategy '{self._strategy}': mesh.tp is {size}, but the {heads} heads of '{name}' can be neither "
                f"split evenly over {size} ranks nor repeated on them; choose a divisor or a multiple of {heads}"
            )
        # Fine-tuning tensors that act on the input are whole on every rank. Each rank computes the part of their
        # gradients that comes from its own outputs, so these parts must be summed.
        self.styles |= dict.fromkeys(_terms(name, child, "in", "in_scale"), TensorStyle.PARTIAL)
        alike = {name: child, **_terms(name, child, "out", "out_scale")}
        if heads is not None and heads < size:
            if isinstance(child, SplitsFeatures):
                child.split_features(OwnHeads(heads, self.ranks))
            for module in alike.values():
                _replace(module, OwnHeadsForward(module, heads, self.ranks))
            self.styles |= dict.fromkeys(alike, TensorStyle.PARTIAL)
            return
        features = len(child.get_parameter("weight"))
        if features % size:
            raise BuildError(
                f"strategy '{self._strategy}': mesh.tp is {size}, which does not divide the {features} features of "
                f"'{name}'; choose a divisor"
            )
        if isinstance(child, SplitsFeatures):
            child.split_features(local_of)
        for module in alike.values():
            self._shard(module, TensorStyle.COLUMN)
            _replace(module, LocalShards(module))
        self.styles |= dict.fromkeys(alike, TensorStyle.COLUMN)

    def _heads(self, name: str, child: nn.Module, heads: int | None) -> None:
        for parameter, tensor in list(child.named_parameters(recurse=False)):
            count = len(tensor) if heads is None else heads
            if count % self.ranks.size:
                raise BuildError(
                    f"strategy '{self._strategy}': mesh.tp is {self.ranks.size}, which does not divide the {count} "
                    f"heads of '{name}'; choose a divisor"
                )
            shard(child, parameter, self.mesh, 0)
        _replace(child, LocalShards(child))

    def _rows(self, name: str, child: nn.Module) -> None:
        self._shard(child, TensorStyle.ROW)
        scattered = self._scatters(child)
        for inside, module in _terms(name, child, "in").items():
            self._shard(module, TensorStyle.ROW)
            self.styles[inside] = TensorStyle.ROW
            if scattered:
                # The low-rank product is added to the layer's sum over ranks, so it is summed over ranks itself.
                _replace(module, RowForward(module, self.ranks))
                self._site(inside, "reduce_scatter", "all_gather", len(module.get_parameter("weight")))
            else:
                _replace(module, LocalShards(module))
        for inside, module in _terms(name, child, "in_scale").items():
            shard(module, "weight", self.mesh, 0)
            _replace(module, LocalShards(module))
            self.styles[inside] = TensorStyle.ROW
        # Modules that add to the output, or scale it, are replicated: they process a partial sum, or only this rank's
        # positions.
        self.styles |= dict.fromkeys(_terms(name, child, "out", "out_scale"), TensorStyle.PARTIAL)
        if isinstance(child, SplitsFeatures):
            child.split_features(local_of, RankSum(self.ranks))
            self._alone(name, child)
        if isinstance(child, SharesInputs):
            child.share_inputs(self.ranks.rank, self.ranks.size)
        scaled = bool(_terms(name, child, "out_scale"))
        _replace(child, LocalShards(child) if scattered else RowForward(child, self.ranks, scaled=scaled))
        features = len(child.get_parameter("weight"))
        both: tuple[Way, ...] = ("forward", "backward")
        self._site(name, "reduce_scatter", "all_gather", features, in_turns=scattered, fused=both)

    def _vocabulary(self, name: str, child: nn.Module) -> None:
        tied = getattr(child, "weight", None) is None
        # A tied head is always split, so that its gradients are partial sums like the gradients of the embedding.
        if not tied and not is_inside(name, self._parts):
            self._leave_vocabulary_whole(name, child)
            return
        rows = getattr(child, "vocabulary", None) if tied else len(child.get_parameter("weight"))
        if not tied:
            self._shard(child, TensorStyle.VOCAB)
        if not isinstance(rows, int):
            raise BuildError(
                f"strategy '{self._strategy}': '{name}' ({type(child).__name__}) has style vocab and no weight of its "
                "own, so its number of rows is unknown; a head tied to the embedding states it as the attribute "
                "'vocabulary', see d9d_core.model.SplitsVocabulary"
            )
        # Rows are divided as in a sharded DTensor: the first ranks have the most rows, the last ranks the rest.
        most = -(-rows // self.ranks.size)
        first = min(rows, self.ranks.rank * most)
        if isinstance(child, nn.Embedding):
            _replace(child, EmbeddingForward(child, first, rows, self.ranks))
            trained = child.weight.requires_grad
            self._site(name, "reduce_scatter", "all_gather" if trained else None, child.embedding_dim)
        elif isinstance(child, SplitsVocabulary):
            child.split_vocabulary(VocabularyShare(first, min(most, rows - first), self.ranks.group))
            _replace(child, LocalShards(child))
            _replace(child, WholeSequence(child, self.ranks, summed=True))
            features = None if tied else child.get_parameter("weight").shape[1]
            self._site(name, "all_gather", "reduce_scatter", features)
            self._alone(name, child)
        else:
            raise BuildError(
                f"strategy '{self._strategy}': '{name}' is {type(child).__name__}, which is not an embedding and lacks "
                "split_vocabulary(); see d9d_core.model.SplitsVocabulary"
            )

    def _site(
        self,
        name: str,
        forward: Exchange,
        backward: Exchange | None,
        features: int | None,
        *,
        in_turns: bool = False,
        fused: tuple[Way, ...] = (),
    ) -> None:
        fused = fused if in_turns and self._fuses else ()
        self.communication.sites.append(Site(name, forward, backward, features, in_turns, fused))

    def _alone(self, name: str, child: nn.Module) -> None:
        """Record that a module communicates by itself, for the prediction of collectives."""
        if isinstance(child, CommunicatesAlone):
            self.communication.alone[name] = child
        else:
            self.notes.append(
                f"{name} ({type(child).__name__}) does not declare its communication: forward_collectives()"
            )

    def _shard(self, child: nn.Module, style: TensorStyle) -> None:
        shard(child, "weight", self.mesh, _SPLIT[style])
        # Only the bias of a column-wise layer is sharded; the bias of a row-wise layer is added to the sum over ranks.
        if style is TensorStyle.COLUMN and getattr(child, "bias", None) is not None:
            shard(child, "bias", self.mesh, 0)

    def check_parts(self) -> None:
        """Check that each matched module is split, and note modules that are left whole.

        Raises:
            BuildError: a pattern matches a module that cannot be split alone.
        """
        split = [name for name, style in self.styles.items() if style in _SPLIT]
        for part in filter(None, self._parts):
            if not any(is_inside(name, [part]) for name in split):
                around = [name for name in self.styles if is_inside(part, [name]) and name != part]
                hint = f"match {around[0]!r} instead" if around else "remove the pattern"
                raise BuildError(
                    f"strategy '{self._strategy}': 'match' matches '{part}', which cannot be split alone; {hint}"
                )
        if self._whole:
            self.notes.append(f"whole on every rank, since 'match' does not match them: {_listed(self._whole)}")

    def check(self, stage: nn.Module, shared: Iterable[Sequence[str]]) -> None:
        """Raise an error if a parameter of the stage has no style, or if several modules share one that is split."""
        for names in shared:
            if any(self._style(name) in _SPLIT for name in names):
                raise BuildError(
                    f"strategy '{self._strategy}': {' and '.join(map(repr, names))} are one parameter, which would be "
                    "split in one of its modules only; give one module no weight of its own, and pass it the other's "
                    "weight, as d9d_nn.heads.causal_lm:CausalLMHead(tied=True) with the style vocab expects"
                )
        for name, _ in stage.named_parameters():
            if self._style(name) is None:
                raise BuildError(
                    f"strategy '{self._strategy}': the style of '{name}' over tp is unknown: no "
                    "tensor_parallel_plan() names its module, or it was added to a layer that is split; "
                    "remove the feature that added it, or give it a style"
                )

    def gradients(self, stage: nn.Module) -> Iterator[GradientOwner]:
        """Owner of each parameter's reduction over ``tp``; ``none`` for shards and gradients equal on all ranks."""
        for name, parameter in stage.named_parameters():
            whole = isinstance(parameter, DTensor) or self._style(name) is TensorStyle.WHOLE
            yield GradientOwner(name, "tp", "none" if whole else "sync")

    def _style(self, parameter: str) -> TensorStyle | None:
        """Style of a parameter; ``None`` if unknown, such as for a parameter added to a module that is split."""
        module = owner = parameter.rpartition(".")[0]
        while module not in self.styles and module:
            module = module.rpartition(".")[0]
        style = self.styles.get(module)
        inside = module != owner or parameter not in (f"{owner}.weight", f"{owner}.bias")
        return None if style in _SPLIT and inside else style


def _shared(stage: nn.Module) -> list[list[str]]:
    """All names of each parameter that several modules share."""
    names: dict[int, list[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _replace(module: nn.Module, forward: LocalShards | OwnTokens | WholeSequence | AsyncColumns) -> None:
    # A bound method: Dynamo guards on the identity of other callables, and would recompile for every block.
    module.forward = forward.__call__


def _terms(name: str, layer: nn.Module, *which: TermKind) -> dict[str, nn.Module]:
    """Submodules of a linear layer that add terms of the given kinds, such as LoRA matrices, by qualified name."""
    terms = layer.tensor_parallel_terms() if isinstance(layer, HasLinearTerms) else {}
    return {_join(name, term): layer.get_submodule(term) for term, kind in terms.items() if kind in which}


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")
