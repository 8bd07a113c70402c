"""Untrusted files, sound and damaged, and the commands that read them, for ``tools/strangers_table.py``."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import yaml
from d9d_testing.hostile.bombs import BOMBS
from d9d_testing.hostile.strangers import (
    ADAPTERS,
    CANARY,
    CONFIGS,
    ESCAPE,
    JOBS,
    TOKENIZERS,
    change_json,
    replace_file,
    weights,
)  # fmt: skip
from d9d_testing.hostile.templates import ATTACKS
from d9d_testing.published import write_published

#: Name of the undamaged file.
SOUND = "sound"
#: Content of a private file, which no command may read or write.
MARKS = "only the user reads this"
_TEXT = "the quick brown fox jumps over the lazy dog"


class Sound:
    """Undamaged files: a model directory, a run that trained an adapter, and a corpus.

    Args:
        root: directory to create them in.
    """

    def __init__(self, root: Path) -> None:
        from d9d_engine.job import Job

        root.mkdir(parents=True)
        self.model = write_published(root / "model")
        self.corpus = root / "corpus" / "a.jsonl"
        self.corpus.parent.mkdir()
        turns = [{"role": "user", "content": _TEXT}, {"role": "assistant", "content": _TEXT}]
        self.corpus.write_text(
            "".join(json.dumps({"text": f"{n} {_TEXT}", "messages": turns}) + "\n" for n in range(8))
        )
        work = Work(root / "work", self)
        work.make("model", None)
        job = work.job(model=str(self.model), chat=True, runs=root, peft={"name": "lora", "r": 2})
        Job.load(job).build(note=lambda _: None).train()
        self.run = root / "run"
        self.adapter = self.run / "adapter"
        shutil.rmtree(work.root)


class Work:
    """Working directory of one cell.

    Args:
        root: the directory.
        sound: undamaged files to copy.

    Attributes:
        place: copy of the files, or of the single file.
        out: directory for the output of commands.
        canary: file that code inside an untrusted file would create.
        victim: private file that links point to.
    """

    def __init__(self, root: Path, sound: Sound) -> None:
        self.root, self.sound = root, sound
        self.place, self.out = root / "place", root / "out"
        self.canary, self.victim = root / CANARY, root / "victim"

    def make(self, family: str, damage: Callable[[Work], Any] | None) -> None:
        """Copy the undamaged files of a family, and damage them; for a corpus, use the file that its damage returns."""
        self.out.mkdir(parents=True)
        self.victim.write_text(MARKS)
        source = {"run": "run", "adapter": "adapter", "corpus": "corpus"}.get(family, "model")
        if source == "corpus":
            self.place.mkdir()
            self.place = self.place / "a.jsonl" if damage is None else damage(self)
            if damage is None:
                shutil.copy(self.sound.corpus, self.place)
            return
        copied = getattr(self.sound, source)
        shutil.copytree(copied, self.place)
        if damage is not None:
            damage(self)

    def job(
        self, model: str | None = None, data: Mapping[str, Any] | None = None, chat: bool = False,
        runs: Path | None = None, **sections: Any,
    ) -> str:  # fmt: skip
        """Write a job that trains on the corpus from a model, and return its path."""
        read = {"name": "chat"} if chat else {"name": "text", "field": "text"}
        values = {
            "run": {"name": "run", "dir": str(runs or self.out)}, "device": "cpu", "steps": 1,
            "batch": {"size": 2, "microbatch": 2},
            "model": {"name": "qwen3", "pretrained": model or str(self.sound.model)}, "task": "causal_lm",
            "data": {**read, "sources": [str(self.sound.corpus)], "sequence_length": 120, **(data or {})},
            "optimizer": "adamw", "checkpoint": {"every": 1}, "trackers": [{"name": "jsonl", "picture": False}],
            **sections,
        }  # fmt: skip
        file = self.out / "job.json"
        file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
        return str(file)

    def inference(self, task: str, **values: Any) -> str:
        """Write an inference job, and return its path."""
        dropped: dict[str, Any] = dict.fromkeys(("steps", "optimizer", "checkpoint", "trackers"))
        generates = {"name": "generations", "max_new_tokens": 1} if task == "generations" else task
        data = {"name": "documents", **values.pop("data", {})}
        return self.job(data=data, task=generates, writer="jsonl", **dropped, **values)


# --- commands

Commands = Mapping[str, Callable[[Work], list[str]]]
_GENERATE = ["--prompt", _TEXT, "--device", "cpu", "--max-new-tokens", "1"]


def _trained(**job: Callable[[Work], Any]) -> Commands:
    """Commands that read a job whose fields refer to the files."""

    def of(*words: str, chat: bool = True) -> Callable[[Work], list[str]]:
        def arguments(work: Work) -> list[str]:
            return [*words[:-1], words[-1], work.job(chat=chat, **{name: make(work) for name, make in job.items()})]

        return arguments

    return {
        "check": of("check"), "explain": of("explain"), "plan": of("plan"), "data show": of("data", "show"),
        "verify": of("verify"), "train": of("train"),
    }  # fmt: skip


def _place(work: Work) -> str:
    return str(work.place)


_STATE: Commands = {
    "state show": lambda w: ["state", "show", str(w.place)],
    "state diff": lambda w: ["state", "diff", str(w.place), str(w.sound.model)],
    "state convert": lambda w: ["state", "convert", str(w.place), str(w.out / "converted")],
}
_MODEL: Commands = {
    **_trained(model=_place),
    **_STATE,
    "infer, log_probs": lambda w: ["infer", w.inference("log_probs", model=str(w.place))],
    "infer, generations": lambda w: ["infer", w.inference("generations", model=str(w.place))],
    "evaluate": lambda w: ["evaluate", str(w.place), "--data", str(w.sound.corpus)],
    "generate": lambda w: ["generate", str(w.place), *_GENERATE],
}
_RUN: Commands = {
    "runs list": lambda w: ["runs", "list", str(w.place)],
    "runs compare": lambda w: ["runs", "compare", str(w.place), str(w.sound.run)],
    "report": lambda w: ["report", str(w.place), "--output", str(w.out / "page.html")],
    "report in place": lambda w: ["report", str(w.place)],
    **_STATE,
    "check": _trained(model=_place)["check"],
    "train": _trained(model=_place)["train"],
    "evaluate": lambda w: ["evaluate", str(w.place)],
    "generate": lambda w: ["generate", str(w.place), *_GENERATE],
    "infer, log_probs": lambda w: ["infer", w.inference("log_probs", model=str(w.place))],
    "train on in the run": lambda w: [
        "train",
        w.job(chat=True, peft={"name": "lora", "r": 2}, steps=2, run={"name": "place", "dir": str(w.root)}),
    ],
    "doctor": lambda _: ["doctor"],
    "plugins list": lambda _: ["plugins", "list"],
}  # fmt: skip
_TUNED = _trained(peft=lambda w: {"name": "lora", "r": 2, "init_from": str(w.place)})
_ADAPTER: Commands = {
    **{name: _TUNED[name] for name in ("check", "explain", "train")},
    "state show": _STATE["state show"],
    "generate": lambda w: ["generate", str(w.place), "--base", str(w.sound.model), *_GENERATE],
}
_READ: dict[str, Callable[[Work], Any]] = {"data": lambda w: {"sources": [str(w.place)]}}
_CORPUS: Commands = {
    **{name: make for name, make in _trained(**_READ).items() if name in ("check", "data show")},
    "train": lambda w: ["train", w.job(data={"sources": [str(w.place)]})],
    "infer, log_probs": lambda w: ["infer", w.inference("log_probs", data={"sources": [str(w.place)]})],
    "evaluate": lambda w: ["evaluate", str(w.sound.model), "--data", str(w.place)],
}
_TEMPLATE: Commands = {
    **{name: _MODEL[name] for name in ("check", "data show", "train", "evaluate", "generate")},
}

# --- damage

Damage = Callable[[Work], Any]


def _replaced(name: str, kind: str) -> Damage:
    return lambda work: replace_file(work.place / name, kind, work.victim)


def _changed(name: str, value: Any) -> Damage:
    def change(work: Work) -> None:
        if isinstance(value, dict):
            change_json(work.place / name, value)
        else:
            (work.place / name).write_text(value if isinstance(value, str) else json.dumps(value))

    return change


def _written(name: str, content: Callable[[], bytes], size: int = 0) -> Damage:
    """Damage that writes a file, and extends it sparsely with zeros to ``size``."""

    def write(work: Work) -> Path:
        (work.place / name).write_bytes(content())
        if size:
            with (work.place / name).open("r+b") as file:
                file.truncate(size)
        return work.place / name

    return write


def _header(header: Any, claimed: int | None = None) -> Callable[[], bytes]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda: struct.pack("<Q", len(text) if claimed is None else claimed) + text + bytes(64)


def _tensor(shape: list[int], size: int) -> Callable[[], bytes]:
    return _header({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}})


def _job(sections: Mapping[str, Any]) -> Damage:
    def write(work: Work) -> None:
        code = f"open({str(work.canary)!r}, 'w')"
        (work.place / "stranger.py").write_text(code)
        text = json.dumps(sections).replace(f'"{CANARY}"', json.dumps(str(work.canary)))
        file = work.place / "job.yaml"
        values = yaml.safe_load(file.read_text()) if file.is_file() else json.loads(Path(work.job()).read_text())
        file.write_text(yaml.safe_dump({**values, **json.loads(text)}))

    return write


def _modules(work: Work) -> None:
    """Create modules named like imports of the commands in their working directory."""
    for name in ("json", "torch", "jinja2", "d9d_core", "d9d_data", "d9d_weights", "sitecustomize", "typing"):
        (work.place / f"{name}.py").write_text(f"open({str(work.canary)!r}, 'w')\nraise ImportError")


def _pickled(name: str, sound: str) -> Damage:
    def write(work: Work) -> None:
        (work.place / sound).unlink()
        (work.place / name).write_bytes(f"cos\nsystem\n(S'touch {work.canary}'\ntR.".encode())

    return write


def _named(name: str) -> Damage:
    return lambda work: weights(work.place / name, f"a{ESCAPE}b")


_NESTED = b"[" * 1_000_000 + b"]" * 1_000_000
_VALUES = b"[" + b"0," * 20_000_000 + b"0]"
_HUGE = 1 << 40
_WEIGHTS: Mapping[str, Callable[[], bytes]] = {
    "a header of 2 ** 62 bytes": _header({}, 2**62),
    "a header of 90 MB": _header(b'{"a":' + b" " * 90_000_000 + b"0}"),
    "a tensor of 2 ** 40 rows": _tensor([_HUGE], 4 * _HUGE),
    "a tensor of no bytes and 2 ** 40 rows": _tensor([_HUGE, 0], 0),
    "a nested header": _header(_NESTED),
}  # fmt: skip
_CONFIGS = (
    "many beams", "a billion layers", "a huge matrix", "code of its own", "ends that are lists of lists",
    "a negative size", "rotary settings that are a number", "a tokenizer of an unknown class",
)  # fmt: skip
_MODEL_FILES: Mapping[str, Damage] = {
    **{f"job.yaml with {name}": _job(JOBS[name]) for name in ("a plugin file", "data that calls a function")},
    "modules in the working directory": _modules,
    **{
        f"{name} is a {kind}": _replaced(name, kind)
        for kind, names in {
            "pipe": ("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
                     "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
            "device": ("config.json", "model.safetensors", "tokenizer.json"),
            "link": ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"),
        }.items()
        for name in names
    },
    "config.json of 1 GB": _written("config.json", lambda: b"{}", 1 << 30),
    "tokenizer.json of 1 GB": _written("tokenizer.json", lambda: b"{}", 1 << 30),
    "config.json nested": _written("config.json", lambda: _NESTED),
    "tokenizer_config.json nested": _written("tokenizer_config.json", lambda: _NESTED),
    "generation_config.json of 20 million values": _written("generation_config.json", lambda: _VALUES),
    "config.json of a vocabulary of 10 ** 9": _changed("config.json", {"vocab_size": 10**9}),
    "config.json with escapes": _changed("config.json", {"model_type": ESCAPE, "architectures": [ESCAPE]}),
    **{f"{CONFIGS[name][0]}: {name}": _changed(*CONFIGS[name]) for name in _CONFIGS},
    **{f"tokenizer.json: {name}": _changed("tokenizer.json", dict(change)) for name, change in TOKENIZERS.items()},
    "weights as a pickle": _pickled("pytorch_model.bin", "model.safetensors"),
    "a pickle called model.safetensors": _pickled("model.safetensors", "model.safetensors"),
    "names of tensors with escapes": _named("model.safetensors"),
    **{f"model.safetensors: {name}": _written("model.safetensors", made) for name, made in _WEIGHTS.items()},
}  # fmt: skip
_STEP = "checkpoints/step-00000001"
_RUN_FILES: Mapping[str, Damage] = {
    **{
        f"job.yaml with {name}": _job(JOBS[name])
        for name in ("a plugin file", "data that calls a function", "a metric that imports", "weights at an address")
    },
    "modules in the working directory": _modules,
    **{
        f"{name} is a {kind}": _replaced(name, kind)
        for kind, names in {
            "pipe": ("job.yaml", "metrics.jsonl", "plugins.json", "finished.json", "checkpoints/.lock",
                     f"{_STEP}/manifest.json", f"{_STEP}/tensors-00000.safetensors", "adapter/adapter_config.json"),
            "device": ("job.yaml", "metrics.jsonl", "startup.json", "tokenizer/tokenizer.json"),
            "link": ("job.yaml", "metrics.jsonl", "plugins.json", "startup.json", "finished.json", "report.html",
                     "checkpoints/.lock", f"{_STEP}/manifest.json", "model/config.json"),
        }.items()
        for name in names
    },
    "metrics.jsonl of one line of 1 GB": _written("metrics.jsonl", lambda: b'{"step":1,"loss":', 1 << 30),
    "metrics.jsonl nested": _written("metrics.jsonl", lambda: _NESTED),
    "metrics.jsonl of 200,000 series": _written(
        "metrics.jsonl", lambda: json.dumps({"step": 1, **{f"s{n}": n for n in range(200_000)}}).encode()
    ),
    "metrics.jsonl of a step 10 ** 18": _changed(
        "metrics.jsonl", f'{{"step": 1, "loss": 1}}\n{{"step": {10**18}, "loss": 1}}\n'
    ),
    "metrics.jsonl with escapes": _changed("metrics.jsonl", json.dumps({"step": 1, f"lo{ESCAPE}ss": 2.0}) + "\n"),
    "job.yaml of aliases that double": _changed(
        "job.yaml", "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    ),
    "job.yaml nested": _written("job.yaml", lambda: _NESTED),
    "job.yaml with escapes": _job({"model": {"name": "qwen3", "preset": ESCAPE}, "task": ESCAPE}),
    "job.yaml that makes an object": _changed("job.yaml", "!!python/object/apply:os.system ['touch canary']\n"),
    "weights of a step as a pickle": _pickled(
        f"{_STEP}/tensors-00000.safetensors", f"{_STEP}/tensors-00000.safetensors"
    ),
    "state.json of a step nested": _written(f"{_STEP}/state.json", lambda: _NESTED),
}  # fmt: skip
_ADAPTER_FILES: Mapping[str, Damage] = {
    **{name: _changed("adapter_config.json", change) for name, change in ADAPTERS.items()},
    "adapter_model.bin": _pickled("adapter_model.bin", "adapter_model.safetensors"),
    "a pickle called adapter_model.safetensors": _pickled("adapter_model.safetensors", "adapter_model.safetensors"),
    "names of tensors with escapes": _named("adapter_model.safetensors"),
    "a config with escapes": _changed("adapter_config.json", {"base_model_name_or_path": ESCAPE, "peft_type": ESCAPE}),
    "a base at an address": _changed("adapter_config.json", {"base_model_name_or_path": "https://localhost:1/x"}),
    "a config that is a pipe": _replaced("adapter_config.json", "pipe"),
    "weights that are a device": _replaced("adapter_model.safetensors", "device"),
    "a config that is a link": _replaced("adapter_config.json", "link"),
    **{name: _written("adapter_model.safetensors", made) for name, made in _WEIGHTS.items()},
}  # fmt: skip


def _bomb(name: str) -> Damage:
    def write(work: Work) -> Path:
        BOMBS[name][0](work.place / name)
        return work.place / name

    return write


def _zone(work: Work) -> Path:
    times = pa.array([0], pa.timestamp("us", tz="Nowhere/Land"))
    pq.write_table(pa.table({"text": ["x"], "messages": ["x"], "at": times}), work.place / "a.parquet")
    return work.place / "a.parquet"


def _corpus_pipe(work: Work, kind: str) -> Path:
    replace_file(work.place / "a.jsonl", kind, work.victim)
    return work.place / "a.jsonl"


def _zstd(work: Work) -> Path:
    file = work.place / "a.jsonl.zst"
    with pa.CompressedOutputStream(str(file), "zstd") as out:
        for _ in range(80):
            out.write(b"0" * (1 << 24))
    return file


_CORPUS_FILES: Mapping[str, Damage] = {
    **{name: _bomb(name) for name in BOMBS},
    "a line of 1 GB": _written("a.jsonl", lambda: b'{"text": "', 1 << 30),
    "a text of 1 GB": _written("a.txt", lambda: b"x", 1 << 30),
    "a value of 1 GB": _written("a.json", lambda: b'[{"text": "', 1 << 30),
    "a nested line": _written("a.jsonl", lambda: _NESTED + b"\n"),
    "a zstd bomb": _zstd,
    "a bomb in a bomb": _written("a.jsonl.gz", lambda: gzip.compress(gzip.compress(bytes(1 << 28)))),
    "an unknown time zone": _zone,
    "a pipe": partial(_corpus_pipe, kind="pipe"),
    "a device": partial(_corpus_pipe, kind="device"),
    "escapes": _written(
        "a.jsonl", lambda: json.dumps({"text": ESCAPE, "messages": [{"role": ESCAPE}]}).encode()
    ),
    "a name with escapes": _written(f"a{ESCAPE.replace('/', '')}.jsonl", lambda: b"{\n"),
}  # fmt: skip


_ATTACKS = (
    "nested lists as JSON", "nested lists compared", "join of many long texts", "block sets", "macros", "splits",
    "sum of squares of time", "urlize of a long word", "powers of a number", "bytes of a long text",
)  # fmt: skip
_TEMPLATE_FILES: Mapping[str, Damage] = {
    **{name: _changed("chat_template.jinja", ATTACKS[name]) for name in _ATTACKS},
    "escapes": _changed("chat_template.jinja", f"{{{{ raise_exception({ESCAPE!r}) }}}}"),
    "a template of 1 GB": _written("chat_template.jinja", lambda: b"x", 1 << 30),
    "a nested template": _changed("chat_template.jinja", "{{" + "(" * 100_000 + ")" * 100_000 + "}}"),
    "attributes of Python": _changed("chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
}

#: Family of files -> damage by name, and the commands that read the files.
FAMILIES: Mapping[str, tuple[Mapping[str, Damage], Commands]] = {
    "model": (_MODEL_FILES, _MODEL),
    "run": (_RUN_FILES, _RUN),
    "adapter": (_ADAPTER_FILES, _ADAPTER),
    "corpus": (_CORPUS_FILES, _CORPUS),
    "template": (_TEMPLATE_FILES, _TEMPLATE),
}

_ALL = ""
_TOKENISED = "data show|^train|infer|evaluate|generate|convert"
#: Family of files -> patterns of file names -> pattern of the commands that read such files; the first match counts.
READERS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "sound": _ALL,
        "^job.yaml|^modules|^config.json is|^config.json of 1|^config.json nested": _ALL,
        "^config.json": "check|plan|data show|^train|show|evaluate|generate",
        "^generation_config": "generat|convert|^train",
        "^chat_template": "data show|^train|generate|convert",
        "^tokenizer": _TOKENISED,
        "": "check|^train|show|convert|diff|generate",
    },
    "run": {
        "sound": _ALL,
        "^job.yaml with|^modules|^job.yaml is": _ALL,
        "^checkpoints|step": "runs list|report$|show|convert|evaluate|generate|train on",
        "^tokenizer|^adapter|^model": "generate|evaluate|show|check|^train$|infer",
        "": "runs|report|train on|show",
    },
    "adapter": {"address|escapes|pipe|device|link|pickle|.bin|sound": _ALL, "": "check|^train|generate"},
}


def is_read(family: str, file: str, command: str) -> bool:
    """Whether a command reads a file of a family."""
    found = (commands for names, commands in READERS.get(family, {}).items() if re.search(names, file))
    return bool(re.search(next(found, _ALL), command))
