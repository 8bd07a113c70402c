"""Feeds the readers of files with hostile ones and prints a table of what they did.

    uv run python tools/hostile_campaign.py --jobs 10000 --models 2000 --checkpoints 1000 --tokenizers 1000
    uv run python tools/hostile_campaign.py --models 200 --seed 7
    uv run python tools/hostile_campaign.py --runs 500 --adapters 2000 --tables 500 --templates 300

A file must be refused by one of the project's own errors, or be read. Exit status 1: a traceback, a reader that takes
more than ten seconds, a file read or written that is none of the campaign's, or values that the undamaged file has not.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from d9d_core.config.pretrained import read_config_json
from d9d_core.config.schema import job_schema
from d9d_core.errors import DataError
from d9d_core.plugin.loader import discover
from d9d_core.plugin.policy import PluginPolicy
from d9d_core.plugin.registry import Registry
from d9d_core.untrusted import visible
from d9d_data.sources.records import read_records
from d9d_data.tokenizer.file import find_tokenizer_file, load_tokenizer
from d9d_engine.api import Job
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.checkpoint.tensors import CheckpointTensors
from d9d_engine.cli.tensors import Conversion, convert_state
from d9d_engine.report import facts
from d9d_engine.runs.record import find_runs
from d9d_testing.hostile.files import Draw, damage, damage_checkpoint
from d9d_testing.hostile.judge import Judge, Verdict, WrongLoad
from d9d_testing.hostile.values import edited, edited_job
from d9d_weights import TemplateError, TemplateLimits, TemplateProcess
from d9d_weights.hugging_face.adapter_bounds import bounded_fields
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.index import read_object
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps. " * 8
KINDS = ("jobs", "models", "checkpoints", "tokenizers", "runs", "adapters", "tables", "templates")
#: Text that would control a terminal.
ESCAPE = "\x1b]0;x\x07"
#: Damages a copy of the sound files with what it draws: what was done, and the reader to judge.
Case = Callable[[Draw, Path], tuple[str, Callable[[], object]]]


class Report:
    """Report of one campaign.

    Attributes:
        counts: verdict -> how often.
        faults: verdict and place -> how often, and one example.
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
    """Judge a reader on many files.

    Args:
        case: draws and damages.
        examples: how many files.
        number: seed.
        judge: of the reader.
        work: a directory for copies.
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
    """Sound files that are damaged: a job, a model of it, checkpoints and tokenizers. Made by a short training.

    Args:
        root: a directory to make them in.
        registry: of all plugins.
    """

    def __init__(self, root: Path, registry: Registry) -> None:
        self.root = root
        self.registry = registry
        (root / "corpus").mkdir()
        for number in range(12):
            (root / "corpus" / f"{number}.txt").write_text(f"{number}: {TEXT}")
        self.outside = root.parent / "outside"
        self.outside.write_text("nobody reads this")
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
        """Job file as the schema allows it, or not."""
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
            if how.startswith("link of") and file.is_symlink():  # weights may be links: they are read as tensors only
                file.unlink()
                file.symlink_to(self.model / file.name)
        job = {**self.job, "model": {"name": "qwen3", "pretrained": str(copy)}}

        def read() -> None:
            tensors = self.tensors_of(copy)
            read_config_json(str(copy))
            self.load(job, self.root / "pretrained.json").plan()
            # An index without a name is a model without it, which the plan refuses.
            if ".safetensors" not in how or ".json" in how:
                _compare(tensors, self.specs)

        return how, read

    def checkpoint_case(self, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
        """Checkpoints, one of them damaged; a run goes on from them and saves."""
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
        """Directory of a run with damaged files, as listed, compared and reported."""
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
                told += [facts.layout(record), facts.start_up(record), facts.plugins(record), facts.environment(record)]
                shown = visible(str(told) + facts.job(record) + facts.overview({"a": record}))
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
                if isinstance(text, str):  # as the library matches it, with the longest names there are
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
        """Chat template that applies what it can to values that grow."""
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

    def case(self, kind: str) -> Case:
        """Case of a kind of files."""
        cases = (
            self.job_case, self.model_case, self.checkpoint_case, self.tokenizer_case, self.run_case, self.adapter_case,
            self.table_case, self.template_case,
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
    """Fields of a job that differ, for people."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [
            key for key in {**before, **after} if key not in before or key not in after or before[key] != after[key]
        ]
        return {key: _changes(before.get(key), after.get(key, "absent")) for key in keys}
    return after


def run(examples: Mapping[str, int], number: int) -> dict[str, Report]:
    """Run campaigns: kind -> examples. Main thread only."""
    # What libraries warn of is no concern here.
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = Path(directory).resolve() / "inside"
        root.mkdir()
        sound = Sound(root, discover(PluginPolicy()))
        import_module("torch._inductor.compile_fx")  # long, and not to be interrupted in the middle
        reports = {}
        for kind, count in examples.items():
            # Whoever writes a job file may name any file in it.
            named = [Path("/etc/passwd"), Path.home()] if kind == "jobs" else []
            judge = Judge(root, *named)
            reports[kind] = campaign(sound.case(kind), count, number, judge, root)
    return reports


def main(arguments: list[str]) -> int:
    """Run and print."""
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
