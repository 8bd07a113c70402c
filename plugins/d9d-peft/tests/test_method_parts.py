"""Methods on small layers, exactly: names, outputs, merged weights, files of the library, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_peft.config import DoraConfig, LoraConfig
from d9d_peft.ia3.config import Ia3Config
from d9d_peft.ia3.method import Ia3
from d9d_peft.lora import files
from d9d_peft.lora.banks import GroupedTerm, merged_bank
from d9d_peft.lora.dora import Dora
from d9d_peft.lora.linear import adapted_layers, is_adapted, merged_weight
from d9d_peft.lora.merging import terms_of
from d9d_peft.lora.method import Lora
from d9d_peft.lora.saved import check_saved
from d9d_peft.lora.vocabulary import merged_embedding
from d9d_weights.graph.graph import map_tensors
from torch import Tensor, nn

PREFIX = "base_model.model."


def stage_of(bias: bool = True) -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"up": nn.Linear(4, 6, bias=bias), "down": nn.Linear(6, 4, bias=bias), "norm": nn.LayerNorm(4)}
    )


def run(mapper: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(map_tensors(mapper, tensors))


@pytest.fixture
def scaled() -> tuple[Any, Ia3]:
    stage, method = stage_of(), Ia3(Ia3Config(targets=("up",), feedforward=("down",)))
    assert method.inject(stage) == {"up.ia3_l.weight", "down.ia3_l.weight"}
    with torch.no_grad():
        for name in ("up", "down"):
            stage[name].ia3_l.weight.copy_(torch.arange(6.0) - 2)
    return stage, method


def test_scales_start_with_ones_and_multiply_outputs_or_inputs(scaled: tuple[Any, Ia3]) -> None:
    stage, method = scaled
    plain, scale = stage_of(), torch.arange(6.0) - 2
    x, y = torch.randn(3, 4), torch.randn(3, 6)
    torch.testing.assert_close(stage["up"](x), plain["up"](x) * scale)
    torch.testing.assert_close(stage["down"](y), plain["down"](y * scale))
    assert stage["up"].tensor_parallel_terms() == {"ia3_l": "out_scale"}
    assert stage["down"].tensor_parallel_terms() == {"ia3_l": "in_scale"}
    with method.off(stage):
        torch.testing.assert_close(stage["up"](x), plain["up"](x))
        with method.off(stage):
            pass
        torch.testing.assert_close(stage["down"](y), plain["down"](y))
    torch.testing.assert_close(stage["up"](x), plain["up"](x) * scale)
    stage["up"].ia3_l.reset_parameters()
    assert stage["up"].ia3_l.weight.tolist() == [1.0] * 6
    assert (type(stage["up"]).__name__, type(stage["up"]) is type(stage["down"])) == ("ScaledLinear", True)


@pytest.mark.parametrize("bias", [True, False])
def test_scales_are_merged_in_place_and_in_a_checkpoint(bias: bool) -> None:
    stage, method = stage_of(bias), Ia3(Ia3Config(targets=("up",), feedforward=("down",)))
    method.inject(stage)
    scale = torch.arange(6.0) - 2
    with torch.no_grad():
        for name in ("up", "down"):
            stage[name].ia3_l.weight.copy_(scale)
    saved = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    merged = run(method.merger(saved), saved)
    plain = stage_of(bias)
    expected = dict(plain.state_dict())
    expected["up.weight"] = plain["up"].weight * scale.unsqueeze(1)
    expected["down.weight"] = plain["down"].weight * scale
    if bias:
        expected["up.bias"] = plain["up"].bias * scale
    method.merge(stage)
    for found in (merged, stage.state_dict()):
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor)


def test_scales_in_a_file_are_columns_or_rows(scaled: tuple[Any, Ia3]) -> None:
    stage, method = scaled
    published = {"up.weight": "m.up.weight", "down.weight": "m.down.weight"}
    assert method.adapter_config(stage, published) == {
        "peft_type": "IA3",
        "target_modules": ["m.down", "m.up"],
        "feedforward_modules": ["m.down"],
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    own = {name: tensor for name, tensor in stage.state_dict().items() if "ia3_l" in name}
    there = run(method.adapter_exporter(stage, published), own)
    assert {name: tuple(tensor.shape) for name, tensor in there.items()} == {
        f"{PREFIX}m.up.ia3_l": (6, 1),
        f"{PREFIX}m.down.ia3_l": (1, 6),
    }
    with pytest.raises(CheckpointError, match="do not have the weight of 'down' as one tensor"):
        method.adapter_config(stage, {"up.weight": "m.up.weight"})
    with pytest.raises(CheckpointError, match="the adapter has peft_type 'LORA', but the job's peft is 'ia3'"):
        method.check_adapter(stage, published, {"peft_type": "LORA"}, [])


def test_a_layer_has_one_scale_and_patterns_match_whole_names_or_last_parts() -> None:
    with pytest.raises(BuildError, match=r"^peft.feedforward: 'up' is also in peft.targets; a layer can have only one"):
        Ia3(Ia3Config(targets=("up", "down"), feedforward=("u*",))).inject(stage_of())
    with pytest.raises(BuildError, match=r"^peft.targets: no linear layers match 'dwn'; did you mean 'down'\?$"):
        Ia3(Ia3Config(targets=("dwn",), feedforward=("down",))).inject(stage_of())
    with pytest.raises(BuildError, match="^peft.feedforward: no linear layers match 'zzz'; there are: up, down$"):
        Ia3(Ia3Config(targets=("up",), feedforward=("zzz",))).inject(stage_of())
    many = nn.ModuleDict({f"l{number}": nn.Linear(2, 2) for number in range(7)})
    with pytest.raises(BuildError, match=r"there are: l0, l1, l2, l3, l4, l5, \.\.\.$"):
        Ia3(Ia3Config(targets=("zzz",), feedforward=())).inject(many)
    deep = nn.ModuleDict({"a": nn.ModuleDict({"up": nn.Linear(2, 2)}), "b": nn.ModuleDict({"up": nn.Linear(2, 2)})})
    assert Ia3(Ia3Config(targets=("a.*",), feedforward=())).inject(deep) == {"a.up.ia3_l.weight"}


def test_low_rank_updates_are_added_switched_off_and_merged() -> None:
    stage, method = stage_of(), Lora(LoraConfig(r=2, alpha=3, exclude=("down",)))
    assert method.inject(stage) == {"up.lora_A.weight", "up.lora_B.weight"}
    assert [name for name, _ in adapted_layers(stage)] == ["up"]
    layer, plain, x = stage["up"], stage_of()["up"], torch.randn(3, 4)
    torch.testing.assert_close(layer(x), plain(x))
    assert layer.lora_B.weight.eq(0).all()
    assert (layer.lora_A.weight.abs() <= 0.5).all()
    assert layer.tensor_parallel_terms() == {"lora_A": "in", "lora_B": "out"}
    nn.init.normal_(layer.lora_B.weight)
    turned = plain.weight + 1.5 * layer.lora_B.weight @ layer.lora_A.weight
    torch.testing.assert_close(layer(x), x @ turned.T + plain.bias)
    with method.off(stage):
        torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer(x), x @ turned.T + plain.bias)
    saved = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    merged = run(method.merger(saved), saved)
    torch.testing.assert_close(merged["up.weight"], turned)
    assert set(merged) == set(stage_of().state_dict())
    method.merge(stage)
    torch.testing.assert_close(stage["up"].weight, turned)
    assert type(stage["up"]) is nn.Linear
    assert not [name for name in vars(stage["up"]) if name.startswith("lora_")]
    assert not is_adapted(stage["up"])


def test_a_rank_may_be_as_large_as_the_smaller_side() -> None:
    assert len(Lora(LoraConfig(r=4)).inject(stage_of())) == 4
    with pytest.raises(BuildError, match=r"a rank of 5 is larger than the matrix of 'up' \[6, 4\]; use at most 4"):
        Lora(LoraConfig(r=5)).inject(stage_of())
    with pytest.raises(BuildError, match="peft.exclude: all targets are excluded"):
        Lora(LoraConfig(r=2, exclude=("up", "down"))).inject(stage_of())
    with pytest.raises(BuildError, match="has no layer that LoRA supports"):
        Lora(LoraConfig(r=2)).inject(nn.LayerNorm(2))
    twice = stage_of()
    Lora(LoraConfig(r=2, targets=("up",))).inject(twice)
    with pytest.raises(BuildError, match="'up' is adapted by another method already; add it to peft.exclude"):
        Lora(LoraConfig(r=2)).inject(twice)


def test_files_of_low_rank_updates_have_the_names_of_the_library() -> None:
    config = LoraConfig(r=2, alpha=3, dropout=0.25, targets=("up",))
    stage, method, published = stage_of(), Lora(config), {"up.weight": "m.up.weight"}
    method.inject(stage)
    expected = {
        "peft_type": "LORA",
        "target_modules": ["m.up"],
        "r": 2,
        "lora_alpha": 3.0,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "lora_dropout": 0.25,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    assert method.adapter_config(stage, published) == expected
    assert files.config_json(config, {}, ["m.up"]) == {**expected, "lora_dropout": 0.0}
    own = {name: tensor for name, tensor in stage.state_dict().items() if "lora" in name}
    there = run(method.adapter_exporter(stage, published), own)
    assert set(there) == {f"{PREFIX}m.up.lora_A.weight", f"{PREFIX}m.up.lora_B.weight"}
    assert torch.equal(there[f"{PREFIX}m.up.lora_A.weight"], stage["up"].lora_A.weight)
    with pytest.raises(CheckpointError, match="do not have the weight of 'up' as one tensor"):
        method.adapter_config(stage, {"up.weight": "m.up"})
    assert Dora(DoraConfig(r=2)).adapter_config(nn.Linear(1, 1), {})["use_dora"] is True


def test_adapters_of_another_kind_rank_or_scale_are_refused() -> None:
    config = LoraConfig(r=2, alpha=3)
    fits = {"peft_type": "LORA", "r": 2, "lora_alpha": 3.0}
    files.check_config(config, fits, [])
    with pytest.raises(CheckpointError, match="peft_type 'IA3', but the job's peft is 'lora'"):
        files.check_config(config, {**fits, "peft_type": "IA3"}, [])
    for field, name, value in (("r", "r", 4), ("lora_alpha", "alpha", 4.0), ("use_rslora", "rs_lora", True)):
        with pytest.raises(CheckpointError, match=f"adapter's {name} differ.*peft.{name}: {value}"):
            files.check_config(config, {**fits, field: value}, [])
    with pytest.raises(CheckpointError, match="no magnitudes"):
        files.check_config(config, fits, [], use_dora=True)


def test_ranks_and_scales_of_single_layers_are_stated_by_names_that_select_no_other_layer() -> None:
    config = LoraConfig(r=2, alpha=3, rank_pattern={"q": 4, "k": 2}, alpha_pattern={"*.q": 5, "v": 3})
    modules = {name: name.removeprefix("d.") for name in ("d.q", "d.a.q", "d.b.a.q", "d.xa.q", "d.a.k", "d.v")}
    found = files.config_json(config, modules, ["m.1.up", "a.0.up"], ["norm.weight", "norm.bias", "h.head.weight"])
    # The library also gives the values of "q" to "a.q", unless the name begins with ^.
    assert found["rank_pattern"] == {"^q": 4, "^a.q": 4, "b.a.q": 4, "xa.q": 4}
    assert found["alpha_pattern"] == {"^q": 5.0, "^a.q": 5.0, "b.a.q": 5.0, "xa.q": 5.0}
    assert found["target_modules"] == ["a.0.up", "a.k", "a.q", "b.a.q", "m.1.up", "q", "v", "xa.q"]
    assert found["modules_to_save"] == ["h.head", "norm"]


@pytest.mark.parametrize(("count", "more"), [(1, ""), (4, ""), (5, ", and 1 more"), (6, ", and 2 more")])
def test_layers_with_another_rank_or_scale_in_an_adapter_are_told(count: int, more: str) -> None:
    pairs = [(f"d.{index}.q", f"m.{index}.q") for index in range(count)]
    listed = ", ".join(f"d.{index}.q: {{0}}" for index in range(min(count, 4)))
    for field, what, value, own in (("rank_pattern", "rank", 8, 2), ("alpha_pattern", "alpha", 6.0, 3.0)):
        with pytest.raises(CheckpointError) as caught:
            files.check_patterns(LoraConfig(r=2, alpha=3), {field: {"q": value}}, [("d.k", "m.k"), *pairs])
        assert str(caught.value) == (
            f"the adapter's {what} for 'm.0.q' is {value}, but the job's is {own}; set the adapter's values: "
            f"peft.{field}: {{{listed.format(value)}}}{more}"
        )


def test_a_module_to_save_shares_no_parameter_has_parameters_and_gets_no_update() -> None:
    stage = nn.ModuleDict(
        {"words": nn.Embedding(5, 4), "up": nn.Linear(4, 5), "norm": nn.LayerNorm(4), "act": nn.Tanh()}
    )
    check_saved(stage, ("words", "norm"), ["up"])
    with pytest.raises(BuildError, match="'act' has no parameters; name another module"):
        check_saved(stage, ("norm", "act"), ["up"])
    with pytest.raises(BuildError, match="'up' is also in peft.targets"):
        check_saved(stage, ("up", "norm"), ["up"])
    stage["up"].weight = stage["words"].weight
    check_saved(stage, ("norm",), [])
    for name in ("words", "up"):
        with pytest.raises(BuildError, match=f"embedding and head share the weight of '{name}'"):
            check_saved(stage, ("norm", name), [])


def test_updates_are_found_among_the_names_of_tensors() -> None:
    names = [
        "a.lora_A.weight", "a.lora_B.weight", "head.lora_head_A.weight", "words.lora_embedding_A.weight",
        "moe.terms.gate.lora_A", "moe.lora_A", "a.weight", "lora_A.weight",
    ]  # fmt: skip
    found = {term.owner: term for term in terms_of(names)}
    assert set(found) == {"a", "head", "words", "moe.gate"}
    assert {owner: term.is_linear for owner, term in found.items()} == {
        "a": True, "head": False, "words": False, "moe.gate": False,
    }  # fmt: skip
    assert found["a"][2:] == ("a.weight", ("a.lora_A.weight", "a.lora_B.weight"), merged_weight)
    assert found["head"].factors == ("head.lora_head_A.weight", "head.lora_head_B.weight")
    assert found["words"].factors == ("words.lora_embedding_A.weight", "words.lora_embedding_B.weight")
    assert found["words"].merged is merged_embedding
    assert found["moe.gate"][2:] == ("moe.gate", ("moe.terms.gate.lora_A", "moe.terms.gate.lora_B"), merged_bank)


def test_experts_of_a_file_are_all_banks_with_a_matrix_for_each_expert() -> None:
    banks = {"gate": torch.zeros(3, 2, 2), "up": torch.zeros(3, 2, 2)}
    terms = nn.ModuleDict({name: GroupedTerm(bank, 1, 1.0, 0.0) for name, bank in banks.items()})

    class Owner(nn.Module):
        def banks(self) -> Any:
            return banks

        def bank_terms(self) -> nn.ModuleDict:
            return terms

    stage = nn.ModuleDict({"moe": Owner()})
    published = {"moe.gate": "m.*.gate.weight", "moe.up": "m.*.up.weight"}
    assert files.experts_of(stage, published, LoraConfig()) == {
        "moe.terms.gate": (3, "m.*.gate"),
        "moe.terms.up": (3, "m.*.up"),
    }
    assert files.modules_of_experts("m.*.gate", 3) == ["m.0.gate", "m.1.gate", "m.2.gate"]
    with pytest.raises(CheckpointError, match="for which rs_lora gives another scale"):
        files.experts_of(stage, published, LoraConfig(rs_lora=True))
    for pattern in ({"rank_pattern": {"gate": 2}}, {"alpha_pattern": {"moe.*": 2}}):
        with pytest.raises(CheckpointError, match="a pattern selects 'moe.gate'; correct peft.rank_pattern"):
            files.experts_of(stage, published, LoraConfig(**pattern))
    for wrong in ("m.gate.weight", "m.*.gate", ""):
        with pytest.raises(CheckpointError, match="do not have a matrix of 'moe.gate' for each expert"):
            files.experts_of(stage, {**published, "moe.gate": wrong}, LoraConfig())
    with pytest.raises(CheckpointError, match="would take 'x.up' for a matrix of experts"):
        files.check_no_expert(stage, ["x.down", "x.up"])
    files.check_no_expert(stage, ["up.x", "x.down"])
    del terms["up"]
    with pytest.raises(CheckpointError, match=r"joins the experts' gate, up, so an adapter needs .*; add up to peft"):
        files.experts_of(stage, published, LoraConfig())


def test_merged_weights_are_computed_in_float32_and_have_their_own_format() -> None:
    weight = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    a = b = torch.ones(1, 1)
    assert merged_weight(weight, a, b, 0.5).item() == 256.0
    assert merged_weight(weight, a, b, 2.0).item() == 258.0
    assert merged_weight(weight, a, b, 2.0).dtype == torch.bfloat16
    words = merged_embedding(torch.zeros(3, 2), torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [10.0]]), 2.0)
    assert words.tolist() == [[2.0, 20.0], [4.0, 40.0], [6.0, 60.0]]
    bank = merged_bank(torch.ones(2, 1, 2), torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[[1.0, 2.0]]] * 2), 3.0)
    assert bank.tolist() == [[[4.0, 7.0]], [[7.0, 13.0]]]


def test_an_update_of_a_bank_merges_into_it_and_is_nothing_while_off() -> None:
    bank = nn.Parameter(torch.ones(2, 4, 3))
    term = GroupedTerm(bank, 2, 0.5, 0.25)
    term.reset_parameters()
    assert (tuple(term.lora_A.shape), tuple(term.lora_B.shape)) == ((2, 4, 2), (2, 2, 3))
    assert term.lora_A.abs().max() <= 0.5
    assert term.lora_B.eq(0).all()
    assert (set(term.op_slots()), term.layout_dependence()) == (
        {"down", "up"}, ["dropout of low-rank updates draws random numbers per microbatch"],
    )  # fmt: skip
    assert term.defer_to(None) == ("lora_A", "lora_B")
    nn.init.ones_(term.lora_A)
    nn.init.ones_(term.lora_B)
    rows, counts = torch.ones(3, 4), torch.tensor([1, 2])
    term.eval()
    assert term(rows, counts, spare_rows=False).tolist() == [[4.0] * 3] * 3
    term.lora_off = True
    off = term(rows, counts, spare_rows=False)
    assert (off.shape, off.item()) == ((), 0.0)
    term.merge_into(bank)
    assert bank.flatten().tolist() == [2.0] * 24
    assert GroupedTerm(bank, 2, 0.5, 0.0).layout_dependence() == []


def test_both_products_of_a_bank_get_the_rows_their_counts_and_the_deferral() -> None:
    term = GroupedTerm(nn.Parameter(torch.ones(2, 4, 3)), 2, 0.5, 0.0)
    asked: list[Any] = []

    def product(name: str, width: int) -> Any:
        def run(rows: torch.Tensor, bank: torch.Tensor, counts: torch.Tensor, **how: Any) -> torch.Tensor:
            asked.append((name, tuple(rows.shape), bank is getattr(term, f"lora_{name}"), counts.tolist(), how))
            return torch.ones(len(rows), width)

        return run

    deferral: Any = object()
    term.defer_to(deferral)
    object.__setattr__(term, "down", product("A", 2))
    object.__setattr__(term, "up", product("B", 3))
    assert term(torch.ones(5, 4), torch.tensor([3, 1]), spare_rows=True).tolist() == [[0.5] * 3] * 5
    how = {"spare_rows": True, "deferral": deferral}
    assert asked == [("A", (5, 4), True, [3, 1], how), ("B", (5, 2), True, [3, 1], how)]
