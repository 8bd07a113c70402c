"""Damaged jobs, models, checkpoints, tokenizers, runs, adapters, tables and templates, and their readers."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from d9d_core.errors import DataError
from d9d_core.job_file.pretrained import read_config_json
from d9d_core.untrusted import visible
from d9d_data.sources.records import read_records
from d9d_data.tokenizer.file import find_tokenizer_file, load_tokenizer
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.job import Job
from d9d_reports.report import facts, summary
from d9d_reports.runs.record import find_runs
from d9d_testing.hostile.files import Draw, damage, damage_checkpoint
from d9d_testing.hostile.judge import WrongLoad
from d9d_testing.hostile.values import edited, edited_job
from d9d_weights.checkpoint.tensors import CheckpointTensors
from d9d_weights.hugging_face.adapter_bounds import bounded_fields
from d9d_weights.hugging_face.index import read_object
from d9d_weights.templates.process import TemplateError, TemplateLimits, TemplateProcess
from hostile_sound import ESCAPE, ODD, Sound, changes_of, saved_tensors
from hypothesis import strategies as st
from torch import Tensor

_NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text())
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


def job_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
    """Job file with drawn edits, valid or invalid by the schema."""
    values = draw(edited_job(sound.job, sound.schema))
    copy.mkdir()
    file = copy / draw(st.sampled_from(["job.json", "job.yaml"]))
    file.write_text(json.dumps(values), "utf-8")
    return json.dumps(changes_of(sound.job, values))[:300], lambda: Job.load(file, registry=sound.registry).plan()


def model_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
    """Model directory with one damaged file."""
    shutil.copytree(sound.model, copy)
    how = damage(draw, copy, sound.outside)
    for file in copy.glob("*.safetensors"):
        if how.startswith("link of") and file.is_symlink():  # weights may be links: only tensors are read
            file.unlink()
            file.symlink_to(sound.model / file.name)
    job = {**sound.job, "model": {"name": "qwen3", "pretrained": str(copy)}}

    def read() -> None:
        tensors = sound.tensors_of(copy)
        read_config_json(str(copy))
        sound.load(job, sound.root / "pretrained.json").plan()
        # An index without a tensor's name describes a model without that tensor, which the plan refuses.
        if ".safetensors" not in how or ".json" in how:
            _compare(tensors, sound.specs)

    return how, read


def checkpoint_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
    """Checkpoints with one damaged; a run resumes from them and saves."""
    shutil.copytree(sound.checkpoints, copy)
    how = damage_checkpoint(draw, copy, sound.outside)

    def read() -> None:
        store = CheckpointStore(copy, keep=2)
        store.prepare()
        with store.opened():
            found = store.newest(lambda _: None)
            if found is not None:
                tensors = {name: torch.full_like(value, 99) for name, value in saved_tensors(0).items()}
                found.load_into(tensors)
                found.values()
                if not how.startswith("consistent"):
                    _compare(tensors, sound.saved.get(found.step, {}))
                store.set_aside(newer_than=found.step)
            store.save(12, saved_tensors(12), {}, {})
        again = store.newest(lambda _: None)
        assert again is not None
        with CheckpointTensors(copy) as opened:
            into = torch.empty(3, 5)
            opened.read("model/weight", [0, 0], into)
            _compare({"model/weight": into}, {"model/weight": saved_tensors(12)["model/weight"]})

    return how, read


def tokenizer_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
    """Tokenizer with one damaged file."""
    copy.mkdir()
    for file in sound.model.glob("tokenizer*"):
        shutil.copy(file, copy)
    how = damage(draw, copy, sound.outside)

    def read() -> None:
        tokenizer = load_tokenizer(find_tokenizer_file(str(copy)), None)
        tokenizer.encode(["the quick é", ""])
        tokenizer.save(copy / "again")

    return how, read


def run_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:
    """Run directory with damaged files, which is listed, compared and reported."""
    shutil.copytree(sound.root / "runs" / "sound", copy / "sound")
    run = copy / "sound"
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 1.0 / n}) + "\n" for n in range(1, 9)))
    (copy / "failures.json").write_text(json.dumps({"sound": f"killed {ESCAPE}"}))
    how = damage(draw, copy, sound.outside)
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


def adapter_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:  # noqa: ARG001
    """Fields of an adapter's config, and names of its tensors."""
    values = draw(edited({**_ADAPTER, draw(st.sampled_from(_ADAPTER_FIELDS)): draw(ODD)}))
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

    return json.dumps(changes_of(_ADAPTER, values))[:300], read


def table_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:  # noqa: ARG001
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


def template_case(sound: Sound, draw: Draw, copy: Path) -> tuple[str, Callable[[], object]]:  # noqa: ARG001
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


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if found.keys() != expected.keys():
        raise WrongLoad(f"names: {sorted(found.keys() ^ expected.keys())[:3]}")
    for name, tensor in found.items():
        if not torch.equal(tensor, expected[name]):
            raise WrongLoad(f"values of {name}")
