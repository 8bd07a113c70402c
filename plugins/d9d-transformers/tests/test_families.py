"""Models of transformers compute the same in d9d: alone, packed, in stages, and from files and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_core.kernel import OpSignature
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec, Ref
from d9d_core.traits import HasExperts, HasOps, LateInit, TensorStyle, modules_with
from d9d_nn.ops import grouped_linear_torch
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.support.models import initialised
from d9d_transformers.attention import window_of
from d9d_transformers.build import build
from d9d_transformers.config import TransformersConfig, example
from d9d_transformers.experts import replace_experts
from d9d_transformers.hugging_face import TransformersFormat
from d9d_transformers.library import library, native_config, native_model
from d9d_transformers.model import TransformersModel
from d9d_transformers.plugin import d9d_models
from d9d_transformers.structure import Parts
from d9d_weights.graph.graph import map_tensors
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

(SPEC,) = d9d_models()
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 8, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2,
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: Types whose matrices transformers' plan splits.
SPLIT = [
    "llama", "qwen3", "gemma3_text", "granite", "cohere", "mistral", "ministral3", "qwen2", "gemma", "smollm3", "olmo",
    "ernie4_5", "arcee", "exaone4", "cohere2", "starcoder2", "helium", "gemma2",
]  # fmt: skip
WHOLE = ["phi3", "olmo2", "olmo3", "glm", "glm4", "hunyuan_v1_dense"]
#: Types with learned sinks in their attention.
SINKS = ["gpt_oss", "granite_swa"]
#: Types with token mixers other than attention: samples are one document each.
MIXERS = ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "lfm2", "jamba", "minimax", "nemotron_h", "mamba"]
EXPERTS = [
    "mixtral", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "deepseek_v3",
]  # fmt: skip
#: Tried in each run of the quick tests; the others are tried in .ci/run.
FIRST = {"llama", "gemma3_text", "qwen3_moe", "gpt_oss"}
APART = [
    pytest.param(kind, marks=() if kind in FIRST else (pytest.mark.thorough,))
    for kind in (*SPLIT, *WHOLE, *SINKS, *EXPERTS)
]
TYPES = [*APART, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in MIXERS)]


def tiny(kind: str, **fields: Any) -> TransformersConfig:
    """Config with the sizes above that the type has."""
    release = tuple(map(int, library().__version__.split(".")[:2]))
    if kind == "ernie4_5_moe" and release < (5, 23):
        pytest.skip("this release of transformers has no rule for the weights of its router")
    known = library().CONFIG_MAPPING[kind]().to_dict()
    own = {name: size for name, size in SIZES.items() if name in known}
    if kind == "deepseek_v3":  # its latent keys become as many heads as there are queries
        own["num_key_value_heads"] = own["num_attention_heads"]
    return TransformersConfig(config={"model_type": kind, **own, **fields})


@cache
def theirs(kind: str) -> Any:
    """Language model of transformers with random weights far from their start."""
    torch.manual_seed(0)
    model = library().AutoModelForCausalLM.from_config(
        native_config(tiny(kind).config), attn_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 or "gemma" in kind else 1.0, std=0.2)
    return model


def ours(kind: str, stage: Stage = Stage()) -> TransformersModel:  # noqa: B008 - Stage is frozen
    """Model of d9d, or a stage of it, with the weights of transformers' model."""
    with torch.device("meta"):
        model = build(tiny(kind), stage)
    model.to_empty(device="cpu")
    for module in modules_with(model, LateInit).values():
        module.reset_parameters()
    weights = converted(theirs(kind).state_dict())
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            stored = weights[name]
            assert stored is not None
            tensor.copy_(stored)
    return model


