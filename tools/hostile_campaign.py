"""Feeds damaged and malicious files to the readers of d9d, and prints a table of the outcomes.

    uv run python tools/hostile_campaign.py --jobs 10000 --models 2000 --checkpoints 1000 --tokenizers 1000
    uv run python tools/hostile_campaign.py --models 200 --seed 7
    uv run python tools/hostile_campaign.py --runs 500 --adapters 2000 --tables 500 --templates 300
    uv run python tools/hostile_campaign.py --generations 500 --rows 2000

A reader must read the file or refuse it with an error of d9d. Exit status 1: a traceback, a reader that takes more than
ten seconds, access to a file outside of the campaign, or values that the undamaged file does not have.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
import resource
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
from d9d_core.components.instantiate import instantiate
from d9d_core.config import PluginConfig
from d9d_core.data import DataContext, DataStream, TextInputs
from d9d_core.errors import DataError, JobError
from d9d_core.job_file.open_union import Named
from d9d_core.job_file.pretrained import read_config_json
from d9d_core.job_file.schema import job_schema
from d9d_core.registry.capabilities import Chosen
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_core.untrusted import parse_json, visible
from d9d_data.sources.records import read_records
from d9d_data.tokenizer.file import find_tokenizer_file, load_tokenizer
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.job import Job
from d9d_inference.config import JsonlWriterConfig, ParquetWriterConfig
from d9d_inference.generation.language_model import Decoding, LanguageModel, row_of
from d9d_inference.generation.prompts import Prompt
from d9d_inference.part_store import PartStore
from d9d_inference.writers.jsonl import JsonlWriter
from d9d_inference.writers.parquet import ParquetWriter
from d9d_reports.report import facts, summary
from d9d_reports.runs.record import find_runs
from d9d_testing.hostile.files import Draw, damage, damage_checkpoint
from d9d_testing.hostile.judge import Judge, Verdict, WrongLoad
from d9d_testing.hostile.values import edited, edited_job, hostile_values
from d9d_weights.checkpoint.tensors import CheckpointTensors
from d9d_weights.hugging_face.adapter_bounds import bounded_fields
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.index import read_object
from d9d_weights.state.tensors import Conversion, convert_state
from d9d_weights.templates.process import TemplateError, TemplateLimits, TemplateProcess
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps. " * 8
KINDS = (
    "jobs", "models", "checkpoints", "tokenizers", "runs", "adapters", "tables", "templates", "generations", "rows",
)  # fmt: skip
#: Escape sequence that would control a terminal.
ESCAPE = "\x1b]0;x\x07"
#: Function that damages a copy of the sound files by drawn choices; returns a description and the reader to judge.
Case = Callable[[Draw, Path], tuple[str, Callable[[], object]]]


class Report:
    """Report of one campaign.

    Attributes:
        counts: verdict -> number of files.
        faults: verdict and place -> number of files, and one example.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, tuple[int, str]] = {}

    def add(self, verdict: Verdict, how: str) -> None:
        """Count a verdict."""
        self.counts[verdict.kind] += 1
        if not verdict.is_sound:
            name = f"{verdict.kind}: {verdict.about}"
            times, example = self.faults.get(name, (0, how))
            self.faults[name] = (times + 1, min(example, how, key=len))


def campaign(case: Case, examples: int, number: int, judge: Judge, work: Path) -> Report:
    """Judge a reader on many damaged files.

    Args:
        case: draws the damage and applies it.
        examples: number of files.
        number: random seed.
        judge: judge of the reader.
        work: directory for copies.
    """
    report = Report()

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        copy = work / "copy"
        if copy.exists():
            shutil.rmtree(copy)
        how, read = case(data.draw, copy)
        report.add(judge(read), how)

    run()
    return report


