"""Parts of generation and inference: decoder, captures, rows, prompts, writers, files of completions, results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError, DataError, JobError, NonFiniteError
from d9d_core.inference import Continuation
from d9d_inference.captures import Captures, groups_of, module_names
from d9d_inference.config import JsonlWriterConfig
from d9d_inference.evaluation.paired import Difference
from d9d_inference.evaluation.result import Evaluated, Report
from d9d_inference.forwards import ManyForwards
from d9d_inference.generation import chat as chat_module
from d9d_inference.generation.chat import chat
from d9d_inference.generation.decoder import Decoder, Sequences, padded_prompts
from d9d_inference.generation.file_job import FileJob
from d9d_inference.generation.language_model import (
    Decoding,
    LanguageModel,
    _check_files,
    _check_sizes,
    _check_writes,
    generation_settings,
)
from d9d_inference.generation.prompts import Prompt, read_prompts, read_tools
from d9d_inference.row_thread import KeptPack, RowThread, check_finite, joined_rows
from d9d_inference.writers.jsonl import JsonlWriter
from torch import Tensor, nn

VOCABULARY = 200


def topology(**coordinate: int) -> Any:
    """Stand-in of a process that is alone, or at a coordinate."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return SimpleNamespace(
        coordinate=dict.fromkeys(axes, 0) | coordinate, sizes=dict.fromkeys(axes, 1), axes_group=lambda *_: None,
        watchdog=SimpleNamespace(beat=lambda: None),
    )  # fmt: skip


def successor(seen: list[list[tuple[int, ...]]]) -> Any:
    """A forward whose logits prefer the token after the last one; notes the shapes of its inputs."""

    def forward(pack: Sequence[Mapping[str, Tensor]], outputs: Callable[..., None]) -> None:
        seen.append([tuple(one["tokens"].shape) for one in pack])
        for one in pack:
            outputs({"logits": torch.nn.functional.one_hot((one["tokens"] + 1) % VOCABULARY, VOCABULARY) * 50.0}, one)

    return forward


def decoder(
    forward: Any, new: int, temperature: float = 0.0, stop: Sequence[int] = (), nonfinite: Any = "keep"
) -> Decoder:
    settings = Continuation(new, temperature, 0)
    return Decoder(forward, topology(), settings, frozenset(stop), lambda found: found.get("logits"), nonfinite)


def pack_of(*prompts: list[int], microbatches: int = 1) -> Any:
    return padded_prompts(prompts, microbatches, torch.device("cpu"))


def test_prompts_are_padded_to_equal_microbatches_with_fillers_at_the_end() -> None:
    first, second = pack_of([5], [6, 7], [8, 9, 10], microbatches=2)
    assert first["tokens"].tolist() == [[5, 0, 0], [6, 7, 0]]
    assert second["tokens"].tolist() == [[8, 9, 10], [5, 0, 0]]
    assert (first["lengths"].tolist(), second["lengths"].tolist()) == ([1, 2], [3, 1])
    assert (first["rows"].tolist(), second["rows"].tolist()) == ([0, 1], [2, -1])


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_sequences_are_continued_until_they_end_or_are_long_enough(temperature: float) -> None:
    seen: list[list[tuple[int, ...]]] = []
    found = decoder(successor(seen), 4, temperature, stop=[8]).continue_all(
        pack_of([5], [1, 2, 20], [7], microbatches=2)
    )
    assert [one.new.tolist() for one in found] == [[[6, 7, 8, -1], [21, 22, 23, 24]], [[8, -1, -1, -1], [-1] * 4]]
    assert [one.ended.tolist() for one in found] == [[True, False], [True, False]]
    assert found[0].lengths.tolist() == [4, 7]
    assert found[0].tokens[0].tolist()[:5] == [5, 6, 7, 8, 0]
    assert len(seen) == 4


def test_decoding_ends_with_the_last_sequence() -> None:
    seen: list[list[tuple[int, ...]]] = []
    decoder(successor(seen), 9, stop=[8]).continue_all(pack_of([5], [6]))
    assert len(seen) == 3


def test_the_width_of_forwards_grows_in_steps_of_64_up_to_what_is_needed() -> None:
    seen: list[list[tuple[int, ...]]] = []
    decoder(successor(seen), 70).continue_all(pack_of(list(range(63))))
    assert [shape[0][1] for shape in seen] == [64] * 2 + [128] * 64 + [133] * 4


