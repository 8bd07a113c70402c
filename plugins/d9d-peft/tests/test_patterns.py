"""Patterns that choose modules by name, and the errors of patterns that choose nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_peft.config import LoraConfig
from d9d_peft.ia3.config import Ia3Config
from d9d_peft.ia3.method import Ia3
from d9d_peft.lora.dropout import dropped, layout_dependence
from d9d_peft.lora.method import Lora
from d9d_peft.patterns import matches, select
from torch import nn

NAMES = ("a.q_proj", "a.k_proj", "b.q_proj", "b.down")


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("q_proj", ["a.q_proj", "b.q_proj"]),
        ("a.*", ["a.q_proj", "a.k_proj"]),
        ("*.q_proj", ["a.q_proj", "b.q_proj"]),
        ("?_proj", ["a.q_proj", "a.k_proj", "b.q_proj"]),
        ("*", list(NAMES)),
        (".q_proj", []),
    ],
)
def test_a_pattern_without_a_dot_matches_the_last_part_of_a_name(pattern: str, chosen: list[str]) -> None:
    assert [name for name in NAMES if matches(name, pattern)] == chosen


def test_chosen_names_keep_their_order_and_are_named_once() -> None:
    assert select(NAMES, ("b.*", "q_proj"), "peft.targets", "layers") == ["a.q_proj", "b.q_proj", "b.down"]


@pytest.mark.parametrize(
    ("names", "pattern", "hint"),
    [
        (NAMES, "qproj", "did you mean 'q_proj' or 'b.q_proj' or 'a.q_proj'?"),
        (("q_proj", "down"), "qproj", "did you mean 'q_proj'?"),
        (NAMES, "a.q_pro", "did you mean 'a.q_proj' or 'b.q_proj' or 'a.k_proj'?"),
        (NAMES, "zzzzzz", "there are: q_proj, k_proj, down"),
        ([f"x.m{number}" for number in range(6)], "zz", "there are: m0, m1, m2, m3, m4, m5"),
        ([f"x.m{number}" for number in range(7)], "zz", "there are: m0, m1, m2, m3, m4, m5, ..."),
        ((), "zz", "there are: none"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_near_names(names: Any, pattern: str, hint: str) -> None:
    with pytest.raises(BuildError) as error:
        select(names, ("*", pattern) if names else (pattern,), "peft.targets", "layers")
    assert str(error.value) == f"peft.targets: no layers match '{pattern}'; {hint}"


def linear() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(4, 6, bias=name != "down") for name in ("q_proj", "k_proj", "down")})


def refused(method: Any) -> str:
    with pytest.raises(BuildError) as error:
        method.inject(linear())
    return str(error.value)


def test_layers_that_low_rank_updates_do_not_find_or_fit_are_named() -> None:
    assert refused(Lora(LoraConfig(targets="qproj"))).endswith("did you mean 'q_proj' or 'k_proj'?")
    assert refused(Lora(LoraConfig(exclude="zzz"))) == (
        "peft.exclude: no layers match 'zzz'; there are: q_proj, k_proj, down"
    )
    assert refused(Lora(LoraConfig(exclude="*"))) == ("peft.exclude: all targets are excluded; exclude fewer layers")
    assert refused(Lora(LoraConfig(r=5))) == (
        "peft.r: a rank of 5 is larger than the matrix of 'q_proj' [6, 4]; use at most 4, or exclude that layer"
    )
    assert len(Lora(LoraConfig(r=4)).inject(linear())) == 6
    with pytest.raises(BuildError, match=r"the model has no layer that LoRA supports \(linear, embedding, head"):
        Lora(LoraConfig()).inject(nn.LayerNorm(2))


def test_layers_that_scales_do_not_find_are_named() -> None:
    assert refused(Ia3(Ia3Config(targets="qproj", feedforward=()))) == (
        "peft.targets: no linear layers match 'qproj'; did you mean 'q_proj'?"
    )
    assert refused(Ia3(Ia3Config(targets=("q_proj", "down"), feedforward="down"))) == (
        "peft.feedforward: 'down' is also in peft.targets; a layer can have only one scale"
    )
    many = nn.ModuleDict({f"m{number}": nn.Linear(1, 1) for number in range(7)})
    with pytest.raises(BuildError, match="there are: m0, m1, m2, m3, m4, m5, ...$"):
        Ia3(Ia3Config(targets="zz", feedforward=())).inject(many)


def scaled() -> tuple[nn.Module, Ia3]:
    stage = linear()
    method = Ia3(Ia3Config(targets="q_proj", feedforward="down"))
    assert method.inject(stage) == {"q_proj.ia3_l.weight", "down.ia3_l.weight"}
    with torch.no_grad():
        for name, layer in stage.named_children():
            layer.weight.copy_(torch.arange(24.0).view(6, 4))
            if name != "k_proj":
                layer.ia3_l.reset_parameters()
                assert layer.ia3_l.weight.tolist() == [1.0] * (4 if name == "down" else 6)
                layer.ia3_l.weight.copy_(torch.arange(len(layer.ia3_l.weight)) + 1.0)
    stage["q_proj"].bias.data.fill_(2.0)
    return stage, method


def test_scales_multiply_rows_and_bias_of_targets_and_columns_of_feed_forward_layers() -> None:
    stage, method = scaled()
    x = torch.tensor([[1.0, 0.0, 2.0, 0.0]])
    rows, whole = torch.arange(1.0, 7.0), torch.arange(24.0).view(6, 4)
    first, last = (x @ whole.T + 2.0) * rows, (x * torch.arange(1.0, 5.0)) @ whole.T
    for name, expected in (("q_proj", first), ("down", last)):
        assert torch.equal(stage[name](x), expected)
    with method.off(stage):
        assert torch.equal(stage["down"](x), x @ whole.T)
    assert torch.equal(stage["down"](x), last)
    terms = {name: stage[name].tensor_parallel_terms() for name in ("q_proj", "down")}
    assert terms == {"q_proj": {"ia3_l": "out_scale"}, "down": {"ia3_l": "in_scale"}}
    merger = method.merger([name for name, _ in stage.named_parameters()])
    assert merger is not None
    method.merge(stage)
    assert torch.equal(stage["q_proj"].weight, whole * rows.unsqueeze(1))
    assert torch.equal(stage["q_proj"].bias, 2.0 * rows)
    assert torch.equal(stage["down"].weight, whole * torch.arange(1.0, 5.0))
    assert [type(layer) for layer in stage.children()] == [nn.Linear] * 3


def test_adapters_of_scales_name_their_modules_and_refuse_other_kinds() -> None:
    stage, method = scaled()
    published = {f"{name}.weight": f"model.{name}.weight" for name in ("q_proj", "k_proj", "down")}
    assert method.adapter_config(stage, published) == {
        "peft_type": "IA3", "target_modules": ["model.down", "model.q_proj"], "feedforward_modules": ["model.down"],
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="published files do not have the weight of 'q_proj' as one tensor"):
        method.adapter_config(stage, {"down.weight": "model.down.weight", "q_proj.weight": "model.qkv"})
    with pytest.raises(CheckpointError, match="^the adapter has peft_type 'LORA', but the job's peft is 'ia3'; "):
        method.check_adapter(stage, published, {"peft_type": "LORA"}, [])


def test_nothing_is_dropped_outside_of_training_and_the_rest_is_scaled_up() -> None:
    x = torch.full((400, 6), 3.0)
    assert dropped(x, 0.0, True) is x
    assert dropped(x, 0.5, False, (1, 2)) is x
    assert torch.equal(dropped(x, 0.5, False), x)
    torch.manual_seed(0)
    whole = dropped(x, 0.25, True)
    assert sorted(whole.unique().tolist()) == [0.0, 4.0]
    assert 0.2 < (whole == 0).float().mean() < 0.3
    parts = []
    for part in range(2):
        torch.manual_seed(0)
        parts.append(dropped(x[:, :3], 0.25, True, (part, 2)))
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert list(layout_dependence(0.0)) == []
    assert list(layout_dependence(0.1)) == ["dropout of low-rank updates draws random numbers per microbatch"]
