"""``d9d generate`` on what training leaves, compared with transformers' own generate."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_engine.job import Job

transformers = pytest.importorskip("transformers")

Run = Callable[..., tuple[int, str, str]]
# The library asks transformers for a name that has changed by now.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
GREEDY = ("--temperature", "0", "--device", "cpu")
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    # It writes to the standard error of the test that made its first logger.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.CRITICAL)


@pytest.fixture(scope="module")
def model(published: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("model"))


def expected(model: Path, ids: list[int], new: int, **settings: Any) -> list[int]:
    """New tokens of transformers' own generate."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    output = loaded.generate(torch.tensor([ids]), max_new_tokens=new, **{"do_sample": False, **settings})
    return list(output[0, len(ids) :].tolist())


def tokenizer_of(model: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model)


def answered(model: Path, messages: list[dict[str, str]], new: int = 12) -> str:
    tokenizer = tokenizer_of(model)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return str(tokenizer.decode(expected(model, ids, new), skip_special_tokens=True))


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.thorough
def test_a_text_is_continued_as_transformers_does(d9d: Run, model: Path) -> None:
    tokenizer = tokenizer_of(model)
    status, out, err = d9d("generate", str(model), "--prompt", "hello", "--raw", "--max-new-tokens", "12", *GREEDY)
    assert (status, err) == (0, "")
    new = expected(model, tokenizer("hello")["input_ids"], 12)
    assert out == tokenizer.decode(new, skip_special_tokens=True) + "\n"


@pytest.mark.thorough
def test_a_prompt_is_answered_by_the_chat_template_with_its_system_message(d9d: Run, model: Path) -> None:
    given = ("--prompt", "hello", "--system", "short", "--max-new-tokens", "12")
    status, out, _ = d9d("generate", str(model), *given, *GREEDY)
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    assert (status, out) == (0, answered(model, messages) + "\n")


