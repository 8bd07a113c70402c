"""Heads that tensor parallelism splits over the vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from d9d_core.errors import BuildError
from d9d_core.model import VocabularyShare
from d9d_core.traits import TensorStyle
from d9d_parallel.tensor_parallel.communication import TensorCommunication
from d9d_parallel.tensor_parallel.strategy import _Split
from torch import nn


class TiedHead(nn.Module):
    """Head that reads the weight of the embedding."""

    def split_vocabulary(self, share: VocabularyShare) -> None:
        self.share = share


class Owner(nn.Module):
    """Module whose head is split."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def tensor_parallel_plan(self) -> dict[str, TensorStyle]:
        return {"head": TensorStyle.VOCAB}


def split(head: nn.Module) -> None:
    ranks = SimpleNamespace(size=2, rank=1, group=None)
    _Split(cast("Any", None), cast("Any", ranks), "tensor_parallel", TensorCommunication(nn.Module(), [0, 1])).children(
        "", Owner(head)
    )


def test_a_tied_head_states_the_rows_of_the_embedding() -> None:
    head = TiedHead()
    cast("Any", head).vocabulary = 7
    split(head)
    assert (head.share.first, head.share.size) == (4, 3)


def test_a_tied_head_that_states_no_rows_is_refused_with_the_protocol() -> None:
    with pytest.raises(BuildError, match=r"'head' \(TiedHead\) has style vocab and no weight.*SplitsVocabulary"):
        split(TiedHead())


def test_a_module_that_is_neither_embedding_nor_head_is_refused() -> None:
    module = nn.Identity()
    cast("Any", module).vocabulary = 7
    with pytest.raises(BuildError, match=r"'head' is Identity, which is not an embedding and lacks split_vocabulary"):
        split(module)
