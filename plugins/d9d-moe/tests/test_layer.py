"""The layer against the published ones, under checkpointing, compiled, and sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_core.traits import HasExperts, TensorStyle
from d9d_engine.compose.kernels import bind_kernels
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.routing import TopKRouting
from d9d_moe.router.top_k import TopKRouter
from d9d_nn.linear import Linear
from d9d_nn.ops import grouped_linear_torch
from d9d_nn.swiglu import SwiGLU
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_testing.world import World
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

HIDDEN, INNER, SHARED, EXPERTS, TOP_K = 32, 24, 40, 8, 2
RENAMED = {"gate.weight": "router.weight", "shared_expert_gate.weight": "shared_gate.weight"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(*, shared: bool = False, renormalise: bool = True, kernel: bool = False) -> MoELayer:
    torch.manual_seed(0)
    made = MoELayer(
        TopKRouter(HIDDEN, EXPERTS, TOP_K, std=0.5, renormalise=renormalise),
        GroupedSwiGLU(HIDDEN, INNER, EXPERTS, std=0.2, output_std=0.2),
        LocalDispatcher(),
        shared_expert=SwiGLU(HIDDEN, SHARED, std=0.2, output_std=0.2) if shared else None,
        shared_gate=Linear(HIDDEN, 1, std=0.2) if shared else None,
    )
    if kernel:
        for slot in (made.experts.into, made.experts.out_of):
            signature = OpSignature("grouped_linear", "cpu", "float32", slot.static)
            assert grouped_linear_torch.supports(signature).accept
            slot.bind("grouped_mm", grouped_linear_torch.build(signature))
    return made


def outcome(module: nn.Module, hidden: Tensor, call: Any = None) -> dict[str, Tensor]:
    """Output, and gradients of hidden states and parameters, by the names of the module."""
    hidden = hidden.clone().requires_grad_()
    out = (module if call is None else call)(hidden)
    (out.float() * normal(*out.shape, seed=9)).sum().backward()
    found = {"out": out.detach(), "hidden": hidden.grad}
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}


def from_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names and layouts: they keep [out, in], and gate and up in one tensor."""
    found = {}
    for name, tensor in tensors.items():
        if name == "experts.gate_up_proj":
            found["experts.gate_proj"], found["experts.up_proj"] = tensor.mT.chunk(2, dim=2)
        elif name == "experts.down_proj":
            found[name] = tensor.mT
        else:
            found[RENAMED.get(name, name)] = tensor
    return found


def published(kind: str) -> nn.Module:
    pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }
    if kind == "qwen3":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

        config: Any = Qwen3MoeConfig(**sizes, norm_topk_prob=True, experts_implementation="eager")
        made: nn.Module = Qwen3MoeSparseMoeBlock(config)
    else:
        from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

        config = Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=SHARED, experts_implementation="eager")
        assert not config.norm_topk_prob
        made = Qwen2MoeSparseMoeBlock(config)
    for seed, parameter in enumerate(made.parameters()):
        parameter.data.copy_(0.3 * normal(*parameter.shape, seed=seed))
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "grouped_mm"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_it_computes_what_the_published_block_computes(kind: str, kernel: bool) -> None:
    theirs, shared = published(kind), kind == "qwen2"
    ours = layer(shared=shared, renormalise=not shared, kernel=kernel)
    ours.load_state_dict(from_hugging_face(theirs.state_dict()))
    hidden = normal(2, 15, HIDDEN)
    expected = from_hugging_face(outcome(theirs, hidden))
    actual = outcome(ours, hidden)
    assert_close_values(actual["out"], expected["out"], TOLERANCES[torch.float32])
    assert_close_gradients(actual, expected, TOLERANCES[torch.float32])


def test_few_tokens_leave_most_experts_gradients_of_zero() -> None:
    for made in (layer(), layer(kernel=True)):
        found = outcome(made, normal(1, 1, HIDDEN))
        used = found["experts.gate_proj"].flatten(1).any(1)
        assert used.sum() == TOP_K
        assert not outcome(layer(), normal(1, 0, HIDDEN))["experts.gate_proj"].any()


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "grouped_mm"])
def test_checkpointing_changes_no_bit(kernel: bool) -> None:
    hidden = normal(2, 9, HIDDEN)
    plain, again = layer(shared=True, kernel=kernel), layer(shared=True, kernel=kernel)
    expected = outcome(plain, hidden)
    actual = outcome(again, hidden, lambda x: checkpoint(again, x, use_reentrant=False))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_it_compiles_whole() -> None:
    hidden = normal(2, 9, HIDDEN).bfloat16()  # torch 2.11 can compile grouped_mm of bfloat16 only
    plain, compiled = (layer(shared=True, kernel=True).bfloat16() for _ in range(2))
    actual = outcome(compiled, hidden, torch.compile(compiled, backend="aot_eager", fullgraph=True))
    assert_close_gradients(actual, outcome(plain, hidden))