def converted(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Tensors of transformers by d9d's names: experts are three banks [experts, in, out]."""
    found = dict(tensors)
    for name in [name for name in found if name.endswith("experts.gate_up_proj")]:
        experts = name.removesuffix(".gate_up_proj")
        if f"{name}_bias" in found:  # these experts compute something else than ours
            continue
        both, down = found.pop(name), found.pop(f"{experts}.down_proj")
        assert both is not None
        assert down is not None
        halves = dict(zip(("gate_proj", "up_proj"), both.chunk(2, dim=1), strict=True))
        found |= {f"{experts}.bank.{bank}": half.mT for bank, half in (halves | {"down_proj": down}).items()}
    return found


def inputs(kind: str) -> dict[str, Tensor]:
    """Two samples of 16 tokens; the first one is a document of 6 tokens and one of 10."""
    draws = torch.Generator().manual_seed(len(kind))
    tokens, targets = (torch.randint(3, 64, (2, 16), generator=draws) for _ in range(2))
    documents = torch.tensor([[0] * 6 + [1] * 10, [0] * 16])
    positions = torch.stack([torch.cat([torch.arange(6), torch.arange(10)]), torch.arange(16)])
    return {"tokens": tokens, "targets": targets, "documents": documents, "positions": positions}


def logits_of(model: TransformersModel, given: dict[str, Tensor]) -> Tensor:
    return model(**{name: tensor for name, tensor in given.items() if name != "targets"})["logits"]


@pytest.mark.parametrize("kind", TYPES)
def test_logits_and_gradients_are_those_of_transformers(kind: str) -> None:
    given, model, reference = inputs(kind), ours(kind), theirs(kind)
    expected = reference(input_ids=given["tokens"], use_cache=False).logits
    assert (model(tokens=given["tokens"])["logits"] - expected).abs().max() < 1e-5 * expected.abs().max()
    reference.zero_grad()
    functional.cross_entropy(expected.flatten(0, 1), given["targets"].flatten(), reduction="sum").backward()
    model(tokens=given["tokens"], targets=given["targets"])["token_loss"].sum().backward()
    gradients = converted({name: parameter.grad for name, parameter in reference.named_parameters()})
    for name, parameter in model.named_parameters():
        wanted = gradients[name]
        if wanted is None:  # a bias that only balances experts
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        assert (parameter.grad - wanted).norm() < 1e-5 * wanted.norm(), name


@pytest.mark.parametrize("kind", APART)
def test_a_document_in_a_sample_is_computed_as_it_is_alone(kind: str) -> None:
    given, model = inputs(kind), ours(kind)
    packed = logits_of(model, given)
    torch.testing.assert_close(
        packed[:1, :6], logits_of(model, {"tokens": given["tokens"][:1, :6]}), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        packed[:1, 6:], logits_of(model, {"tokens": given["tokens"][:1, 6:]}), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", TYPES)
def test_stages_compute_the_bits_of_the_whole_model_with_its_parameters(kind: str) -> None:
    given, whole = inputs(kind), ours(kind)
    stages = [ours(kind, Stage(index, 3)) for index in range(3)]
    names = [] if kind in MIXERS else ["documents", "positions"]
    others = {name: given[name] for name in names}
    passed = stages[0](tokens=given["tokens"], **others)
    for stage in stages[1:]:
        passed = stage(**passed, **others)
    assert torch.equal(passed["logits"], whole(tokens=given["tokens"], **others)["logits"])
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    shared = {f"{whole.head_facts.embedding}.weight"} if whole.head_facts.tied else set()
    assert {name for name in names if names.count(name) > 1} == shared
    assert set(names) == {name for name, _ in whole.named_parameters()}


@pytest.mark.parametrize("kind", TYPES)
def test_weights_come_from_files_and_go_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    reference, form = theirs(kind), TransformersFormat()
    reference.save_pretrained(tmp_path)
    files = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    config = form.config_from_json(json.loads((tmp_path / "config.json").read_text()))
    loaded = map_tensors(form.importer(config, config), files)
    state = ours(kind).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    exported = map_tensors(form.exporter(config), loaded)
    assert exported.keys() == files.keys()
    assert all(torch.equal(exported[name], files[name]) for name in files)


@pytest.mark.parametrize("kind", SPLIT[:5])
def test_a_plan_of_transformers_becomes_styles_of_every_parameter(kind: str) -> None:
    model = ours(kind)
    plan = model.tensor_parallel_plan()
    assert {plan[name] for name in plan if name.endswith("norm")} <= {TensorStyle.SEQUENCE}
    assert plan[model.head_facts.name] is plan[model.head_facts.embedding] is TensorStyle.VOCAB
    attention = model.get_submodule("model.layers.0.self_attn")
    styles: Any = attention.tensor_parallel_plan()  # type: ignore[operator]
    assert (styles["q_proj"], styles["o_proj"]) == (TensorStyle.COLUMN, TensorStyle.ROW)
    heads: Any = attention.tensor_parallel_heads()  # type: ignore[operator]
    assert heads["q_proj"] == 4


@pytest.mark.parametrize(
    ("kind", "attention", "others"),
    [("olmo2", "gathered", None), ("phi3", "gathered", "sequence"), ("qwen3_moe", None, "sequence")],
)
def test_parts_that_a_plan_does_not_split_are_whole_on_every_rank(
    kind: str, attention: str | None, others: str | None
) -> None:
    plan = ours(kind).tensor_parallel_plan()
    assert plan.get("model.layers.1.self_attn") == attention
    assert plan.get("model.layers.1.mlp") == others


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("doge", r"gives its attention a mask of another kind \(changed\)|gives its attention a mask, which"),
        ("phi", "the head of PhiForCausalLM is Linear, but d9d supports only a linear layer without bias"),
        ("seed_oss", "attention_dropout is 0.1; .* set attention_dropout to 0 in config.json"),
        ("nemotron", "passes no keywords to its attention"),
        ("vit", "transformers has no language model"),
    ],
)
def test_a_model_that_cannot_be_exact_is_refused_with_the_reason(kind: str, text: str) -> None:
    with torch.device("meta"), pytest.raises(BuildError, match=text):
        build(tiny(kind), Stage())


