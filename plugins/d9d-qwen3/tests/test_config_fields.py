"""Every field of a ``config.json`` is honoured, harmless or refused, as transformers treats it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_nn.rope.scaling import scaling_from_hugging_face
from d9d_qwen3 import config, moe_config
from d9d_qwen3.hugging_face.dense import Qwen3HuggingFace
from d9d_qwen3.hugging_face.moe import READ_OF_EXPERTS, Qwen3MoeHuggingFace
from d9d_weights.hugging_face.fields import HARMLESS, ONLY, READ

DENSE, MOE = Qwen3HuggingFace(), Qwen3MoeHuggingFace()
FORMATS: dict[str, tuple[Any, Any]] = {
    "Qwen3Config": (DENSE, DENSE.config_json(config.tiny(), "float32")),
    "Qwen3MoeConfig": (MOE, MOE.config_json(moe_config.tiny(), "float32")),
}
BOTH = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def read(name: str, **changes: Any) -> Any:
    form, data = FORMATS[name]
    return form.config_from_json({**data, **changes})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
PLAIN = {"rope_type": "default"}


@pytest.mark.thorough
@BOTH
@pytest.mark.parametrize("top", [None, 7e6])
@pytest.mark.parametrize(
    "scaling", [None, {}, YARN, LINEAR, YARN | {"rope_theta": 3e6}, {"type": "linear", "factor": 3.0}]
)
@pytest.mark.parametrize("parameters", [None, {}, PLAIN | {"rope_theta": 5e6}, LINEAR | {"rope_theta": 5e6}, PLAIN])
def test_positions_are_those_of_transformers(
    name: str, parameters: Any, scaling: Any, top: float | None, transformers: Any
) -> None:
    form, data = FORMATS[name]
    stated = {"rope_parameters": parameters, "rope_scaling": scaling, "rope_theta": top}
    data = {key: value for key, value in data.items() if key not in stated}
    data |= {key: value for key, value in stated.items() if value is not None}
    theirs = dict(getattr(transformers, name).from_dict(copy.deepcopy(data)).rope_parameters)  # it writes into them
    if (
        not any(source and "rope_theta" in source for source in (scaling, parameters if not scaling else None))
        and not top
    ):
        # Nothing that transformers reads states a theta, so it takes 10000; a published model means another.
        with pytest.raises(CheckpointError, match="rope_theta"):
            form.config_from_json(data)
        return
    ours = form.config_from_json(data)
    assert ours.rope_theta == theirs["rope_theta"]
    assert ours.rope_scaling == scaling_from_hugging_face(theirs, ours.max_positions)
    assert (ours.rope_scaling is None) == (theirs["rope_type"] == "default")


def test_a_scaling_that_loses_its_theta_is_refused_with_a_way_out() -> None:
    data = {key: value for key, value in FORMATS["Qwen3Config"][1].items() if key != "rope_theta"}
    with pytest.raises(CheckpointError, match=r"rope_theta = 1000000\.0, and uses 10000\. Move the fields"):
        DENSE.config_from_json(data | {"rope_scaling": YARN})


@BOTH
def test_all_that_transformers_writes_is_known(name: str, transformers: Any) -> None:
    form, data = FORMATS[name]
    theirs = getattr(transformers, name).from_dict(copy.deepcopy(data)).to_dict()
    known = READ.union(READ_OF_EXPERTS if name == "Qwen3MoeConfig" else (), ONLY, *HARMLESS.values())
    assert theirs.keys() <= known
    assert form.config_from_json(theirs | {"architectures": data["architectures"]}) == form.config_from_json(data)


#: Values that fields of transformers accept, where a field is not free text.
PLAUSIBLE: dict[str, Any] = {
    "use_cache": False, "is_decoder": True, "chunk_size_feed_forward": 3, "pad_token_id": 2, "bos_token_id": 3,
    "eos_token_id": 4, "router_aux_loss_coef": 0.5, "problem_type": "single_label_classification", "label2id": {"a": 0},
}  # fmt: skip


@pytest.mark.thorough
@BOTH
def test_harmless_fields_change_nothing_here_and_no_logit_of_transformers(name: str, transformers: Any) -> None:
    form, data = FORMATS[name]
    for field in frozenset().union(*HARMLESS.values()):
        assert read(name, **{field: PLAUSIBLE.get(field, "anything")}) == form.config_from_json(data), field
    logits = []
    kind = getattr(transformers, name.replace("Config", "ForCausalLM"))
    for changes in ({}, PLAUSIBLE):
        torch.manual_seed(0)
        model = kind(getattr(transformers, name).from_dict(copy.deepcopy({**data, **changes}))).eval()
        if not logits:
            state = model.state_dict()
        model.load_state_dict(state)
        with torch.no_grad():
            logits.append(model(torch.arange(1, 11).unsqueeze(0)).logits)
    assert torch.equal(*logits)


@BOTH
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("dual_chunk_attention_config", {"chunk_size": 262144}, ".*262144.*is unknown to .* remove"),
        ("qkv_bias", True, "qkv_bias is True, a field that"),
        ("n_shared_experts", 1, "n_shared_experts is 1, a field"),
        ("weird", "x" * 500, r"weird is 'x{79}\.\.\., a field"),
        ("mlp_bias", True, "mlp_bias is True; .* supports False only"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5; .* supports 1 only"),
        ("is_encoder_decoder", True, "is_encoder_decoder is True"),
        ("pruned_heads", {"0": [1]}, "pruned_heads is"),
        ("auto_map", {"AutoModel": "code.Model"}, "contain their own model code"),
        ("cross_attention_hidden_size", 8, "supports null only"),
        ("shared_expert_intermediate_size", 32, "supports 0 only"),
    ],
)  # fmt: skip
def test_fields_that_we_would_not_follow_are_refused(name: str, field: str, value: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: .*{text}"):
        read(name, **{field: value})
    assert read(name, **{field: None}) == read(name)


@BOTH
def test_fields_that_say_what_is_computed_anyway_are_taken(name: str) -> None:
    for field, values in ONLY.items():
        for value in values:
            assert read(name, **{field: value}) == read(name), field


def test_experts_in_a_dense_model_are_refused() -> None:
    with pytest.raises(CheckpointError, match="num_experts is 8, a field that is unknown to qwen3 here"):
        read("Qwen3Config", num_experts=8)


def test_the_readme_shows_these_fields() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text("utf-8").split("## Fields of config.json")[1]
    rows = [line.strip("| ").split(" | ") for line in text.split("\n\n")[1].splitlines()[2:]]
    shown = {(models, fate): {name.strip("` ") for name in names.split(",")} for models, fate, names in rows}
    assert shown == {
        ("both", "honoured"): READ,
        ("`qwen3_moe`", "honoured"): READ_OF_EXPERTS,
        **{("both", f"harmless: {about}"): fields for about, fields in HARMLESS.items()},
        ("both", "refused, except the one value that means what d9d computes anyway"): set(ONLY),
    }


def test_tokens_generation_and_names_of_classes_outlive_the_training() -> None:
    tiny = config.tiny().model_dump()
    names = {"id2label": {"0": "bad", "1": "good", "2": "fair"}, "label2id": {"bad": 0, "good": 1, "fair": 2}}
    source = {
        "architectures": ["Qwen3ForSequenceClassification"], "eos_token_id": [3, 5], "top_p": 0.8, "dtype": "bfloat16",
        "transformers_version": "5", "use_cache": False, "vocab_size": 1, **names,
    }  # fmt: skip
    head = {"kind": "classification", "num_classes": 3}
    classifier = config.Qwen3Config.model_validate({**tiny, "heads": {"classes": head}})
    assert DENSE.kept_fields(source, classifier) == {"eos_token_id": [3, 5], "top_p": 0.8, **names}
    fewer = config.Qwen3Config.model_validate({**tiny, "heads": {"classes": {**head, "num_classes": 2}}})
    for other in (fewer, config.tiny()):
        assert DENSE.kept_fields(source, other) == {"eos_token_id": [3, 5], "top_p": 0.8}
