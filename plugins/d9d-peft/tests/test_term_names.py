"""Low-rank updates found by the names of a model's tensors."""

from __future__ import annotations

import pytest
from d9d_peft.lora.merging import terms_of


@pytest.mark.parametrize(
    ("name", "owner", "linear", "weight", "second"),
    [
        ("a.q_proj.lora_A.weight", "a.q_proj", True, "a.q_proj.weight", "a.q_proj.lora_B.weight"),
        ("a.embed.lora_embedding_A.weight", "a.embed", False, "a.embed.weight", "a.embed.lora_embedding_B.weight"),
    ],
)
def test_an_update_is_found_by_its_first_factor(name: str, owner: str, linear: bool, weight: str, second: str) -> None:
    (term,) = terms_of([name, second, "a.norm.weight"])
    assert (term.owner, term.is_linear, term.weight, term.factors) == (owner, linear, weight, (name, second))


def test_updates_of_a_bank_belong_to_the_module_around_their_last_container() -> None:
    (term,) = terms_of(["x.terms.y.terms.gate_proj.lora_A", "x.terms.y.terms.gate_proj.lora_B"])
    assert (term.owner, term.is_linear, term.weight) == ("x.terms.y.gate_proj", False, "x.terms.y.gate_proj")
    assert list(terms_of(["x.gate_proj.lora_A"])) == []
