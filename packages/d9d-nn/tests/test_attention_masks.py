"""Layers that share their masks, and packed documents that are as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.attention.masks import AttentionMasks, prepare_masks
from d9d_nn.decoder.config import PROJECTIONS
from d9d_nn.ops.attention import flex, sdpa
from d9d_nn.ops.attention.reference import attention
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from d9d_nn.rope.scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    # Dynamo looks at .grad of the hidden states.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]

BACKENDS = {"sdpa": sdpa.build, "flex": flex.build}
LENGTHS = (4, 1, 9)
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)).unsqueeze(0)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
WINDOWS = {"full": (None, None), "sliding": (3, 3), "mixed": (None, 3, None)}


class Tower(nn.Module):
    """Layers of attention with residuals, and a loss per token: the use of masks in a model."""

    def __init__(self, windows: tuple[int | None, ...], backend: str = "reference", scaling: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        nn.init.normal_(self.embedding.weight, std=0.5)  # losses near one, so that rounding stays small
        self.rotary = RotaryEmbedding(8, theta=100.0, scaling=scaling)
        self.layers = nn.ModuleList(
            GroupedQueryAttention(
                16,
                query_heads=4,
                key_value_heads=2,
                head_dim=8,
                std=0.25,
                output_std=0.25,
                biases=PROJECTIONS,
                window=window,
            )
            for window in windows
        )
        for layer in self.layers:
            slot = layer.core.attention
            if backend != "reference":
                slot.bind(backend, BACKENDS[backend](OpSignature("attention", "cpu", "float32", slot.static)))

    def masks(self, documents: Tensor | None, length: int) -> AttentionMasks:
        return prepare_masks((layer.core.attention for layer in self.layers), documents, length, torch.device("cpu"))

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None, *, shared: bool = True) -> Tensor:
        hidden, rotation = self.embedding(tokens), self.rotary(positions)
        seen = self.masks(documents, tokens.shape[1]) if shared else documents
        for layer in self.layers:
            hidden = hidden + layer(hidden, rotation, seen)
        logits = hidden @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten(), reduction="none")


def tokens(length: int = sum(LENGTHS)) -> Tensor:
    return torch.randint(20, (1, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearScaling(factor=4),
        YarnScaling(factor=4, original_max_positions=64),
        Llama3Scaling(factor=4, original_max_positions=64, low_freq_factor=1, high_freq_factor=4),
    ],
    ids=["plain", "linear", "yarn", "llama3"],  # dynamic depends on the sample's length: see test_rope_scaling.py
)
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_packed_documents_have_the_losses_they_have_alone(
    backend: str, windows: tuple[int | None, ...], scaling: RopeScaling | None
) -> None:
    tower, batch = Tower(windows, backend, scaling), tokens()
    targets = batch.roll(1)
    start = 0
    with torch.no_grad():
        packed = tower(batch, POSITIONS, DOCUMENTS)
        for length in LENGTHS:
            inside = slice(start, start + length)
            alone = tower(batch[:, inside], torch.arange(length).unsqueeze(0), None)
            # The first target of a document alone is its own last token; all others are the same.
            same = targets[0, inside] == batch[0, inside].roll(1)
            assert same[1:].all()
            torch.testing.assert_close(packed[inside][same], alone[same], rtol=1e-6, atol=1e-6)
            start += length


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
def test_shared_masks_are_what_each_layer_would_make(backend: str, documents: Tensor | None) -> None:
    tower = Tower(WINDOWS["mixed"], backend)
    with torch.no_grad():
        shared = tower(tokens(), POSITIONS, documents)
        assert torch.equal(shared, tower(tokens(), POSITIONS, documents, shared=False))
        assert not torch.allclose(shared, Tower((None, None, None), backend)(tokens(), POSITIONS, documents))


def test_every_backend_computes_the_same_loss() -> None:
    with torch.no_grad():
        expected = Tower(WINDOWS["mixed"])(tokens(), POSITIONS, DOCUMENTS)
        for backend in BACKENDS:
            assert_close_values(Tower(WINDOWS["mixed"], backend)(tokens(), POSITIONS, DOCUMENTS), expected)


def test_layers_with_one_backend_and_window_share_a_mask() -> None:
    masks = Tower(WINDOWS["mixed"], "sdpa").masks(DOCUMENTS, 14)
    assert set(masks.prepared) == {("sdpa", None, "causal"), ("sdpa", 3, "causal")}
    assert masks.prepared["sdpa", 3, "causal"].sum() < masks.prepared["sdpa", None, "causal"].sum()
    assert masks.documents is DOCUMENTS


def test_layers_with_other_backends_have_masks_of_their_own() -> None:
    tower = Tower(WINDOWS["full"], "sdpa")
    slot = tower.layers[1].core.attention
    slot.bind("flex", flex.build(OpSignature("attention", "cpu", "float32", slot.static)))
    with torch.no_grad():
        assert_close_values(
            tower(tokens(), POSITIONS, DOCUMENTS), Tower(WINDOWS["full"])(tokens(), POSITIONS, DOCUMENTS)
        )
    assert set(tower.masks(DOCUMENTS, 14).prepared) == {("sdpa", None, "causal"), ("flex", None, "causal")}


def test_a_layer_without_a_shared_mask_makes_its_own() -> None:
    tower = Tower(WINDOWS["mixed"], "sdpa")
    with torch.no_grad():
        expected = tower(tokens(), POSITIONS, DOCUMENTS)
        tower.masks = lambda documents, length: AttentionMasks(documents, {})
        assert torch.equal(tower(tokens(), POSITIONS, DOCUMENTS), expected)


def test_a_backend_that_prepares_nothing_gets_documents() -> None:
    tower = Tower((3,))
    tower.layers[0].core.attention.bind("plain", lambda *args: attention(*args, window=3))
    assert tower.masks(DOCUMENTS, 14).prepared["plain", 3, "causal"] is DOCUMENTS
    with torch.no_grad():
        assert torch.equal(tower(tokens(), POSITIONS, DOCUMENTS), Tower((3,))(tokens(), POSITIONS, DOCUMENTS))


def gradients(tower: Tower, loss: Tensor) -> dict[str, Tensor]:
    loss.sum().backward()
    return {name: parameter.grad for name, parameter in tower.named_parameters() if parameter.grad is not None}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_compiled_layers_take_shared_masks_in_one_graph(backend: str) -> None:
    plain, compiled = Tower(WINDOWS["mixed"], backend), Tower(WINDOWS["mixed"], backend)
    for layer in compiled.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    expected, found = (tower(tokens(), POSITIONS, DOCUMENTS) for tower in (plain, compiled))
    assert_close_values(found, expected)
    assert_close_gradients(gradients(compiled, found), gradients(plain, expected))


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_compiled_layers_hold_flex_in_their_graph(shared: bool) -> None:
    """Forward only: on the CPU it has no backward."""
    torch.compiler.reset()  # Dynamo counts what other tests compiled
    plain, compiled = Tower(WINDOWS["mixed"], "flex"), Tower(WINDOWS["mixed"], "flex")
    for layer in compiled.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for documents in (DOCUMENTS, None):
            expected, found = (tower(tokens(), POSITIONS, documents, shared=shared) for tower in (plain, compiled))
            assert_close_values(found, expected)


def test_a_recomputed_layer_makes_no_mask_again() -> None:
    made: list[int | None] = []

    class Counts(sdpa.Sdpa):
        def prepare(self, documents: Tensor | None, length: int, device: torch.device) -> Tensor | None:
            made.append(self._window)
            return super().prepare(documents, length, device)

    plain, recomputed = Tower(WINDOWS["mixed"]), Tower(WINDOWS["mixed"])
    for layer in recomputed.layers:
        layer.core.attention.bind("counts", Counts(layer.core.attention.static["window"], grouped_with_mask=True))
        forward = layer.forward
        layer.forward = lambda *args, run=forward: checkpoint(run, *args, use_reentrant=False)
    expected, found = (tower(tokens(), POSITIONS, DOCUMENTS) for tower in (plain, recomputed))
    assert_close_values(found, expected)
    assert_close_gradients(gradients(recomputed, found), gradients(plain, expected))
    assert made == [None, 3]


def bfloat16_with_and_without_fsdp(backend: str) -> tuple[Tensor, Tensor]:
    """Collective over the one rank."""
    sharded, plain = (Tower(WINDOWS["mixed"], backend) for _ in range(2))
    mesh = init_device_mesh("cpu", (1,))
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        layer.register_forward_pre_hook(_arguments_are_untouched)
    plain.layers.to(torch.bfloat16)
    for layer in plain.layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(), *args[1:]))
    with torch.no_grad():
        return tuple(tower(tokens(), POSITIONS, DOCUMENTS) for tower in (sharded, plain))  # type: ignore[return-value]


def _arguments_are_untouched(_: nn.Module, args: tuple[Any, ...]) -> None:
    hidden, rotation, masks = args
    assert isinstance(masks, AttentionMasks)
    assert (hidden.dtype, rotation.cos.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_precision_wrappers_leave_masks_and_angles_alone(world: Any, backend: str) -> None:
    ((sharded, plain),) = world(1).run(bfloat16_with_and_without_fsdp, backend)
    assert torch.equal(sharded, plain)