class Sound:
    """Sound files to damage: a job, a model, checkpoints and tokenizers, made by a short training.

    Args:
        root: directory to create them in.
        registry: registry with all plugins.
    """

    def __init__(self, root: Path, registry: Registry) -> None:
        self.root = root
        self.registry = registry
        (root / "corpus").mkdir()
        for number in range(12):
            (root / "corpus" / f"{number}.txt").write_text(f"{number}: {TEXT}")
        self.outside = root.parent / "outside"
        self.outside.write_text("must not be read")
        self.job: dict[str, Any] = {
            "run": {"name": "sound", "dir": str(root / "runs")},
            "device": "cpu",
            "steps": 2,
            "batch": {"size": 4, "microbatch": 2},
            "model": {
                "name": "qwen3", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
            },
            "task": {"name": "causal_lm"},
            "data": {
                "name": "text", "sources": [str(root / "corpus")], "sequence_length": 32, "tokenizer": {"bpe": 300},
            },
            "optimizer": {"name": "adamw", "lr": 0.01},
            "lr_schedule": {"name": "cosine", "warmup_steps": 1},
            "metrics": [{"name": "perplexity"}],
            "trackers": [],
        }  # fmt: skip
        job = self.load(self.job, root / "job.json")
        job.build(note=lambda _: None).train()
        self.model = root / "model"
        source = str(root / "runs" / "sound" / "model")
        convert_state(Conversion(source, str(self.model), None, 40_000, 1), registry)
        self.specs = self.tensors_of(self.model)
        self.checkpoints = root / "checkpoints"
        self.saved = {step: _tensors(step) for step in (4, 8)}
        store = CheckpointStore(self.checkpoints)
        store.prepare()
        for step, tensors in self.saved.items():
            store.save(step, tensors, {"data": {"consumed": step}}, {"job": {"model": {}}, "plugins": {}})
        self.schema = job_schema(registry)
        self.chat_tokenizer = root / "chat_tokenizer"
        self.chat_tokenizer.mkdir()
        for file in self.model.glob("tokenizer*"):
            shutil.copy(file, self.chat_tokenizer)
        (self.chat_tokenizer / "chat_template.jinja").write_text(_TEMPLATE)

    def load(self, values: Mapping[str, Any], file: Path) -> Job:
        """Write a job file and load it."""
        file.write_text(json.dumps(values), "utf-8")
        return Job.load(file, registry=self.registry)

    def tensors_of(self, directory: Path) -> dict[str, Tensor]:
        """All tensors of a model directory."""
        found = {}
        with ModelDirectory.open(directory) as opened:
            for name, spec in opened.specs.items():
                found[name] = torch.empty(spec.shape, dtype=spec.dtype)
                opened.read(name, [0] * len(spec.shape), found[name])
            for name in opened.other_files():
                opened.read_file(name)
        return found

    def job_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Job file with drawn edits, valid or invalid by the schema."""
        values = draw(edited_job(self.job, self.schema))
        copy.mkdir()
        file = copy / draw(st.sampled_from(["job.json", "job.yaml"]))
        file.write_text(json.dumps(values), "utf-8")
        return json.dumps(_changes(self.job, values))[:300], lambda: Job.load(file, registry=self.registry).plan()

    def model_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Model directory with one damaged file."""
        shutil.copytree(self.model, copy)
        how = damage(draw, copy, self.outside)
        for file in copy.glob("*.safetensors"):
            if how.startswith("link of") and file.is_symlink():  # weights may be links: only tensors are read
                file.unlink()
                file.symlink_to(self.model / file.name)
        job = {**self.job, "model": {"name": "qwen3", "pretrained": str(copy)}}

        def read() -> None:
            tensors = self.tensors_of(copy)
            read_config_json(str(copy))
            self.load(job, self.root / "pretrained.json").plan()
            # An index without a tensor's name describes a model without that tensor, which the plan refuses.
            if ".safetensors" not in how or ".json" in how:
                _compare(tensors, self.specs)

        return how, read

    def checkpoint_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Checkpoints with one damaged; a run resumes from them and saves."""
        shutil.copytree(self.checkpoints, copy)
        how = damage_checkpoint(draw, copy, self.outside)

        def read() -> None:
            store = CheckpointStore(copy, keep=2)
            store.prepare()
            with store.opened():
                found = store.newest(lambda _: None)
                if found is not None:
                    tensors = {name: torch.full_like(value, 99) for name, value in _tensors(0).items()}
                    found.load_into(tensors)
                    found.values()
                    if not how.startswith("consistent"):
                        _compare(tensors, self.saved.get(found.step, {}))
                    store.set_aside(newer_than=found.step)
                store.save(12, _tensors(12), {}, {})
            again = store.newest(lambda _: None)
            assert again is not None
            with CheckpointTensors(copy) as opened:
                into = torch.empty(3, 5)
                opened.read("model/weight", [0, 0], into)
                _compare({"model/weight": into}, {"model/weight": _tensors(12)["model/weight"]})

        return how, read

    def tokenizer_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Tokenizer with one damaged file."""
        copy.mkdir()
        for file in self.model.glob("tokenizer*"):
            shutil.copy(file, copy)
        how = damage(draw, copy, self.outside)

        def read() -> None:
            tokenizer = load_tokenizer(find_tokenizer_file(str(copy)), None)
            tokenizer.encode(["the quick é", ""])
            tokenizer.save(copy / "again")

        return how, read

    def run_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Run directory with damaged files, which is listed, compared and reported."""
        shutil.copytree(self.root / "runs" / "sound", copy / "sound")
        run = copy / "sound"
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": n, "loss": 1.0 / n}) + "\n" for n in range(1, 9))
        )
        (copy / "failures.json").write_text(json.dumps({"sound": f"killed {ESCAPE}"}))
        how = damage(draw, copy, self.outside)
        if draw(st.booleans()) and (run / "metrics.jsonl").is_file():
            name = draw(st.text(max_size=20)) + ESCAPE
            (run / "metrics.jsonl").write_text(json.dumps({"step": draw(st.integers()), name: draw(_NUMBERS)}) + "\n")

        def read() -> None:
            for record in find_runs([copy]):
                told: list[object] = [
                    record.status,
                    record.step,
                    record.total,
                    record.seconds,
                    record.started,
                    record.best("loss"),
                ]
                told += [facts.layout(record), facts.data(record), facts.start_up(record), facts.environment(record)]
                told += [facts.used_plugins(record), facts.job(record)]
                runs = {"a": record}
                shown = visible(str(told) + summary.trained(runs) + summary.results(runs) + summary.tiles(record))
                if "\x1b" in shown:
                    raise WrongLoad("an escape sequence would reach the terminal")

        return how, read

    def adapter_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Fields of an adapter's config, and names of its tensors."""
        values = draw(edited({**_ADAPTER, draw(st.sampled_from(_ADAPTER_FIELDS)): draw(_ODD)}))
        copy.mkdir()
        file = copy / "adapter_config.json"
        file.write_text(json.dumps(values), "utf-8")

        def read() -> None:
            found = bounded_fields(read_object(str(file), file.read_bytes()), str(file))
            expressions = [
                found.get("target_modules"),
                found.get("exclude_modules"),
                *(found.get("rank_pattern") or {}),
            ]
            for text in expressions:
                if isinstance(text, str):  # as the peft library matches it, with the longest names
                    re.fullmatch(text, "model.layers.0.self_attn." * 8 + "q_proj!")

        return json.dumps(_changes(_ADAPTER, values))[:300], read

    def table_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Parquet or Arrow file of repeated values, with damaged bytes or without."""
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        copy.mkdir()
        text = "a" * draw(st.sampled_from([0, 1, 1000, 10**6]))
        rows = draw(st.sampled_from([0, 1, 300]))
        column = draw(st.sampled_from([[text] * rows, [[text] * 9] * rows, [{"a": text, "b": None}] * rows]))
        table = pa.table({draw(st.text(min_size=1, max_size=5)) + ESCAPE: column})
        how = draw(st.sampled_from(["parquet", "arrow", "stream.arrow"]))
        file = copy / f"a.{how}"
        if how == "parquet":
            pq.write_table(table, file, compression=draw(st.sampled_from(["zstd", "snappy", "none"])))
        else:
            options = pa.ipc.IpcWriteOptions(compression=draw(st.sampled_from(["zstd", "lz4", None])))
            new = pa.ipc.new_stream if how == "stream.arrow" else pa.ipc.new_file
            with new(str(file), table.schema, options=options) as out:
                out.write_table(table)
        content = bytearray(file.read_bytes())
        for _ in range(draw(st.integers(0, 4))):
            content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
        file.write_bytes(content)

        def read() -> None:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in read_records(file):
                pass
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 1 << 21:
                raise WrongLoad("more than 2 GiB were taken")

        return f"{how}, {rows} rows of {len(text)} characters", read

    def template_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Chat template that applies drawn filters to values that grow."""
        copy.mkdir()
        change = draw(st.sampled_from(_GROWTH))
        use = draw(st.sampled_from(_USES)).replace("X", draw(st.sampled_from(["ns.s", "[ns.s]", "{'a': ns.s}"])))
        first = draw(st.sampled_from(["['a']", "'ab'", "{'a': 1}", "3"]))
        times = draw(st.integers(1, 90))
        text = f"{{% set ns = namespace(s={first}) %}}{{% for i in range({times}) %}}{{% set ns.s = {change} %}}"
        text += f"{{% endfor %}}{use}"

        def read() -> None:
            limits = TemplateLimits(steps=1 << 18, seconds=0.5)
            try:
                TemplateProcess({"default": text}, limits=limits).render("default", {"messages": []})
            except TemplateError as error:
                raise DataError(str(error)) from error

        return text, read

    def generation_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Generation settings of a model, read as by ``d9d generate``, which then generates a few tokens."""
        shutil.copytree(self.model, copy)
        changes: dict[str, Any] = {}
        also = draw(st.sampled_from([True, False, False]))
        for name, fields, most in (
            ("generation_config.json", _GENERATION_FIELDS, 2),
            ("config.json", None, 1 if also else 0),
        ):
            values = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
            for field in draw(st.lists(st.sampled_from(fields or sorted(values)), max_size=most, unique=True)):
                changes[field] = values[field] = draw(_SETTINGS)
            if draw(st.sampled_from([True, *[False] * 9])):
                changes[name] = values = draw(edited(values))
            (copy / name).write_text(json.dumps(values), "utf-8")
        if draw(st.sampled_from([True, *[False] * 9])):
            changes["damaged"] = damage(draw, copy, self.outside)

        def read() -> None:
            with _heard() as said:
                generated(copy, number, further)
            if visible(text := said.getvalue()) != text:
                at = next(at for at, letter in enumerate(text) if visible(letter) != letter)
                raise WrongLoad(f"would reach the terminal: {text[max(0, at - 60) : at + 20]!r}")

        number = draw(st.integers(0, 9))
        further: dict[str, Any] = {}
        if draw(st.sampled_from([True, *[False] * 9])):
            changes["further"] = further = {draw(st.sampled_from(_GENERATION_FIELDS)): draw(_SETTINGS)}
        return json.dumps(changes)[:300], read

    def row_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Corpus records, read by datasets for training or inference; the rows of inference are written."""
        copy.mkdir()
        name = draw(st.sampled_from(sorted(_RECORDS)))
        fields, record = _RECORDS[name]
        lines = [draw(_line(record)) for _ in range(draw(st.integers(1, 5)))]
        file = copy / "a.jsonl"
        file.write_bytes(b"\n".join(lines))
        if draw(st.sampled_from([True, *[False] * 5])):
            file = copy / "a.json"
            file.write_bytes(b"[" + b",".join(lines) + b"]")
        common = {
            "sources": [str(file)], "sequence_length": 32, "malformed": draw(st.sampled_from(["error", "skip"])),
        }  # fmt: skip
        if name in ("chat", "preference"):
            common["tokenizer"] = str(self.chat_tokenizer)
        elif name == "labelled words":
            common["tokenizer"] = "bytes"
        if name == "dataset":
            data: dict[str, Any] = {**fields, "arguments": {"path": str(file)}}
        else:
            data = {**common, **fields}
        if draw(st.sampled_from([True, *[False] * 5])):
            data = {"name": "mixture", "parts": [{"data": data}, {"data": {**data, "shuffle": False}}]}
        one_pass = draw(st.booleans())
        inputs: TextInputs = "own"
        if one_pass:
            inputs = draw(st.sampled_from(["own", "with_end", "as_encoded", "without_end"]))
        texts = draw(st.lists(st.text(), min_size=20, max_size=20))

        def read() -> None:
            notes: list[str] = []
            context = DataContext(
                0, 2, 1, self.root / "cache", note=notes.append, one_pass=one_pass, inputs=inputs
            )  # fmt: skip
            stream = open_dataset(self.registry, data, context)
            if one_pass:
                write_rows(rows_of(stream), texts, copy / "written")
            else:
                for _ in range(3):
                    stream.next_pack()
                stream.load_state(json.loads(json.dumps(stream.state())))
                stream.next_pack()
            (copy / "assets").mkdir()
            stream.save_assets(copy / "assets")

        return f"{name}, {json.dumps(data)[-60:]}: {b' '.join(lines)[:200]!r}", read

    def case(self, kind: str) -> Case:
        """Case of a kind of files."""
        cases = (
            self.job_case, self.model_case, self.checkpoint_case, self.tokenizer_case, self.run_case, self.adapter_case,
            self.table_case, self.template_case, self.generation_case, self.row_case,
        )  # fmt: skip
        return dict(zip(KINDS, cases, strict=True))[kind]


_NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text())
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(["(a*)*b", "((\\w+)+)+$", ".*" * 40]),
    st.lists(st.text(), max_size=3),
    st.dictionaries(st.text(), st.integers(), max_size=3),
)
_ADAPTER = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "bias": "none", "target_modules": ["q_proj"],
    "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "base_model_name_or_path": "x",
}  # fmt: skip
_ADAPTER_FIELDS = (*_ADAPTER, "exclude_modules", "layers_pattern", "layer_replication", "modules_to_save", "new_field")
_GROWTH = (
    "[ns.s, ns.s]", "ns.s ~ ns.s", "{'a': ns.s, 'b': ns.s}", "ns.s + ns.s", "ns.s * 2", "[ns.s] * 9", "ns.s | list",
    "ns.s | string | replace('a', 'aa')", "ns.s | tojson", "(ns.s | string).join('abc')", "ns.s | string | indent(99)",
)  # fmt: skip
_USES = (
    "{{ X }}", "{{ X | tojson }}", "{{ X == X }}", "{{ X < X }}", "{{ X | join(X) }}", "{{ X | string | wordwrap(1) }}",
    "{{ X | pprint }}", "{{ X | string | urlize }}", "{{ X | sort }}", "{{ [X, X] | unique | list }}",
    "{{ X | length }}",
    "{{ (X | string).translate({97: 'b' * 99999}) }}", "{{ strftime_now(X | string) }}", "{{ [X, X] | sum(start=X) }}",
    "{% set a %}{{ X }}{{ X }}{% endset %}{{ a ~ a }}", "{% filter upper %}{{ X }}{% endfilter %}", "{{ '%s' % X }}",
    "{{ X | string | center(9999999) }}", "{{ '{}{}'.format(X, X) }}", "{{ X | string | title }}",
    "{{ X | urlencode }}",
)  # fmt: skip