def test_layers_that_get_more_than_hidden_states_are_refused() -> None:
    with torch.device("meta"), pytest.raises(BuildError, match="Zamba2MambaDecoderLayer reads other tensors besides"):
        build(example("zamba2"), Stage())


def test_numbers_that_only_a_constructor_knows_are_found_in_a_small_model() -> None:
    config = tiny("apertus", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    model = initialised(SPEC, config)
    native = library().AutoModelForCausalLM.from_config(native_config(config.config))
    path = "model.layers.0.mlp.act_fn"
    expected = native.get_submodule(path).state_dict()
    assert {"alpha_p", "beta"} <= expected.keys()
    for name, tensor in model.get_submodule(path).state_dict().items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype))


def test_a_model_with_other_token_mixers_takes_one_document_per_sample_and_all_positions() -> None:
    given, config = inputs("lfm2"), tiny("lfm2", layer_types=["conv", "conv", "full_attention"])
    model = initialised(SPEC, config)
    assert isinstance(model, TransformersModel)
    assert model.token_mixers() == ["model.layers.0.conv", "model.layers.1.conv"]
    with pytest.raises(ValueError, match=r"several documents, whose tokens model\.layers\.0\.conv would mix"):
        logits_of(model, given)
    with pytest.raises(BuildError, match=r"model\.layers\.0\.conv mixes tokens and needs whole samples"):
        model.split_context(None)  # type: ignore[arg-type]
    assert model.tensor_parallel_plan()["model.layers.0.conv"] is TensorStyle.GATHERED
    assert ours("llama").token_mixers() == []


def test_padding_is_no_second_document_for_a_model_with_other_token_mixers() -> None:
    model = ours("qwen3_5_text")
    tokens = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 8, [0] * 5 + [1] * 3])
    alone = model(tokens=tokens[1:, :5])["logits"]
    padded = model(tokens=tokens, documents=documents, lengths=torch.tensor([8, 5]))["logits"]
    torch.testing.assert_close(padded[1:, :5], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="several documents"):
        model(tokens=tokens, documents=documents)


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic', whose angles",
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; .* set router_jitter_noise to 0"),
        ("starcoder2", {"residual_dropout": 0.1}, "residual_dropout is 0.1"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (
            "phi3",
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                }
            },
            "'longrope', whose angles",
        ),
    ],
)
def test_computations_that_depend_on_the_batch_are_refused(kind: str, fields: dict[str, Any], text: str) -> None:
    with torch.device("meta"), pytest.raises(BuildError, match=text):
        build(tiny(kind, **fields), Stage())