@pytest.mark.thorough
def test_draws_follow_the_seed(d9d: Run, model: Path) -> None:
    given = ("generate", str(model), "--prompt", "x", "--temperature", "1", "--top-p", "0.9", "--max-new-tokens", "16")
    first, again, other = (d9d(*given, "--device", "cpu", "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other
    torch.manual_seed(1)
    ids = tokenizer_of(model).apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, return_dict=False
    )
    new = expected(model, ids, 16, do_sample=True, temperature=1.0, top_p=0.9)
    assert first == tokenizer_of(model).decode(new, skip_special_tokens=True) + "\n"


@pytest.mark.thorough
def test_a_conversation_is_kept_until_its_input_ends(d9d: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nand?\n"))
    status, out, err = d9d("generate", str(model), "--chat", "--max-new-tokens", "12", *GREEDY)
    messages = [{"role": "user", "content": "hi"}]
    first = answered(model, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    assert (status, err) == (0, "end of input after 2 replies\n")
    assert out == f"{first}\n{answered(model, messages)}\n"


def test_an_interrupt_ends_a_conversation_with_one_line(d9d: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def readline(self, *_: Any) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    status, _, err = d9d("generate", str(model), "--chat", *GREEDY)
    assert (status, err) == (130, "interrupted: after 0 replies\n")


@pytest.mark.thorough
def test_a_file_is_completed_in_its_order_in_padded_batches(d9d: Run, model: Path, tmp_path: Path) -> None:
    prompts = written(
        tmp_path / "prompts.jsonl",
        {"id": 7, "prompt": "a"},
        {"messages": [{"role": "user", "content": "tell me something longer"}]},
        "\n",
        {"prompt": "look it up", "tools": [TOOL]},
    )
    output = tmp_path / "out.jsonl"
    given = ("generate", str(model), "--file", str(prompts), "--output", str(output), "--max-new-tokens", "10")
    status, _, err = d9d(*given, "--batch", "2", *GREEDY)
    assert (status, err) == (0, f"3 completions in {output}\n")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    texts = ("a", "tell me something longer", "look it up")
    assert [row["completion"] for row in rows] == [answered(model, [{"role": "user", "content": t}], 10) for t in texts]
    assert rows[0]["id"] == 7
    assert {(row["finish"], row["tokens"] == 10) for row in rows} <= {("length", True), ("stop", False), ("stop", True)}
    assert [file.name for file in tmp_path.glob("*out.jsonl*")] == ["out.jsonl"]  # nothing is left behind
    status, _, err = d9d(*given)
    assert (status, err) == (
        2,
        f"error: --output: {output} exists; name another file, or replace it with --overwrite\n",
    )


@pytest.mark.thorough
def test_a_killed_command_goes_on_where_it_was(
    d9d: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from d9d_inference.generation import language_model

    prompts = written(tmp_path / "prompts.jsonl", *({"prompt": f"number {n}"} for n in range(5)))

    def given(name: str, *more: str) -> tuple[str, ...]:
        return (
            "generate", str(model), "--file", str(prompts), "--output", str(tmp_path / name), "--batch", "2",
            "--max-new-tokens", "6", "--device", "cpu", "--temperature", "1", *more,
        )  # fmt: skip

    assert d9d(*given("whole.jsonl"))[0] == 0
    complete, calls = language_model.LanguageModel.complete, []

    def stop(*arguments: Any) -> Any:
        calls.append(arguments[1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return complete(*arguments)

    monkeypatch.setattr(language_model.LanguageModel, "complete", stop)
    assert d9d(*given("out.jsonl"))[0] == 130
    with (tmp_path / "out.jsonl.partial").open("a") as file:
        file.write('{"prompt": "torn')
    status, _, err = d9d(*given("out.jsonl", "--seed", "5"))
    assert status == 2
    assert "was started with other seed: repeat that command" in err
    status, _, err = d9d(*given("out.jsonl"))
    assert status == 0
    assert "2 of 5 completions exist; continuing" in err
    assert len(calls) == 4
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}\n', '{"prompt": \n'], ":2: Expecting value"),
        (['{"prompt": "a", "messages": []}\n'], ":1: a line needs either 'prompt' or 'messages'"),
        (['{"messages": [{"content": "a"}]}\n'], ":1: messages[0] must be an object with 'role' and 'content'"),
        (['{"prompt": ""}\n'], ":1: 'prompt' must be a non-empty text, not an empty one"),
        (['{"prompt": "a", "tools": {}}\n'], ":1: 'tools': must be a list of tool schemas"),
        (['[1]\n'], ":1: a line must hold a JSON object, not a list"),
        (['{"prompt": "a", "finish": 1}\n'], ":1: 'finish' is a field of the output; rename it"),
        (["\n"], " has no prompt"),
    ],
)  # fmt: skip
def test_malformed_lines_are_told_before_a_model_is_looked_for(
    d9d: Run, tmp_path: Path, lines: list[str], message: str
) -> None:
    prompts = written(tmp_path / "prompts.jsonl", *lines)
    status, _, err = d9d("generate", "nowhere", "--file", str(prompts), "--output", str(tmp_path / "out"))
    assert status == 2
    assert f"{prompts}{message}" in err
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_is_too_long_is_refused_with_its_line(d9d: Run, model: Path, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"prompt": "b" * 120})
    status, _, err = d9d(
        "generate", str(model), "--file", str(prompts), "--output", str(tmp_path / "out"), "--max-new-tokens", "16"
    )
    assert status == 2
    assert f"{prompts}:2: " in err
    assert "exceed the model's 128 positions" in err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.thorough
def test_what_a_model_lacks_is_told(d9d: Run, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("chat_template.jinja"))
    status, _, err = d9d("generate", str(bare), "--chat")
    assert (status, err) == (
        2,
        f"error: --chat: {bare} has no chat template; continue a text instead: --prompt TEXT\n",
    )
    status, _, err = d9d("generate", str(bare), "--prompt", "a", "--system", "b")
    assert (status, "need a chat template, but" in err) == (2, True)
    (bare / "tokenizer.json").unlink()
    status, _, err = d9d("generate", str(bare), "--prompt", "a")
    assert (status, err) == (
        2,
        f"error: {bare} has no tokenizer; name a directory with the model's tokenizer: --tokenizer DIR\n",
    )
    status, out, _ = d9d(
        "generate", str(bare), "--prompt", "a", "--tokenizer", str(model), "--max-new-tokens", "4", *GREEDY
    )
    assert (status, out) == (0, answered(model, [{"role": "user", "content": "a"}], 4) + "\n")
    status, _, err = d9d("generate", str(tmp_path), "--prompt", "a")
    assert (status, "has neither a config.json nor checkpoints" in err) == (2, True)
    status, _, err = d9d("generate", str(model))
    assert (status, err) == (2, "error: give one of --prompt TEXT, --chat and --file FILE\n")


def test_a_missing_library_is_told_with_its_install_line(
    d9d: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr("d9d_inference.generation.library.import_module", lacking)
    status, _, err = d9d("generate", str(model), "--prompt", "a")
    assert (status, err) == (2, "error: d9d generate needs transformers; install it with: pip install transformers\n")


def test_code_beside_a_model_does_not_run(d9d: Run, model: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    shutil.copytree(model, hostile)
    values = json.loads((hostile / "config.json").read_text())
    values |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (hostile / "config.json").write_text(json.dumps(values))
    (hostile / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    status, _, err = d9d("generate", str(hostile), "--prompt", "a")
    assert (status, "cannot be loaded by transformers" in err) == (2, True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.thorough
def test_a_run_is_read_from_its_checkpoint_until_it_has_an_export(
    d9d: Run, small_job: Callable[..., Path], tmp_path: Path
) -> None:
    job = small_job(steps=3, metrics=[], trackers=[])
    Job.load(job).build(lambda _: None).train()
    run = tmp_path / "runs" / "small"
    given = ("--prompt", "the quick", "--max-new-tokens", "8", *GREEDY)
    _, exported, _ = d9d("generate", str(run), *given)
    shutil.rmtree(run / "model")
    status, stored, err = d9d("generate", str(run), *given)
    assert (status, stored) == (0, exported)
    assert "exporting" in err
    checkpoint = max((run / "checkpoints").glob("step-*"))
    assert d9d("generate", str(checkpoint), *given)[:2] == (0, exported)


@pytest.mark.full
def test_an_adapter_is_put_on_its_base(d9d: Run, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    chats = written(
        tmp_path / "chats.jsonl",
        *(
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
            for n in range(8)
        ),
    )
    values = {
        "run": {"name": "lora", "dir": str(tmp_path / "runs")}, "steps": 4, "device": "cpu",
        "batch": {"size": 4}, "model": {"name": "qwen3", "pretrained": str(model)}, "task": "causal_lm",
        "data": {"name": "chat", "sources": [str(chats)], "sequence_length": 64}, "trackers": [],
        "optimizer": {"name": "adamw", "lr": 0.05}, "peft": {"name": "lora", "r": 4}, "export": True,
    }  # fmt: skip
    Job.from_values(values).build(lambda _: None).train()
    run = tmp_path / "runs" / "lora"
    given = ("--prompt", "3?", "--max-new-tokens", "8", *GREEDY)
    _, merged, _ = d9d("generate", str(run), *given)
    assert merged == answered(run / "model", [{"role": "user", "content": "3?"}], 8) + "\n"
    assert merged != answered(model, [{"role": "user", "content": "3?"}], 8) + "\n"
    assert d9d("generate", str(run / "adapter"), *given)[:2] == (0, merged)
    shutil.rmtree(run / "model")
    assert d9d("generate", str(run), *given)[:2] == (0, merged)
    config = run / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "/nowhere"}))
    status, _, err = d9d("generate", str(run / "adapter"), *given)
    assert status == 2
    assert "is an adapter of the model '/nowhere', which this machine lacks; name its directory with --base" in err
    assert d9d("generate", str(run / "adapter"), "--base", str(model), *given)[:2] == (0, merged)
    shutil.rmtree(run / "adapter")
    # A checkpoint is merged, and takes the template and the ends of texts from where its run started.
    assert d9d("generate", str(run), *given)[:2] == (0, merged)


NESTED = "{% set ns = namespace(s=['a']) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("template", "says"),
    [
        (f"{NESTED}{{{{ ns.s }}}}", ""),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% if %}", "malformed"),
    ],
)
def test_a_template_that_harms_or_refuses_is_an_error(
    template: str, says: str, d9d: Run, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    (copy / "chat_template.jinja").write_text(template)
    status, out, err = d9d("generate", str(copy), "--prompt", "x", "--device", "cpu")
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert "chat template" in err
    assert says in err


def copied(model: Path, directory: Path, **settings: Any) -> Path:
    """Copy of a model with settings in its ``generation_config.json``."""
    shutil.copytree(model, directory)
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return directory


@pytest.mark.thorough
def test_a_model_that_asks_for_a_dictionary_of_outputs_writes_the_same(d9d: Run, model: Path, tmp_path: Path) -> None:
    given = ("--prompt", "hello", "--raw", "--max-new-tokens", "4", *GREEDY)
    asking = copied(model, tmp_path / "model", return_dict_in_generate=True, output_scores=True)
    status, out, _ = d9d("generate", str(asking), *given)
    assert status == 0
    assert d9d("generate", str(model), *given, "--generation", "return_dict_in_generate=true")[:2] == (0, out)
    assert d9d("generate", str(model), *given)[:2] == (0, out)


@pytest.mark.thorough
def test_several_completions_of_a_prompt_are_refused(d9d: Run, model: Path, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"prompt": "b"})
    files = ("--file", str(prompts), "--output", str(tmp_path / "out.jsonl"), "--max-new-tokens", "2", *GREEDY)
    several = ("--generation", "num_beams=2", "--generation", "num_return_sequences=2")
    status, _, err = d9d("generate", str(model), *files, *several)
    assert status == 2
    assert "2 prompts have 4 completions, but one per prompt is needed; remove --generation" in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.thorough
def test_the_log_of_the_library_controls_no_terminal(d9d: Run, model: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    handlers = logging.getLogger("transformers").handlers
    (handler,) = (one for one in handlers if type(one) is logging.StreamHandler)  # pytest has some of its own
    before = handler.setStream(said)
    transformers.utils.logging.set_verbosity(logging.WARNING)
    try:
        odd = copied(model, tmp_path / "model", max_length="\x1b]0;x\x07\x9b31m")
        d9d("generate", str(odd), "--prompt", "hello", "--max-new-tokens", "2", *GREEDY)
    finally:
        handler.setStream(before)
    assert r"\x1b]0;x\x07\x9b31m" in said.getvalue()
    assert said.getvalue().replace("\n", "").isprintable()


@pytest.mark.thorough
@pytest.mark.parametrize("setting", ["cache_implementation=-21", "num_beams=x"])
def test_a_setting_that_the_library_refuses_is_one_line(d9d: Run, model: Path, setting: str) -> None:
    given = ("--prompt", "a", "--max-new-tokens", "2", "--device", "cpu")
    status, _, err = d9d("generate", str(model), *given, "--generation", setting)
    assert status == 2
    assert f"{model} cannot generate: " in err
    assert "Traceback" not in err