#: Fields of a generation config; only the library has the full list.
_GENERATION_FIELDS = (
    "num_beams", "num_return_sequences", "num_beam_groups", "max_length", "max_new_tokens", "min_length",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "force_words_ids",
    "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id",
    "do_sample", "use_cache", "early_stopping", "cache_implementation", "cache_config", "guidance_scale",
    "watermarking_config", "constraints", "stop_strings", "penalty_alpha", "dola_layers", "diversity_penalty",
    "max_time", "renormalize_logits", "remove_invalid_values", "return_dict_in_generate", "output_scores",
    "output_attentions", "assistant_early_exit", "prompt_lookup_num_tokens", "num_assistant_tokens",
    "prefill_chunk_size", "compile_config", "disable_compile", "low_memory", "token_healing", "transformers_version",
    "trust_remote_code", "custom_generate", "_from_model_config", "x" + ESCAPE,
)  # fmt: skip
_SETTINGS = st.one_of(
    hostile_values(),
    st.integers(-3, 20),
    st.floats(0, 2),
    st.booleans(),
    st.lists(st.integers(-2, 400), max_size=3),
    st.lists(st.lists(st.integers(-2, 400), max_size=3), max_size=3),
    st.sampled_from(
        [ESCAPE, [ESCAPE], {ESCAPE: ESCAPE}, "static", "dynamic", "quantized", "sliding_window", "offloaded"]
    ),
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MESSAGES = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]
#: Dataset and variant -> its config, and a sound record.
_RECORDS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"name": "text", "field": "text"}, {"text": TEXT, "id": 3}),
    "text, best fit": (
        {"name": "text", "field": "meta.text", "packing": "best_fit"},
        {"meta": {"text": TEXT}, "id": 3},
    ),
    "documents": ({"name": "documents"}, {"text": TEXT[:30], "id": "a"}),
    "documents, drop": ({"name": "documents", "too_long": "drop", "field": "a.b"}, {"a": {"b": "the fox"}}),
    "labelled": ({"name": "labelled"}, {"text": "the fox", "label": "good"}),
    "labelled pairs": ({"name": "labelled", "pair": "other"}, {"text": "the fox", "other": "a dog", "label": 1}),
    "labelled names": ({"name": "labelled", "labels": ["a", ESCAPE]}, {"text": "the fox", "label": ESCAPE}),
    "labelled words": ({"name": "labelled", "per": "word"}, {"tokens": ["the", "fox"], "labels": ["a", -100]}),
    "pairs": ({"name": "pairs", "negatives": 1}, {"query": "the fox", "positive": "runs", "negatives": ["sits"]}),
    "chat": ({"name": "chat"}, {"messages": _MESSAGES, "tools": None}),
    "chat, packed": ({"name": "chat", "packing": "best_fit"}, {"prompt": "why", "completion": "because"}),
    "preference": ({"name": "preference"}, {"prompt": "why", "chosen": "because", "rejected": "no"}),
    "preference of messages": ({"name": "preference"}, {"chosen": _MESSAGES, "rejected": [*_MESSAGES[:1], *_MESSAGES]}),
    "dataset": (
        {"name": "dataset", "build": f"{__name__}:lines_of", "padding": {"tokens": 0}},
        {"tokens": [1, 2], "score": 0.5},
    ),
}
#: Lines that are no valid JSON record.
_LINES = (
    b"", b" ", b"\xff", b"\xef\xbb\xbf{}", b'{"text": "a", "text": "b"}', b'{"text": NaN}',
    b'{"text": 1e999, "label": Infinity}',
    b"[" * 10**4, b'{"text":' * 300 + b"1" + b"}" * 300, b'{"text": "\\ud800"}', b'{"\\udfff": "a", "text": "a"}',
    b'{"text": 1' + b"0" * 5000 + b"}", b"null", b"3", b'"text"', b"{}", b'{"text": "a"}\r', b'{"text": "\0"}',
    b'{"text": "',
    b'{"text": "\\u0000", "label": "\\u001b[2J"}',
)  # fmt: skip


