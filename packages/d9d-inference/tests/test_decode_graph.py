"""Decoding steps as replays of one captured step, with a stand-in for CUDA graphs that records the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_inference.generation import decode_graph
from torch import Tensor


def suitable(**changed: Any) -> bool:
    given = {"layer_types": ["full_attention"] * 2, "device": "cuda", "new": 32, **changed}
    fields = {name: value for name, value in given.items() if name in ("layer_types", "num_experts")}
    config = SimpleNamespace(num_attention_heads=2, **fields)
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: config), device=torch.device(given["device"])
    )
    settings = {name: value for name, value in given.items() if name in decode_graph._OTHERS}
    return decode_graph.suits(model, SimpleNamespace(**settings), given["new"])


def test_a_model_of_attention_on_a_gpu_suits() -> None:
    assert suitable()
    assert suitable(layer_types=None, use_cache=True, num_beams=1, num_return_sequences=1)
    assert suitable(new=5)


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "cpu"},
        {"new": 4},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["linear_attention"]},
        {"num_experts": 4},
        {"num_beams": 2},
        {"num_return_sequences": 2},
        {"use_cache": False},
        {"cache_implementation": "dynamic"},
    ],
)
def test_other_layers_devices_and_settings_do_not_suit(changed: dict[str, Any]) -> None:
    assert not suitable(**changed)


def test_configs_of_the_library_are_read() -> None:
    transformers = pytest.importorskip("transformers")

    def suits(config: Any) -> bool:
        model = SimpleNamespace(config=config, device=torch.device("cuda"))
        return decode_graph.suits(model, transformers.GenerationConfig(), 32)

    assert suits(transformers.Qwen3Config())
    assert suits(transformers.LlamaConfig())
    assert not suits(transformers.Qwen3MoeConfig())
    assert not suits(transformers.MixtralConfig())
    assert not suits(transformers.DeepseekV3Config())
    assert not suits(transformers.Gemma3TextConfig())
    assert not suits(transformers.MambaConfig())


class Recorder:
    """Capture that runs nothing; a replay runs the call on whichever values its inputs have then."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1
        return run


def test_steps_with_one_shape_and_cache_are_captured_once_and_read_the_new_inputs() -> None:
    cache, other = SimpleNamespace(total=0.0), SimpleNamespace(total=0.0)
    recorder, seen = Recorder(), []

    def forward(input_ids: Tensor, past_key_values: Any, masks: dict[str, Tensor], flag: bool) -> Tensor:
        seen.append((input_ids, flag))
        past_key_values.total += input_ids.sum().item() * masks["full"].item()
        return torch.tensor(past_key_values.total)

    steps = decode_graph.StepReplays(forward, recorder)

    def step(value: int, to: Any, rows: int = 1, width: int = 1) -> float:
        ids = torch.full((rows, width), value)
        return float(steps(input_ids=ids, past_key_values=to, masks={"full": torch.tensor(2.0)}, flag=True))

    assert step(1, cache, width=3) == 6  # the prompt
    assert [step(value, cache) for value in (2, 3, 4, 5)] == [10, 16, 24, 34]
    assert recorder.captures == 1
    assert len({id(ids) for ids, _ in seen[-2:]}) == 1
    assert step(6, cache) == 46
    assert [step(1, other) for _ in range(3)] == [2, 4, 6]  # the next batch of prompts
    assert recorder.captures == 2
    assert [step(1, other, rows=2) for _ in range(3)] == [10, 14, 18]
    assert recorder.captures == 3
    for _ in range(4):  # prompts, however many of one length
        step(1, other, width=2)
    assert recorder.captures == 3
    assert all(flag for _, flag in seen)


def test_calls_that_are_no_decoding_steps_run_as_they_are() -> None:
    seen: list[Any] = []
    steps = decode_graph.StepReplays(lambda *args, **given: seen.append((args, given)) or "found", Recorder())
    ids = torch.ones(1, 1)
    for _ in range(4):
        assert steps(ids, flag=True) == steps(flag=True) == steps(input_ids=None) == "found"
    assert seen == [((ids,), {"flag": True}), ((), {"flag": True}), ((), {"input_ids": None})] * 4


def test_a_captured_call_is_replayed_and_has_the_outputs_of_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []

    @contextmanager
    def recording(graph: Any) -> Iterator[None]:
        did.append("begin")
        yield
        did.append(graph)

    graph = SimpleNamespace(replay=lambda: did.append("replay"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    replay = decode_graph.captured(lambda: did.append("run") or "outputs")
    assert did == ["begin", "run", graph]
    assert [replay(), replay()] == ["outputs"] * 2
    assert did[3:] == ["replay"] * 2


def test_a_forward_of_its_own_is_put_back() -> None:
    def own() -> None: ...

    model = SimpleNamespace(forward=own)
    with decode_graph.replayed_steps(model, Recorder()):
        assert isinstance(model.forward, decode_graph.StepReplays)
    assert model.forward is own


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generated_tokens_are_the_library_s_own(device: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2}
    config = transformers.Qwen3Config(hidden_size=16, intermediate_size=32, vocab_size=64, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(device).eval()
    rows = torch.tensor([[5, 5, 7, 9], [3, 8, 2, 40]], device=device)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], device=device)
    given = {"input_ids": rows, "attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 5}
    recorder = Recorder()
    with torch.inference_mode():
        expected = model.generate(**given)
        with decode_graph.replayed_steps(model, recorder if device == "cpu" else decode_graph.captured):
            found = model.generate(**given, **decode_graph.SETTINGS)
    assert recorder.captures == (device == "cpu")
    assert torch.equal(found, expected)
    assert "forward" not in vars(model)
