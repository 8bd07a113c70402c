"""The comparison with torch's own parallelism: its side computes what one process does, and turns are taken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_testing.world import World
from torch import Tensor, nn
from torch import distributed as dist

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "tools" / "bench"
NAMES = ("records", "random_tokens", "rows", "layout_rows", "plain_qwen3", "torch_peers", "rank_processes", "peers")


@pytest.mark.slow
def test_both_sides_are_measured_and_a_side_that_fails_ends_no_other(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "peers.py"), "--tiny", "--rounds", "2", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("tiny-peers--*.json")
    turns = json.loads(path.read_text())["peers"]
    found = [(turn["what"], "row" if "row" in turn else turn["peer"]["rotate"], turn["round"]) for turn in turns]
    assert found == [
        ("tp", "row", 0), ("tp", None, 0), ("cp", "row", 0), ("cp", "allgather", 0), ("cp", "alltoall", 0),
        ("cp", "row", 1), ("tp", None, 1), ("tp", "row", 1),
    ]  # fmt: skip
    # torch has no ring of a CPU's attention.
    failed = [turn for turn in turns if "failed" in turn]
    assert {turn["peer"]["rotate"] for turn in failed} == {"allgather", "alltoall"}
    assert all("NotImplementedError" in turn["failed"] for turn in failed)
    for turn in turns:
        if turn not in failed:
            assert turn["tokens_per_second"] == pytest.approx(4 * 64 / 2 / turn["seconds"])
            assert turn["losses"][0] == pytest.approx(6.24, abs=0.05)
            assert turn["losses"][-1] < turn["losses"][0]
    assert "| `torch parallelize_module tiny 4x64 cudnn` |" in done.stdout


def test_the_plain_qwen3_computes_what_that_of_transformers_does(room: SimpleNamespace) -> None:
    transformers = pytest.importorskip("transformers")
    from d9d_qwen3.config import Qwen3Config
    from d9d_qwen3.hugging_face.dense import Qwen3HuggingFace

    values = {**room.rows.MODELS["tiny"], "max_positions": 64}
    config = Qwen3HuggingFace().config_json(Qwen3Config.model_validate(values), "float32")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config.from_dict(config), dtype=torch.float32, attn_implementation="sdpa"
    )
    ours = room.plain_qwen3.PlainQwen3(values)
    for parameter in ours.parameters():  # the norms too, which all have ones at first
        nn.init.normal_(parameter, std=0.3)
    theirs.load_state_dict(ours.state_dict())
    tokens, targets = room.random_tokens.drawn(2, 64, 512, torch.Generator().manual_seed(1))
    loss = room.plain_qwen3.cross_entropy(ours(tokens, torch.arange(64)[None]), targets)
    expected = theirs(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    others = dict(theirs.named_parameters())
    assert set(others) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert _distance(parameter.grad, others[name].grad) < 1e-5, name


def test_a_model_that_is_not_written_here_is_refused(room: SimpleNamespace) -> None:
    for name in ("tiny-moe", "dense-0.6b"):
        with pytest.raises(ValueError, match="only a dense Qwen3 without tied embeddings"):
            room.plain_qwen3.PlainQwen3(room.rows.MODELS[name])


SPREAD: list[Any] = [
    ("tp", None, None),
    ("cp", "allgather", None),
    ("cp", "alltoall", None),
    *(pytest.param(*one, "aot_eager", marks=pytest.mark.full) for one in (("tp", None), ("cp", "alltoall"))),
]


@pytest.mark.parametrize(("axis", "rotate", "backend"), SPREAD)
def test_what_torch_spreads_has_the_loss_and_gradients_of_one_process(
    room: SimpleNamespace, axis: str, rotate: str | None, backend: str | None
) -> None:
    values = {"axis": axis, "rotate": rotate, "backend": backend, "samples": 2, "length": 64}
    peer = room.torch_peers.Peer(**values, model="tiny", dtype="float32")
    model = room.torch_peers.model_of(peer, torch.device("cpu"))
    tokens, targets = room.random_tokens.drawn(2, 64, 512, torch.Generator().manual_seed(0))
    settings = sys.modules["settings"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.LR, betas=settings.BETAS, weight_decay=settings.DECAY)
    losses, gradients = [], {}
    for _ in range(3):
        loss = room.plain_qwen3.cross_entropy(model(tokens, torch.arange(64)[None]), targets)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: one.grad.clone() for name, one in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), settings.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    for found, places, first, steps in World(2, timeout=120).run(_spread, asdict(peer)):
        assert first == pytest.approx(losses[0], rel=1e-5)
        assert steps == pytest.approx(losses, rel=1e-5)
        assert set(found) == set(gradients)
        for name, gradient in gradients.items():
            assert _distance(found[name], gradient) < 1e-5, name
        split = {"model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight", "lm_head.weight"}
        assert all("S" in places[name] for name in split), places


def _spread(values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], float, list[float]]:
    """Gradients and placements of parameters, the loss, and losses of three steps on this rank."""
    sys.path.insert(0, str(BENCH))
    from torch_peers import Peer, spread_of, step_of

    if values["axis"] == "cp":
        _add_ring_of_cpu()
    peer, device = Peer(**values), torch.device("cpu")
    spread = spread_of(peer, device)
    loss = spread.backward().item()
    named: dict[str, Any] = dict(spread.model.named_parameters())
    gradients = {name: one.grad.full_tensor() for name, one in named.items()}
    places = {name: str(one.placements) for name, one in named.items()}
    torch.compiler.reset()
    step = step_of(peer, device)
    return gradients, places, loss, [step().item() for _ in range(3)]


def _add_ring_of_cpu() -> None:
    """Teach torch's ring, whose parts are private, the attention of a CPU as it knows a GPU's."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def spread(tensors: Sequence[Tensor], mesh: Any) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(one, mesh, [Shard(2)], run_check=False) for one in tensors)

    def ring(_: Any, args: Sequence[Any], more: Mapping[str, Any]) -> tuple[DTensor, ...]:
        query, key, value, _dropout, causal = args[:5]
        mesh = query.device_mesh
        whole = [one.to_local() for one in (query, key, value)]
        out = _attention._templated_ring_attention(
            mesh.get_group(), 2, forward, *whole, is_causal=causal, scale=more.get("scale")
        )
        return spread(out, mesh)

    def op(*, grad_out: Tensor, is_causal: bool, scale: float | None, **rest: Tensor) -> Any:
        inputs = [rest[name] for name in ("query", "key", "value", "out", "logsumexp")]
        return backward(grad_out, *inputs, 0.0, is_causal, scale=scale)

    def ring_backward(_: Any, args: Sequence[Any], more: Mapping[str, Any]) -> tuple[DTensor, ...]:
        mesh = args[1].device_mesh
        grad, *inputs = [one.to_local() for one in args[:6]]
        found = _attention._templated_ring_attention_backward(
            mesh.get_group(), 2, op, grad, "grad_out", *inputs, is_causal=args[7], scale=more.get("scale")
        )
        return spread(found, mesh)

    _attention.custom_ops.update({forward.default: ring, backward.default: ring_backward})
    assert dist.get_world_size() == 2


