"""Parts of published models and adapters: bounds of fields, plans of files, names, and deviations between tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_weights.graph.base import Parallel, lines, raise_if
from d9d_weights.graph.expressions import Converted, Joined, Permuted, Sliced, Source, Squeezed, Unsqueezed, Value
from d9d_weights.graph.graph import StateGraph
from d9d_weights.graph.mappers import Identity, Rename
from d9d_weights.graph.pictures import graph_mermaid, graph_text, tensor_lines
from d9d_weights.graph.simplify import converted, joined, permuted, sliced, squeezed, unsqueezed
from d9d_weights.hugging_face import convert
from d9d_weights.hugging_face.adapter import _numbered
from d9d_weights.hugging_face.adapter_bounds import bounded_fields
from d9d_weights.hugging_face.adapter_config import check_adapter_config
from d9d_weights.hugging_face.family import Family, published_head
from d9d_weights.hugging_face.fields import check_fields
from d9d_weights.hugging_face.plan import plan_files, spec_bytes
from torch import Tensor

LORA = {"peft_type": "LORA"}


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("r", [1, 1 << 14], [0, -1, (1 << 14) + 1, 1.0, True, None, "8"]),
        ("lora_alpha", [1e6, -1e6, 0, 16], [1e6 + 1, math.inf, math.nan, True, "16", None]),
        ("lora_dropout", [0, 1, 0.5], [-0.1, 1.1, math.nan, True]),
        ("task_type", [None, "x" * 4096], ["x" * 4097, 1]),
        ("inference_mode", [None, True, False], [1, "true"]),
        ("modules_to_save", [None, [], ["a.b-c_1"] * 3, ["x" * 256]], ["a", ["x" * 257], ["a b"], [1], [""]]),
        ("target_modules", [None, ["q_proj"], "all-linear", r"a.*b.*c", r"^(q|v)\.x$"],
         [r"a.*b.*c.*d", "a+", "(a)*", "a{3}", "x" * 257, ["a*"], 3]),
        ("layers_pattern", ["layers", "", None, ["h"]], ["a b", 3, ["a b"]]),
        ("layers_to_transform", [None, 0, [0, (1 << 20) - 1], []], [-1, [1 << 20], [True], ["1"], 1.5, {}]),
        ("bias", ["none", "all", "lora_only"], ["some", None]),
        ("init_lora_weights", [True, False, None, "gaussian", "orthogonal"], ["pissa", 1]),
        ("rank_pattern", [None, {}, {"a.*": 3}], [{"a": 0}, {"a b": 1}, [], 3]),
        ("alpha_pattern", [{"a": 0.5}], [{"a": math.inf}]),
        ("unheard_of", [None, False, 0, "", [], {}], [1, True, "x", [0]]),
        ("auto_mapping", [None, {"base_model_class": "X"}], []),
        ("qalora_group_size", [16, 0], [17]),
        ("megatron_core", ["megatron.core"], ["other"]),
    ],
)  # fmt: skip
def test_fields_of_an_adapter_are_bounded(field: str, allowed: Sequence[Any], refused: Sequence[Any]) -> None:
    for value in allowed:
        found = bounded_fields({**LORA, field: value}, "f")
        kept = field not in ("unheard_of", "auto_mapping", "qalora_group_size", "megatron_core")
        assert found == ({**LORA, field: value} if kept else LORA)
    for value in refused:
        with pytest.raises(CheckpointError, match=f"^f: .*{field}"):
            bounded_fields({**LORA, field: value}, "f")


def test_lists_and_values_of_an_adapter_have_a_largest_size() -> None:
    many = ["a"] * (1 << 14)
    bounded_fields({**LORA, "target_modules": many, "layers_to_transform": [1] * (1 << 14)}, "f")
    for field, value in (("target_modules", [*many, "a"]), ("layers_to_transform", [1] * ((1 << 14) + 1))):
        with pytest.raises(CheckpointError, match="which is out of bounds or of a wrong type"):
            bounded_fields({**LORA, field: value}, "f")
    with pytest.raises(CheckpointError, match="f has no field peft_type; set it to LORA or IA3"):
        bounded_fields({"r": 1}, "f")
    with pytest.raises(CheckpointError, match="peft_type"):
        bounded_fields({"peft_type": "PROMPT"}, "f")
    for length, shown in ((78, "'" + "x" * 78 + "'"), (79, "'" + "x" * 76 + "...")):
        with pytest.raises(CheckpointError) as caught:
            bounded_fields({**LORA, "new": "x" * length}, "f")
        assert f"'new' is set to {shown}, and d9d" in str(caught.value)


def tensors_of(*modules: str) -> list[str]:
    return [f"base_model.model.{module}.lora_{side}.weight" for module in modules for side in "AB"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "task_type": "X", "use_dora": False, "bias": "none"}, None),
        ({"init_lora_weights": "eva", "fan_in_fan_out": None, "rank_pattern": {}, "loftq_config": []}, None),
        (
            {"init_lora_weights": "pissa"},
            "its config has init_lora_weights='pissa', which d9d's 'lora' does not support; merge",
        ),
        ({"use_dora": True, "bias": "all"}, "its config has bias='all', use_dora=True, which"),
        ({"rank_pattern": {"a": 1}}, r"its config has rank_pattern=\{'a': 1\}"),
        ({"zero": 0}, "its config has zero=0"),
        ({"target_modules": ["q_proj", "fc"]}, None),
        ({"target_modules": ["model.layers.0.q_proj", "fc"]}, None),
        ({"target_modules": "any expression"}, None),
        (
            {"target_modules": ["q_proj"]},
            "the adapter has tensors for 'model.fc', which its config excludes .target_modules=",
        ),
        ({"target_modules": ["proj", "fc"]}, "the adapter has tensors for 'model.layers.0.q_proj'"),
        ({"exclude_modules": ["v_proj"]}, None),
        ({"exclude_modules": ["fc"]}, "the adapter has tensors for 'model.fc'"),
        ({"layers_to_transform": [0]}, "the adapter has tensors for 'model.fc'.*layers_to_transform="),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, "layers_pattern='h', but d9d finds layers by the name"),
        ({"layers_pattern": "h"}, None),
    ],
)
def test_the_config_of_an_adapter_uses_known_fields_and_fits_its_tensors(
    config: Mapping[str, Any], problem: str | None
) -> None:
    names = tensors_of("model.layers.0.q_proj", "model.fc")
    if problem is None:
        check_adapter_config(config, names, method="lora", compared=("r", "lora_alpha"))
        return
    with pytest.raises(CheckpointError, match=problem):
        check_adapter_config(config, names, method="lora", compared=("r", "lora_alpha"))


def test_layers_of_an_adapter_are_those_of_its_config() -> None:
    for layers in (0, [0, 1], [0]):
        check_adapter_config({"layers_to_transform": layers}, tensors_of("layers.0.q"), method="lora")
    for layers in (1, [1], []):
        with pytest.raises(CheckpointError, match="'layers.0.q', which its config excludes"):
            check_adapter_config({"layers_to_transform": layers}, tensors_of("layers.0.q"), method="lora")
    with pytest.raises(CheckpointError) as caught:
        check_adapter_config({"x": "y" * 400}, [], method="lora")
    assert f"its config has x='{'y' * 297}..., which" in str(caught.value)


def test_fields_of_a_model_without_an_effect_here_are_accepted_and_others_named() -> None:
    def check(**data: Any) -> None:
        check_fields(data, "qwen3", frozenset({"read"}), {"mine": (1, 2)})

    check(read=9, use_cache=True, torch_dtype="x", hidden_act="silu", attention_dropout=0.0, auto_map={}, mine=2)
    check(unheard_of=None, cross_attention_hidden_size=None)
    with pytest.raises(CheckpointError, match="config.json: mine is 3; qwen3 here supports 1 or 2 only; take a model"):
        check(mine=3)
    with pytest.raises(CheckpointError, match="is 5; qwen3 here supports null only"):
        check(cross_attention_hidden_size=5)
    with pytest.raises(CheckpointError, match="attention_dropout is 0.1; no attention is dropped here; set it to 0"):
        check(attention_dropout=0.1)
    for length, shown in ((78, "'" + "x" * 78 + "', a"), (79, "'" + "x" * 79 + "..., a")):
        with pytest.raises(CheckpointError) as caught:
            check(unheard_of="x" * length)
        assert f"unheard_of is {shown} field that is unknown to qwen3 here" in str(caught.value)


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def test_tensors_fill_files_up_to_their_size_widest_dtype_first() -> None:
    specs = {"a": spec(2), "b": spec(3, dtype=torch.int8), "c": spec(2), "d": spec(9), "e": spec(1)}
    files = plan_files(specs, 19)
    assert {file: list(of) for file, of in files.items()} == {
        "model-00001-of-00003.safetensors": ["a", "c", "b"],
        "model-00002-of-00003.safetensors": ["d"],
        "model-00003-of-00003.safetensors": ["e"],
    }
    assert [list(of) for of in plan_files(specs, 18).values()] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(plan_files(specs, 59)) == ["model.safetensors"]
    assert spec_bytes(spec(2, 3, dtype=torch.bfloat16)) == 12
    plan_files({"a": spec(1)}, 1)
    with pytest.raises(CheckpointError, match="the size of weight files is 0 bytes"):
        plan_files(specs, 0)
    with pytest.raises(CheckpointError, match="a model without tensors cannot be written"):
        plan_files({}, 9)


def head(kind: str, **more: Any) -> Any:
    return SimpleNamespace(kind=kind, **more)


@pytest.mark.parametrize(
    ("heads", "published"),
    [
        ({}, None),
        ({"a": head("embedding")}, None),
        ({"a": head("token_classification"), "b": head("classification", pooling="last"), "c": head("causal_lm")}, "c"),
        ({"a": head("token_classification"), "b": head("classification", pooling="last")}, "b"),
        ({"a": head("classification", pooling="mean"), "b": head("token_classification")}, "b"),
        ({"a": head("causal_lm", layers=2), "b": head("causal_lm"), "c": head("causal_lm")}, "b"),
    ],
)
def test_the_published_head_is_the_first_that_transformers_has(heads: Mapping[str, Any], published: str | None) -> None:
    assert published_head(heads) == published


def test_classes_of_a_family_have_its_prefix() -> None:
    family = Family("qwen3", "Qwen3", {})
    assert (family.language_model, family.backbone) == ("Qwen3ForCausalLM", "Qwen3Model")
    assert family.classifier == "Qwen3ForSequenceClassification"
    assert family.token_classifier == "Qwen3ForTokenClassification"


@pytest.mark.parametrize(
    ("names", "count", "pattern"),
    [
        (["e.0.w", "e.1.w", "e.2.w"], 3, "e.*.w"),
        (["e.1.w", "e.0.w"], 2, None),
        (["e.0.w", "e.2.w"], 2, None),
        (["e.0.w", "e.1.w"], 3, None),
        (["e.0.w", "e.1.v"], 2, None),
        (["e.0.w", "e.1"], 2, None),
        (["e.0.w"], 1, None),
    ],
)
def test_names_of_experts_are_one_pattern_if_only_their_numbers_differ(
    names: list[str], count: int, pattern: str | None
) -> None:
    assert _numbered(names, count) == pattern


class Tensors:
    """Tensors of a checkpoint; notes the windows that are read."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors, self.windows = tensors, list[tuple[int, ...]]()
        self.specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        self.windows.append(tuple(offset))
        window = tuple(slice(o, o + n) for o, n in zip(offset, into.shape, strict=True))
        into.copy_(self.tensors[name][window])


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("left", "right", "size"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0, 5.0], [1.5, 2.0, 4.0], 1.0),
        ([NAN, INF, -INF], [NAN, INF, -INF], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([INF], [1.0], INF),
        ([INF], [-INF], INF),
        ([3], [7], 4.0),
        ([2**62], [2**62 + 1], 1.0),
        ([True, False], [True, True], 1.0),
    ],
)
def test_the_deviation_of_tensors_is_their_largest_difference(left: Any, right: Any, size: float) -> None:
    read: list[int] = []
    a, b = torch.tensor(left), torch.tensor(right)
    assert convert.deviation("a", Tensors(a=a), Tensors(a=b), read.append) == size
    assert sum(read) == a.nbytes


