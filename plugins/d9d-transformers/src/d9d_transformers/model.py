"""Model of transformers, whole or as one pipeline stage.

Shapes: B samples, S positions, H features, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_core.model import ContextShare, Stage
from d9d_core.traits import TensorStyle
from d9d_core.types import TensorSpec
from d9d_moe.balancing.base import Balancer
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.masks import prepare_masks
from d9d_nn.heads.causal_lm import CausalLMHead
from torch import Tensor, nn

from d9d_transformers.attention import CORE, DOCUMENTS
from d9d_transformers.balance import Balance
from d9d_transformers.experts import RoutedExperts, replace_experts
from d9d_transformers.head import Head
from d9d_transformers.library import base_of
from d9d_transformers.stages import keep_stage, layers_of
from d9d_transformers.structure import Parts, Structure, examine
from d9d_transformers.tensor_styles import attach_styles, check_splittable, styles_of


class TransformersModel(nn.Module):
    """Decoder language model with modules and parameter names of transformers, and with d9d's attention and head.

    Parameter names have the index of a layer in the whole model. Layers of other stages are replaced by modules that do
    nothing, because models choose masks and rotations by the index of a layer.

    Args:
        native: language model of transformers, on the meta device.
        parts: facts about the classes of its modules.
        stage: pipeline stage to build.
        balancing: balancers of the routers; ``None`` if routers are not observed.

    Attributes:
        base_name: name of the module that is the model without its head.
        head_facts: facts about the head.
        structure: structure of the model without its head, of all stages.
        styles: tensor-parallel styles of its modules.
        layer_numbers: number of parameter elements, summed over the layers of all stages, that one token uses.
        layer_indices: layers of the stage.

    Raises:
        BuildError: d9d cannot train the model, or the layers cannot be split over the stages.
    """

    def __init__(self, native: Any, parts: Parts, stage: Stage, balancing: Sequence[Balancer] | None = None) -> None:
        super().__init__()
        self.stage = stage
        self.base_name, base = base_of(native)
        head = Head.of(native)
        replace_experts(base, head.std)
        structure = examine(base, parts)
        self.head_facts, self.structure = head, structure
        self.styles = styles_of(base, structure)
        if balancing is not None:
            _balance(base, parts, balancing)
        self.layer_numbers = _used_numbers(base.get_submodule(structure.layers))
        self.layer_indices = layers_of(structure.count, self.layer_numbers, head, stage)
        _attach(base, structure, parts.constants)
        attach_styles(base, structure, self.styles)
        self._entry, self._exit = keep_stage(
            base,
            structure,
            self.layer_indices,
            first=stage.is_first,
            last=stage.is_last,
            embedding=stage.is_last and head.tied,
        )
        self.add_module(self.base_name, base)
        if stage.is_last:
            sizes = head.features, head.vocabulary
            self.add_module(head.name, CausalLMHead(*sizes, std=head.std, tied=head.tied, softcap=head.softcap))
        cores = (module for module in self.modules() if isinstance(module, AttentionCore))
        self._slots = [core.attention for core in cores]  # found once, not in each step
        self._balances = {name: module for name, module in self.named_modules() if isinstance(module, Balance)}
        self._sequence_ranks = 1
        self._context: ContextShare | None = None

    def blocks(self) -> Mapping[str, nn.Module]:
        """Layers of this stage."""
        names = (f"{self.base_name}.{self.structure.layers}.{index}" for index in self.layer_indices)
        return {name: self.get_submodule(name) for name in names}

    def token_mixers(self) -> Sequence[str]:
        """Modules of this model, other than attention, that mix tokens."""
        return [f"{self.base_name}.{name}" for name in self.structure.mixers]

    def attention_cores(self) -> Mapping[str, nn.Module]:
        """Attention cores of this stage's layers."""
        cores = (name for name, module in self.named_modules() if isinstance(module, AttentionCore))
        return {name: self.get_submodule(name) for name in cores}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Tensor-parallel styles of the modules outside of split parts, and of the head, which splits the vocabulary.

        Raises:
            BuildError: the model cannot be split.
        """
        check_splittable(self.styles)
        plan = {f"{self.base_name}.{name}": style for name, style in self.styles.model.items()}
        mine = [name for name, _ in self.named_parameters()]
        head = {self.head_facts.name: TensorStyle.VOCAB} if self.stage.is_last else {}
        head |= dict.fromkeys(self._balances, TensorStyle.SEQUENCE)
        return {part: style for part, style in plan.items() if any(name.startswith(f"{part}.") for name in mine)} | head

    def split_sequence(self, ranks: int) -> None:
        """Expect S / ``ranks`` positions in hidden states from now on."""
        self._sequence_ranks = ranks

    def split_context(self, share: ContextShare) -> None:
        """Expect only this rank's positions from now on; ``documents`` still cover all positions.

        Raises:
            BuildError: a module other than attention mixes tokens.
        """
        if mixers := self.token_mixers():
            raise BuildError(
                f"strategy 'context_parallel': {mixers[0]} mixes tokens and needs whole samples; remove the strategy"
            )
        self._context = share

    def boundary(self, microbatch: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Spec of ``hidden`` [B, S, H] in the dtype of this stage's parameters; empty on the last stage."""
        if self.stage.is_last:
            return {}
        samples, length = microbatch["tokens"].shape
        shape = samples, length // self._sequence_ranks, self.head_facts.features
        return {"hidden": TensorSpec(shape, next(self.parameters()).dtype)}

    def forward(
        self,
        *,
        tokens: Tensor | None = None,
        hidden: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run this stage.

        Args:
            tokens: int64 [B, S], for the first stage.
            hidden: [B, S, H], for later stages: returned by the previous stage.
            positions: int64 [B, S], position inside the document; counted from the sample's start if ``None``.
            documents: int64 [B, S]; tokens attend only within their own document. ``None`` if a sample is one document.
                With other token mixers than attention and ``lengths``, a sample must be one document and padding.
            targets: int64 [B, S], -100 where nothing is predicted.
            lengths: int64 [B], tokens of each right-padded sample.

        Returns:
            Before the last stage ``{"hidden": [B, S, H]}``; from the last stage ``{"token_loss": float32 [B, S]}`` with
            targets, else ``{"logits": [B, S, V]}``.

        Raises:
            ValueError: the first stage got no tokens, a later stage got no hidden states, a model with other token
                mixers than attention got documents, or a stage with balanced experts got padded samples.
        """
        if documents is not None and (mixers := self.token_mixers()):
            if lengths is None:
                raise ValueError(
                    f"a sample has several documents, whose tokens {mixers[0]} would mix; use unpacked data"
                )
            documents = None  # they mark only padding, which comes last and changes no earlier position
        given = tokens if self.stage.is_first else hidden
        if given is None:
            what = "tokens" if self.stage.is_first else "hidden, returned by the previous stage"
            raise ValueError(f"stage {self.stage.index} of {self.stage.count} needs {what}")
        length = given.shape[1] * (1 if self.stage.is_first else self._sequence_ranks)
        if self._context is not None:
            length *= self._context.ranks
        if positions is None:
            positions = torch.arange(length, device=given.device).unsqueeze(0)
            positions = positions if self._context is None else self._context.own(positions)
        base: Any = getattr(self, self.base_name)
        masks = prepare_masks(self._slots, documents, length, given.device)
        padding = self._padding(lengths, length)
        for balance in self._balances.values():
            balance.samples, balance.padding = len(given), padding
        if self._entry is not None:
            self._entry.hand(given)
        inputs = {"input_ids" if self.stage.is_first else "inputs_embeds": given}
        outputs = base(**inputs, position_ids=positions, use_cache=False, **{DOCUMENTS: masks})
        if self._exit is not None:
            return {"hidden": self._exit.take()}
        final: Tensor = outputs.last_hidden_state
        if self.head_facts.scale != 1:
            final = final * self.head_facts.scale
        weight = self.get_parameter(f"{self.head_facts.embedding}.weight") if self.head_facts.tied else None
        loss: dict[str, Tensor] = getattr(self, self.head_facts.name)(final, targets, weight)
        return loss

    def _padding(self, lengths: Tensor | None, length: int) -> Tensor | None:
        """Mask bool [T] of padded positions of this rank, for balanced experts; ``None`` if there is no padding.

        Raises:
            ValueError: there are several stages, in which recomputed blocks would use the mask of another microbatch.
        """
        if lengths is None or not self._balances:
            return None
        if self.stage.count > 1:
            raise ValueError(
                "model.balancing: samples are padded, which balancing does not support in a pipeline; use data without "
                "padding, or no pipeline"
            )
        padded = torch.arange(length, device=lengths.device) >= lengths.unsqueeze(1)
        return (padded if self._context is None else self._context.own(padded)).flatten()


class _Initialisation:
    """Initialisation of a module's own parameters and buffers by the rules of its model (``_init_weights``).

    As in transformers, the rule for the containing module runs after the rule for the module itself: it may initialise
    a projection in another way, or be the only rule for a router.

    Args:
        base: model without its head.
        module: the module.
        parent: module of the same layer that contains it; ``None`` if there is none.
        constants: initial value of tensors that no rule initialises, by class of the module and name of the tensor.
    """

    def __init__(
        self, base: Any, module: nn.Module, parent: nn.Module | None, constants: Mapping[tuple[str, str], float]
    ) -> None:
        self._base, self._module, self._parent, self._constants = base, module, parent, constants

    @torch.no_grad()
    def __call__(self) -> None:
        """Initialise the module's parameters and buffers.

        Raises:
            BuildError: no rule initialises a tensor, and its initial value is unknown.
        """
        kind = type(self._module).__name__
        own = dict([*self._module.named_parameters(recurse=False), *self._module.named_buffers(recurse=False)])
        numbers = {name: tensor for name, tensor in own.items() if tensor.is_floating_point()}
        for tensor in numbers.values():
            tensor.fill_(torch.nan)
        for owner in (self._module, self._parent):
            if owner is not None:
                # The public initialize_weights() initialises all modules.
                self._base._init_weights(self._only(owner, own.values()))  # noqa: SLF001
        left = [name for name in own if name not in numbers or numbers[name].isnan().any()]
        for name in [name for name in left if (kind, name) in self._constants]:
            own[name].fill_(self._constants[kind, name])
            left.remove(name)
        if left:
            raise BuildError(
                f"model.config: transformers initialises {', '.join(left)} of {kind} in its constructor only, so d9d, "
                "which builds models without memory first, cannot train it"
            )

    def _only(self, owner: nn.Module, own: Iterable[Tensor]) -> nn.Module:
        """Copy of a module that shares these tensors; its other tensors are on the meta device."""
        shared = {id(tensor) for tensor in own}

        def bare(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or id(tensor) in shared:
                return tensor
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty

        def shell(module: nn.Module) -> nn.Module:
            # deepcopy refuses modules of FSDP2, whose class is a subclass of the module's own.
            copied = object.__new__(type(module))
            copied.__dict__.update(module.__dict__)
            copied.__dict__["_parameters"] = {name: bare(one) for name, one in module._parameters.items()}  # noqa: SLF001
            copied.__dict__["_buffers"] = {name: bare(one) for name, one in module._buffers.items()}  # noqa: SLF001
            copied.__dict__["_modules"] = {name: shell(child) for name, child in module.named_children()}
            return copied

        return shell(owner)


def _used_numbers(layers: nn.Module) -> int:
    """Number of parameter elements that one token uses; of experts, only the experts of the token count."""
    unused = sum(module.unused_numbers() for module in layers.modules() if isinstance(module, RoutedExperts))
    return sum(parameter.numel() for parameter in layers.parameters()) - unused


def _attach(base: Any, structure: Structure, constants: Mapping[tuple[str, str], float]) -> None:
    """Attach an initialisation to every module with tensors, and a core to every attention module."""
    inside = structure.layers.count(".") + 2  # dots in the name of a module inside a part of a layer
    for path, module in base.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and not isinstance(module, GroupedSwiGLU | Balance):  # which initialise themselves
            in_part = path.startswith(f"{structure.layers}.") and path.count(".") > inside
            parent = base.get_submodule(path.rpartition(".")[0]) if in_part else None
            module.reset_parameters = _Initialisation(base, module, parent, constants)
    for path, call in structure.attention.items():
        base.get_submodule(path).add_module(CORE, call.core(path))


def _balance(base: Any, parts: Parts, balancing: Sequence[Balancer]) -> None:
    """Attach a :class:`Balance` to all layers with d9d's experts, by their routers.

    Raises:
        BuildError: there are no such layers, or d9d does not know how a router computes its scores.
    """
    found = {path: module for path, module in base.named_modules() if isinstance(module, RoutedExperts)}
    if not found:
        raise BuildError("model.balancing: the model has no experts that d9d computes; remove the field")
    for path, module in found.items():
        parent = base.get_submodule(path.rpartition(".")[0])
        facts = parts.routers.get(type(parent).__name__)
        if facts is None:
            kind = type(parent).__name__
            raise BuildError(
                f"model.balancing: d9d cannot tell how the router of {kind} scores experts; remove the field"
            )
        module.balance = Balance(module.num_experts, module.chosen, balancing, parent, facts)
