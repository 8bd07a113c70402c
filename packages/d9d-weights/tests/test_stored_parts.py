"""Parts of stored checkpoints and their model cards: exact pages, the manifest's schema, names, and file errors."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_weights.checkpoint import manifest as manifest_module
from d9d_weights.checkpoint import pretrained, stored_model
from d9d_weights.checkpoint.manifest import are_losses, manifest_bytes, tensors_file, with_values
from d9d_weights.checkpoint.manifest_model import check_form, piece_key
from d9d_weights.checkpoint.names import folder, step_of, steps_in, strays_in
from d9d_weights.files.failures import as_os_error, unreadable, unwritable
from d9d_weights.graph.mappers import Identity
from d9d_weights.model_card.card import ModelCard
from d9d_weights.model_card.markdown import inline, table, yaml_block, yaml_text
from d9d_weights.model_card.stored import card_of, versions_of

JOB = {
    "run": {"name": "my run", "dir": "/data/runs"},
    "model": {"name": "llama", "pretrained": "/models/base-1b/"},
    "data": {"name": "documents", "sources": ["/data/books.jsonl"]},
    "task": {"name": "causal_lm"},
    "peft": None,
    "batch": {"size": 8, "microbatch": 2},
    "steps": 3000,
}


def test_the_card_of_a_model_is_this_page() -> None:
    card = ModelCard(
        JOB,
        {"architectures": ["LlamaForCausalLM", "Other"]},
        parameters=1_234_567,
        trained=1000,
        data={"vocab_size": 32000, "entropy": 1.23456, "packed": True, "mixture": [{"weight": 0.5}, 7]},
        step=2500,
        tokens=1_000_000,
        losses={"loss": 2.34567, "eval/loss": 2.5},
        versions={"torch": "2.11", "d9d-core": "1.0"},
    )
    assert card.text().decode() == "\n".join(
        [
            "---", "library_name: transformers", "base_model: base-1b", "tags:", "- d9d",
            "pipeline_tag: text-generation", "---", "", "# my run", "", "This model was trained with d9d.", "",
            "|  |  |", "| --- | --- |",
            "| Model | llama (LlamaForCausalLM) |", "| Base model | base-1b |", "| Parameters | 1,234,567 |",
            "| Trained parameters | 1,000 |", "| Task | causal\\_lm |", "| Fine-tuning method | none |",
            "| Steps | 2,500 |", "| Tokens or samples | 1,000,000 |", "",
            "## Data", "", "Dataset: documents.", "",
            "| fact | value |", "| --- | --- |",
            "| vocab size | 32,000 |", "| entropy | 1.235 |", "| packed | yes |", "| mixture 1: weight | 0.5 |",
            "| mixture 2: | 7 |", "",
            "## Results", "", "Last logged values.", "",
            "| series | value |", "| --- | --- |", "| eval/loss | 2.5 |", "| loss | 2.346 |", "",
            "## Job", "",
            "Fields about where and how the job ran are left out; paths are cut to their last component.", "",
            "```yaml", "model:", "  name: llama", "  pretrained: base-1b", "data:", "  name: documents", "  sources:",
            "  - books.jsonl", "task:", "  name: causal_lm", "batch:", "  size: 8", "steps: 3000", "```", "",
            "## Versions", "",
            "| package | version |", "| --- | --- |", "| d9d-core | 1.0 |", "| torch | 2.11 |", "",
            "<!-- To publish this directory on the Hugging Face Hub: d9d state push DIRECTORY OWNER/NAME -->", "",
        ]
    )  # fmt: skip


def test_the_card_of_an_adapter_without_facts_is_short() -> None:
    text = ModelCard({"peft": {"name": "lora"}}, {}, 5).text("peft").decode()
    assert text.startswith("---\nlibrary_name: peft\ntags:\n- d9d\n---\n\n# run\n\nThis adapter was trained with d9d.")
    assert "| Model |  |\n| Base model | none |\n| Parameters | 5 |\n| Task |  |\n| Fine-tuning method | lora |" in text
    assert "| Steps | 0 |\n\n## Data\n\nDataset: unknown.\n\n## Job" in text
    assert "## Results" not in text
    assert "## Versions" not in text


@pytest.mark.parametrize(
    ("architecture", "purpose"),
    [
        ("XForCausalLM", "text-generation"), ("XForSequenceClassification", "text-classification"),
        ("XForTokenClassification", "token-classification"), ("XModel", "feature-extraction"), ("XOther", None),
    ],
)  # fmt: skip
def test_the_purpose_of_a_model_follows_from_its_class(architecture: str, purpose: str | None) -> None:
    text = ModelCard({}, {"architectures": [architecture]}, 1).text().decode()
    assert (f"pipeline_tag: {purpose}\n" in text) == (purpose is not None)
    assert ("pipeline_tag" in text) == (purpose is not None)


def test_texts_of_a_page_are_escaped_and_cut() -> None:
    assert inline("a\n b\t*c*") == r"a b \*c\*"
    assert inline("x" * 300) == "x" * 300
    assert inline("x" * 301) == "x" * 299 + "…"
    assert inline("http://www.x") == "http&#58;//www&#46;x"
    assert table(["a|b"], [["`"]]) == "| a|b |\n| --- |\n| &#96; |"
    assert yaml_block(["a"]) == "```yaml\n- a\n```"
    assert yaml_block(["````"]).startswith("`````yaml\n")
    assert yaml_text(["é"]) == "- é\n"
    assert yaml_text(["a\u202eb"]) == '- "a\\u202Eb"\n'


def checkpoint(values: Any, **manifest: Any) -> Any:
    def read() -> Any:
        if isinstance(values, Exception):
            raise values
        return values

    return SimpleNamespace(location="run/step-3", manifest={"step": 3, "job": JOB, **manifest}, values=read)


def test_the_card_of_a_checkpoint_has_its_values_and_versions() -> None:
    notes: list[str] = []
    published = {"a": TensorSpec((2, 3), torch.float32), "b": TensorSpec((4,), torch.float32)}
    plugins = {"one": {"version": "1.2", "sha256": "f" * 64}, "two": {"version": "", "sha256": "0123456789abcdef"}}
    plugins["three"] = {"version": "", "sha256": ""}
    tensors = checkpoint({"tokens": 0, "losses": {"loss": 1.5}}, plugins=plugins)
    card = card_of(tensors, {"x": 1}, published, notes.append)
    assert card == ModelCard(
        JOB, {"x": 1}, 10, step=3, tokens=0, losses={"loss": 1.5}, versions={"one": "1.2", "two": "0123456789ab"}
    )
    assert notes == []
    assert card_of(checkpoint({"tokens": 1}), {}, {}, notes.append).losses == {}
    assert versions_of({}) == {}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "tokens"), ({"tokens": -1}, "tokens"), ({"tokens": True}, "tokens"),
        ({"tokens": 1, "losses": 3}, "losses"), ({"losses": {"a": 1}}, "tokens, losses"),
    ],
)  # fmt: skip
def test_damaged_values_of_a_checkpoint_are_left_out_with_a_warning(values: Any, named: str) -> None:
    notes: list[str] = []
    card = card_of(checkpoint(values), {}, {}, notes.append)
    assert (card.tokens, card.losses, card.step) == (None, {}, 3)
    warning = "warning: the model card lacks tokens and losses: run/step-3: state.json has no usable"
    assert notes == [f"{warning} {named}; copy the checkpoint again"]


def test_losses_are_finite_numbers_by_name() -> None:
    assert are_losses({})
    assert are_losses({"a": 1.0})
    for values in ({"a": 1}, {"a": float("nan")}, {"a": float("inf")}, {"a": None}, [], None):
        assert not are_losses(values)


def test_checkpoints_are_named_by_their_steps() -> None:
    assert (folder(7), folder(123456789)) == ("step-00000007", "step-123456789")
    names = {
        "step-00000007": 7, "step-123456789": 123456789, "step-0000007": None, "step-000000007": None,
        "step-7": None, "step-0000000x": None, "xstep-00000007": None, "step-00000007.damaged": None,
    }  # fmt: skip
    assert {name: step_of(name) for name in names} == names
    storage: Any = SimpleNamespace(names=lambda: ["step-00000002", "other", "step-00000010", "step-3", "step-1"])
    assert steps_in(storage) == [10, 2]
    assert strays_in(storage) == ["step-1", "step-3"]
    assert tensors_file(12) == "tensors-00012.safetensors"
    assert piece_key("a", (0, 3), True) == "a"
    assert piece_key("a", (0, 3), False) == "a@0,3"


def piece(offset: list[int], shape: list[int], name: str = "a", whole: bool = False, rank: int = 0) -> dict[str, Any]:
    key = name if whole else f"{name}@{','.join(map(str, offset))}"
    return {"file": f"tensors-{rank:05d}.safetensors", "key": key, "offset": offset, "shape": shape}


def manifest(*pieces: dict[str, Any], shape: Any = (4, 2), dtype: str = "float32", **more: Any) -> dict[str, Any]:
    facts = {"bytes": 1, "sha256": "0" * 64}
    return {
        "format": "d9d-checkpoint", "version": 2, "step": 0, "sha256": "x",
        "tensors": {"a": {"dtype": dtype, "shape": list(shape), "pieces": list(pieces)}},
        "files": {"state.json": facts, "tensors-00000.safetensors": facts}, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        manifest(piece([0, 0], [4, 2], whole=True)),
        manifest(piece([0, 0], [1, 2]), piece([1, 0], [3, 1]), piece([1, 1], [3, 1])),
        manifest(piece([], [], whole=True), shape=()),
        manifest(piece([0], [0], whole=True), shape=(0,)),
        manifest(piece([0, 0], [4, 2], whole=True), score={"series": "x", "value": 1.5}),
        manifest(piece([0, 0], [4, 2], whole=True), average={"slot": "x", "weight": 0.5}, left_out=["b"]),
    ],
)
def test_pieces_that_make_a_tensor_are_a_manifest(given: dict[str, Any]) -> None:
    check_form(given, "there")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (manifest(), "the tensor's pieces together do not have as many elements as the tensor"),
        (manifest(shape=(0,)), "the tensor's pieces together do not have as many elements as the tensor"),
        (manifest(piece([0, 0], [3, 2])), "the tensor's pieces together do not have as many elements as the tensor"),
        (manifest(piece([1, 0], [4, 2])), "the piece [4, 2] at [1, 0] exceeds the tensor"),
        (manifest(piece([0], [4])), "a piece of the tensor does not have 2 dimensions"),
        (manifest(piece([0, 0], [2, 2]), piece([1, 0], [2, 2])), "pieces of the tensor overlap"),
        (manifest(piece([0, 0], [4, 1]), piece([1, 0], [2, 2])), "pieces of the tensor overlap"),
        (
            manifest(piece([0, 0], [4, 2], whole=True), dtype="float33"),
            "the dtype 'float33', which checkpoints do not support",
        ),
        (
            manifest(piece([0, 0], [4, 2], whole=True), dtype="Tensor"),
            "the dtype 'Tensor', which checkpoints do not support",
        ),
        (manifest(piece([0, 0], [4, 2], whole=True), shape=(2**62, 2**62)), "no tensor can have the shape"),
        (manifest(piece([0, 0], [4, 2])), "tensors.a: a piece has the wrong key 'a@0,0'"),
        (manifest(piece([0, 0], [4, 2], whole=True, rank=1)), "tensors.a: tensors-00001.safetensors is not listed"),
        (manifest(piece([0, 0], [4, 2], whole=True), files={}), "files: state.json is not listed"),
        (manifest(piece([0, 0], [4, 2], whole=True), step=-1), "step: Input should be greater than or equal to 0"),
        (manifest(piece([0, 0], [4, 2], whole=True), step=2**63), "step: "),
        (manifest(piece([0, 0], [4, 2], whole=True), more=1), "more: Extra inputs are not permitted"),
        ("text", "manifest: "),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_form(given, "there")
    assert str(caught.value).startswith("there is not valid: ")
    assert problem in str(caught.value)
    assert str(caught.value).endswith("; copy the checkpoint again")


def test_at_most_three_problems_of_a_manifest_are_listed() -> None:
    for count, more in ((3, False), (4, True)):
        given = {**manifest(piece([0, 0], [4, 2], whole=True)), **{f"more{number}": 1 for number in range(count)}}
        with pytest.raises(CheckpointError) as caught:
            check_form(given, "there")
        assert str(caught.value).count("Extra inputs") == 3
        assert ("(and 1 more)" in str(caught.value)) == more


def test_a_manifest_names_its_files_with_their_sums_and_its_own() -> None:
    written: Any = {"state.json": SimpleNamespace(bytes=3, sha256="abc")}
    content = json.loads(manifest_bytes(7, {"a": 1}, written, {"score": None}))
    digest = content.pop("sha256")
    assert content == {
        "format": "d9d-checkpoint", "version": 2, "step": 7, "tensors": {"a": 1},
        "files": {"state.json": {"bytes": 3, "sha256": "abc"}}, "score": None,
    }  # fmt: skip
    assert manifest_module._digest({**content, "sha256": "other"}) == digest
    assert manifest_module._digest({**content, "step": 8}) != digest
    assert with_values(b"{}", {}) == b"{}"
    assert json.loads(with_values(b'{"a": 1, "b": 2}', {"b": 3})) == {"a": 1, "b": 3}
    with pytest.raises(CheckpointError, match="a component's state cannot be saved as JSON"):
        with_values(b"{}", {"a": "\ud800"})


def test_a_json_file_of_a_checkpoint_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "MAX_BYTES", 10)
    for content, fits in ((b'{"a": 123}', True), (b'{"a": 1234}', False)):
        storage: Any = SimpleNamespace(open=lambda _name, _file, content=content: io.BytesIO(content))
        if fits:
            assert manifest_module.read_values(storage, "x", "state.json") == {"a": 123}
            continue
        with pytest.raises(ValueError, match="."):
            manifest_module.read_values(storage, "x", "state.json")


@pytest.mark.parametrize("spec", [object(), None])
def test_a_job_whose_model_has_no_published_layout_has_no_graph(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    class Spec:
        hugging_face = None

    monkeypatch.setattr(pretrained, "ModelSpec", Spec)
    model = SimpleNamespace(spec=spec or Spec(), entry="toy")
    monkeypatch.setattr(pretrained, "select", lambda *_: SimpleNamespace(model=model))
    with pytest.raises(
        CheckpointError, match="^model toy has no Hugging Face layout, so no state graph maps its tensors$"
    ):
        pretrained.job_state_graph(cast("Any", None), cast("Any", None))


def raising(context: Callable[[object], Any], error: Exception) -> None:
    with context("there"):
        raise error


def test_errors_of_drivers_name_the_place_and_the_next_action() -> None:
    reads: list[tuple[Exception, str]] = [
        (FileNotFoundError("x"), "there does not exist: check the path, or download the model first"),
        (ImportError("no s3fs"), "there cannot be reached: no s3fs; install its fsspec driver"),
        (ValueError("odd"), "there cannot be read: ValueError: odd"),
    ]
    for error, said in reads:
        with pytest.raises(CheckpointError) as caught:
            raising(unreadable, error)
        assert str(caught.value) == said
    with pytest.raises(CheckpointError) as caught:
        raising(unwritable, ValueError("odd"))
    advice = "check the address, its driver and your permissions"
    assert str(caught.value) == f"there cannot be written: ValueError: odd; {advice}"
    for context in (unwritable, lambda _: as_os_error()):
        with pytest.raises(CheckpointError, match="^own$"):
            raising(context, CheckpointError("own"))
    with pytest.raises(PermissionError, match="^no$"):
        raising(lambda _: as_os_error(), PermissionError("no"))
    with pytest.raises(OSError, match="^ValueError: odd$"):
        raising(lambda _: as_os_error(), ValueError("odd"))


class Registry:
    """Registry of one component."""

    def __init__(self, spec: Any) -> None:
        self.entry = SimpleNamespace(spec=spec, __str__=lambda: "it")
        self.asked: list[tuple[str, str]] = []

    def find(self, kind: str, name: str) -> Any:
        self.asked.append((kind, name))
        return self.entry


@pytest.mark.parametrize(
    ("job", "left_out", "problem"),
    [
        ("none", (), "run/step-3 does not name its model, so d9d train did not save it; use a checkpoint of a run"),
        ({"peft": {"name": "x"}}, ("w",), "belongs to a fine-tuning run and lacks frozen weights"),
        ({"peft": "lora"}, (), "peft in its manifest has no name; use a checkpoint that d9d train wrote"),
        ({"peft": {"name": 3}}, (), "peft in its manifest has no name; use a checkpoint that d9d train wrote"),
    ],
)
def test_a_checkpoint_that_cannot_be_merged_says_why(job: Any, left_out: Any, problem: str) -> None:
    tensors = checkpoint({}, job=job, left_out=left_out)
    with pytest.raises(CheckpointError) as caught:
        stored_model.merger_of(tensors, cast("Any", Registry(None)))
    assert problem in str(caught.value)


def test_a_checkpoint_without_a_method_is_as_it_is() -> None:
    for job in ({}, {"peft": None}, {"peft": {}}):
        assert isinstance(stored_model.merger_of(checkpoint({}, job=job), cast("Any", Registry(None))), Identity)


@pytest.mark.parametrize("model", [None, "llama", {}, {"name": 3}])
def test_a_checkpoint_whose_manifest_names_no_model_is_refused(model: Any) -> None:
    with pytest.raises(
        CheckpointError, match="run/step-3: its manifest names no model; use a checkpoint that d9d train wrote"
    ):
        stored_model.model_of(checkpoint({}, job={"model": model}), cast("Any", Registry(None)))


def test_the_model_of_a_checkpoint_has_its_sizes_and_no_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Mapping[str, Any]] = []

    class Spec:
        key = "llama"
        hugging_face: Any = SimpleNamespace(load=lambda: lambda: "layout")

    monkeypatch.setattr(stored_model, "ModelSpec", Spec)
    config = SimpleNamespace(model_validate=lambda values: given.append(values) or "config")
    monkeypatch.setattr(stored_model, "load_config", lambda _entry: config)
    registry = Registry(Spec())
    tensors = checkpoint({}, job={"model": {"name": "my.llama", "pretrained": "x", "layers": 2}})
    assert stored_model.model_of(tensors, cast("Any", registry)) == cast("Any", ("layout", "config"))
    assert given == [{"name": "llama", "layers": 2}]
    assert registry.asked == [("model", "my.llama")]
    registry.entry.spec.hugging_face = None
    with pytest.raises(CheckpointError, match="which has no Hugging Face layout"):
        stored_model.model_of(tensors, cast("Any", registry))