def test_a_part_of_a_layer_that_no_small_model_has_is_refused() -> None:
    config = tiny("lfm2", layer_types=["conv", "conv", "full_attention"])
    with torch.device("meta"):
        native = native_model(native_config(config.config))
        with pytest.raises(BuildError, match=r"layers\.0\.conv \(Lfm2ShortConv\) mixes documents"):
            TransformersModel(native, Parts(frozenset(), frozenset({"Lfm2DecoderLayer"}), {}, {}), Stage())


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (lambda _b, _h, query, key: key <= query, None),
        (lambda _b, _h, query, key: (key <= query) & (key > query - 4096), 4096),
        (lambda _b, _h, query, key: key > query - 2**30, "which is not causal"),
        (lambda _b, _h, query, key: (key <= query) & (key // 4096 == query // 4096), "which depends on the position"),
        (lambda _b, _h, query, key: (key <= query) & (key % 2 == 0), "which leaves out some earlier keys"),
        (lambda *_: 1 / 0, "which cannot be evaluated: division by zero"),
    ],
)
def test_a_window_is_the_one_that_the_mask_computes(function: Callable[..., Any], window: int | str | None) -> None:
    assert window_of(function) == window


def test_values_that_no_rule_gives_are_not_left_out_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = build(tiny("llama"), Stage())
    norm: Any = model.to_empty(device="cpu").get_submodule("model.layers.0.input_layernorm")
    monkeypatch.setattr(type(getattr(model, "model")), "_init_weights", lambda *_: None)  # noqa: B009
    norm.reset_parameters()  # ones in all small models
    assert (norm.weight == 1).all()
    projection: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    with pytest.raises(BuildError, match="initialises weight of Linear in its constructor only"):
        projection.reset_parameters()


def test_a_rule_of_the_containing_module_comes_after_the_own_one() -> None:
    mixer = initialised(SPEC, example("falcon_mamba")).get_submodule("backbone.layers.1.mixer")
    steps = functional.softplus(mixer.get_parameter("dt_proj.bias"))
    assert 5e-4 < steps.min() < steps.max() < 0.2  # of zeros, which the rule of linear layers gives, it would be 0.69