def test_autocast_computes_experts_narrow_and_keeps_gradients_wide() -> None:
    made, hidden = layer(shared=True, kernel=True), normal(2, 9, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        out = made(hidden)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in made.parameters())
    assert_close_gradients({"out": out}, {"out": layer(shared=True)(hidden)})


def test_kernels_are_chosen_for_its_products(registry: Any) -> None:
    made = layer()
    choices = bind_kernels(made.named_modules(), registry("d9d_nn.plugin"), {}, "cpu", "float32", lambda _: ())
    chosen = {"grouped_linear": "grouped_mm", "silu_mul": "reference", "permute": "reference", "unpermute": "reference"}
    assert {c.op: c.backend for c in choices} == chosen
    assert {site for c in choices for site in c.sites} >= {"dispatcher.permute", "dispatcher.unpermute"}
    hidden = normal(2, 9, HIDDEN)
    assert_close_gradients(outcome(made, hidden), outcome(layer(), hidden))


def sharded(rank_tokens: int) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients of a sharded layer, averaged over ranks, and how many rows each expert got on this rank."""
    made = layer(shared=True)
    fully_shard(made.experts)  # as a unit of its own, as well as within one
    fully_shard(made)
    hidden = rank_hidden(dist.get_rank(), rank_tokens)
    out = made(hidden)
    (out * normal(*out.shape, seed=9)).sum().backward()
    made.unshard()  # the router's weight is the layer's own
    routed = made.router(hidden.flatten(0, 1)).indices.flatten().bincount(minlength=EXPERTS).tolist()
    made.reshard()
    grads = {name: p.grad.full_tensor() for name, p in made.named_parameters() if isinstance(p.grad, DTensor)}
    return grads, routed


def rank_hidden(rank: int, tokens: int) -> Tensor:
    """The second rank has copies of one token, so it uses no more than k experts."""
    return normal(1, tokens, HIDDEN, seed=rank) if rank == 0 else normal(1, 1, HIDDEN, seed=rank).repeat(1, tokens, 1)


@pytest.mark.thorough
def test_sharded_ranks_may_leave_experts_without_tokens(world: type[World]) -> None:
    results = world(2).run(sharded, 12)
    routed = [rows for _, rows in results]
    assert routed[0] != routed[1]
    assert routed[1].count(0) == EXPERTS - TOP_K
    expected: dict[str, Tensor] = {}
    for rank in range(2):
        for name, grad in outcome(layer(shared=True), rank_hidden(rank, 12)).items():
            expected[name] = expected.get(name, torch.zeros(())) + grad / 2
    for grads, _ in results:
        assert_close_gradients(grads, {name: expected[name] for name in expected if name not in ("out", "hidden")})


def test_banks_from_the_meta_device_are_filled_late() -> None:
    with torch.device("meta"):
        experts = GroupedSwiGLU(64, 48, 4, std=0.5, output_std=0.1)
    experts.to_empty(device="cpu")
    torch.manual_seed(0)
    experts.reset_parameters()
    spread = {name: parameter.std().item() for name, parameter in experts.named_parameters()}
    assert spread == pytest.approx({"gate_proj": 0.5, "up_proj": 0.5, "down_proj": 0.1}, rel=0.05)


def test_it_says_where_its_experts_are() -> None:
    made = layer(shared=True)
    assert isinstance(made, HasExperts)
    assert made.expert_banks() == {"experts": made.get_submodule("experts")}
    assert {len(bank) for bank in made.expert_banks()["experts"].parameters()} == {EXPERTS}


def test_the_shared_expert_is_computed_while_tokens_travel() -> None:
    made, order = layer(shared=True), []

    class Slow(LocalDispatcher):
        def dispatch(self, tokens: Tensor, routing: TopKRouting) -> Any:
            order.append("dispatch")
            arrived = super().dispatch(tokens, routing)
            return SimpleNamespace(wait=lambda: (order.append("wait"), arrived.wait())[1])

    made.dispatcher = Slow()
    made.shared_expert.register_forward_hook(lambda *_: order.append("shared expert"))
    assert_close_values(made(normal(2, 9, HIDDEN)), layer(shared=True)(normal(2, 9, HIDDEN)))
    assert order == ["dispatch", "shared expert", "wait"]


def test_parts_that_do_not_fit_are_refused() -> None:
    experts = GroupedSwiGLU(HIDDEN, INNER, 4, std=0.2, output_std=0.2)
    with pytest.raises(BuildError, match="among 8 experts, but there are 4"):
        MoELayer(TopKRouter(HIDDEN, 8, 2, std=0.2), experts, LocalDispatcher())
    with pytest.raises(BuildError, match="shared_gate without shared_expert has no effect"):
        MoELayer(TopKRouter(HIDDEN, 4, 2, std=0.2), experts, LocalDispatcher(), shared_gate=Linear(HIDDEN, 1, std=0.2))


@pytest.mark.parametrize("backend", ["reference", "grouped_mm"])
def test_experts_may_leave_the_gradients_of_their_banks(backend: str) -> None:
    found = []
    for late in (False, True):
        torch.manual_seed(0)
        experts = GroupedSwiGLU(HIDDEN, INNER, EXPERTS, std=0.5, output_std=0.5)
        if backend == "grouped_mm":
            for name, slot in experts.op_slots().items():
                if name != "silu_mul":
                    slot.bind(backend, grouped_linear_torch.build(OpSignature("grouped_linear", "cpu", "float32")))
        deferral = Deferral()
        names = experts.defer_to(deferral if late else None)
        assert set(names) == {name for name, _ in experts.named_parameters()}
        rows = normal(12, HIDDEN).requires_grad_()
        with deferral.collect() as left:
            experts(rows, torch.tensor([3, 0, 2, 1, 0, 0, 4, 0])).square().sum().backward()
        assert all((parameter.grad is None) == late for parameter in experts.parameters())
        left.run()
        found.append({"rows": rows.grad} | {name: parameter.grad for name, parameter in experts.named_parameters()})
    assert_close_gradients(found[1], found[0])


def test_kernels_are_told_the_sizes_of_the_products() -> None:
    slots = GroupedSwiGLU(3, 5, 7, std=0.2, output_std=0.2).op_slots()
    assert {name: (slot.op, slot.static) for name, slot in slots.items()} == {
        "into": ("grouped_linear", {"in_features": 3, "out_features": 5, "experts": 7}),
        "out_of": ("grouped_linear", {"in_features": 5, "out_features": 3, "experts": 7}),
        "silu_mul": ("silu_mul", {"features": 5}),
    }


def test_router_experts_and_gate_are_replicated_on_a_ranks_own_positions() -> None:
    experts, router = GroupedSwiGLU(4, 5, 3, std=0.2, output_std=0.2), TopKRouter(4, 3, 2, std=0.2)
    plain = MoELayer(router, experts, LocalDispatcher())
    assert plain.tensor_parallel_plan() == dict.fromkeys(("router", "experts"), TensorStyle.SEQUENCE)
    shared = nn.Identity()
    gated = MoELayer(
        router, experts, LocalDispatcher(), shared_expert=shared, shared_gate=Linear(4, 1, std=0.2)
    )  # fmt: skip
    assert gated.tensor_parallel_plan() == dict.fromkeys(("router", "experts", "shared_gate"), TensorStyle.SEQUENCE)
    assert set(plain.op_slots()) == {"dispatcher.permute", "dispatcher.unpermute"}
    plain.dispatcher = SimpleNamespace()  # type: ignore[assignment] - of a third party, without ops
    assert plain.op_slots() == {}


def test_a_shared_expert_is_scaled_by_the_sigmoid_of_its_gate() -> None:
    hidden = torch.tensor([[[1.0, 2.0]]])
    gate = Linear(2, 1, std=0.2)
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([[3.0, -1.0]]))
    experts = GroupedSwiGLU(2, 3, 4, std=0.0, output_std=0.0)  # give zeros
    router = TopKRouter(2, 4, 2, std=0.2)
    made = MoELayer(router, experts, LocalDispatcher(), shared_expert=nn.Identity(), shared_gate=gate)
    assert_close_values(made(hidden), hidden / (1 + math.exp(-1.0)))
    made.shared_gate = None
    assert torch.equal(made(hidden), hidden)
    made.shared_expert = None
    assert not made(hidden).any()


def test_updates_of_a_bank_are_added_to_its_product() -> None:
    class Term(nn.Module):
        def forward(self, rows: Tensor, counts: Tensor, *, spare_rows: bool) -> Tensor:
            assert (counts.tolist(), spare_rows) == ([1, 1], False)
            return torch.full((len(rows), 2), 7.0)

    experts = GroupedSwiGLU(2, 3, 2, std=0.0, output_std=0.0)
    experts.bank_terms()["down_proj"] = Term()
    out = experts(torch.ones(2, 2), torch.tensor([1, 1]), spare_rows=False)
    assert out.tolist() == [[7.0, 7.0]] * 2
