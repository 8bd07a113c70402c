"""LoRA updates of banks of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_peft.config import LoraConfig
from d9d_peft.lora.method import Lora
from d9d_weights.graph.graph import map_tensors
from torch import Tensor, nn

experts = pytest.importorskip("d9d_moe.experts.grouped_swiglu")
COUNTS = torch.tensor([3, 0, 2])


def layer() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = experts.GroupedSwiGLU(6, 4, 3, std=0.5, output_std=0.5)
    return nn.ModuleDict({"experts": made})


def adapted(**config: Any) -> tuple[nn.Module, Lora, frozenset[str]]:
    stage, method = layer(), Lora(LoraConfig.model_validate({"r": 2, "alpha": 6, "targets": ["experts.*"], **config}))
    named = method.inject(stage)
    for module in stage.modules():
        if "lora_A" in dict(module.named_parameters(recurse=False)):
            module.reset_parameters()
    return stage, method, named


def forward(stage: nn.Module, **how: Any) -> Tensor:
    rows = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    out: Tensor = stage["experts"](rows[: 7 if how else 5], COUNTS, spare_rows=bool(how))
    return out


def randomise(stage: nn.Module, named: frozenset[str]) -> None:
    for name in sorted(named):
        nn.init.normal_(stage.get_parameter(name), std=0.5)


def test_each_expert_has_a_term_of_its_own_which_starts_at_nothing() -> None:
    stage, _, named = adapted(targets=["gate_proj", "down_proj"])
    assert {name: tuple(stage.get_parameter(name).shape) for name in named} == {
        "experts.terms.gate_proj.lora_A": (3, 6, 2),
        "experts.terms.gate_proj.lora_B": (3, 2, 4),
        "experts.terms.down_proj.lora_A": (3, 4, 2),
        "experts.terms.down_proj.lora_B": (3, 2, 6),
    }
    assert torch.equal(forward(stage), forward(layer()))
    drawn = stage.get_parameter("experts.terms.gate_proj.lora_A").abs()
    assert 0.2 < drawn.max() <= 6**-0.5


@pytest.mark.thorough
@pytest.mark.parametrize("spare", [{}, {"spare_rows": True}])
def test_merged_banks_compute_what_the_terms_did(spare: dict[str, Any]) -> None:
    stage, method, named = adapted()
    randomise(stage, named)
    plain, expected = forward(layer(), **spare), forward(stage, **spare)
    assert (expected[:5] - plain[:5]).abs().max() > 0.1
    before = {name: p.clone() for name, p in stage.named_parameters() if "terms" not in name}
    a, b = (stage.get_parameter(f"experts.terms.up_proj.lora_{factor}") for factor in "AB")
    method.merge(stage)
    torch.testing.assert_close(forward(stage, **spare), expected)
    assert dict(stage.named_parameters()).keys() == before.keys()
    torch.testing.assert_close(stage["experts"].up_proj, before["experts.up_proj"] + 3 * torch.bmm(a, b))


def test_tensors_of_a_checkpoint_are_merged_as_banks_are() -> None:
    stage, method, named = adapted(targets=["gate_proj", "down_proj"])
    randomise(stage, named)
    tensors = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    made = map_tensors(method.merger(tensors.keys()), tensors)
    method.merge(stage)
    assert made.keys() == stage.state_dict().keys()
    assert all(torch.equal(tensor, made[name]) for name, tensor in stage.state_dict().items())


def test_linear_layers_are_the_default_and_a_second_method_adds_nothing_to_what_has_a_term() -> None:
    with pytest.raises(BuildError, match="peft.targets: no layers match 'experts.gate'"):
        adapted(targets=["experts.gate"])
    stage, _, _ = adapted(targets=["gate_proj"])
    with pytest.raises(BuildError, match="'experts.gate_proj' is adapted by another method already; add it to peft.e"):
        Lora(LoraConfig(r=2, targets=("*",))).inject(stage)
    again = Lora(LoraConfig(r=2, targets=("*",), exclude=("gate_proj",))).inject(stage)
    assert {name.split(".")[2] for name in again} == {"up_proj", "down_proj"}
    with pytest.raises(BuildError, match="peft.targets: the model has no layer that LoRA supports"):
        Lora(LoraConfig(r=2)).inject(nn.ModuleDict({"norm": nn.LayerNorm(2)}))


def test_a_rank_beyond_the_matrices_is_refused() -> None:
    with pytest.raises(BuildError, match=r"larger than the matrix of 'experts.gate_proj' \[6, 4\]; use at most 4"):
        adapted(r=5)


PUBLISHED = {f"experts.{bank}": f"mlp.*.{bank}.weight" for bank in ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize(
    ("config", "published", "text"),
    [
        ({}, {}, "published files do not have a matrix of 'experts.gate_proj' for each expert"),
        (
            {"targets": ["gate_proj", "up_proj"]},
            PUBLISHED,
            "needs updates of all or none; add down_proj to peft.targets",
        ),
        ({"rs_lora": True}, PUBLISHED, "for which rs_lora gives another scale"),
    ],
)
def test_an_adapters_file_has_experts_only_as_the_library_reads_them(
    config: dict[str, Any], published: dict[str, str], text: str
) -> None:
    stage, method, _ = adapted(**config)
    for function in (method.adapter_config, method.adapter_exporter):
        with pytest.raises(CheckpointError, match=text):
            function(stage, published)


def test_an_adapters_file_has_a_term_for_each_expert() -> None:
    stage, method, named = adapted()
    randomise(stage, named)
    terms = {name: stage.get_parameter(name) for name in named}
    exporter = method.adapter_exporter(stage, PUBLISHED)
    made = map_tensors(exporter, terms)
    ours = terms["experts.terms.up_proj.lora_B"]
    assert torch.equal(made["base_model.model.mlp.2.up_proj.lora_B.weight"], ours[2].T)
    assert "mlp.2.up_proj" in method.adapter_config(stage, PUBLISHED)["target_modules"]
    back = map_tensors(exporter.inverse(), made)
    assert all(torch.equal(back[name], tensor) for name, tensor in terms.items())


def test_what_is_dropped_depends_on_the_microbatch_and_only_while_training() -> None:
    stage, _, named = adapted(dropout=0.5)
    randomise(stage, named)
    torch.manual_seed(3)
    assert not torch.equal(forward(stage), forward(stage))
    term = stage["experts"].terms["gate_proj"]
    assert "dropout" in term.layout_dependence()[0]
    stage.eval()
    assert torch.equal(forward(stage), forward(stage))
    assert not adapted()[0]["experts"].terms["gate_proj"].layout_dependence()