@st.composite
def _line(draw: st.DrawFn, record: Mapping[str, Any]) -> bytes:
    """Line of a corpus: a sound record, an edited one, one with an odd value in a field, or an invalid line."""
    way = draw(st.sampled_from([*["sound"] * 8, "edited", "edited", "odd", "line"]))
    if way == "line":
        return draw(st.sampled_from(_LINES))
    values: Any = draw(edited(record)) if way == "edited" else dict(record)
    if way == "odd":
        values[draw(st.sampled_from([*record, ESCAPE, "rows", "lengths"]))] = draw(hostile_values() | _ODD)
    return json.dumps(values, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


def lines_of(path: str) -> list[Any]:
    """Dataset of the values in a file's lines, as a user-defined function may return it."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]


def open_dataset(registry: Registry, values: Mapping[str, Any], context: DataContext) -> DataStream:
    """Open a dataset in the same way as a job.

    Raises:
        D9dError: the dataset cannot be opened.
    """
    try:
        config = _DATASET.validate_python(values, context={"registry": registry})
    except ValidationError as error:
        raise JobError(str(error)) from error
    parts = [part.data for part in getattr(config, "parts", ())]
    inner = [(Chosen("data.parts", registry.find("dataset", part.selector)), part) for part in parts]
    stream: DataStream = instantiate(Chosen("data", registry.find("dataset", config.selector), inner), config, context)
    return stream


def rows_of(stream: DataStream) -> list[int]:
    """Row indices of one pass.

    Raises:
        DataError: the dataset cannot make a single pass.
        WrongLoad: a row is missing, or appears twice.
    """
    count, samples = stream.facts.get("rows"), stream.facts.get("samples")
    if not isinstance(count, int) or not isinstance(samples, int):
        raise DataError("no pass can be made over it")
    packed, found = stream.facts.get("packed") is True, list[int]()
    for _ in range(samples // 2 + 2):
        for microbatch in stream.next_pack():
            for place, first in enumerate(microbatch["rows"].tolist()):
                rows = int(microbatch["documents"][place].max()) + 1 if packed else 1
                found += range(first, first + rows) if first >= 0 else ()
    if sorted(found) != list(range(count)):
        raise WrongLoad(f"rows {sorted(found)[:20]} of {count}")
    return found


def write_rows(numbers: Sequence[int], texts: Sequence[str], directory: Path) -> None:
    """Write rows in both formats, as an inference run does, and read them back.

    Raises:
        WrongLoad: a row is missing, appears twice or has other values.
    """
    half = len(numbers) // 2
    for writer in (JsonlWriter(JsonlWriterConfig()), ParquetWriter(ParquetWriterConfig())):
        store = PartStore(directory / writer.suffix, writer)
        with store.opened():
            store.begin({})
            for begin, end in ((0, half), (half, len(numbers))) if half else ((0, len(numbers)),):
                rows = list(range(begin, end))
                store.write(begin, end - begin, _columns(rows, texts), {})
            store.finish(len(numbers), {})
        if writer.suffix == ".jsonl":
            found = [parse_json(line, strict=True) for line in store.output.read_bytes().split(b"\n") if line]
        else:
            import pyarrow.parquet as pq

            found = pq.read_table(store.output).to_pylist()
        expected = [text_of(number, texts) for number in range(len(numbers))]
        if [one["row"] for one in found] != list(range(len(numbers))) or [one["text"] for one in found] != expected:
            raise WrongLoad(f"{writer.suffix}: {found[:2]!r}")


def text_of(number: int, texts: Sequence[str]) -> str:
    """Text of a row."""
    return texts[number % len(texts)]


def _columns(rows: Sequence[int], texts: Sequence[str]) -> dict[str, list[Any]]:
    odd = (float("nan"), float("inf"), 1e-320, -0.0, 3.5)
    return {
        "row": list(rows),
        "text": [text_of(row, texts) for row in rows],
        "score": [odd[row % len(odd)] for row in rows],
        "vector": [np.asarray(odd[: row % len(odd)], dtype=np.float32) for row in rows],
        "tokens": [np.arange(row % 3) for row in rows],
    }


def generated(directory: Path, number: int, further: Mapping[str, Any]) -> None:
    """Generate a few tokens with a model, as ``d9d generate --file`` and ``--prompt`` do.

    Args:
        directory: model directory.
        number: random seed.
        further: settings of ``--generation``.

    Raises:
        WrongLoad: the output is not the JSON of the completions.
    """
    model = LanguageModel(directory, directory, None, torch.device("cpu"), None)
    decoding = Decoding(max_new_tokens=3, seed=number, further=further)
    prompt = Prompt("here", {"id": 1}, text="the quick")
    ids = model.encode(prompt, None, None, raw=False)
    model.check_length(ids, 3, "here")
    found = model.complete([ids, ids[:2]], decoding, number)
    if len(found) != 2 or any(len(one) > 3 for one in found):
        raise WrongLoad(f"completions of {[len(one) for one in found]} tokens")
    for one in found:
        json.dumps(row_of(prompt, one, model), ensure_ascii=False).encode()
    model.stream(ids, decoding)


@contextmanager
def _heard() -> Iterator[io.StringIO]:
    """Capture all text that libraries print on the terminal within the block."""
    said, out = io.StringIO(), io.StringIO()
    handlers = [one for one in logging.getLogger("transformers").handlers if isinstance(one, logging.StreamHandler)]
    before = [handler.setStream(said) for handler in handlers]
    with redirect_stderr(said), redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            yield said
        finally:
            for handler, stream in zip(handlers, before, strict=True):
                if stream is not None:
                    handler.setStream(stream)


_DATASET: TypeAdapter[PluginConfig] = TypeAdapter(Annotated[PluginConfig, Named("dataset")])


def _tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(3, 5, generator=generator),
        "model/other": torch.randn(3, 5, generator=generator),
        "model/half": torch.randn(4, generator=generator).bfloat16(),
        "optimizer/step": torch.tensor(float(step)),
        "metrics/empty": torch.zeros(0, 3, dtype=torch.int64),
    }


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if found.keys() != expected.keys():
        raise WrongLoad(f"names: {sorted(found.keys() ^ expected.keys())[:3]}")
    for name, tensor in found.items():
        if not torch.equal(tensor, expected[name]):
            raise WrongLoad(f"values of {name}")


def _changes(before: Any, after: Any) -> Any:
    """Fields of a job that differ, for display."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [
            key for key in {**before, **after} if key not in before or key not in after or before[key] != after[key]
        ]
        return {key: _changes(before.get(key), after.get(key, "absent")) for key in keys}
    return after


