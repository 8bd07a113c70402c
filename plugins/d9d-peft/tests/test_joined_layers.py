"""Adapted layers on the same input, which a backend of the op ``low_rank_linear`` computes together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.delta.gated_delta_net import GatedDeltaNet
from d9d_nn.geglu import GeGLU
from d9d_nn.linear import Linear
from d9d_nn.ops.low_rank_linear import low_rank_linear
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from d9d_nn.swiglu import SwiGLU
from d9d_peft.config import DoraConfig, LoraConfig
from d9d_peft.ia3.config import Ia3Config
from d9d_peft.ia3.method import Ia3
from d9d_peft.lora.dora import Dora
from d9d_peft.lora.method import Lora
from d9d_testing.tolerances import assert_close_gradients
from torch import Tensor, nn


class Recorded:
    """Backend that computes like the reference, and records the numbers of features of each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, x: Tensor, weights: Sequence[Tensor], *others: Any) -> tuple[Tensor, ...]:
        self.calls.append([len(weight) for weight in weights])
        return low_rank_linear(x, weights, *others)


class Attention(nn.Module):
    """Attention layer with rotations of its own positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = GroupedQueryAttention(
            8, query_heads=2, key_value_heads=1, head_dim=4, std=0.5, output_std=0.5, **options
        )
        self.rotary = RotaryEmbedding(4, theta=100.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, self.rotary(torch.arange(x.shape[1]).unsqueeze(0)), None)
        return out

    @classmethod
    def biased(cls) -> Attention:
        """Layer whose projections of queries and values have biases."""
        return cls(biases=("q_proj", "v_proj"))


class DeltaNet(nn.Module):
    """Gated DeltaNet without documents."""

    def __init__(self) -> None:
        super().__init__()
        heads = {"key_heads": 1, "value_heads": 2, "key_dim": 4, "value_dim": 3}
        self.layer = GatedDeltaNet(8, **heads, std=0.5, output_std=0.5, norm_eps=1e-6)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, None)
        return out


#: Module, and the calls of the backend: the features of each layer in a call.
LAYERS: Mapping[str, tuple[Callable[[], nn.Module], list[list[int]]]] = {
    "swiglu": (lambda: SwiGLU(8, 12, std=0.5, output_std=0.5), [[12, 12], [8]]),
    "geglu": (lambda: GeGLU(8, 12, std=0.5, output_std=0.5), [[12, 12], [8]]),
    "attention": (Attention, [[8, 4, 4], [8]]),
    "attention with biases": (Attention.biased, [[8, 4, 4], [8]]),
    "attention with gate": (lambda: Attention(output_gate=True), [[16, 4, 4], [8]]),
    "delta net": (DeltaNet, [[2], [2], [4, 4, 6, 6], [8]]),
}


def adapted(make: Callable[[], nn.Module], config: LoraConfig | None = None) -> nn.Module:
    """Module with updates that are not zero."""
    torch.manual_seed(0)
    module = make()
    method = Lora(config or LoraConfig(r=2, alpha=3))
    module.requires_grad_(False)
    added = method.inject(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in added)
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return module


def bind(module: nn.Module) -> Recorded:
    """Bind a recorder to the slots of all adapted layers."""
    recorded = Recorded()
    for layer in module.modules():
        if hasattr(layer, "lora_linear"):
            for slot in layer.op_slots().values():
                slot.bind("recorded", recorded)
    return recorded


def step(module: nn.Module) -> dict[str, Tensor]:
    """Output, and the gradients of the input and of all trained parameters."""
    module.zero_grad()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = module(x)
    (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    gradients = {name: parameter.grad for name, parameter in (*module.named_parameters(), ("x", x))}
    return {"out": out.detach()} | {name: grad for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_the_same_input_are_computed_in_one_call(name: str) -> None:
    make, calls = LAYERS[name]
    module = adapted(make)
    expected = step(module)
    recorded = bind(module)
    assert_close_gradients(step(module), expected)
    assert recorded.calls == calls


def test_each_layer_has_its_own_rank_and_scale() -> None:
    patterns = {"rank_pattern": {"*up_proj": 4}, "alpha_pattern": {"*up_proj": 1.5}}
    module = adapted(swiglu, LoraConfig(r=2, alpha=3, **patterns))  # type: ignore[arg-type]
    expected = step(module)
    recorded = bind(module)
    assert_close_gradients(step(module), expected)
    assert recorded.calls == [[12, 12], [8]]


def test_layers_without_an_update_are_computed_alone() -> None:
    module = adapted(Attention, LoraConfig(r=2, targets=("*q_proj", "*v_proj")))
    expected = step(module)
    recorded = bind(module)
    assert_close_gradients(step(module), expected)
    assert recorded.calls == [[8, 4]]


def swiglu() -> Any:
    return LAYERS["swiglu"][0]()


def test_with_dropout_layers_are_computed_together_in_evaluation_only() -> None:
    module = adapted(swiglu, LoraConfig(r=2, dropout=0.5))
    recorded = bind(module)
    step(module)
    assert recorded.calls == []
    step(module.eval())
    assert recorded.calls == [[12, 12], [8]]


def test_a_backend_computes_no_update_that_is_switched_off() -> None:
    module, plain = adapted(swiglu), swiglu()
    plain.load_state_dict({name: x for name, x in module.state_dict().items() if "lora_" not in name})
    recorded = bind(module)
    with Lora(LoraConfig(r=2)).off(module), torch.no_grad():
        x = torch.randn(3, 8)
        assert torch.equal(module(x), plain(x))
    assert recorded.calls == []


def lend(module: Any) -> None:
    module.up_proj.lend_product(lambda rows: rows @ module.up_proj.weight.T)


def defer(module: Any) -> None:
    deferral = Deferral()
    deferral.wanted = True
    module.up_proj.lora_A.defer_to(deferral)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.up_proj.register_forward_hook(lambda *_: None),
        lambda module: module.up_proj.lora_B.register_forward_pre_hook(lambda *_: None),
        lend,
        defer,
    ],
    ids=["hook of the layer", "hook of a factor", "lent product", "deferred weight gradient"],
)
def test_a_layer_whose_calls_do_more_than_multiply_is_computed_by_itself(change: Callable[[Any], object]) -> None:
    module = adapted(swiglu)
    recorded = bind(module)
    change(module)
    with torch.no_grad() if change is not defer else torch.enable_grad():
        module(torch.randn(2, 3, 8))
    assert recorded.calls == [[12], [8]]


class Halved(Linear):
    """Linear layer with a product of its own."""

    def multiply(self, rows: Tensor, deferral: Deferral | None) -> Tensor:
        return super().multiply(rows, deferral) / 2


def replaced(path: str) -> Callable[[Any], None]:
    """Function that gives a module inside of a layer a forward of its own."""

    def replace_forward(module: Any) -> None:
        part = module.up_proj.get_submodule(path)
        part.forward = part.forward

    return replace_forward


def halve(module: Any) -> None:
    module.up_proj = Halved(8, 12, std=0.5)


@pytest.mark.parametrize("before", [None, halve], ids=["plain", "own product"])
@pytest.mark.parametrize(
    "after", [None, replaced(""), replaced("lora_A"), replaced("lora_B")], ids=["plain", "layer", "A", "B"]
)
def test_only_layers_that_multiply_and_add_have_the_slot(
    before: Callable[[Any], None] | None, after: Callable[[Any], None] | None
) -> None:
    def make() -> nn.Module:
        module = swiglu()
        if before is not None:
            before(module)
        return module

    module: Any = adapted(make)
    if after is not None:
        after(module)
    assert bool(module.up_proj.op_slots()) == (before is None and after is None)
    assert module.gate_proj.op_slots()


def test_a_strategy_that_replaces_the_product_of_adapted_layers_takes_their_slot() -> None:
    convert = pytest.importorskip("d9d_fp8.linear").Float8
    module = adapted(swiglu)
    layer = module.up_proj
    layer.__class__ = type("Float8Lora", (convert, type(layer)), {})
    assert not layer.op_slots()
    assert module.gate_proj.op_slots()


def test_layers_with_different_backends_are_computed_by_their_own() -> None:
    module = adapted(swiglu)
    expected = step(module)
    first, second = Recorded(), Recorded()
    module.gate_proj.lora_linear.bind("first", first)
    module.up_proj.lora_linear.bind("second", second)
    assert_close_gradients(step(module), expected)
    assert (first.calls, second.calls) == ([[12]], [[12]])


def test_a_projection_of_another_library_is_called_as_it_is() -> None:
    module = adapted(swiglu)
    module.up_proj = nn.Linear(8, 12, bias=False)
    recorded = bind(module)
    step(module)
    assert recorded.calls == [[12], [8]]


def test_other_methods_have_no_slot() -> None:
    module = swiglu()
    Dora(DoraConfig(r=2)).inject(module)
    assert not any(layer.op_slots() for layer in module.modules() if hasattr(layer, "lora_linear"))
    module = adapted(swiglu)
    Ia3(Ia3Config(targets=("up_proj",))).inject(module)
    assert not module.up_proj.op_slots()
    assert module.gate_proj.op_slots()


def test_under_autocast_the_op_gets_tensors_of_one_dtype() -> None:
    module = adapted(Attention.biased)
    found: list[torch.dtype] = []

    def backend(x: Tensor, *groups: Sequence[Any]) -> tuple[Tensor, ...]:
        found.extend(one.dtype for group in ([x], *groups) for one in group if isinstance(one, Tensor))
        return low_rank_linear(x, *groups)

    for layer in module.modules():
        if hasattr(layer, "lora_linear"):
            layer.lora_linear.bind("backend", backend)
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(1, 2, 8))
    assert set(found) == {torch.bfloat16}
