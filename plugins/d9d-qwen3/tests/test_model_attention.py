"""Windows, biases and stretched positions: the numbers of transformers' Qwen3, and packed documents as if alone."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_core.model import Stage
from d9d_nn.ops.attention import sdpa
from d9d_nn.rope.scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling, scaling_to_hugging_face
from d9d_qwen3.config import Qwen3Config, tiny
from d9d_qwen3.model import Qwen3
from d9d_testing.suites.support.models import microbatch
from d9d_testing.tolerances import Tolerance, assert_close_gradients
from pydantic import ValidationError
from torch import Tensor

YARN = YarnScaling(factor=4, original_max_positions=8)
VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 5},
    "window_in_later_layers": {"sliding_window": 5, "sliding_from_layer": 1},
    "window_of_one": {"sliding_window": 1},
    "bias": {"attention_bias": True},
    "linear": {"rope_scaling": LinearScaling(factor=3)},
    "dynamic": {"rope_scaling": DynamicScaling(factor=2, original_max_positions=8)},
    "yarn": {"rope_scaling": YARN},
    "llama3": {
        "rope_scaling": Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=32)
    },
    "all": {"sliding_window": 5, "sliding_from_layer": 2, "attention_bias": True, "rope_scaling": YARN},
}
#: theirs -> ours, where a layer's parts are called otherwise.
NAMES = {
    "model.": "",
    "embed_tokens": "embedding",
    "lm_head": "heads.causal_lm",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "mlp": "ffn",
}


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    def rename(name: str) -> str:
        return reduce(lambda text, pair: text.replace(*pair), NAMES.items(), name)

    return {rename(name): tensor for name, tensor in state.items()}


def variant(**changes: Any) -> Qwen3Config:
    """Small, with a theta at which every scaling changes every pair but the first within a few positions."""
    values = tiny().model_dump(exclude={"heads"}) | {"rope_theta": 100.0, "num_layers": 3} | changes
    return Qwen3Config.model_validate(values)


def transformers_model(config: Qwen3Config, transformers: Any) -> Any:
    scaling = config.rope_scaling
    dynamic = isinstance(scaling, DynamicScaling)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=scaling.original_max_positions if dynamic else config.max_positions,
            rope_parameters={"rope_theta": config.rope_theta, **scaling_to_hugging_face(scaling)},
            attention_bias=config.attention_bias,
            use_sliding_window=config.sliding_window is not None,
            sliding_window=config.sliding_window,
            max_window_layers=config.sliding_from_layer,
            attn_implementation="eager",
        )
    )


def assert_same_as_transformers(config: Qwen3Config, transformers: Any) -> None:
    torch.manual_seed(0)
    theirs, ours = transformers_model(config, transformers), Qwen3(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    ours.load_state_dict(renamed(dict(theirs.named_parameters())))
    tokens = torch.randint(config.vocab_size, (3, 17))
    targets = tokens.roll(-1, dims=1)
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens=tokens)["logits"], expected, rtol=1e-5, atol=1e-5)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours(tokens=tokens, targets=targets)["token_loss"].sum().backward()
    assert_close_gradients(
        {name: p.grad for name, p in ours.named_parameters() if _learns(config, name)},
        {
            name: g
            for name, g in renamed({n: p.grad for n, p in theirs.named_parameters()}).items()
            if _learns(config, name)
        },
        within=Tolerance(rtol=0, atol=0, angle=1e-8, norm=1e-4),
    )


def _learns(config: Qwen3Config, name: str) -> bool:
    """Whether more than rounding is left of the gradient: one score has a softmax of one."""
    return config.sliding_window != 1 or not any(part in name for part in ("q_", "k_"))


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.thorough
@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_computes_the_same(name: str, transformers: Any) -> None:
    config = variant(**VARIANTS[name])
    assert_same_as_transformers(config, transformers)
    tokens = torch.randint(config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    with torch.no_grad():
        changed, plain = (Qwen3(c) for c in (config, variant()))
        plain.load_state_dict(changed.state_dict(), strict=False)
        for model in (changed, plain):
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
                    parameter.mul_(20)
                if parameter_name.endswith("bias"):
                    parameter.fill_(1)
        difference = changed(tokens=tokens)["logits"] - plain(tokens=tokens)["logits"]
    assert difference.abs().max() > 1e-3, "the variant computes the same as the plain model"


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"dynamic"}))  # it depends on the length of the sample
def test_packed_documents_have_the_losses_they_have_alone(name: str, backend: str) -> None:
    torch.manual_seed(0)
    config, model = variant(**VARIANTS[name]), Qwen3(variant(**VARIANTS[name]))
    if backend == "sdpa":
        for layer in model.layers.values():
            slot = layer.attention.core.attention
            slot.bind("sdpa", sdpa.build(OpSignature("attention", "cpu", "float32", slot.static)))
    batch = microbatch(config)
    with torch.no_grad():
        packed = model(**batch)["token_loss"]
        for sample in range(len(packed)):
            for document in batch["documents"][sample].unique():
                inside = batch["documents"][sample] == document
                alone = {key: batch[key][sample, inside].unsqueeze(0) for key in ("tokens", "targets")}
                torch.testing.assert_close(
                    model(**alone)["token_loss"][0], packed[sample, inside], rtol=1e-6, atol=1e-6
                )


def windows(model: Qwen3) -> list[int | None]:
    return [layer.attention.core.attention.static["window"] for layer in model.layers.values()]


def test_every_layer_slides_by_default_and_none_without_a_window() -> None:
    assert windows(Qwen3(variant(sliding_window=5))) == [5, 5, 5]
    assert windows(Qwen3(variant())) == [None, None, None]


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"sliding_window": 0}, "sliding_window", "greater than 0"),
        ({"sliding_from_layer": 1}, "sliding_from_layer", "1 has no effect without sliding_window"),
        ({"sliding_window": 4, "sliding_from_layer": 3}, "sliding_from_layer", "3 is not below num_layers = 3"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_scaling", "'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling", "missing"),
        ({"rope_scaling": {"type": "linear", "factr": 2, "factor": 2}}, "rope_scaling", "did you mean 'factor'?"),
    ],
)
def test_impossible_settings_are_refused_where_they_are_wrong(changes: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ValidationError) as error:
        variant(**changes)
    assert any(line["loc"][0] == field and text in line["msg"] for line in error.value.errors())


def test_layers_slide_from_the_one_named_in_every_stage() -> None:
    config = variant(sliding_window=5, sliding_from_layer=1)
    assert windows(Qwen3(config)) == [None, 5, 5]
    assert [windows(Qwen3(config, Stage(index, 2))) for index in range(2)] == [[None, 5], [5]]


def test_a_forward_makes_each_mask_once() -> None:
    made: list[int | None] = []

    class Counts(sdpa.Sdpa):
        def prepare(self, documents: Tensor | None, length: int, device: torch.device) -> Tensor | None:
            made.append(self._window)
            return super().prepare(documents, length, device)

    model = Qwen3(variant(sliding_window=5, sliding_from_layer=2))
    for layer in model.layers.values():
        slot = layer.attention.core.attention
        slot.bind("counts", Counts(slot.static["window"], grouped_with_mask=True))
    model(**microbatch(model.config))["token_loss"].sum().backward()
    assert made == [None, 5]
