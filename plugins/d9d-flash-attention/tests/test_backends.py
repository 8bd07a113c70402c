"""Backends against the op's reference, over stand-ins of the libraries that are as demanding as those."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_core.registry.capabilities import Circumstances, Judge
from d9d_engine.compose.kernels import bind_kernels
from d9d_flash_attention import backend, cute, rules
from d9d_flash_attention.starts import document_starts, most_documents
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

AttentionCore = pytest.importorskip("d9d_nn.attention.core").AttentionCore
attention = pytest.importorskip("d9d_nn.ops.attention.reference").attention
pytestmark = pytest.mark.usefixtures("libraries")

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 32
STATIC = {
    "query_heads": HEADS,
    "key_value_heads": KEY_HEADS,
    "head_dim": HEAD_DIM,
    "causal": True,
    "window": None,
}
NUMBERS = (2, 3, 4)


def signature(documents: bool | None = None, **changes: Any) -> OpSignature:
    facts = {"device": "cuda", "dtype": "bfloat16"} | changes
    device, dtype = facts.pop("device"), facts.pop("dtype")
    return OpSignature("attention", device, dtype, STATIC | facts, documents=documents)


def build(number: int, documents: bool | None = None, **changes: Any) -> backend.FlashAttention:
    built: backend.FlashAttention = getattr(backend, f"build_{number}")(signature(documents, **changes))
    return built


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def heads(samples: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = (HEADS, KEY_HEADS, KEY_HEADS)
    query, key, value = (normal(samples, length, count, HEAD_DIM, seed=s) for s, count in enumerate(counts))
    return query, key, value


def outcome(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    leaves = dict(zip(("query", "key", "value"), (t.clone().requires_grad_() for t in tensors), strict=True))
    out = function(*leaves.values())
    out.backward(normal(*out.shape, seed=9).to(out.dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


class OverStandIn(KernelSuite):
    """With tensors on the CPU."""

    asked = "cuda"
    dtypes = ("bfloat16", "float16")
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"head_dim": 12}, {"head_dim": 264}, {"causal": False})


@pytest.mark.thorough
class TestFlashAttention2(OverStandIn):
    target = "attention.flash_attention_2"


@pytest.mark.thorough
class TestFlashAttention3(OverStandIn):
    target = "attention.flash_attention_3"


@pytest.mark.thorough
class TestFlashAttention4(OverStandIn):
    target = "attention.flash_attention_4"


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("number", NUMBERS)
def test_bidirectional_attention_reads_documents_even_if_a_sample_is_one(number: int, documents: bool) -> None:
    """They mark the padding, which causal attention never reaches."""
    facts = {"causal": False, "mask": "bidirectional"}
    padded = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]])
    function, tensors = build(number, documents, **facts), heads(2, 6)
    assert function.mask_kinds == ("bidirectional",)
    starts = function.prepare(padded, 6, padded.device)
    found = outcome(lambda q, k, v: function(q, k, v, starts), tensors)
    wide = tuple(tensor.double() for tensor in tensors)
    expected = outcome(lambda q, k, v: attention(q, k, v, padded, mask="bidirectional"), wide)
    assert_close_values(found.pop("out"), expected.pop("out"))
    assert_close_gradients(found, expected)
    refused = rules.decide(rules.LIBRARIES[number], signature(documents, causal=False, mask="blocks"))
    assert "causal and bidirectional attention only, here it is blocks" in refused.reason


@pytest.mark.parametrize("number", NUMBERS)
@given(lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=15)
def test_documents_of_any_lengths_see_themselves_only(number: int, lengths: list[list[int]]) -> None:
    length = max(map(sum, lengths))
    rows = []
    for sample in lengths:  # the padding behind the last document is one more
        numbers = [n for n, count in enumerate([*sample, length - sum(sample)]) for _ in range(count)]
        rows.append(numbers)
    documents = torch.tensor(rows)
    function, tensors = build(number), heads(len(rows), length)
    starts = function.prepare(documents, length, documents.device)
    found = outcome(lambda q, k, v: function(q, k, v, starts), tensors)
    wide = tuple(tensor.double() for tensor in tensors)
    expected = outcome(lambda q, k, v: attention(q, k, v, documents), wide)
    assert_close_values(found.pop("out"), expected.pop("out"))
    # Of tokens that all see nothing but themselves, gradients of scores are rounding, whose direction says nothing.
    rounding = [name for name, gradient in expected.items() if gradient.abs().max() < 1e-12]
    assert set(rounding) <= {"query", "key"}
    for name in rounding:
        del expected[name]
        assert found.pop(name).abs().max() < 1e-4
    assert_close_gradients(found, expected, within=None)


@pytest.mark.parametrize("number", NUMBERS)
def test_where_samples_are_one_document_documents_are_not_read(number: int) -> None:
    padded = torch.tensor([[0, 0, 1]])
    assert build(number, documents=False).prepare(padded, 3, padded.device) is None
    assert build(number, documents=True).prepare(padded, 3, padded.device) is not None
    assert build(number, documents=True).prepare(None, 3, padded.device) is None


@pytest.mark.parametrize("number", NUMBERS)
def test_a_window_as_long_as_a_sample_is_none(number: int) -> None:
    function, tensors = build(number, window=5), heads(2, 5)
    assert_close_values(function(*tensors, None), attention(*tensors))
    tensors = heads(2, 6)
    assert_close_values(function(*tensors, None), attention(*tensors, window=5))


@pytest.mark.parametrize("number", NUMBERS)
def test_autocast_narrows_all_three(number: int) -> None:
    query, key, value = heads(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert build(number)(query.float(), key, value.float(), None).dtype == torch.bfloat16


# --- starts of documents


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a number, or a shape, back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "equal"}, name
        return func(*args, **(kwargs or {}))


def test_starts_are_made_on_the_device_and_what_is_not_there_is_empty_at_the_end() -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    with NoWaiting():
        starts = document_starts(documents)
    assert starts.dtype == torch.int32
    assert len(starts) == most_documents(3, 5) + 1
    assert starts.tolist() == [0, 2, 3, 5, 6, 10] + [15] * (len(starts) - 6)


def test_there_is_room_for_documents_of_one_token_where_there_are_few_tokens() -> None:
    documents = torch.arange(48).view(2, 24)
    assert document_starts(documents).tolist() == list(range(49))


@pytest.mark.parametrize(("samples", "length"), [(1, 4096), (4, 4096), (64, 16), (1, 1), (512, 128)])
def test_there_is_room_for_documents_of_the_shortest_mean_and_for_every_sample(samples: int, length: int) -> None:
    most = most_documents(samples, length)
    assert samples <= most <= samples * length
    assert most * 64 >= samples * length


def test_too_many_documents_are_an_error_that_says_what_to_choose() -> None:
    most = most_documents(1, 8192)
    document_starts(torch.arange(8192).clamp(max=most - 1)[None])
    with pytest.raises(RuntimeError, match=f"more than {most} documents.*attention: flex"):
        document_starts(torch.arange(8192).clamp(max=most)[None])


# --- the compiler


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, True), (3, False)])
def test_four_is_one_operation_for_the_compiler(packed: bool, window: int | None, causal: bool) -> None:
    tensors = tuple(tensor.requires_grad_() for tensor in heads(2, 6))
    starts = document_starts(torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])) if packed else None
    if packed:
        tensors = tuple(tensor.detach().flatten(0, 1).requires_grad_() for tensor in tensors)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(cute.forward.overload, (*tensors, starts, 6, window, causal), test_utils=checks)
    out, sums = cute.forward(*(tensor.detach() for tensor in tensors), starts, 6, window, causal)
    arguments = (
        normal(*out.shape, seed=5),
        *(tensor.detach() for tensor in tensors),
        out,
        sums,
        starts,
        6,
        window,
        causal,
    )
    torch.library.opcheck(cute.backward.overload, arguments, test_utils=checks)


@pytest.mark.thorough
def test_a_compiled_block_is_one_graph_around_four(libraries: Mapping[int, Any]) -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    function, tensors = build(4), heads(2, 6)
    starts = function.prepare(documents, 6, documents.device)

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query * 2, key, value, starts) + 1

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    found, expected = outcome(compiled, heads(2, 6)), outcome(block, tensors)
    assert libraries[4].calls == ["forward", "backward"] * 2
    for name, tensor in expected.items():
        assert_close_values(found[name], tensor, what=name)


def test_what_four_returns_can_be_kept_by_checkpointing(libraries: Mapping[int, Any]) -> None:
    """By the name that the documentation of checkpointing gives."""
    kept, function = [torch.ops.d9d_flash_attention.forward.default], build(4)
    for operators, forwards in ((kept, 1), ([], 2)):
        libraries[4].calls.clear()
        contexts = partial(create_selective_checkpoint_contexts, operators)
        tensors = (tensor.requires_grad_() for tensor in heads(2, 6))
        out = checkpoint(function, *tensors, None, use_reentrant=False, context_fn=contexts)
        out.sum().backward()
        assert sorted(libraries[4].calls) == ["backward", *["forward"] * forwards]


def test_another_release_of_four_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_bwd")
    with pytest.raises(BuildError, match="has no _flash_attn_bwd; install a release of flash-attn-4 that d9d knows"):
        build(4)


@pytest.mark.parametrize(("asked", "found"), [(None, "1"), ("0", "0")])
def test_four_keeps_its_kernels_on_disk_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, found: str
) -> None:
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    monkeypatch.delenv(name, raising=False)
    if asked is not None:
        monkeypatch.setenv(name, asked)
    build(4)
    assert os.environ[name] == found


# --- decisions


@pytest.mark.parametrize(
    ("number", "major", "documents", "window"),
    [
        *((number, 9, documents, None) for number in (2, 3) for documents in (None, False, True)),
        *((4, 9, documents, None) for documents in (None, True)),
        (4, 9, False, 512),
        (4, 10, False, None),
    ],
)
def test_what_nobody_measured_is_by_name_only(
    monkeypatch: pytest.MonkeyPatch, number: int, major: int, documents: bool | None, window: int | None
) -> None:
    monkeypatch.setattr(rules, "capability", lambda: major)
    decision = getattr(rules, f"supports_{number}")(signature(documents, window=window))
    assert decision.accept
    assert decision.priority == 0
    assert "used only if the job names it" in decision.reason


@pytest.mark.parametrize("major", [9, None])
def test_four_is_taken_by_itself_for_samples_of_one_document(
    monkeypatch: pytest.MonkeyPatch, major: int | None
) -> None:
    monkeypatch.setattr(rules, "capability", lambda: major)
    decision = rules.supports_4(signature(documents=False))
    assert decision.accept
    assert decision.priority > 10, "above sdpa"


@pytest.mark.parametrize(
    ("number", "major", "changes", "why"),
    [
        (2, 7, {}, r"compute capability 8.x or 9.x or 10.x or 12.x, this GPU has 7.x"),
        (3, 8, {}, r"FlashAttention 3 needs compute capability 9.x, this GPU has 8.x"),
        (3, 10, {}, r"FlashAttention 3 needs compute capability 9.x, this GPU has 10.x"),
        (4, 8, {}, r"compute capability 9.x or 10.x, this GPU has 8.x"),
        (4, 10, {"head_dim": 256}, "needs head_dim up to 128, a multiple of 8; here it is 256"),
        (4, 9, {"head_dim": 256}, None),
        (4, 9, {"head_dim": 16}, "wrong or unmeasured gradients for head_dim 16; known to be right: 24, 32, 56"),
        (4, 9, {"head_dim": 80}, "wrong or unmeasured gradients for head_dim 80"),
        (4, 9, {"head_dim": 24}, None),
        (2, 9, {"head_dim": 8}, None),
        (2, 8, {"head_dim": 256}, None),
        (2, None, {"head_dim": 260}, "needs head_dim up to 256, a multiple of 8; here it is 260"),
    ],
)
def test_each_library_is_for_its_gpus_and_heads(
    monkeypatch: pytest.MonkeyPatch, number: int, major: int | None, changes: dict[str, Any], why: str | None
) -> None:
    monkeypatch.setattr(rules, "capability", lambda: major)
    decision = getattr(rules, f"supports_{number}")(signature(**changes))
    assert decision.accept == (why is None)
    assert why is None or why in decision.reason


class Half:
    """Share of the first half of the positions."""

    ranks = 2

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim=1)[0]

    def gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError("nothing is gathered where masks are made")


@pytest.mark.parametrize("number", NUMBERS)
def test_queries_of_some_positions_are_refused_by_the_answer_and_never_fail_a_job(
    registry: Any, monkeypatch: pytest.MonkeyPatch, libraries: Mapping[int, Any], number: int
) -> None:
    monkeypatch.setattr(rules, "capability", lambda: 9)
    offers = registry("d9d_flash_attention.plugin", "d9d_nn.plugin")
    judge = Judge([], offers, Circumstances(device="cuda"))
    name, chosen = f"flash_attention_{number}", []
    for some in (False, True):
        core = AttentionCore(query_heads=HEADS, key_value_heads=KEY_HEADS, head_dim=HEAD_DIM)
        if some:
            core.see_queries(Half())
        where = core.named_modules(), offers
        (choice,) = bind_kernels(*where, {}, "cuda", "bfloat16", judge.verdicts, documents=False)
        assert choice.considered[name].accept is not some
        chosen.append(choice.backend)
        if some:
            assert (
                "needs the queries of all positions of a sample, but ranks of cp hold" in choice.considered[name].reason
            )
            assert core.attention.prepare(None, 8, torch.device("cpu")) is not None
            with pytest.raises(BuildError, match=f"kernels.attention: '{name}'.*cannot run here: .*all positions"):
                bind_kernels(
                    core.named_modules(),
                    offers,
                    {"attention": name},
                    "cuda",
                    "bfloat16",
                    judge.verdicts,
                    documents=False,
                )
    assert chosen[0] == "flash_attention_4"
    assert chosen[1] in ("flex", "sdpa")


def bound(registry: Any, requested: dict[str, str]) -> str:
    offers = registry("d9d_flash_attention.plugin", "d9d_nn.plugin")
    core = AttentionCore(query_heads=HEADS, key_value_heads=KEY_HEADS, head_dim=HEAD_DIM)
    judge = Judge([], offers, Circumstances(device="cuda"))
    (choice,) = bind_kernels(core.named_modules(), offers, requested, "cuda", "bfloat16", judge.verdicts)
    return choice.backend


@pytest.mark.parametrize("number", NUMBERS)
def test_a_job_gets_it_by_name_only(registry: Any, number: int) -> None:
    assert bound(registry, {}) == "flex"
    assert bound(registry, {"attention": f"flash_attention_{number}"}) == f"flash_attention_{number}"


@pytest.mark.parametrize(
    ("number", "module"),
    [(2, "flash_attn.flash_attn_interface"), (3, "flash_attn_interface"), (4, "flash_attn.cute")],
)
def test_without_its_library_it_is_refused_though_others_are_there(
    registry: Any, monkeypatch: pytest.MonkeyPatch, number: int, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if module == "flash_attn_interface":
        monkeypatch.delitem(sys.modules, module)
    for other in NUMBERS:
        name = f"flash_attention_{other}"
        if other != number:
            assert bound(registry, {"attention": name}) == name
            continue
        with pytest.raises(BuildError, match=f"needs import:{module}: module {module} is not installed"):
            bound(registry, {"attention": name})


@pytest.fixture
def real() -> Iterator[ModuleType]:
    """The library itself, which imports on a CPU, and computes nothing there."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flash_attn"}
    yield pytest.importorskip("flash_attn.cute.interface")
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    sys.modules.update(hidden)


@pytest.mark.full
def test_the_stand_in_of_four_takes_what_the_library_takes(libraries: Mapping[int, Any], real: ModuleType) -> None:
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        theirs = inspect.signature(getattr(real, name)).parameters
        ours = inspect.signature(getattr(libraries[4], name)).parameters
        assert set(ours) <= set(theirs)
        without_default = [key for key, one in ours.items() if one.default is inspect.Parameter.empty]
        assert list(theirs)[: len(without_default)] == without_default


@pytest.mark.parametrize("number", NUMBERS)
def test_queries_of_some_positions_are_refused(number: int) -> None:
    decision = getattr(rules, f"supports_{number}")(signature(own_queries=True))
    assert not decision.accept
    assert "needs the queries of all positions of a sample, but ranks of cp hold only some" in decision.reason