def test_the_width_of_forwards_is_a_multiple_of_what_layouts_need() -> None:
    one = Sequences.of({"tokens": torch.ones(1, 5, dtype=torch.int64), "rows": torch.tensor([3])}, 4, 6)
    assert (one.tokens.shape, one.growth, one.lengths.tolist(), one.longest) == ((1, 12), 192, [5], 5)
    assert (one.numbers, one.active) == ([3], [0])


def test_draws_depend_on_the_row_and_the_place_only_and_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.25]).log()

    def forward(pack: Any, outputs: Any) -> None:
        for one in pack:
            outputs({"logits": logits.expand(*one["tokens"].shape, 3)}, one)

    (many,) = decoder(forward, 2, temperature=1.0).continue_all(pack_of(*[[1]] * 400))
    shares = torch.bincount(many.new.flatten(), minlength=3) / 800
    assert torch.allclose(shares, logits.exp(), atol=0.06)
    apart = decoder(forward, 2, temperature=1.0).continue_all(pack_of(*[[1]] * 400, microbatches=4))
    assert torch.equal(torch.cat([one.new for one in apart]), many.new)
    (cold,) = decoder(forward, 2, temperature=0.05).continue_all(pack_of(*[[1]] * 20))
    assert not cold.new.any()


def test_logits_that_are_not_finite_name_the_first_row_of_a_sequence_that_goes_on() -> None:
    def forward(pack: Any, outputs: Any) -> None:
        for one in pack:
            logits = torch.nn.functional.one_hot(one["tokens"], VOCABULARY).float()
            logits[one["tokens"] == 9] = math.nan
            outputs({"logits": logits}, one)

    with pytest.raises(NonFiniteError, match="row 1: the logits of its new token number 0 "):
        decoder(forward, 3, nonfinite="error").continue_all(pack_of([1], [9], [9]))
    assert len(decoder(forward, 3).continue_all(pack_of([1], [9]))) == 1
    # A sequence that has ended is not looked at.
    decoder(forward, 3, stop=[9], nonfinite="keep").continue_all(pack_of([9]))


def test_excluded_tokens_are_finite_enough() -> None:
    def forward(pack: Any, outputs: Any) -> None:
        for one in pack:
            logits = torch.full((*one["tokens"].shape, 3), -math.inf)
            logits[..., 2] = 0.0
            outputs({"logits": logits}, one)

    (found,) = decoder(forward, 1, nonfinite="error").continue_all(pack_of([1]))
    assert found.new.tolist() == [[2]]


def test_a_model_without_logits_cannot_continue_a_text() -> None:
    with pytest.raises(BuildError, match="the model returns no logits"):
        decoder(lambda pack, outputs: [outputs({}, one) for one in pack], 1).continue_all(pack_of([1]))


@pytest.mark.parametrize(("ranks", "last", "groups"), [(1, True, [1] * 5), (1, False, [1] * 5), (2, True, [5])])
def test_microbatches_are_continued_together_where_stages_need_many(ranks: int, last: bool, groups: list[int]) -> None:
    sizes: list[int] = []

    def made(_forward: object) -> Any:
        def continue_all(pack: Any) -> list[Any]:
            sizes.append(len(pack))
            return [SimpleNamespace(new=one, ended=one + 1) for one in pack]

        return SimpleNamespace(continue_all=continue_all)

    forwards = ManyForwards(cast("Any", None), cast("Any", SimpleNamespace(ranks=ranks)), topology(), made, last)
    found: list[Any] = []
    forwards.run(cast("Any", list(range(5))), lambda outputs, one: found.append((one, outputs)))
    assert sizes == groups
    assert found == ([(one, {"new_tokens": one, "ended": one + 1}) for one in range(5)] if last else [])


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(5, 2, [2, 3]), (4, 2, [2, 2]), (3, 4, [3]), (9, 4, [4, 5]), (1, 1, [1])]
)
def test_groups_have_at_least_their_size(count: int, size: int, sizes: list[int]) -> None:
    groups = list(groups_of(cast("Any", list(range(count))), size))
    assert [len(group) for group in groups] == sizes
    assert [one for group in groups for one in group] == list(range(count))


class Runs:
    """Stand-in of an executor: runs stages one after another."""

    def __init__(self, model: nn.Module, times: int = 1) -> None:
        self.model, self.times = model, times

    def evaluate(self, pack: Any, outputs: Any) -> None:
        for microbatch in pack:
            for _ in range(self.times):
                found = {"out": self.model(microbatch["x"])}
            outputs(found, microbatch)