def test_tensors_of_other_dtypes_are_compared_in_blocks_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_BLOCK", 2)
    left, right = Tensors(a=torch.tensor([1.0, 2.0, 9.0])), Tensors(a=torch.tensor([1, 4, 6]))
    assert convert.deviation("a", left, right, lambda _: None) == 3.0
    assert left.windows == right.windows == [(0,), (2,)]


A = Source("a", spec(4, 6))


def test_opposite_operations_leave_the_value() -> None:
    assert permuted(A, [0, 1]) is A
    assert permuted(permuted(A, [1, 0]), [1, 0]) is A
    cube = Source("c", spec(2, 3, 4))
    # Dimension k of the result is dimension (1, 2, 0)[k] of the permuted value.
    assert permuted(permuted(cube, [2, 0, 1]), [2, 0, 1]) == Permuted(cube, (1, 2, 0))
    assert squeezed(unsqueezed(A, 1), 1) is A
    assert squeezed(unsqueezed(A, 1), 0) == Squeezed(Unsqueezed(A, 1), 0)
    flat = squeezed(Source("s", spec(1, 4)), 0)
    assert unsqueezed(flat, 0) == Source("s", spec(1, 4))
    assert unsqueezed(flat, 1) == Unsqueezed(flat, 1)
    assert converted(A, torch.float32) is A
    assert converted(A, torch.int8) == Converted(A, torch.int8)


