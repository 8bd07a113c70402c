from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_engine.distributed.mesh import Topology
from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.activation_checkpointing.strategy import ActivationCheckpointing
from d9d_parallel.compile.config import CompileConfig
from d9d_parallel.compile.strategy import Compile
from d9d_parallel.context_parallel.share import ContextPositions, exchange
from d9d_parallel.ranks import Ranks
from d9d_parallel.tensor_parallel.async_forwards import AsyncColumns, Column, HandedProduct, RowProduct
from d9d_parallel.tensor_parallel.async_products import AsyncProducts
from d9d_parallel.tensor_parallel.collectives import gather, scatter_sum
from d9d_parallel.tensor_parallel.forwards import LocalShards, RowForward, WholeSequence, local_of, shard
from d9d_testing.world import World
from pydantic import ValidationError
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

# Dynamo itself looks at the gradients of inputs that are no leaves.
pytestmark = [
    pytest.mark.smoke,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
    # torch 2.11's Inductor, when it is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module) -> tuple[str, ...]:
    config = CompileConfig(backend="aot_eager", fullgraph=True)
    return Compile(config).apply(model, Topology()).modules


def checkpointed(model: nn.Module, *save: str) -> None:
    ActivationCheckpointing(ActivationCheckpointingConfig(save=save)).apply(model, Topology())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "topology", "started"),
    [
        ("inductor", Topology(device=torch.device("cuda")), 1),
        ("inductor", Topology(device=torch.device("cuda"), simulated=True), 0),
        ("inductor", Topology(), 0),
        ("aot_eager", Topology(device=torch.device("cuda")), 0),
    ],
)
def test_workers_that_compile_kernels_start_where_there_will_be_kernels(
    make_model, monkeypatch: pytest.MonkeyPatch, backend: str, topology: Topology, started: int
) -> None:
    """By a private function of torch: this fails when there is none of its name, or torch does not call it itself."""
    from torch._dynamo.backends import inductor

    calls: list[int] = []
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: calls.append(1))
    Compile(CompileConfig(backend=backend)).apply(make_model(), topology)
    assert len(calls) == started
    assert "maybe_warm_pool()" in inspect.getsource(inductor)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def keeping_count(model: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Output of a model, and how many elements it keeps for the backward."""
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(rows)
    return out, saved


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", [None, [], ["aten.addmm"]])
def test_outputs_and_gradients_are_those_of_the_plain_model(
    make_model, loss_and_gradients, checkpointing: list[str] | None
) -> None:
    # Depth 10 is more than Dynamo's limit of 8 recompilations: alike blocks must share graphs.
    plain, changed = without_dropout(make_model(depth=10)), without_dropout(make_model(depth=10))
    if checkpointing is not None:
        checkpointed(changed, *checkpointing)
    names = compiled(changed)
    loss, gradients = loss_and_gradients(plain)
    loss_again, gradients_again = loss_and_gradients(changed)
    assert len(names) == 10
    assert 1 <= graphs() <= 2
    torch.testing.assert_close(loss, loss_again)
    assert gradients.keys() == gradients_again.keys()
    torch.testing.assert_close(gradients, gradients_again)


def test_parameter_names_and_module_tree_stay(make_model) -> None:
    plain, changed = make_model(), make_model()
    checkpointed(changed)
    assert compiled(changed) == ("backbone.layers.0", "backbone.layers.1", "backbone.layers.2")
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in changed.named_modules()]
    assert list(plain.state_dict()) == list(changed.state_dict())


@pytest.mark.full
def test_checkpointed_blocks_keep_less_when_compiled(make_model) -> None:
    # Without dropout: the saved state of the CPU's generator outweighs the activations of a toy.
    plain, changed = without_dropout(make_model()), without_dropout(make_model())
    checkpointed(changed)
    compiled(plain)
    compiled(changed)
    assert keeping_count(changed, torch.ones(64, 4))[1] < keeping_count(plain, torch.ones(64, 4))[1]


@pytest.mark.full
def test_saved_operators_run_once_in_compiled_blocks_too(make_model, loss_and_gradients) -> None:
    def calls(*save: str) -> int:
        torch.compiler.reset()
        model = without_dropout(make_model())
        checkpointed(model, *save)
        compiled(model)
        loss_and_gradients(model)  # compiles
        with torch.profiler.profile(acc_events=True) as profile:
            loss_and_gradients(model)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::tanh")

    assert (calls(), calls("aten.tanh")) == (6, 3)


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_checkpointed_blocks_may_replace_parameters_in_their_forwards(make_model, is_checkpointed: bool) -> None:
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=False):
        model = make_model(depth=1)
        if is_checkpointed:
            checkpointed(model)
        compiled(model)
        assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint is is_checkpointed


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "inductor", "mode": "max-autotune-no-cudagraphs", "fullgraph": False, "dynamic": None},
        {"backend": "aot_eager", "mode": None, "fullgraph": True, "dynamic": False},
    ],
)
def test_every_setting_reaches_torch(make_model, monkeypatch, settings: dict[str, object]) -> None:
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda _module, **given: seen.append(given))
    Compile(CompileConfig(**settings)).apply(make_model(depth=2), Topology())
    assert seen == [settings, settings]


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({"cudagraphs": True}, {}),
        ({"mode": "reduce-overhead"}, {}),
        ({"mode": "max-autotune"}, {"max_autotune": True}),
        ({"cudagraphs": True, "mode": "max-autotune"}, {"max_autotune": True}),
        ({"cudagraphs": True, "mode": "default"}, {}),
    ],
    ids=str,
)
def test_graphs_are_recorded_or_refused_by_inductor_and_announced(
    make_model, monkeypatch, given: dict[str, object], more: dict[str, object]
) -> None:
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda _module, **settings: seen.append(settings))
    applied = Compile(CompileConfig(**given)).apply(make_model(depth=1), Topology())
    assert applied.cuda_graphs
    (settings,) = seen
    assert "mode" not in settings  # torch refuses both
    assert {"triton.cudagraphs": True, "triton.cudagraph_or_error": True, **more}.items() <= settings["options"].items()
    monkeypatch.undo()
    torch.compile(nn.Linear(2, 2), **settings)  # every version of torch knows these options


def test_compiled_code_is_kept_on_disk_by_default() -> None:
    import torch._functorch.config
    import torch._inductor.config

    # The README says so. Both read an environment variable, which is not set here.
    assert torch._inductor.config.fx_graph_cache
    assert torch._functorch.config.enable_autograd_cache


@pytest.mark.parametrize("given", [{}, {"mode": "default"}, {"mode": "max-autotune-no-cudagraphs"}], ids=str)
def test_other_modes_announce_no_graphs(make_model, given: dict[str, str]) -> None:
    assert not Compile(CompileConfig(**given)).apply(make_model(depth=1), Topology()).cuda_graphs


def test_contradictory_graphs_are_refused() -> None:
    with pytest.raises(ValidationError, match="contradicts mode 'max-autotune-no-cudagraphs'"):
        CompileConfig(mode="max-autotune-no-cudagraphs", cudagraphs=True)
    with pytest.raises(ValidationError, match="cudagraphs belongs to backend 'inductor'"):
        CompileConfig(backend="aot_eager", cudagraphs=True)


def test_unknown_backend_is_an_error_with_a_suggestion(make_model) -> None:
    with pytest.raises(BuildError, match="unknown backend 'inducter'; did you mean 'inductor'"):
        Compile(CompileConfig(backend="inducter")).apply(make_model(), Topology())


def test_model_without_the_trait_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"strategy 'compile' needs model trait 'blocks'"):
        compiled(nn.Linear(2, 2))


def test_compiling_blocks_twice_is_an_error(make_model) -> None:
    model = make_model()
    compiled(model)
    with pytest.raises(BuildError, match=r"compile block 'backbone\.layers\.0' a second time"):
        compiled(model)


def test_mode_of_another_backend_is_refused() -> None:
    with pytest.raises(ValidationError, match="mode belongs to backend 'inductor'"):
        CompileConfig(backend="aot_eager", mode="max-autotune")


def exchanged() -> None:
    """Compare outputs and gradients of compiled collectives with the same collectives outside of a graph."""
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD)
    calls = [
        lambda x: gather(x, ranks, summed=True),
        lambda x: gather(x, ranks, summed=False),
        lambda x: scatter_sum(x, ranks),
        lambda x: exchange(x, ranks),
        lambda x: ContextPositions(ranks).gather(x),
    ]
    for call in calls:
        found = []
        for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            x = torch.arange(32.0).view(2, 4, 4).add(dist.get_rank()).requires_grad_()
            out = function(x)
            out.backward(torch.arange(float(out.numel())).view(out.shape) + dist.get_rank())
            found.append((out.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.full
def test_collectives_of_a_compiled_graph_have_their_gradients() -> None:
    """With torch 2.11, Dynamo lost gradients of outputs that a Function returned as it had filled them."""
    World(2).run(exchanged)


class LendingLinear(nn.Linear):
    """Linear layer that asks a function for its product, once it was lent."""

    deferral = None
    _lent: Callable[[torch.Tensor], torch.Tensor | None] | None = None

    def lend_product(self, compute: Callable[[torch.Tensor], torch.Tensor | None]) -> bool:
        self._lent = compute
        return True

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Linear
        out = None if self._lent is None else self._lent(input)
        if out is None:
            return super().forward(input)
        return out if self.bias is None else out + self.bias


class SplitBlock(nn.Module):
    """Feed-forward layer whose two column-wise products may come from outside; a module with one block, itself.

    Args:
        ranks: share its features.
        asynchronous: whether its products overlap with the exchange of positions.
    """

    def __init__(self, ranks: Ranks, *, asynchronous: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Module()
        self.inner.gate, self.inner.up = LendingLinear(4, 8), LendingLinear(4, 8, bias=False)
        self.inner.down = LendingLinear(8, 4)
        self.inner.forward = self._multiplied
        mesh = init_device_mesh("cpu", (ranks.size,))
        products = AsyncProducts(ranks, symmetric=False) if asynchronous else None
        columns = []
        for layer in (self.inner.gate, self.inner.up):
            shard(layer, "weight", mesh, 0)
            if layer.bias is not None:
                shard(layer, "bias", mesh, 0)
            layer.forward = LocalShards(layer)
            columns.append(Column(layer, local_of, HandedProduct()))
        shard(self.inner.down, "weight", mesh, 1)
        self.inner.down.forward = LocalShards(self.inner.down) if asynchronous else RowForward(self.inner.down, ranks)
        if products is None:
            self.inner.forward = WholeSequence(self.inner, ranks, summed=True)
            return
        self.inner.forward = AsyncColumns(self.inner, columns, products)
        self.inner.down.lend_product(RowProduct(self.inner.down, products))
        for column in columns:
            column.layer.lend_product(column.handed)

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner.down(self.inner.gate(rows).tanh() * self.inner.up(rows))

    def blocks(self) -> dict[str, nn.Module]:
        return {"inner": self.inner}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.inner(rows)


def split_blocks(asynchronous: bool) -> None:
    """Compare a split block as it is, one that is compiled to one graph, and one that is checkpointed, too."""
    assert dist.group.WORLD is not None
    found, kept = [], []
    for changes in ((), (compiled,), (checkpointed, compiled)):
        torch.compiler.reset()
        block = SplitBlock(Ranks(dist.group.WORLD), asynchronous=asynchronous)
        for change in changes:
            change(block)
        rows = torch.arange(8.0).view(1, 2, 4).sub(4 * dist.get_rank()).div(8).requires_grad_()
        out, elements = keeping_count(block, rows)
        out.square().sum().backward()
        found.append([out.detach(), rows.grad, *(local_of(one.grad) for one in block.parameters())])
        kept.append(elements)
        assert all(isinstance(one, DTensor) for name, one in block.named_parameters() if name.endswith("weight"))
    assert graphs() == 2
    torch.testing.assert_close(found[1:], [found[0]] * 2)
    # The input and parameters, and nothing that an autograd Function inside returned.
    assert kept[2] < kept[1]
    assert kept[2] <= rows.numel() + sum(local_of(one).numel() for one in block.parameters())


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "overlapped"])
def test_split_blocks_that_are_checkpointed_are_one_graph(asynchronous: bool) -> None:
    """Local shards take the place of their parameters while they are traced."""
    World(2).run(split_blocks, asynchronous)