def pipeline(ranks: int = 1, stages: int = 1) -> Any:
    return SimpleNamespace(ranks=ranks, hosts=[stage % ranks for stage in range(stages)])


def test_outputs_of_named_modules_are_added_to_those_of_the_model() -> None:
    model = nn.Sequential(nn.Identity(), nn.Tanh(), nn.Identity())
    captures = Captures(["1"], {0: model}, pipeline(), topology())
    found: list[Any] = []
    pack: Any = [{"x": torch.full((2,), float(index))} for index in range(2)]
    captures.run(cast("Any", Runs(model)), pack, lambda outputs, _one: found.append(outputs))
    assert [one.keys() for one in found] == [{"out", "module/1"}] * 2
    assert all(torch.equal(one["module/1"], torch.full((2,), float(index)).tanh()) for index, one in enumerate(found))
    assert module_names([model, nn.Sequential(nn.Identity())]) == ["0", "1", "2"]


@pytest.mark.parametrize(("names", "times"), [(["1"], 2), (["0"], 1)])
def test_a_module_that_does_not_run_once_cannot_be_read(names: list[str], times: int) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Identity())
            self.add_module("1", nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.get_submodule("1")(x))

    model = Skips()
    captures = Captures(names, {0: model}, pipeline(), topology())
    with pytest.raises(BuildError, match=f"module '{names[0]}' does not run once"):
        captures.run(cast("Any", Runs(model, times)), cast("Any", [{"x": torch.ones(1)}]), lambda *_: None)


def test_a_module_that_returns_no_tensor_cannot_be_read() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x,)

    model = nn.Sequential(Pair())
    captures = Captures(["0"], {0: model}, pipeline(), topology())
    with pytest.raises(BuildError, match=r"module '0' \(Pair\) returns no tensor"):
        captures.run(cast("Any", Runs(model)), cast("Any", [{"x": torch.ones(1)}]), lambda *_: None)


@pytest.mark.parametrize(
    ("names", "ranks", "stages", "sizes"),
    [(["a"], 2, 2, [8, 8]), ([], 2, 2, [16]), (["a"], 1, 1, [16]), (["a"], 1, 2, [4] * 4)],
)
def test_captures_of_stages_are_held_for_a_few_microbatches(
    names: list[str], ranks: int, stages: int, sizes: list[int]
) -> None:
    captures = Captures(names, {}, pipeline(ranks, stages), topology())
    assert [len(group) for group in captures.groups(cast("Any", list(range(16))))] == sizes


class Task:
    """Task whose rows have a number and a value."""

    columns = ("row", "value")

    def rows(self, kept: Mapping[str, Tensor]) -> Any:
        return {"row": kept["rows"].tolist(), "value": kept["x"].tolist()}

    def tally(self, rows: Any) -> int:
        return len(rows["row"])


def test_rows_are_in_order_of_their_numbers_and_without_fillers() -> None:
    kept = [
        {"rows": torch.tensor([4, -1, 2]), "x": torch.tensor([0.5, 9.0, 1.5])},
        {"rows": torch.tensor([-1]), "x": torch.tensor([9.0])},
        {"rows": torch.tensor([0, 3]), "x": torch.tensor([2.5, 3.5])},
    ]
    assert joined_rows(cast("Any", Task()), kept) == {"row": [0, 2, 3, 4], "value": [2.5, 1.5, 3.5, 0.5]}


@pytest.mark.parametrize("columns", [("value", "row"), ("row",), ("row", "value", "more")])
def test_a_task_whose_rows_are_not_as_declared_is_an_error(columns: tuple[str, ...]) -> None:
    task = Task()
    task.columns = columns  # type: ignore[assignment]
    with pytest.raises(BuildError, match="it declares"):
        joined_rows(cast("Any", task), [{"rows": torch.tensor([0]), "x": torch.tensor([1.0])}])


def test_columns_of_different_lengths_are_an_error() -> None:
    class Short(Task):
        def rows(self, kept: Mapping[str, Tensor]) -> Any:
            return {"row": [0, 1], "value": [1.0]}

    with pytest.raises(BuildError, match="each with one value per row"):
        joined_rows(cast("Any", Short()), [{"rows": torch.tensor([0, 1])}])


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, math.nan], np.asarray([-math.inf]), np.float32(math.nan)])
def test_a_row_that_is_not_finite_is_named(value: object) -> None:
    check_finite({"row": [0, 1], "value": [1.0, "nan"]})
    check_finite({"row": [0, 1], "value": [[1.0, 2.0], np.asarray([3])]})
    with pytest.raises(NonFiniteError, match="row 7: 'value' has NaN or infinity"):
        check_finite({"row": [5, 7], "value": [1.0, value]})