def test_slices_of_slices_and_of_concatenations_are_slices_of_the_parts() -> None:
    assert sliced(A, 1, 0, 6) is A
    assert sliced(sliced(A, 1, 2, 4), 1, 1, 2) == Sliced(A, 1, 3, 2)
    assert sliced(sliced(A, 1, 2, 4), 0, 1, 2) == Sliced(Sliced(A, 1, 2, 4), 0, 1, 2)
    b = Source("b", spec(4, 2))
    both = joined([A, b], 1)
    assert sliced(both, 1, 4, 3) == Joined((Sliced(A, 1, 4, 2), Sliced(b, 1, 0, 1)), 1)
    assert sliced(both, 1, 6, 2) is b
    assert sliced(both, 1, 0, 6) is A
    assert sliced(both, 1, 3, 0) == Sliced(both, 1, 3, 0)


def test_adjacent_slices_are_joined_to_one() -> None:
    assert joined([sliced(A, 0, 0, 1), sliced(A, 0, 1, 3)], 0) is A
    assert joined([sliced(A, 0, 0, 1), sliced(A, 0, 1, 2)], 0) == Sliced(A, 0, 0, 3)
    gap: list[Value] = [sliced(A, 0, 0, 1), sliced(A, 0, 2, 1)]
    assert joined(gap, 0) == Joined(tuple(gap), 0)
    across: list[Value] = [sliced(A, 1, 0, 1), sliced(A, 1, 1, 1)]
    assert joined(across, 0) == Joined(tuple(across), 0)


