"""Encoding of prompts by chat templates, checks of a loaded model, and tokenizers of runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError, DataError, PluginError
from d9d_inference.generation import language_model as module
from d9d_inference.generation import library, tokenizer_files
from d9d_inference.generation.language_model import LanguageModel, row_of
from d9d_inference.generation.prompts import Prompt
from d9d_inference.generation.tokenizer_files import tokenizer_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{{ tools | length if tools else '' }}{{ documents is none }}{{ '>' if add_generation_prompt }}"
)


class Tokenizer:
    """A token id for each character, after a begin unless special tokens are in the text."""

    name_or_path = "tok"
    special_tokens_map = {"bos_token": "^"}

    def __init__(self, template: str | Mapping[str, str] | None) -> None:
        self.chat_template = template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        if text == "broken":
            raise RuntimeError("no such word")
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}


def encoded(
    prompt: Prompt, template: Any = TEMPLATE, tools: Any = None, system: str | None = None, raw: bool = False
) -> str:
    model = LanguageModel.__new__(LanguageModel)
    model.tokenizer = Tokenizer(template)
    return "".join("<s>" if one == 1 else chr(one) for one in model.encode(prompt, tools, system, raw))


def text(words: str, **given: Any) -> Prompt:
    return Prompt("f:1", {}, words, **given)


def said(*roles: str, **given: Any) -> Prompt:
    return Prompt("f:2", {}, messages=[{"role": role, "content": role.upper()} for role in roles], **given)


def test_a_text_is_a_message_of_the_user_unless_it_is_to_be_continued() -> None:
    assert encoded(text("hi")) == "^[user]hiTrue>"
    assert encoded(text("hi"), raw=True) == "<s>hi"
    assert encoded(text("hi"), template=None) == "<s>hi"
    assert encoded(said("user", "assistant", "user")) == "^[user]USER[assistant]ASSISTANT[user]USERTrue>"
    assert encoded(said("user"), raw=True) == "^[user]USERTrue>"


def test_a_system_message_is_added_where_a_prompt_has_none() -> None:
    assert encoded(text("hi"), system="be brief") == "^[system]be brief[user]hiTrue>"
    assert encoded(said("system", "user"), system="be brief") == "^[system]SYSTEM[user]USERTrue>"
    messages = said("user")
    encoded(messages, system="be brief")
    assert len(messages.messages) == 1


def test_tools_of_the_prompt_replace_those_of_the_command() -> None:
    assert encoded(text("hi"), tools=[{}, {}]) == "^[user]hi2True>"
    assert encoded(text("hi", tools=[{}]), tools=[{}, {}]) == "^[user]hi1True>"
    assert encoded(text("hi", tools=[]), tools=[{}, {}]) == "^[user]hiTrue>"
    both = {"default": "plain", "tool_use": "with tools"}
    assert encoded(text("hi"), both, tools=[{}]) == "with tools"
    assert encoded(text("hi"), both) == "plain"
    assert encoded(text("hi"), {"default": "plain"}, tools=[{}]) == "plain"


@pytest.mark.parametrize(
    ("prompt", "given", "error", "problem"),
    [
        (text("hi"), {"raw": True, "system": "x"}, DataError, "f:1: .* need a chat template, but --raw disables it"),
        (text("hi"), {"template": None, "tools": [{}]}, DataError, "f:1: .* need a chat template, but tok has none"),
        (said("user"), {"template": None}, DataError, "f:2: tok has no chat template, so it cannot answer messages"),
        (text("hi"), {"template": {"rag": "x", "tool_use": "y"}}, DataError, "tok has no .* 'default' .it has rag, to"),
        (text("hi"), {"template": "{{ raise_exception('no') }}"}, DataError, "f:1: the chat template of tok .*: no"),
        (text("hi"), {"template": "{% if %}"}, CheckpointError, "tok is malformed: "),
        (
            text("hi"),
            {"template": "{{ '' }}"},
            DataError,
            "f:1: the tokenizer makes no token of the prompt; give another prompt",
        ),
        (text("broken"), {"raw": True}, CheckpointError, "tok cannot be loaded by transformers: RuntimeError: no such"),
    ],
)
def test_a_prompt_that_cannot_be_encoded_says_why(
    prompt: Prompt, given: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        encoded(prompt, **given)


def test_a_row_has_the_fields_of_its_prompt_and_how_it_ended() -> None:
    model: Any = SimpleNamespace(ends=lambda ids: ids[-1] == 2, text=lambda ids: f"{len(ids)} words")
    prompt = Prompt("f:1", {"id": 7, "prompt": "x"}, "x")
    assert row_of(prompt, [5, 2], model) == {
        "id": 7, "prompt": "x", "completion": "2 words", "tokens": 2, "finish": "stop",
    }  # fmt: skip
    assert row_of(prompt, [5], model)["finish"] == "length"


class Layer(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def checked(tied: bool, stored: list[float] | None, monkeypatch: pytest.MonkeyPatch, **report: Any) -> None:
    table = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    head = Layer(table if tied else torch.nn.Parameter(torch.zeros(2)))
    model = SimpleNamespace(get_output_embeddings=lambda: head, get_input_embeddings=lambda: Layer(table))

    class Files:
        specs = {} if stored is None else {"lm_head.weight": SimpleNamespace(shape=(2,))}

        def __enter__(self) -> Files:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self, name: str, at: list[int], into: torch.Tensor) -> None:
            assert (name, at) == ("lm_head.weight", [0])
            into.copy_(torch.tensor(stored))

    monkeypatch.setattr(module, "ModelDirectory", SimpleNamespace(open=lambda _directory: Files()))
    module._check_complete(Path("dir"), model, {"missing_keys": [], "mismatched_keys": [], **report})


def test_a_model_whose_files_lack_weights_or_hold_another_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(True, None, monkeypatch)
    checked(True, [1.0, 2.0], monkeypatch)
    checked(False, [9.0, 9.0], monkeypatch)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' in the files differs from the embedding"):
        checked(True, [1.0, 3.0], monkeypatch)
    with pytest.raises(CheckpointError, match=r"dir: the files lack .*a.*b.*, which config.json describes"):
        checked(True, None, monkeypatch, missing_keys=["b"], mismatched_keys=["a"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, CheckpointError, PluginError])
def test_interrupts_and_errors_of_d9d_pass_through_a_library(error: type[BaseException]) -> None:
    with pytest.raises(error, match="^x$"), module._loading(Path("dir")):
        raise error("x")


def test_an_error_of_a_library_is_one_line_of_at_most_500_characters() -> None:
    with pytest.raises(CheckpointError) as caught, module._loading(Path("dir")):
        raise BuildError("a\n  b" + "c" * 600)
    assert str(caught.value) == "dir cannot be loaded by transformers: BuildError: a b" + "c" * 497


def test_a_library_that_is_missing_is_named_with_its_user() -> None:
    with pytest.raises(PluginError, match="^d9d generate needs no_such_library; install it with: pip install no_such"):
        library.load_library("no_such_library", "d9d generate")


def test_a_library_whose_own_needs_are_missing_is_no_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_need")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_need"):
        library.load_library("half_installed", "d9d generate")


def test_the_log_of_a_library_controls_no_terminal() -> None:
    log, handler = logging.getLogger("json"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("<%(message)s>"))
    log.addHandler(handler)
    try:
        for _ in range(2):
            assert library.load_library("json", "x") is json
        record = logging.LogRecord("json", logging.INFO, "f", 1, "a\x1b[2J", None, None)
        assert handler.format(record) == r"<a\x1b[2J>"
        formatter: Any = handler.formatter
        assert not isinstance(formatter._inner, library._VisibleFormatter)
    finally:
        log.removeHandler(handler)


def test_the_tokenizer_of_the_data_comes_before_that_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Library:
        class Tokenizer:
            @staticmethod
            def from_str(content: str) -> str:
                seen.append(json.loads(content))
                return "tokenizer"

    def load(name: str, user: str) -> type[Library]:
        seen.append((name, user))
        return Library

    monkeypatch.setattr(tokenizer_files, "load_library", load)
    monkeypatch.setattr(tokenizer_files, "_directories", lambda _job: [tmp_path / "none", tmp_path])
    monkeypatch.setattr(tokenizer_files, "check_tokenizer", lambda value: seen.append(("checked", value)))

    def found(data: str | None) -> Any:
        seen.clear()

        def save_assets(directory: Path) -> None:
            if data is not None:
                (directory / "tokenizer.json").write_text(data)

        return tokenizer_of(cast("Any", None), cast("Any", SimpleNamespace(save_assets=save_assets)), "samples")

    assert found(None) is None
    (tmp_path / "tokenizer.json").write_text('{"of": "weights"}')
    assert found(None) == "tokenizer"
    assert seen == [("checked", {"of": "weights"}), ("tokenizers", "samples"), {"of": "weights"}]
    assert found('{"of": "data"}') == "tokenizer"
    assert seen[0] == ("checked", {"of": "data"})
    with pytest.raises(DataError, match=r"^samples: .*tokenizer.json is not a valid tokenizer: "):
        found("{")


class Loaded(SimpleNamespace):
    """Stand-in of a loaded model."""

    def to(self, device: object) -> Loaded:
        self.device = device
        return self

    def eval(self) -> Loaded:
        self.evaluates = True
        return self


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of stand-ins of transformers and peft."""
    calls: list[Any] = []

    def called(name: str, result: Any) -> Any:
        def from_pretrained(*given: Any, **options: Any) -> Any:
            calls.append((name, *given, options))
            return result

        return SimpleNamespace(from_pretrained=from_pretrained)

    def loaded() -> Loaded:
        return Loaded(generation_config=SimpleNamespace(eos_token_id=2))

    config = SimpleNamespace(architectures=["XForCausalLM"], max_position_embeddings=64)
    transformers = SimpleNamespace(
        AutoTokenizer=called("tokenizer", SimpleNamespace(chat_template="t")),
        AutoConfig=called("config", config),
        AutoModelForCausalLM=called("model", (loaded(), {"missing_keys": []})),
        GenerationConfig=called("generation", SimpleNamespace(eos_token_id=[7, 8])),
    )
    kinds = {
        name: lambda name=name, **given: SimpleNamespace(kind=name, given=given) for name in ("LoraConfig", "IA3Config")
    }
    peft = SimpleNamespace(PeftModel=called("adapter", loaded()), **kinds)
    found = {"transformers": transformers, "peft": peft}
    monkeypatch.setattr(module, "load_library", lambda name, user: calls.append((name, user)) or found[name])
    monkeypatch.setattr(module, "read_config_json", lambda directory: calls.append(directory) or {})
    monkeypatch.setattr(module, "_check_complete", lambda *given: calls.append(given[2]))
    return calls