@pytest.mark.parametrize("nonfinite", ["error", "keep"])
def test_rows_are_written_by_a_thread_whose_failure_comes_back(nonfinite: Any) -> None:
    written: list[tuple[Any, ...]] = []
    waited: list[str] = []
    store: Any = SimpleNamespace(write=lambda *given: written.append(given))
    copied: Any = SimpleNamespace(synchronize=lambda: waited.append("waited"))
    good = KeptPack(3, 1, [{"rows": torch.tensor([0]), "x": torch.tensor([1.0])}], copied)
    bad = KeptPack(4, 1, [{"rows": torch.tensor([1]), "x": torch.tensor([math.nan])}], None)
    with RowThread(cast("Any", Task()), store, nonfinite) as thread:
        thread.put(good)
        thread.drain()
        assert written == [(3, 1, {"row": [0], "value": [1.0]}, 1)]
        assert waited == ["waited"]
        thread.put(bad)
        if nonfinite == "error":
            with pytest.raises(NonFiniteError):
                thread.drain()
            with pytest.raises(NonFiniteError):
                thread.put(good)
        else:
            thread.drain()
            thread.put(good)
    assert len(written) == (1 if nonfinite == "error" else 3)


def test_rows_as_lines_of_json_have_the_shortest_numbers_of_their_dtype(tmp_path: Path) -> None:
    writer = JsonlWriter(JsonlWriterConfig())
    rows: dict[str, Sequence[object]] = {
        "row": [0, 1, np.int64(2)],
        "é": [1.5, math.nan, [1.0, {"a": math.inf}]],
        "x": [np.asarray([0.1, np.nan], np.float32), np.asarray([[1, 2]]), np.float32(0.1)],
    }
    writer.write(tmp_path / "a", rows)
    assert (tmp_path / "a").read_text("utf-8").splitlines() == [
        '{"row": 0, "é": 1.5, "x": [0.1, null]}',
        '{"row": 1, "é": null, "x": [[1, 2]]}',
        '{"row": 2, "é": [1.0, {"a": null}], "x": 0.1}',
    ]
    with pytest.raises(FileExistsError):
        writer.write(tmp_path / "a", rows)
    writer.join([tmp_path / "a", tmp_path / "a"], tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes() * 2
    with pytest.raises(FileExistsError):
        writer.join([tmp_path / "a"], tmp_path / "b")
    assert writer.suffix == ".jsonl"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "a line must hold a JSON object, not an empty one"),
        ("[1]", "a line must hold a JSON object, not a list"),
        ('"x"', "not a text"),
        ("3", "not a number"),
        ("true", "not true or false"),
        ("null", "not null"),
        ("{", ""),
        ('{"prompt": "a", "tokens": 1}', "'tokens' is a field of the output; rename it"),
        ("{}", "a line needs either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "a line needs either 'prompt' or 'messages'"),
        ('{"prompt": ""}', "'prompt' must be a non-empty text, not an empty one"),
        ('{"prompt": {"a": 1}}', "'prompt' must be a non-empty text, not an object"),
        ('{"messages": []}', "'messages' must be a non-empty list, not an empty one"),
        ('{"messages": "a"}', "'messages' must be a non-empty list, not a text"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": 1}]}', "messages[1] must be an object"),
        ('{"messages": [3]}', "messages[0] must be an object"),
        ('{"messages": [{"role": "user"}]}', "messages[0] has no 'content'"),
        ('{"prompt": "a", "tools": [1]}', "'tools': must be a list of tool schemas, each an object, not a list"),
        ('{"prompt": "a", "tools": []}', "'tools': must be a list of tool schemas"),
    ],
)
def test_a_malformed_prompt_is_named_with_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert problem in str(error.value)


def test_prompts_have_their_lines_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": []}]
    path.write_text(f'{{"prompt": "good", "id": 3}}\n \n{json.dumps({"messages": messages, "tools": [{}]})}\n')
    first, second = read_prompts(path)
    assert first == Prompt(f"{path}:1", {"prompt": "good", "id": 3}, "good", (), None)
    assert (second.where, second.text, second.messages, second.tools) == (f"{path}:3", None, messages, [{}])
    path.write_text("\n")
    with pytest.raises(DataError, match="has no prompt"):
        read_prompts(path)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_prompts(path)