def test_layers_share_a_line_with_ranges_of_their_indices() -> None:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in (0, 1, 2) for expert in (0, 2)]
    specs = {**{name: spec(2) for name in names}, "norm.w": spec(2), "layers.7.odd": spec(3), "layers.8.odd": spec(4)}
    found = [(line.name, len(line.names), line.spec.shape) for line in tensor_lines(specs)]
    assert found == [
        ("layers.{0..2}.experts.{n}.w", 6, (2,)), ("norm.w", 1, (2,)), ("layers.7.odd", 1, (3,)),
        ("layers.8.odd", 1, (4,)),
    ]  # fmt: skip
    same = tensor_lines({"a.5.b.1": spec(1), "a.5.b.2": spec(1)})
    assert [line.name for line in same] == ["a.5.b.{1..2}"]
    digits = {f"a.{'1' * 10}.b.{index}": spec(1) for index in (3, 4)}
    assert [line.name for line in tensor_lines(digits)] == [f"a.{'1' * 10}.b.{{3..4}}"]
    assert [line.name for line in tensor_lines({f"a.{10**9 + i}": spec(1) for i in (0, 1)})] == ["a.{n}"]
    assert [line.name for line in tensor_lines({f"a.{10**8 + i}": spec(1) for i in (0, 1)})] == [
        "a.{100000000..100000001}"
    ]


def test_a_graph_is_text_and_a_chart() -> None:
    sources = {"old.0.w": spec(2), "old.1.w": spec(2), 'odd"': spec(3, dtype=torch.int8)}
    graph = StateGraph(Parallel(Rename("old.0.w", "new.0.w"), Rename("old.1.w", "new.1.w"), Identity()), sources)
    assert graph_text(graph) == 'new.{0..1}.w  [2] float32\n    = old.{n}.w\nodd"  [3] int8\n    = odd"'
    assert graph_mermaid(graph) == (
        "flowchart LR\n"
        '    n0["new.{0..1}.w"]\n    n1["old.{n}.w"]\n    n1 --> n0\n'
        '    n2["odd#quot;"]\n    n3["odd#quot;"]\n    n3 --> n2\n'
    )


def test_many_problems_are_listed_up_to_a_number_and_once() -> None:
    assert list(lines(["a", "b", "a"])) == ["a", "b"]
    many = list(lines([str(number) for number in range(100)]))
    shown = len(many) - 1
    assert many[-1] == f"... and {100 - shown} more"
    assert list(lines([str(number) for number in range(shown)])) == [str(number) for number in range(shown)]
    raise_if([], "it fails:")
    with pytest.raises(CheckpointError, match="^it fails:\n  a\n  b$"):
        raise_if(["a", "b"], "it fails:")
