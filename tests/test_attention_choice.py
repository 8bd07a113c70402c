"""The backend of attention that a job gets on a GPU, as its data says; none is needed to ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import TrainingError
from d9d_core.events import ForwardReady, TrainingStarts
from d9d_engine.job import Job

Write = Callable[..., Path]
D9d = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.smoke

MODEL = {
    "name": "qwen3", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 64, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
}  # fmt: skip
TEXT: dict[str, Any] = {"name": "text", "sources": ["python:topics"], "sequence_length": 64}
DOCUMENTS: dict[str, Any] = {**TEXT, "name": "documents"}


@pytest.fixture
def explained(small_job: Write, d9d: D9d, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Lines of ``d9d explain`` about attention: each choice, and what flex and sdpa answered to it.

    As on a GPU of a capability that FlashAttention 4 has no kernels for, whether it is installed here or not.
    """
    monkeypatch.setattr("d9d_flash_attention.rules.capability", lambda: 8)

    def lines_of(data: dict[str, Any], device: str = "cuda", ranks: int = 1, **sections: Any) -> list[str]:
        sections = {"model": MODEL, "precision": {"parameters": "bfloat16"}} | sections
        job = small_job(data=data, device=device, **sections)
        status, out, err = d9d("explain", str(job), "--world-size", str(ranks))
        assert status == 0, err
        lines = [" ".join(line.split()) for line in out.splitlines()]
        own = ("attention: ", "attention_block: ", "flex ", "sdpa ")
        return [line for line in lines if line.startswith(own)]

    return lines_of


@pytest.mark.thorough
def test_packed_documents_get_flex(explained: Any) -> None:
    chosen, flex, sdpa = explained(TEXT)
    assert chosen.startswith("attention: flex (d9d-nn")
    assert "accepts, priority 15: the data packs documents: skips keys of other documents" in flex
    assert "accepts, priority 10: fused, torch chooses the kernel; documents need a mask of S x S" in sdpa


def test_samples_of_one_document_get_sdpa_without_a_mask_unless_an_evaluation_packs(explained: Any) -> None:
    chosen, flex, sdpa = explained(DOCUMENTS)
    assert chosen.startswith("attention: sdpa (d9d-nn")
    assert "used only if the job names it: samples are one document each, with no window" in flex
    assert "samples are one document each, so it needs no mask" in sdpa
    chosen, flex, _ = explained(DOCUMENTS, evaluation={"every": 1, "sets": {"whole": DOCUMENTS, "packed": TEXT}})
    assert chosen.startswith("attention: flex (d9d-nn")
    assert "the data packs documents" in flex


def test_layers_with_windows_get_flex_and_the_others_sdpa(explained: Any) -> None:
    model = {**MODEL, "sliding_window": 16, "sliding_from_layer": 1}
    lines = explained(DOCUMENTS, model=model)
    chosen = sorted(line for line in lines if line.startswith("attention: "))
    assert [line.partition(" (")[0] for line in chosen] == ["attention: flex", "attention: sdpa"]
    assert chosen[0].endswith("at layers.1.attention.core.attention")
    assert any("skips keys outside of windows of 16" in line for line in lines)


@pytest.mark.parametrize(("data", "backend"), [(TEXT, "flex"), (DOCUMENTS, "sdpa")], ids=["packed", "of one document"])
def test_queries_of_some_positions_get_one_backend_on_all_stages(
    explained: Any, data: dict[str, Any], backend: str
) -> None:
    sections = {"mesh": {"pp": 2, "cp": 2}, "pipeline": "1f1b", "parallel": ["context_parallel"]}
    chosen, flex, sdpa = explained({**data, "pad_multiple": 4} if data is DOCUMENTS else data, ranks=4, **sections)
    assert chosen.startswith(f"attention: {backend} (d9d-nn")
    assert chosen.endswith("at layers.0.attention.core.attention, layers.1.attention.core.attention")
    assert "accepts, priority 15" in flex
    if backend == "sdpa":
        assert "accepts, priority 20" in sdpa
        assert "queries of some positions attend in rectangles, without a mask" in sdpa
    else:
        assert "queries of some positions need a mask" in sdpa


@pytest.mark.parametrize(("data", "backend"), [(TEXT, "flex"), (DOCUMENTS, "sdpa")], ids=["packed", "of one document"])
def test_a_ring_gets_one_backend_of_blocks_on_all_stages(explained: Any, data: dict[str, Any], backend: str) -> None:
    ring = {"name": "context_parallel", "method": "ring"}
    data = {**data, "pad_multiple": 4} if data is DOCUMENTS else data
    chosen, flex, sdpa = explained(data, ranks=4, mesh={"pp": 2, "cp": 2}, pipeline="1f1b", parallel=[ring])
    assert chosen.startswith(f"attention_block: {backend} (d9d-nn")
    assert chosen.endswith("at layers.0.attention.core.attention_block, layers.1.attention.core.attention_block")
    assert "accepts, priority 15" in flex
    assert ("refuses: the data packs documents" in sdpa) == (backend == "flex")


def test_a_ring_computes_layers_with_windows_by_flex_and_the_others_by_sdpa(explained: Any) -> None:
    model = {**MODEL, "sliding_window": 16, "sliding_from_layer": 1}
    sections = {"mesh": {"cp": 2}, "parallel": [{"name": "context_parallel", "method": "ring"}]}
    lines = explained({**DOCUMENTS, "pad_multiple": 4}, model=model, ranks=2, **sections)
    chosen = sorted(line for line in lines if line.startswith("attention_block: "))
    assert [line.partition(" (")[0] for line in chosen] == ["attention_block: flex", "attention_block: sdpa"]
    assert chosen[0].endswith("at layers.1.attention.core.attention_block")