OWN = {"local_files_only": True, "trust_remote_code": False}


def test_a_model_and_its_tokenizer_are_loaded_without_code_and_pickles(libraries: list[Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer; name a directory with .*: --tokenizer DIR"):
        LanguageModel(tmp_path, tmp_path, None, torch.device("cpu"), None)
    libraries.clear()
    (words := tmp_path / "words").mkdir()
    (words / "vocab.txt").write_text("a")
    model = LanguageModel(tmp_path, words, None, torch.device("cpu"), torch.bfloat16)
    weights = {"use_safetensors": True, "dtype": torch.bfloat16, "output_loading_info": True, **OWN}
    assert libraries == [
        ("transformers", "d9d generate"), ("tokenizer", words, OWN), str(tmp_path), ("config", tmp_path, OWN),
        ("model", tmp_path, weights), {"missing_keys": []},
    ]  # fmt: skip
    assert (model.device, model.positions, model.has_template) == (torch.device("cpu"), 64, True)
    assert (model._model.device, model._model.evaluates) == (torch.device("cpu"), True)
    LanguageModel(tmp_path, words, None, torch.device("cpu"), None)
    assert libraries[-2][-1]["dtype"] == "auto"


def test_an_adapter_is_applied_and_may_end_texts_with_tokens_of_its_own(libraries: list[Any], tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    adapter = tmp_path / "adapter"
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"], "peft_version": "1"}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))

    def loaded() -> LanguageModel:
        return LanguageModel(tmp_path / "model", tmp_path / "model", adapter, torch.device("cpu"), None)

    with pytest.raises(CheckpointError, match=r"adapter has no adapter_model\.safetensors; other formats, such as"):
        loaded()
    (adapter / "adapter_model.safetensors").write_text("")
    model = loaded()
    assert libraries[1] == ("peft", "d9d generate of an adapter")
    name, base, place, options = libraries[-1]
    assert (name, hasattr(base, "evaluates"), place) == ("adapter", False, adapter)
    assert (options["local_files_only"], options["config"].kind, options["config"].inference_mode) == (
        True, "LoraConfig", True,
    )  # fmt: skip
    assert {"r": 4, "lora_alpha": 8, "target_modules": ["q"]}.items() <= options["config"].given.items()
    assert not {"peft_type", "peft_version"} & options["config"].given.keys()
    assert model._model.generation_config.eos_token_id == 2
    (adapter / "generation_config.json").write_text("{}")
    assert loaded()._model.generation_config.eos_token_id == [7, 8]
    assert libraries[-1] == ("generation", adapter, {"local_files_only": True})
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "target_modules": ["q"]}))
    loaded()
    assert libraries[-2][-1]["config"].kind == "IA3Config"