def _distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def test_both_sides_of_a_comparison_do_the_same_work(room: SimpleNamespace) -> None:
    for what, ways, count in (("tp", 1, 1), ("cp", 2, 2)):
        contenders = room.peers.contenders_of(what)
        ours, peers = contenders[0], contenders[ways:]
        assert len(peers) == count
        for own in contenders[:ways]:
            assert own.made.ranks == room.peers.RANKS
            assert dict(own.made.mesh) == {what: 2}
            assert own.made.compiled
        for peer in peers:
            made = peer.made
            assert (made.model, made.samples, made.length) == (ours.made.model, ours.made.samples, ours.made.length)
            assert made.tokens == ours.made.tokens == 32_768
            assert (made.backend, made.dtype) == ("inductor", ours.made.precision)
    names = [one.name for one in (*room.peers.contenders_of("tp", 4), *room.peers.contenders_of("cp", None, "cudnn"))]
    assert names == [
        "d9d dense-2b 4x4096 compiled tp=2 tensor_parallel",
        "torch parallelize_module dense-2b 4x4096 cudnn",
        "d9d dense-2b 2x16384 compiled cp=2 context_parallel(method=ulysses) fsdp",
        "d9d dense-2b 2x16384 compiled cp=2 context_parallel(method=all_gather) fsdp",
        "torch context_parallel dense-2b 2x16384 allgather cudnn",
        "torch context_parallel dense-2b 2x16384 alltoall cudnn",
    ]