def test_on_a_cpu_a_ring_computes_blocks_by_the_reference(explained: Any) -> None:
    sections = {"mesh": {"cp": 2}, "parallel": [{"name": "context_parallel", "method": "ring"}]}
    chosen, flex, sdpa = explained(TEXT, device="cpu", precision={"parameters": "float32"}, ranks=2, **sections)
    assert chosen.startswith("attention_block: reference")
    assert flex == "flex refuses: FlexAttention has no backward on the CPU; use sdpa"
    assert sdpa == "sdpa refuses: the data packs documents, which it cannot separate"


def test_on_a_cpu_it_is_sdpa(explained: Any) -> None:
    chosen, flex, _ = explained(TEXT, device="cpu", precision={"parameters": "float32"})
    assert chosen.startswith("attention: sdpa (d9d-nn")
    assert flex == "flex refuses: FlexAttention has no backward on the CPU; use sdpa"


@pytest.mark.parametrize("method", ["all_gather", pytest.param("ulysses", marks=pytest.mark.full)])
def test_ranks_that_hold_the_queries_of_some_positions_get_a_backend_that_attends_from_them(
    small_job: Write, d9d: D9d, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr("d9d_flash_attention.rules.capability", lambda: 9)  # of a GPU that prefers FlashAttention 4
    job = small_job(
        data=DOCUMENTS,
        device="cuda",
        model=MODEL,
        precision={"parameters": "bfloat16"},
        mesh={"cp": 2},
        parallel=[{"name": "context_parallel", "method": method}],
    )
    status, out, err = d9d("explain", str(job), "--world-size", "2")
    assert status == 0, err
    # Ranks that swap heads have all positions, as one process has, and FlashAttention 4 is the best if it is there.
    attends = "queries of some positions attend in rectangles, without a mask" in out
    assert attends == (method == "all_gather")
    assert ("attention: sdpa (d9d-nn" in out) or method == "ulysses"


@pytest.mark.thorough
@pytest.mark.parametrize(("data", "refused"), [(DOCUMENTS, True), (TEXT, False)], ids=["documents", "text"])
def test_a_forward_on_packed_data_is_refused_where_kernels_expect_samples_of_one_document(
    small_job: Write, data: dict[str, Any], refused: bool
) -> None:
    tokens = torch.arange(8)[None]
    padded = {"tokens": tokens, "documents": (tokens > 5).long(), "lengths": torch.tensor([6])}
    packed = {"tokens": tokens, "documents": (tokens > 3).long(), "lengths": torch.tensor([6])}
    errors: list[str] = []

    class Forwards:
        def subscriptions(self) -> Any:
            return [(ForwardReady, self.take), (TrainingStarts, self.run)]

        def take(self, event: ForwardReady) -> None:
            self.forward = event.forward

        def run(self, _: TrainingStarts) -> None:
            self.forward([{"tokens": tokens}, padded], lambda *_: None)
            try:
                self.forward([packed], lambda *_: None)
            except TrainingError as error:
                errors.append(str(error))

    job = Job.load(small_job(data=data, model=MODEL, steps=1, lr_schedule=None))
    job.build(lambda _: None, observers=[Forwards()]).train()
    assert bool(errors) is refused
    assert all("mark padding after a sample by 'lengths'" in error for error in errors)


@pytest.mark.thorough
def test_rules_choose_the_backend_of_each_layer(explained: Any) -> None:
    rules = [{"backend": "reference", "match": ["layers.0"]}]
    lines = explained(TEXT, device="cpu", model={**MODEL, "num_layers": 3}, kernels={"attention": rules})
    assert [line for line in lines if line.startswith("attention: ")] == [
        "attention: reference, asked for by kernels.attention[0], at layers.0.attention.core.attention",
        "attention: sdpa (d9d-nn 0.1.0) at layers.1.attention.core.attention, layers.2.attention.core.attention",
    ]


@pytest.mark.thorough
def test_a_layer_that_two_rules_match_is_refused(small_job: Write, d9d: D9d) -> None:
    rules = [{"backend": "reference", "match": ["layers.0"]}, {"backend": "sdpa", "match": ["layers.*.core"]}]
    status, _, err = d9d("explain", str(small_job(kernels={"attention": rules})))
    assert status != 0
    assert "kernels.attention[0] (reference) and kernels.attention[1] (sdpa) both match layers.0.attention.core" in err


@pytest.mark.thorough
def test_prefixes_and_encoders_get_a_backend_that_computes_them(explained: Any) -> None:
    chosen, _, sdpa = explained(TEXT, model={**MODEL, "attention_mask": "prefix"})
    assert chosen.startswith("attention: flex (d9d-nn")
    assert "accepts, priority 10: fused, torch chooses the kernel; blocks need a mask of S x S per sample" in sdpa
    lines = explained(TEXT, model={**MODEL, "attention_mask": "prefix"}, mesh={"cp": 2}, ranks=2, parallel=[
        {"name": "context_parallel", "method": "ring"}
    ])  # fmt: skip
    assert any(line.startswith("attention_block: flex") for line in lines)
    assert any(line.startswith("sdpa refuses: computes causal attention only") for line in lines)
