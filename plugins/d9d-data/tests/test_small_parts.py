"""Small functions of the data plugin: markers in messages, masks and padding for collate functions, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import DataError, TrainingError
from d9d_data.chat import variants
from d9d_data.library.padding import pad_stack
from d9d_data.library.pooling import pooling_mask
from d9d_data.order.permutation import Permutation
from d9d_data.order.windows import WindowOrder
from d9d_data.stream import reader


def test_markers_are_put_before_and_after_a_text_with_or_without_its_white_space() -> None:
    text = " a </think> b "
    assert variants.put_last(text, "M") == " a </think> b M"
    assert variants.put_last_stripped(text, "M") == " a </think> bM"
    assert variants.put_first(text, "M") == "M a </think> b "
    assert variants.put_first_stripped(text, "M") == "Ma </think> b "
    assert variants.put_after_reasoning(text, "M") == " a </think>M b "
    assert variants.put_after_reasoning_stripped(text, "M") == " a </think>Mb "
    assert variants.put_after_reasoning("b", "M") == "Mb"


def test_the_first_or_last_part_with_text_is_changed() -> None:
    message: Any = {"role": "user", "content": [{"text": " "}, {"text": "a", "x": 1}, {"text": "b"}, {"text": ""}]}
    for last, changed in ((False, [" ", "a!", "b", ""]), (True, [" ", "a", "b!", ""])):
        found = variants.with_content(message, lambda text: f"{text}!", last=last)
        assert [part["text"] for part in found["content"]] == changed
        assert found["content"][1]["x"] == 1
    assert [part["text"] for part in message["content"]] == [" ", "a", "b", ""]
    plain: Any = {"role": "user", "content": "a"}
    assert variants.with_content(plain, str.upper, last=True) == {"role": "user", "content": "A"}


def test_the_name_of_one_call_is_changed() -> None:
    message: Any = {"tool_calls": [{"function": {"name": "f", "arguments": 1}}, {"name": "g"}]}
    first = variants.with_name(message, 0, str.upper)["tool_calls"]
    assert first == [{"function": {"name": "F", "arguments": 1}}, {"name": "g"}]
    assert variants.with_name(message, 1, str.upper)["tool_calls"] == [message["tool_calls"][0], {"name": "G"}]
    assert message["tool_calls"][0]["function"]["name"] == "f"


def test_pooled_positions_are_the_first_the_last_or_all_tokens() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    expected = {
        "all": mask.tolist(),
        "first": [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
        "last": [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]],
    }
    for pool, rows in expected.items():
        found = pooling_mask(mask, pool)  # type: ignore[arg-type]
        assert (found.tolist(), found.dtype) == (rows, torch.int64)
        assert pooling_mask(mask.bool(), pool).dtype == torch.bool  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"an attention mask has shape \[B, S\], not \[4\]"):
        pooling_mask(mask[0], "all")
    with pytest.raises(ValueError, match="pool is 'mean'; use 'first', 'last' or 'all'"):
        pooling_mask(mask, "mean")  # type: ignore[arg-type]


def test_tensors_are_padded_on_either_side_to_a_multiple() -> None:
    items = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    assert pad_stack(items, -1).tolist() == [[1, 2, 3], [4, -1, -1]]
    assert pad_stack(items, -1, "left", multiple=2).tolist() == [[-1, 1, 2, 3], [-1, -1, -1, 4]]
    assert pad_stack(items, 0, multiple=3).shape == (2, 3)


@pytest.mark.parametrize(
    ("items", "options", "why"),
    [
        ([], {}, "there are no tensors to stack; give at least one"),
        ([torch.ones(1)], {"multiple": 0}, "multiple is 0"),
        ([torch.ones(1)], {"side": "top"}, "side is 'top'; use 'left' or 'right'"),
        ([torch.ones(1), torch.ones(1, 2)], {}, r"tensor 1 has shape \[1, 2\]; only tensors of one dim"),
        ([torch.ones(1), torch.ones(1).int()], {}, "tensor 1 has dtype torch.int32, but tensor 0 has torch.float32"),
    ],
)
def test_what_cannot_be_padded_is_refused(items: Any, options: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pad_stack(items, 0, **options)


def test_a_permutation_has_at_least_one_item_and_at_most_2_to_the_62() -> None:
    for size in (0, 2**62 + 1):
        with pytest.raises(ValueError, match=f"a permutation cannot have {size} items; give a size from 1 to 2"):
            Permutation(size, "key")
    Permutation(1, "key")
    Permutation(2**62, "key")


def test_windows_have_whole_packs_and_packs_have_enough_samples() -> None:
    order: Any = SimpleNamespace(samples=4)
    with pytest.raises(ValueError, match="the window of 6 samples is not a multiple of the batch size 4"):
        WindowOrder(order, None, 9, 6, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the batch size 5 is larger than the number of samples, 4"):
        WindowOrder(order, None, 9, 10, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [("Caught ValueError in worker", DataError, "failed"), ("DataLoader worker exited", TrainingError, "died")],
)
def test_a_failed_worker_and_a_dead_one_are_told_apart(text: str, kind: type[Exception], what: str) -> None:
    def packs() -> Any:
        raise RuntimeError(text)
        yield

    made = reader.PackReader(SimpleNamespace(pack_at=lambda _consumed: []), step=4, workers=2)  # type: ignore[arg-type]
    made._expected, made._packs = 8, packs()
    closed: list[bool] = []
    made.close = lambda: closed.append(True)  # type: ignore[method-assign]
    with pytest.raises(kind, match=rf"^data.workers: a process that builds packs {what} \({text}\); if memory"):
        made.read(8)
    assert closed == [True]
