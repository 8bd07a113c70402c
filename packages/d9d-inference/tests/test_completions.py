"""Completions with transformers: settings, files of completions, chat, and sizes."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError, DataError, JobError
from d9d_inference.generation import chat as chat_module
from d9d_inference.generation import language_model as language_model_module
from d9d_inference.generation.chat import chat
from d9d_inference.generation.file_job import FileJob
from d9d_inference.generation.language_model import (
    Decoding,
    LanguageModel,
    _check_files,
    _check_sizes,
    _check_writes,
    generation_settings,
)
from d9d_inference.generation.prompts import Prompt


class Model:
    """Stand-in of a language model: completes with the length of the prompt and the seed."""

    def __init__(self, fails_at: int = 99) -> None:
        self.calls: list[tuple[Any, int]] = []
        self.fails_at = fails_at

    def complete(self, prompts: Sequence[Sequence[int]], _decoding: object, seed: int) -> list[list[int]]:
        if len(self.calls) == self.fails_at:
            raise KeyboardInterrupt
        self.calls.append((list(prompts), seed))
        return [[len(ids), seed % 1000] for ids in prompts]

    def text(self, ids: Sequence[int]) -> str:
        return f"é{ids}"

    def ends(self, ids: Sequence[int]) -> bool:
        return ids[0] == 1


def file_job(directory: Path, overwrite: bool = False, batch: int = 2, count: int = 5, **settings: Any) -> FileJob:
    prompts = [Prompt(f"p:{number}", {"prompt": "x" * number}, "x" * number) for number in range(1, count + 1)]
    return FileJob(prompts, directory / "out.jsonl", batch, overwrite, {"model": "m", **settings})


IDS = [[0] * number for number in range(1, 6)]


def complete(job: FileJob, model: Model) -> list[str]:
    said: list[str] = []
    job.check()
    job.run(cast("Any", model), IDS[: len(job.prompts)], Decoding(seed=3), said.append)
    return said


def test_an_interrupted_file_of_completions_goes_on_and_has_the_same_lines(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    model = Model()
    assert complete(file_job(whole), model) == [f"5 completions in {whole / 'out.jsonl'}"]
    assert [prompts for prompts, _ in model.calls] == [IDS[:2], IDS[2:4], IDS[4:]]
    assert len({seed for _, seed in model.calls}) == 3
    with pytest.raises(KeyboardInterrupt):
        complete(file_job(parts), Model(fails_at=1))
    with (parts / "out.jsonl.partial").open("a") as file:
        file.write("half a line")
    again = Model()
    assert complete(file_job(parts), again)[0] == "2 of 5 completions exist; continuing"
    assert again.calls == model.calls[1:]
    assert (parts / "out.jsonl").read_bytes() == (whole / "out.jsonl").read_bytes()
    assert [file.name for file in parts.iterdir()] == ["out.jsonl"]
    first = json.loads((whole / "out.jsonl").read_text("utf-8").splitlines()[0])
    assert first == {"prompt": "x", "completion": f"é[1, {model.calls[0][1] % 1000}]", "tokens": 2, "finish": "stop"}
    assert "é" in (whole / "out.jsonl").read_text("utf-8")
    assert json.loads((whole / "out.jsonl").read_text("utf-8").splitlines()[1])["finish"] == "length"


def test_finished_batches_are_in_the_file_before_the_next_begins(tmp_path: Path) -> None:
    lines: list[int] = []

    class Looks(Model):
        def complete(self, *given: Any) -> list[list[int]]:
            lines.append((tmp_path / "out.jsonl.partial").read_bytes().count(b"\n"))
            return super().complete(*given)

    complete(file_job(tmp_path), Looks())
    assert lines == [0, 2, 4]


def test_the_rest_of_another_command_is_neither_continued_nor_overwritten_unasked(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        complete(file_job(tmp_path), Model(fails_at=1))
    with pytest.raises(DataError, match="was started with other batch, model: repeat that command"):
        file_job(tmp_path, batch=3, model="other").check()
    with pytest.raises(DataError, match="was started with other prompts: "):
        file_job(tmp_path, count=4).check()
    (tmp_path / "out.jsonl.partial.json").write_text("{")
    with pytest.raises(DataError, match="cannot be continued"):
        file_job(tmp_path).check()
    complete(file_job(tmp_path, overwrite=True, batch=3), Model())
    with pytest.raises(DataError, match=r"out.jsonl exists; name another file"):
        file_job(tmp_path).check()
    complete(file_job(tmp_path, overwrite=True), Model())


def test_lines_without_a_description_are_not_continued(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.partial").write_text("{}\n" * 4)
    model = Model()
    assert complete(file_job(tmp_path), model) == [f"5 completions in {tmp_path / 'out.jsonl'}"]
    assert [prompts for prompts, _ in model.calls] == [IDS[:2], IDS[2:4], IDS[4:]]


def test_an_output_needs_a_directory(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").mkdir()
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match="cannot be a file there"):
            file_job(directory, overwrite=True).check()


def test_settings_of_decoding_say_whether_to_sample() -> None:
    assert Decoding().arguments() == {"max_new_tokens": 256}
    assert Decoding(3, temperature=0).arguments() == {"max_new_tokens": 3, "do_sample": False}
    assert Decoding(3, temperature=0.5, further={"a": 1}).arguments() == {
        "a": 1, "max_new_tokens": 3, "do_sample": True, "temperature": 0.5,
    }  # fmt: skip
    assert Decoding(3, top_p=0.5).arguments() == {"max_new_tokens": 3, "do_sample": True, "top_p": 0.5}
    with pytest.raises(JobError, match="no effect at temperature 0"):
        Decoding(temperature=0, top_p=0.5)


def test_further_settings_of_generation_are_fields_of_the_library() -> None:
    class GenerationConfig:
        def __init__(self) -> None:
            self.num_beams, self._hidden = 1, 2

    library = SimpleNamespace(GenerationConfig=GenerationConfig)
    assert generation_settings(["num_beams=[2, x]"], library) == {"num_beams": [2, "x"]}
    for text, said in (
        ("num_beam=2", "did you mean 'num_beams'?"),
        ("num_beams", "write FIELD=VALUE"),
        ("_hidden=1", ""),
    ):
        with pytest.raises(JobError, match=f"--generation {text} is not FIELD=VALUE with a field of") as error:
            generation_settings([text], library)
        assert said in str(error.value)


def language_model(output: Any = None, eos: Any = 2, **config: Any) -> tuple[LanguageModel, dict[str, Any]]:
    """A language model whose library returns this output, and the arguments that it gets."""
    seen: dict[str, Any] = {}

    class Config(SimpleNamespace):
        def update(self, **given: Any) -> None:
            vars(self).update(given)

    def generate(**given: Any) -> Any:
        seen.update(given)
        return output

    model = LanguageModel.__new__(LanguageModel)
    settings = Config(eos_token_id=eos, max_length=20, **config)
    model._model = SimpleNamespace(generation_config=settings, generate=generate)
    model.tokenizer = SimpleNamespace(
        pad_token_id=None, eos_token_id=7, name_or_path="dir", decode=lambda ids, skip_special_tokens: str(ids)
    )
    model.device, model.positions = torch.device("cpu"), 10
    return model, seen


def test_prompts_are_padded_on_the_left_and_completions_cut_after_their_end() -> None:
    output = torch.tensor([[2, 2, 5, 8, 2, 2], [5, 6, 7, 8, 9, 8]])
    model, seen = language_model(output)
    assert model.complete([[5], [5, 6, 7]], Decoding(3), 4) == [[8, 2], [8, 9, 8]]
    assert seen["input_ids"].tolist() == [[2, 2, 5], [5, 6, 7]]
    assert seen["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    config = seen["generation_config"]
    assert (config.max_length, config.max_new_tokens, config.pad_token_id, config.eos_token_id) == (None, 3, 2, [2])
    assert config.return_dict_in_generate is False
    assert model._model.generation_config.max_length == 20
    assert (model.ends([8, 2]), model.ends([8, 9]), model.ends([])) == (True, False, False)


@pytest.mark.parametrize("wrapped", [False, True])
def test_steps_on_a_device_are_replayed_with_a_cache_of_final_size(
    wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = language_model(torch.tensor([[5, 8]]))
    model.device, inner = torch.device("meta"), model._model
    if wrapped:
        inner = SimpleNamespace()
        model._model.get_base_model = lambda: inner
    replayed: list[Any] = []

    def suits(of: object, settings: Any, new: int) -> bool:
        assert (of is inner, hasattr(settings, "cache_implementation")) == (True, False)
        return new == 3

    monkeypatch.setattr(language_model_module, "suits", suits)
    monkeypatch.setattr(language_model_module, "replayed_steps", lambda of: replayed.append(of) or nullcontext())
    model.complete([[5]], Decoding(3), 0)
    config = seen["generation_config"]
    assert (config.cache_implementation, config.disable_compile, replayed) == ("static", True, [inner])
    assert (seen["input_ids"].device, seen["attention_mask"].device) == (model.device, model.device)
    model.complete([[5]], Decoding(2), 0)
    assert not hasattr(seen["generation_config"], "disable_compile")
    assert len(replayed) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_a_streamed_completion_controls_no_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []

    class Streamer:
        def __init__(self, *given: Any, **options: Any) -> None:
            self.given = given, options

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            printed.append((text, stream_end))

    model, seen = language_model(torch.tensor([[5, 6, 8, 2, 2]]))
    model._library = SimpleNamespace(TextStreamer=Streamer)
    assert model.stream([5, 6], Decoding(3, seed=9)) == [8, 2]
    assert torch.initial_seed() == 9
    assert seen["streamer"].given == ((model.tokenizer,), {"skip_prompt": True, "skip_special_tokens": True})
    monkeypatch.setattr(language_model_module.sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    seen["streamer"].on_finalized_text("a\x1b[2J")
    seen["streamer"].on_finalized_text("b", True)
    assert printed == [(r"a\x1b[2J" if terminal else "a\x1b[2J", False), ("b", True)]


def test_more_completions_than_prompts_are_an_error() -> None:
    model, _ = language_model(torch.zeros(2, 2))
    with pytest.raises(BuildError, match="1 prompts have 2 completions"):
        model.complete([[5]], Decoding(1), 0)


@pytest.mark.parametrize(("stated", "given", "fine"), [(16, {}, True), (17, {}, False), (17, {"num_beams": 17}, True)])
def test_a_model_may_not_ask_for_many_beams_by_itself(stated: int, given: dict[str, int], fine: bool) -> None:
    model, _ = language_model(torch.zeros(1, 2, dtype=torch.int64), num_beams=stated)
    if fine:
        model.complete([[5]], Decoding(1, further=given), 0)
        return
    with pytest.raises(BuildError, match="sets num_beams to 17"):
        model.complete([[5]], Decoding(1, further=given), 0)


@pytest.mark.parametrize(("eos", "ends"), [(None, [7]), ([3, "x", 4], [3, 4]), (5, [5])])
def test_the_model_or_else_the_tokenizer_says_what_ends_a_text(eos: Any, ends: list[int]) -> None:
    assert language_model(eos=eos)[0]._ends == ends


def test_a_prompt_may_fill_the_positions_with_its_completion() -> None:
    model, _ = language_model()
    model.check_length([0] * 6, 4, "here")
    with pytest.raises(DataError, match="here: 7 tokens and 4 new ones exceed the model's 10 positions"):
        model.check_length([0] * 7, 4, "here")
    model.positions = None
    model.check_length([0] * 70, 4, "here")


def test_sizes_that_no_model_has_are_refused() -> None:
    _check_sizes("c", {"hidden_size": 1 << 24, "num_hidden_layers": 1 << 14, "sliding": True, "x": 1 << 60})
    for values in ({"hidden_size": (1 << 24) + 1}, {"deep": {"num_heads": 1 << 15}}, {"max_position": 1 << 28}):
        with pytest.raises(CheckpointError, match="but no model has more than"):
            _check_sizes("c", values)


def test_sizes_are_checked_in_at_most_eight_nested_sections() -> None:
    def nested(sections: int) -> dict[str, Any]:
        values: dict[str, Any] = {"hidden_size": 1 << 60}
        for _ in range(sections):
            values = {"deep": values}
        return values

    with pytest.raises(CheckpointError, match="c: hidden_size is 1152921504606846976, but no model has more than 16,7"):
        _check_sizes("c", nested(7))
    _check_sizes("c", nested(8))
    _check_sizes("c", nested(5000))


@pytest.mark.parametrize(
    ("names", "fine"), [([], True), (["AForCausalLM"], True), (["A", "GPT2LMHeadModel"], True), (["A"], False)]
)
def test_only_models_of_text_generate(names: list[str], fine: bool) -> None:
    config = SimpleNamespace(architectures=names)
    if fine:
        _check_writes(Path("d"), config)
        return
    with pytest.raises(CheckpointError, match="which generates no text"):
        _check_writes(Path("d"), config)


@pytest.mark.parametrize(
    ("fields", "mask"),
    [({"d9d": {"attention_mask": "prefix"}}, "prefix"), ({"is_causal": False}, "bidirectional"), ({"d9d": {}}, None)],
)
def test_models_with_other_than_causal_attention_generate_nothing(fields: dict[str, Any], mask: str | None) -> None:
    """The library would compute causal attention."""
    config = SimpleNamespace(architectures=["AForCausalLM"], **fields)
    if mask is None:
        _check_writes(Path("d"), config)
        return
    with pytest.raises(CheckpointError, match=rf"attention is not causal \({mask}\), but generation computes causal"):
        _check_writes(Path("d"), config)


def test_files_that_a_library_would_read_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_text("x")
    (tmp_path / "additional_chat_templates").mkdir()
    _check_files(tmp_path)
    large = tmp_path / "additional_chat_templates" / "a.jinja"
    large.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match=r"a.jinja cannot be read"):
        _check_files(tmp_path)
    large.write_bytes(b" " * (1 << 20))
    _check_files(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        _check_files(tmp_path)


def test_a_conversation_grows_with_each_line_and_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hello", "  ", "again", None])
    monkeypatch.setattr(chat_module, "_next_line", lambda: next(lines))
    seen: list[tuple[str, list[Any], Any]] = []
    checked: list[Any] = []

    class Talks:
        def encode(self, prompt: Prompt, tools: object, system: object, raw: bool) -> list[int]:
            seen.append((prompt.where, [dict(one) for one in prompt.messages], (tools, system, raw)))
            return [1, 2]

        def check_length(self, *given: object) -> None:
            checked.append(given)

        def stream(self, ids: list[int], decoding: Decoding) -> list[int]:
            assert (ids, decoding.max_new_tokens) == ([1, 2], 5)
            return [3]

        def text(self, _ids: object) -> str:
            return "reply"

    said: list[str] = []
    chat(cast("Any", Talks()), Decoding(5), None, "be kind", said.append)
    user, reply = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "reply"}
    assert seen == [
        ("message 1 of the conversation", [user], (None, "be kind", False)),
        (
            "message 3 of the conversation",
            [user, reply, {"role": "user", "content": "again"}],
            (None, "be kind", False),
        ),
    ]
    assert checked[0] == ([1, 2], 5, "message 1 of the conversation")
    assert said == ["end of input after 2 replies"]


def test_an_interrupted_conversation_counts_its_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["a", "b", KeyboardInterrupt()])

    def next_line() -> str:
        if isinstance(line := next(lines), KeyboardInterrupt):
            raise line
        return line

    monkeypatch.setattr(chat_module, "_next_line", next_line)
    model = SimpleNamespace(
        encode=lambda *_, raw: [1], check_length=lambda *_: None, stream=lambda *_: [3], text=lambda _ids: "reply"
    )
    with pytest.raises(KeyboardInterrupt, match="^after 2 replies$"):
        chat(cast("Any", model), Decoding(5), None, None, print)


def test_lines_of_a_conversation_come_from_a_pipe_or_from_a_terminal_with_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.StringIO("hello \n\nlast")
    monkeypatch.setattr(chat_module.sys, "stdin", pipe)
    assert [chat_module._next_line() for _ in range(4)] == ["hello ", "", "last", None]
    pipe = io.StringIO("piped\n")
    monkeypatch.setattr(pipe, "isatty", lambda: True)
    monkeypatch.setattr(chat_module.sys, "stdin", pipe)
    shown: list[str] = []

    def typed(prompt: str) -> str:
        shown.append(prompt)
        if len(shown) > 1:
            raise EOFError
        return "typed"

    monkeypatch.setattr("builtins.input", typed)
    assert [chat_module._next_line() for _ in range(2)] == ["typed", None]
    assert shown == ["> ", "> "]