@pytest.mark.parametrize(("count", "more"), [(10, []), (12, ["and 2 more lines"])])
def test_at_most_ten_malformed_lines_are_listed(tmp_path: Path, count: int, more: list[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("{}\n" * count)
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert str(error.value).splitlines()[10:] == more


def test_tools_are_a_list_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    for text, said in (("{", "is no JSON"), ("{}", "not an empty one"), ("[[]]", "not a list")):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            read_tools(path)
    path.write_text('[{"type": "function"}]')
    assert read_tools(path) == [{"type": "function"}]
    with pytest.raises(DataError, match="cannot be read"):
        read_tools(tmp_path / "none")


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
    for text, said in (("num_beam=2", "did you mean 'num_beams'?"), ("num_beams", ""), ("_hidden=1", "")):
        with pytest.raises(JobError, match=f"--generation {text}: no field of a generation config") as error:
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

        def stream(self, _ids: object, _decoding: object) -> list[int]:
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


def evaluated(name: str) -> Evaluated:
    return Evaluated(name, 3, {"a": {"loss": 2.0}}, {"a": 9}, {"a": {"load": [[1.0]]}})


@pytest.mark.parametrize(
    ("mean", "low", "high", "phrase", "better"),
    [
        (-1.0, -2.0, -0.5, "x is better", "first"),
        (1.0, 0.5, 2.0, "y is better", "other"),
        (1.0, 0.0, 2.0, "no difference found", None),
        (-1.0, -2.0, 0.0, "no difference found", None),
    ],
)
def test_a_comparison_says_which_model_is_better_if_the_interval_excludes_zero(
    mean: float, low: float, high: float, phrase: str, better: str | None
) -> None:
    report = Report(evaluated("x"), evaluated("y"), {"a": Difference(mean, 0.25, low, high, 0.95, 9)})
    assert report.verdict("a") == phrase
    values = report.to_json()
    assert values["model"] == "x"
    assert values["step"] == 3
    assert values["sets"] == {"a": {"samples": 9, "loss": 2.0, "load": [[1.0]]}}
    assert values["compare"]["other"] == {**evaluated("y").to_json()}
    assert values["compare"]["differences"]["a"] == {
        "loss_difference": mean, "standard_error": 0.25, "confidence_interval": [low, high], "confidence": 0.95,
        "samples": 9, "better": better,
    }  # fmt: skip
    assert "compare" not in Report(evaluated("x")).to_json()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_captures_go_from_the_rank_of_their_module_to_that_of_the_last_stage(
    monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """Module ``near`` is on the last rank, ``far`` on the first, and the second rank has none."""
    model = {0: nn.ModuleDict({"far": nn.Identity()}), 1: nn.ModuleDict(), 2: nn.ModuleDict({"near": nn.Identity()})}
    place = topology(pp=position)
    place.axes_group, place.device = (lambda *_: "group"), torch.device("cpu")
    captures = Captures(["far", "near"], {position: model[position]}, pipeline(3, 3), place)
    shapes = {"far": [([2], "torch.float64")] * 2, "near": [([2], "torch.float32")] * 2}
    told = [{"far": shapes["far"]}, {}, {"near": shapes["near"]}]
    monkeypatch.setattr("d9d_inference.captures.all_gather_objects", lambda _own, _group: told)
    moved: list[Any] = []
    monkeypatch.setattr(
        "d9d_inference.captures.dist.send", lambda one, group, group_dst: moved.append((one.tolist(), group_dst))
    )

    def receive(one: Tensor, group: object, group_src: int) -> None:
        moved.append((one.dtype, group_src))
        one.fill_(7.0)

    monkeypatch.setattr("d9d_inference.captures.dist.recv", receive)

    class Stage:
        def evaluate(self, pack: Any, outputs: Any) -> None:
            for index, one in enumerate(pack):
                for module in model[position].values():
                    module(torch.full((2,), float(index)))
                if position == 2:
                    outputs({"out": one}, one)

    found: list[Any] = []
    captures.run(cast("Any", Stage()), cast("Any", ["first", "second"]), lambda outputs, _one: found.append(outputs))
    assert (
        moved
        == {
            0: [([0.0, 0.0], 2), ([1.0, 1.0], 2)],
            1: [],
            2: [(torch.float64, 0), (torch.float64, 0)],
        }[position]
    )
    if position < 2:
        assert found == []
        return
    assert [one["out"] for one in found] == ["first", "second"]
    assert [one["module/near"].tolist() for one in found] == [[0.0, 0.0], [1.0, 1.0]]
    assert [one["module/far"].tolist() for one in found] == [[7.0, 7.0]] * 2
