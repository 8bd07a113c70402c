"""Tensor-parallel styles of stand-in models follow their plans, part by part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.traits import TensorStyle
from d9d_transformers.attention import AttentionCall
from d9d_transformers.structure import Structure
from d9d_transformers.tensor_styles import Styles, attach_styles, check_splittable, styles_of
from torch import nn

COLUMN, ROW, PARTIAL = TensorStyle.COLUMN, TensorStyle.ROW, TensorStyle.PARTIAL
PLAN = {
    "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise", "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", "layers.*.mixer.in_proj": "colwise",
    "layers.*.two.one.up_proj": "colwise", "layers.*.two.other.up_proj": "colwise", "layers.*.odd.up_proj": "packed",
    "layers.*.odd.down_proj": "rowwise", "layers.*.other_attn.q_proj": "colwise",
}  # fmt: skip


def linear(*names: str, outputs: int = 8) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(4, outputs, bias=False) for name in names})


class Layer(nn.Module):
    """Layer with parts of all kinds, and with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(4)
        self.self_attn = linear("q_proj", "k_proj", "o_proj")
        self.self_attn["k_proj"] = nn.Linear(4, 4, bias=False)
        self.self_attn["q_norm"] = nn.LayerNorm(2)
        self.mlp = linear("up_proj", "down_proj")
        self.mixer = linear("in_proj")
        self.two = nn.ModuleDict({"one": linear("up_proj"), "other": linear("up_proj")})
        self.odd = linear("up_proj", "down_proj")
        self.other_attn = nn.ModuleDict({"inner": linear("q_proj")})


def base_of(plan: dict[str, str] | None, layers: str, **others: nn.Module) -> Any:
    base = nn.ModuleDict({"embed": nn.Embedding(5, 4), **others, "norm": nn.LayerNorm(4)})
    inside: nn.Module = nn.ModuleList([Layer()])
    for name in reversed(layers.split(".")[1:]):
        inside = nn.ModuleDict({name: inside})
    base[layers.split(".", maxsplit=1)[0]] = inside
    base.config = SimpleNamespace(base_model_tp_plan=plan)
    return base


def structure_of(layers: str) -> Structure:
    core = AttentionCall(4, 2, 2, 2, 1.0, None, None, False, ())
    attention = {f"{layers}.0.self_attn": core, f"{layers}.0.other_attn.inner": core}
    return Structure(layers, 1, ("embed",), ("norm",), None, attention, (f"{layers}.0.mixer",))


@pytest.mark.parametrize("layers", ["layers", "decoder.layers"])
def test_each_part_of_a_layer_is_split_by_its_plan_or_whole(layers: str) -> None:
    plan = {name.replace("layers", layers, 1): style for name, style in PLAN.items()}
    found = styles_of(base_of(plan, layers), structure_of(layers))
    first = f"{layers}.0"
    assert found == Styles(
        model={
            "embed": TensorStyle.VOCAB,
            "norm": TensorStyle.SEQUENCE,
            first: TensorStyle.SEQUENCE,
            f"{first}.norm": TensorStyle.SEQUENCE,
            f"{first}.mixer": TensorStyle.GATHERED,
            f"{first}.two": TensorStyle.SEQUENCE,
            f"{first}.odd": TensorStyle.SEQUENCE,
            f"{first}.other_attn": TensorStyle.GATHERED,
        },
        owners={
            f"{first}.self_attn": {"q_proj": COLUMN, "k_proj": COLUMN, "o_proj": ROW, "q_norm": PARTIAL},
            f"{first}.mlp": {"up_proj": COLUMN, "down_proj": ROW},
        },
    )
    check_splittable(found)


def test_without_a_plan_attention_gathers_and_other_parts_have_their_own_positions() -> None:
    found = styles_of(base_of(None, "layers"), structure_of("layers"))
    assert found.owners == {}
    gathered = {name for name, style in found.model.items() if style is TensorStyle.GATHERED}
    assert gathered == {"layers.0.self_attn", "layers.0.mixer", "layers.0.other_attn"}
    assert set(found.model.values()) == {TensorStyle.GATHERED, TensorStyle.SEQUENCE, TensorStyle.VOCAB}


def test_a_module_before_the_layers_that_is_no_embedding_is_a_reason_not_to_split() -> None:
    found = styles_of(base_of(PLAN, "layers", projection=nn.Linear(4, 4)), structure_of("layers"))
    assert "projection" not in found.model
    with pytest.raises(
        BuildError, match="^strategy 'tensor_parallel': projection runs before the layers, and is not an embedding$"
    ):
        check_splittable(found)


def test_split_modules_get_their_plan_and_attention_its_numbers_of_heads() -> None:
    base, structure = base_of(PLAN, "layers"), structure_of("layers")
    styles = styles_of(base, structure)
    attach_styles(base, structure, styles)
    attention, mlp = base.get_submodule("layers.0.self_attn"), base.get_submodule("layers.0.mlp")
    assert attention.tensor_parallel_plan() == styles.owners["layers.0.self_attn"]
    assert attention.tensor_parallel_heads() == {"q_proj": 4, "k_proj": 2}
    assert mlp.tensor_parallel_plan() == {"up_proj": COLUMN, "down_proj": ROW}
    assert not hasattr(mlp, "tensor_parallel_heads")
    assert not hasattr(base.get_submodule("layers.0.mixer"), "tensor_parallel_plan")