def run(examples: Mapping[str, int], number: int) -> dict[str, Report]:
    """Run the campaigns: kind -> number of examples. Only on the main thread."""
    # Warnings of libraries are irrelevant here.
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(), ExitStack() as contexts:
        warnings.simplefilter("ignore")
        root = Path(directory).resolve() / "inside"
        root.mkdir()
        contexts.enter_context(mock.patch.object(tempfile, "tempdir", str(root)))
        sound = Sound(root, discover(PluginPolicy()))
        import_module("torch._inductor.compile_fx")  # takes long; must not be interrupted by a time limit
        if "generations" in examples:
            import_module("transformers").utils.logging.disable_progress_bar()
            with _heard():
                generated(sound.model, 0, {})  # its imports take long
        reports = {}
        for kind, count in examples.items():
            # A job file may name any existing file.
            named = [Path("/etc/passwd"), Path.home()] if kind == "jobs" else []
            judge = Judge(root, *named)
            reports[kind] = campaign(sound.case(kind), count, number, judge, root)
    return reports


def main(arguments: list[str]) -> int:
    """Run the campaigns of the command line, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    examples = {kind: given[kind] for kind in KINDS if given[kind]}
    reports = run(examples or dict.fromkeys(KINDS, 100), given["seed"])
    columns = ("refused", "read", "traceback", "hang", "outside", "wrong")
    print("| files | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for kind, report in reports.items():
        print(f"| {kind} | " + " | ".join(f"{report.counts[column]:,}" for column in columns) + " |")
    for kind, report in reports.items():
        for fault, (times, example) in sorted(report.faults.items(), key=lambda item: -item[1][0]):
            print(f"{kind}: {times} x {fault}\n    {example}")
    return int(any(report.faults for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