def test_a_rule_of_the_containing_module_initialises_a_router_and_nothing_else() -> None:
    with torch.device("meta"):
        model = build(tiny("qwen3_next"), Stage())
    block: Any = model.to_empty(device="cpu").get_submodule("model.layers.0.mlp")
    for name, parameter in block.named_parameters():
        nn.init.constant_(parameter, 7.0)
        assert (parameter == 7).all(), name
    block.gate.reset_parameters()
    assert block.gate.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert all((tensor == 7).all() for name, tensor in block.named_parameters() if name != "gate.weight")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "has no model_type|model_type is"),
        ({"model_type": 3}, "has no model_type|model_type is"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantized weights cannot be trained"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "d9d trains decoders"),
    ],
)
def test_a_config_that_describes_no_trainable_decoder_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        TransformersConfig(config=fields)
    with pytest.raises(CheckpointError, match=text):
        TransformersFormat().config_from_json(fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": "no_such"}, r"transformers .* has no model_type 'no_such'; install a release that has it"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C"}},
            "its code is next to the weights, and d9d never",
        ),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "transformers refuses it for llama"),
    ],
)
def test_a_type_that_transformers_lacks_and_values_that_it_refuses_are_errors(
    fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        native_config(fields)


def test_fields_about_files_and_programs_are_not_part_of_the_model() -> None:
    given = {
        "model_type": "llama",
        "dtype": "float16",
        "transformers_version": "5",
        "use_cache": False,
        "vocab_size": 9,
    }
    config = TransformersFormat().config_from_json(given)
    assert config.config == {"model_type": "llama", "vocab_size": 9}
    assert TransformersFormat().config_json(config, "bfloat16") == {**config.config, "dtype": "bfloat16"}
    assert (config.model_type, config.vocab_size, config.max_positions) == ("llama", 9, None)


def test_a_smaller_model_keeps_each_kind_of_layer() -> None:
    full, sliding = "full_attention", "sliding_attention"
    kinds = [full, full, sliding, full, sliding, full]
    config = TransformersConfig(
        config={
            "model_type": "qwen3",
            "num_hidden_layers": 6,
            "hidden_size": 64,
            "layer_types": kinds,
            "others": [1, 2],
        }
    )
    assert {"num_hidden_layers": 6, "hidden_size": 64, "head_dim": 128}.items() <= config.sizes().items()
    smaller = {count: config.resized({"num_hidden_layers": count, "hidden_size": 32}).config for count in (2, 4)}
    assert smaller[2]["layer_types"] == [full, sliding]
    assert smaller[4]["layer_types"] == [full, full, sliding, full]
    assert (smaller[2]["hidden_size"], smaller[2]["others"]) == (32, [1, 2])
    assert config.resized({"hidden_size": 8}).config == {**config.config, "hidden_size": 8}


class OnDevice(Ref):
    """Builds with the products by expert that GPUs choose."""

    def load(self) -> Callable[..., TransformersModel]:
        def built(*args: Any) -> TransformersModel:
            model = build(*args).bfloat16()
            for module in modules_with(model, HasOps).values():
                for slot in module.op_slots().values():
                    if slot.op == "grouped_linear":
                        signature = OpSignature(slot.op, "cuda", "bfloat16", slot.static)
                        slot.bind("grouped_mm", grouped_linear_torch.build(signature))
            return model

        return built


class TestModel(ModelSuite):
    plugin = "d9d_transformers.plugin"
    target = "transformers"
    flops_per_parameter = (1.5, 9.0)
    depth_scaled = False  # transformers initialises all layers alike

    def test_a_step_never_waits_for_the_device(self, spec: ModelSpec, config: Any) -> None:
        """As on a GPU: the reference of the products by expert reads the counts of rows."""
        super().test_a_step_never_waits_for_the_device(replace(spec, build=OnDevice("on:device")), config)

    def test_claims_agree_with_traits(self, spec: ModelSpec, config: Any) -> None:  # type: ignore[override]
        """With balancing: without it, routers are not observed."""
        super().test_claims_agree_with_traits(spec, initialised(spec, config.model_copy(update={"balancing": ()})))

    @pytest.mark.thorough
    def test_every_data_parallel_layout_computes_the_same(self, config: Any) -> None:
        """This takes 15 s, because each process imports transformers."""
        super().test_every_data_parallel_layout_computes_the_same(config)


@pytest.mark.thorough
class TestBalancedModel(TestModel):
    test_hugging_face_round_trip_is_bitwise = None  # balancing is no field of config.json
    test_every_data_parallel_layout_computes_the_same = None  # tests/test_layouts.py has layouts of balanced experts

    @pytest.fixture
    def config(self, spec: ModelSpec) -> Any:
        assert spec.tiny is not None
        balancing = [{"name": "auxiliary_loss", "coefficient": 0.01}]
        return TransformersConfig.model_validate({**spec.tiny.load()().model_dump(), "balancing": balancing})


class TestPlugin(PluginSuite):
    plugin = "d9d_transformers.plugin"
    builds_on = ("d9d_nn.plugin",)


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_banks_that_can_be_sharded_by_expert(kind: str) -> None:
    with torch.device("meta"):
        model = build(tiny(kind), Stage())
    layers = modules_with(model, HasExperts)
    assert layers
    for layer in layers.values():
        assert {len(bank) for bank in layer.expert_banks()["bank"].parameters()} == {4}


def test_experts_that_compute_something_else_stay_as_they_are() -> None:
    with torch.device("meta"):
        native = library().AutoModelForCausalLM.from_config(native_config(tiny("gpt_oss").config))
    assert replace_experts(native.model, 0.02) == []
    with torch.device("meta"):
        native = library().AutoModelForCausalLM.from_config(native_config(tiny("mixtral", hidden_act="gelu").config))
    assert replace_experts(native.model, 0.02) == []


@pytest.mark.parametrize("kind", ["gemma2", "granite", "qwen3_moe"])
def test_a_model_has_the_dtype_in_which_it_is_built(kind: str) -> None:
    wide = ours(kind)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = ours(kind)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name} == {torch.float32}
    assert model.head_facts == wide.head_facts
    assert modules_with(model, HasExperts).keys() == modules_with(wide, HasExperts).keys()
    given = inputs(kind)
    assert torch.isfinite(model(tokens=given["tokens"], targets=given["targets"])["token_loss"]).all()


def test_initialisation_is_the_rule_of_the_model() -> None:
    model = initialised(SPEC, tiny("gemma3_text"))
    assert not model.get_parameter("model.norm.weight").any()
    spread = model.get_parameter("model.layers.0.mlp.up_proj.weight").std().item()
    assert spread == pytest.approx(0.02, rel=0.1)