def test_a_contender_that_failed_takes_no_further_turn(room: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = room.peers.contenders_of("cp", tiny=True)
    swap, ours, gather, exchange = (one.name for one in contenders)
    asked: list[list[str]] = []

    def answers(script: str, questions: Sequence[Mapping[str, Any]], ranks: int, *_: Any) -> list[dict[str, Any]]:
        assert (BENCH / script).exists()
        assert ranks == 2
        asked.append([question["name"] for question in questions])
        found: list[dict[str, Any]] = []
        for question in questions:
            told = {"name": question["name"], "hardware": {"device": "NVIDIA H100", "versions": {}}}
            if question.get("peer", {}).get("rotate") == "allgather":
                return [*found, {**told, "failed": "out of memory"}]
            found.append({**told, "seconds": 1.0, "tokens_per_second": 10.0})
        return found

    monkeypatch.setattr(room.peers, "answers_of", answers)
    result = room.peers.measure(contenders, 2, None, "peers")
    assert asked == [
        [swap, ours, gather, exchange, exchange, gather, ours, swap],
        [exchange, exchange, ours, swap],
    ]
    turns = [(turn["round"], turn["name"], "failed" in turn) for turn in result[room.peers.KIND]]
    assert turns == [
        (0, swap, False), (0, ours, False), (0, gather, True), (0, exchange, False),
        (1, exchange, False), (1, ours, False), (1, swap, False),
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="nothing was measured"):
        room.peers.measure(contenders, 2, 0.0, "peers")


def result_of(room: SimpleNamespace) -> dict[str, Any]:
    swap, ours, gather, exchange = room.peers.contenders_of("cp")

    def turn(one: Any, number: int, speed: float, **more: Any) -> dict[str, Any]:
        told = {"what": one.what, "round": number, **one.as_json(), "tokens_per_second": speed}
        return {**told, "seconds": 16_384 / speed, **more}

    gpu = {"peak_gib": 50.26, "communication_ms": 30.0, "exposed_ms": 20.0}
    named = {"longest": {"ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": 12.34}}
    turns = [
        turn(swap, 0, 28_000.0, **gpu), turn(ours, 0, 30_000.0, **gpu), turn(gather, 0, 20_000.0, **gpu),
        {"what": "cp", "round": 0, **exchange.as_json(), "failed": "out of memory"},
        turn(gather, 1, 24_000.0, **gpu | {"exposed_ms": 24.0}, **named),
        turn(ours, 1, 30_000.0, **gpu), turn(swap, 1, 28_000.0, **gpu),
        turn(gather, 2, 25_000.0),
    ]  # fmt: skip
    return {
        "table": "peers", "taken": "2026-11-25", "command": "python tools/bench/peers.py", "commit": "abc",
        "hardware": {"device": "NVIDIA H100", "versions": {"torch": "2.11.0"}}, room.peers.KIND: turns,
    }  # fmt: skip


def test_tables_show_medians_and_ratios_of_the_same_round(room: SimpleNamespace) -> None:
    lines = room.peers.text_of([json.loads(json.dumps(result_of(room)))]).splitlines()
    assert lines[0] == "### peers: NVIDIA H100"
    ours = "| `d9d dense-2b 2x16384 compiled cp=2 context_parallel(method=all_gather) fsdp` "
    assert ours + "| 30,000 | 546.1 | 50.3 | 30.0 | 20.0 |  |" in lines
    gather = "| `torch context_parallel dense-2b 2x16384 allgather flash` "
    # The third round has no turn of d9d's.
    assert gather + "| 24,000 | 682.7 | 50.3 | 30.0 | 22.0 | 1.375 (1.250 to 1.500) |" in lines
    exchange = "| `torch context_parallel dense-2b 2x16384 alltoall flash` "
    assert exchange + "| out of memory |  |  |  |  |  |" in lines
    said = "Communication of `torch context_parallel dense-2b 2x16384 allgather flash`: "
    assert said + "`ncclDevKernel_AllGather_RING_LL` 12.3 ms." in lines
    assert room.peers.text_of([]) == room.peers.NONE_YET


def test_the_page_has_the_tables_of_the_files_beside_it(room: SimpleNamespace) -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text()
    text = room.peers.text_of(room.records.read(folder, room.peers.KIND))
    assert page == room.records.fill(page, text, room.peers.MARKS), (
        "run: uv run python tools/bench/peers.py --tables --folder benchmarks"
    )
