"""Starts of documents, the most of them, and limits of the libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_flash_attention import plugin, rules
from d9d_flash_attention.starts import document_starts, most_documents


@pytest.mark.parametrize(
    ("samples", "length", "most"), [(1, 10, 10), (1, 1000, 64), (20, 100, 80), (1, 64 * 100, 100), (2, 64 * 100, 200)]
)
def test_a_microbatch_may_have_a_document_per_64_tokens_or_some_per_sample(
    samples: int, length: int, most: int
) -> None:
    assert most_documents(samples, length) == most


def test_starts_are_counted_over_all_samples_and_padded_with_the_end() -> None:
    starts = document_starts(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 2]]))
    assert starts.tolist() == [0, 2, 4, 7, 8, 8, 8, 8, 8]
    assert starts.dtype == torch.int32
    assert document_starts(torch.arange(4).view(1, 4)).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="a microbatch of 1 x 65 tokens has more than 64 documents"):
        document_starts(torch.arange(65).view(1, 65))


def asked(version: int, major: int | None, documents: bool | None = None, **static: Any) -> Any:
    given = OpSignature("attention", "cuda", "bfloat16", static, documents=documents)
    rules_of = {2: rules.supports_2, 3: rules.supports_3, 4: rules.supports_4}[version]
    patch = pytest.MonkeyPatch()
    patch.setattr(rules, "capability", lambda: major)
    try:
        return rules_of(given)
    finally:
        patch.undo()


def test_libraries_have_the_gpus_and_heads_that_they_support() -> None:
    accepted = {
        version: [major for major in (None, 7, 8, 9, 10, 11, 12) if asked(version, major, head_dim=64).accept]
        for version in (2, 3, 4)
    }
    assert accepted == {2: [None, 8, 9, 10, 12], 3: [None, 9], 4: [None, 9, 10]}
    widest = {
        (version, major): max(width for width in range(8, 513, 8) if asked(version, major, head_dim=width).accept)
        for version, major in ((2, 8), (3, 9), (4, 9), (4, 10))
    }
    assert widest == {(2, 8): 256, (3, 9): 256, (4, 9): 256, (4, 10): 128}
    right = [width for width in range(8, 257, 8) if asked(4, 9, head_dim=width).accept]
    assert right == [24, 32, 56, 64, 96, 128, 160, 192, 256]
    assert not asked(2, 9, head_dim=60).accept


def test_version_4_is_chosen_for_whole_samples_where_it_was_measured() -> None:
    assert asked(4, 9, documents=False, head_dim=128).priority == 20
    assert asked(4, None, documents=False, head_dim=128).priority == 20
    assert asked(4, 10, documents=False, head_dim=128).priority == 0
    assert asked(4, 9, documents=None, head_dim=128).priority == 0
    assert asked(4, 9, documents=False, head_dim=128, window=7).priority == 0
    assert asked(3, 9, documents=False, head_dim=128).priority == 0


def test_each_version_needs_its_own_module_and_version_4_is_one_operation() -> None:
    found = {one.name: (set(one.requires), one.operators) for one in plugin.d9d_kernels()}
    assert found == {
        "flash_attention_2": ({"import:flash_attn.flash_attn_interface"}, ()),
        "flash_attention_3": ({"import:flash_attn_interface"}, ()),
        "flash_attention_4": ({"import:flash_attn.cute"}, ("d9d_flash_attention.forward",)),
    }
    # Query gradients are added in arbitrary order.
    assert not any(one.deterministic for one in plugin.d9d_kernels())
