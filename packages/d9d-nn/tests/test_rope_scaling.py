"""Frequencies as transformers computes them, and the settings that config.json may hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from d9d_nn.rope.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RopeScaling,
    YarnScaling,
    scaling_from_hugging_face,
    scaling_to_hugging_face,
)
from d9d_nn.rope.scaling_frequencies import rotary_frequencies
from d9d_testing.suites.fresh import import_fresh
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

CPU = torch.device("cpu")
ADAPTER = TypeAdapter(RopeScaling)
ORIGINAL = {"original_max_positions": 4096}
YARN = {"factor": 4.0, **ORIGINAL}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}

SCALINGS = {
    "default": None,
    "linear": LinearScaling(factor=4),
    "linear_uneven": LinearScaling(factor=1.7),
    "dynamic": DynamicScaling(factor=2, **ORIGINAL),
    "dynamic_uneven": DynamicScaling(factor=3.3, **ORIGINAL),
    "yarn": YarnScaling(**YARN),
    "yarn_of_qwen3": YarnScaling(factor=4, original_max_positions=32768),
    "yarn_betas": YarnScaling(**YARN, beta_fast=16, beta_slow=2),
    "yarn_one_bound": YarnScaling(**YARN, beta_fast=1.0001, beta_slow=1),
    "yarn_exact_bounds": YarnScaling(**YARN, truncate=False),
    "yarn_attention_factor": YarnScaling(**YARN, attention_factor=1.3),
    "yarn_mscale": YarnScaling(**YARN, mscale=0.7, mscale_all_dim=1.2),
    "yarn_of_factor_one": YarnScaling(factor=1, **ORIGINAL),
    "llama3": Llama3Scaling(**LLAMA3),
    "llama3_narrow": Llama3Scaling(factor=32, low_freq_factor=1, high_freq_factor=1.5, original_max_positions=64),
}


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.thorough
@pytest.mark.parametrize("length", [10, 4096, 4097, 20_000])
@pytest.mark.parametrize("head_dim", [6, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(
    name: str, theta: float, head_dim: int, length: int, transformers: Any
) -> None:
    scaling = SCALINGS[name]
    parameters = {**scaling_to_hugging_face(scaling), "rope_theta": theta}
    longest = scaling.original_max_positions if isinstance(scaling, DynamicScaling) else 131072
    config = transformers.Qwen3Config(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=longest)
    if scaling is None:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        expected, factor = Qwen3RotaryEmbedding.compute_default_rope_parameters(config)
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        expected, factor = ROPE_INIT_FUNCTIONS[scaling.type](config, CPU, seq_len=length)
    found, found_factor = rotary_frequencies(head_dim, theta, scaling, length, CPU)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_rotations_are_those_of_transformers(name: str, transformers: Any) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    scaling = SCALINGS[name]
    config = transformers.Qwen3Config(
        head_dim=16,
        rope_parameters={**scaling_to_hugging_face(scaling), "rope_theta": 10_000.0},
        max_position_embeddings=4096,
    )
    positions = torch.arange(5000).unsqueeze(0)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
    rotation = RotaryEmbedding(16, theta=10_000.0, scaling=scaling)(positions)
    torch.testing.assert_close(rotation.cos, cos[..., :8], rtol=0, atol=2e-3)  # float32 of an angle of 5000: 2 ** -11
    torch.testing.assert_close(rotation.sin, sin[..., :8], rtol=0, atol=2e-3)
    torch.testing.assert_close(rotation.cos[:, :100], cos[:, :100, :8], rtol=0, atol=2e-5)


def test_linear_scaling_puts_positions_closer() -> None:
    scaled = RotaryEmbedding(8, theta=100.0, scaling=LinearScaling(factor=4))(torch.tensor([[8]]))
    plain = RotaryEmbedding(8, theta=100.0)(torch.tensor([[2]]))
    torch.testing.assert_close(scaled.cos, plain.cos)


def test_dynamic_scaling_changes_nothing_up_to_the_original_length() -> None:
    scaling = DynamicScaling(factor=2, original_max_positions=8)
    plain, _ = rotary_frequencies(8, 100.0, None, 8, CPU)
    assert torch.equal(rotary_frequencies(8, 100.0, scaling, 8, CPU)[0], plain)
    longer = rotary_frequencies(8, 100.0, scaling, 9, CPU)[0]
    assert longer[0] == plain[0]
    assert (longer[1:] < plain[1:]).all()


def test_dynamic_scaling_depends_on_the_length_of_the_sample_not_on_positions() -> None:
    rotary = RotaryEmbedding(8, theta=100.0, scaling=DynamicScaling(factor=2, original_max_positions=8))
    packed = torch.arange(6).repeat(2).unsqueeze(0)  # two documents of six tokens in a sample of twelve
    assert not torch.equal(rotary(packed).cos[:, :6], rotary(packed[:, :6]).cos)
    assert torch.equal(rotary(packed).cos[:, :6], rotary(torch.arange(12).unsqueeze(0)).cos[:, :6])


def test_dynamic_scaling_of_padded_samples_is_that_of_each_alone() -> None:
    rotary = RotaryEmbedding(8, theta=100.0, scaling=DynamicScaling(factor=2, original_max_positions=8))
    lengths = [20, 13, 8, 3]
    padded = rotary(torch.arange(20).unsqueeze(0), torch.tensor(lengths))
    for sample, length in enumerate(lengths):
        alone = rotary(torch.arange(length).unsqueeze(0))
        torch.testing.assert_close(padded.cos[sample, :length], alone.cos[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(padded.sin[sample, :length], alone.sin[0], rtol=0, atol=1e-6)


def test_other_scalings_do_not_read_lengths() -> None:
    rotary, positions = RotaryEmbedding(8, theta=100.0, scaling=LinearScaling(factor=4)), torch.arange(9).unsqueeze(0)
    assert torch.equal(rotary(positions, torch.tensor([4, 9])).cos, rotary(positions).cos)


@pytest.mark.parametrize("scaling", [DynamicScaling(factor=2, original_max_positions=8), NtkScaling(factor=2)])
def test_ntk_scaling_of_one_pair_is_refused(scaling: DynamicScaling | NtkScaling) -> None:
    with pytest.raises(BuildError, match=f"{scaling.type} scaling needs more than one pair.*head_dim is 2"):
        RotaryEmbedding(2, theta=100.0, scaling=scaling)


@pytest.mark.parametrize("head_dim", [6, 64, 128])
def test_static_ntk_is_dynamic_ntk_at_one_length(head_dim: int, transformers: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}
    config = transformers.Qwen3Config(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=4096)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=8192)  # twice the original: 3 * 2 - (3 - 1) = 4
    found, factor = rotary_frequencies(head_dim, 1e4, NtkScaling(factor=4), 1, CPU)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == 1.0
    plain, _ = rotary_frequencies(head_dim, 1e4, None, 1, CPU)
    torch.testing.assert_close(plain[-1] / found[-1], torch.tensor(4.0))


def test_a_config_json_states_static_ntk_as_a_larger_base() -> None:
    assert scaling_to_hugging_face(NtkScaling(factor=4)) == {"rope_type": "default"}
    assert scaling_from_hugging_face({"rope_type": "ntk", "factor": 4.0}, 4096) == NtkScaling(factor=4)


def test_yarn_scales_scores_by_the_square_of_its_attention_factor() -> None:
    rotation = RotaryEmbedding(8, theta=100.0, scaling=YarnScaling(**YARN))(torch.arange(9).unsqueeze(0))
    lengths = (rotation.cos.square() + rotation.sin.square()).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 0.1 * math.log(4) + 1))


@pytest.mark.parametrize("name", SCALINGS)
def test_rotations_are_computed_without_reading_a_value(name: str) -> None:
    rotary = RotaryEmbedding(16, theta=10_000.0, scaling=SCALINGS[name])
    assert rotary(torch.zeros(2, 5000, dtype=torch.long, device="meta")).cos.shape == (2, 5000, 8)
    assert not list(rotary.buffers())


@settings(max_examples=50)
@given(
    factor=st.floats(1, 64),
    fast=st.floats(4, 64),
    slow=st.floats(0.5, 3.5),
    pairs=st.integers(2, 64),
    truncate=st.booleans(),
)
def test_yarn_lies_between_plain_and_interpolated(
    factor: float, fast: float, slow: float, pairs: int, truncate: bool
) -> None:
    scaling = YarnScaling(factor=factor, beta_fast=fast, beta_slow=slow, truncate=truncate, **ORIGINAL)
    plain, _ = rotary_frequencies(2 * pairs, 10_000.0, None, 1, CPU)
    found, _ = rotary_frequencies(2 * pairs, 10_000.0, scaling, 1, CPU)
    assert (found <= plain * (1 + 1e-6)).all()
    assert (found >= plain / factor * (1 - 1e-6)).all()


@pytest.mark.parametrize("name", SCALINGS)
def test_config_json_holds_every_setting(name: str) -> None:
    scaling = SCALINGS[name]
    longest = scaling.original_max_positions if isinstance(scaling, DynamicScaling) else 131072
    stated = scaling_to_hugging_face(scaling)
    assert scaling_from_hugging_face({**stated, "rope_theta": 1e6}, longest) == scaling
    stated["type"] = stated.pop("rope_type")  # as transformers before 4.43 wrote it
    assert scaling_from_hugging_face(stated, longest) == scaling


@pytest.mark.parametrize("name", SCALINGS)
def test_jobs_hold_every_setting(name: str) -> None:
    scaling = SCALINGS[name]
    if scaling is not None:
        assert ADAPTER.validate_python(scaling.model_dump()) == scaling


@pytest.mark.parametrize("stated", [{}, {"rope_type": None}, {"type": "default"}, {"partial_rotary_factor": 1.0}])
def test_no_scaling_is_stated_in_several_ways(stated: dict[str, Any]) -> None:
    assert scaling_from_hugging_face(stated, 4096) is None


def test_what_config_json_leaves_out_is_what_transformers_takes() -> None:
    stated = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "mscale": 0.7}
    assert scaling_from_hugging_face(stated, 4096) == YarnScaling(factor=4, original_max_positions=1024)
    assert scaling_from_hugging_face({"rope_type": "yarn", "factor": 2.0, "beta_fast": None}, 4096) == YarnScaling(
        factor=2, **ORIGINAL
    )


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type 'longrope' .*'linear', 'ntk', 'dynamic', 'yarn'"),
        ({"rope_type": "mrope"}, "rope_type 'mrope' "),
        ({"rope_type": "linear"}, "factor: missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor: .*greater than or equal to 1"),
        ({"rope_type": "linear", "factor": 2, "long_factor": [1.0]}, "long_factor: not a field"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 1}, "beta_slow: .*1 is not smaller than beta_fast = 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; d9d rotates whole heads of this model only"),
    ],
)
def test_config_json_of_another_method_is_refused(stated: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)config.json: rope_parameters.*{text}"):
        scaling_from_hugging_face(stated, 4096)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"type": "longrope", "factor": 2},
            "longrope.* expected tags: .linear., .ntk., .dynamic., .yarn., .llama3.",
        ),
        ({"factor": 2}, "discriminator 'type'"),
        ({"type": "yarn", **YARN, "mscale": 1.0}, "only together"),
        ({"type": "yarn", **YARN, "mscale_all_dim": 1.0}, "only together"),
        (
            {"type": "yarn", **YARN, "mscale": 1, "mscale_all_dim": 1, "attention_factor": 1},
            "attention_factor excludes",
        ),
        ({"type": "llama3", **LLAMA3, "high_freq_factor": 1}, "1 is not greater than low_freq_factor = 1"),
        ({"type": "linear", "factor": 2, "original_max_positions": 4}, "original_max_positions"),
    ],
)
def test_impossible_or_idle_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ADAPTER.validate_python(settings)


@pytest.mark.thorough
def test_settings_are_checked_without_torch() -> None:
    assert "torch" not in import_fresh("d9d_nn.rope.scaling")["d9d_nn.rope.scaling"].modules
