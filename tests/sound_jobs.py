"""Random sound jobs over everything that is installed: each component with random values of its own fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from d9d_core.config import PluginConfig
from d9d_core.errors import D9dError
from d9d_core.grid import AXES
from d9d_core.job_file.lookup import config_schema, load_config
from d9d_core.plugin import ModelSpec, StrategySpec
from d9d_core.registry.capabilities import missing_modules
from d9d_core.registry.entries import Entry
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from pydantic import TypeAdapter, ValidationError

#: Texts that a careless writer of YAML leaves without quotes, or that a reader takes for something else.
TEXTS = ("1e3", "3e-4", "1_000", "yes", "null", "~", "0x1F", "2026-01-01", "12:30:00", "=", "<<", "é", "a: b", "#x",
         " x ", "", "-", "\t", "line\nline", "\x85", "\u2028", "\ufeffx", "\x00", "\U0001f600", "inf", ".nan",
         "*")  # fmt: skip
#: Fields whose texts mean something, by name.
MEANINGFUL: dict[str, tuple[Any, ...]] = {
    "sources": (["x"],), "tokenizer": (None, "bytes", {"bpe": 300}), "target": ("torch.optim.RAdam",),
    "match": ("*", "*embed*"), "targets": ("*", ["*q_proj"]), "field": (None, "text", "1e3"), "build": ("json:loads",),
    "values": ("targets", "labels"), "weights": ("targets", "labels"), "mask": (None, "targets"), "pretrained": (None,),
    "sequence_length": (8, 16, 64), "pad_multiple": (1, 8), "prompts": (["a", "b"],), "file": (None,),
    "function": (None, "torch:sub"), "curve": ("linear", "cosine", "poly"),
    "end_of_text": (None, "<|endoftext|>"), "series": ("loss", "eval/loss"), "init_from": (None,), "preset": (None,),
}  # fmt: skip
_SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_layers": 2,
    "max_positions": 64,
}  # fmt: skip
#: Fields of models that others must fit, so that random values would hardly ever do.
_MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**_SIZES, "intermediate_size": 64},
    "qwen3_moe": {**_SIZES, "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 32},
    "transformers": {
        "config": {
            "model_type": "llama",
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
    },
}
_SECTIONS = {
    "task": "task", "data": "dataset", "optimizer": "optimizer", "lr_schedule": "lr schedule", "pipeline": "schedule",
    "peft": "peft method",
}  # fmt: skip
_PLAIN = (
    "run", "batch", "gradient_clipping", "gradients", "logging", "checkpoint", "precision", "timeouts", "loading",
    "profiling", "garbage_collection", "seed", "deterministic", "nonfinite",
)  # fmt: skip
_LISTS = {"parallel": "strategy", "metrics": "metric", "trackers": "tracker", "subscribers": "subscriber"}
_TRIES = 60
_DRAWS = 500


class SoundJobs:
    """Draws of sound jobs: values of a job file that pass the checks which need no tensors.

    Args:
        seed: of all draws.
    """

    def __init__(self, seed: int) -> None:
        self.registry: Registry = discover(PluginPolicy())
        self._random = Random(seed)
        self._schema = Job.model_json_schema()
        self._sections = {name: TypeAdapter[Any](Job.model_fields[name].annotation) for name in _PLAIN}
        self._schemas: dict[tuple[str, str], dict[str, Any]] = {}
        self._where = {kind: (section, False) for section, kind in _SECTIONS.items()}
        self._where |= {kind: (section, True) for section, kind in _LISTS.items()} | {"model": ("model", False)}

    def draw(self, kind: str = "", name: str = "") -> Job:
        """Draw until a job is sound; it has a component of this kind and name, if they are given."""
        for _ in range(_DRAWS):
            values = self._job()
            if kind in self._where:
                section, several = self._where[kind]
                values[section] = [self.component(kind, name)] if several else self.component(kind, name)
            if kind == "schedule":  # some need more microbatches than a random batch often has
                values["batch"] = {"size": 16, "microbatch": self._random.choice((1, 2))}
            self._use_axes(values)
            try:
                job = Job.from_values(values, registry=self.registry)
                job.check()
            except D9dError:
                continue
            return job
        raise AssertionError(f"none of {_DRAWS} jobs with {kind} {name} is sound")

    def kinds(self) -> dict[str, list[str]]:
        """Kinds of components of a job -> names of installed components."""
        return {
            kind: [entry.spec.key for entry in self.registry.entries(kind) if not missing_modules(entry.spec)]
            for kind in self._where
        }

    def _job(self) -> dict[str, Any]:
        random = self._random
        values: dict[str, Any] = {"model": self.component("model"), **self._plain()}
        for section, kind in _SECTIONS.items():
            if section not in ("lr_schedule", "pipeline", "peft") or random.random() < 0.3:
                values[section] = self.component(kind)
        for section, kind in _LISTS.items():
            if random.random() < 0.5:
                values[section] = [self.component(kind) for _ in range(random.randint(0, 2))]
        if random.random() < 0.3:
            values["evaluation"] = {"every": 2, "data": self.component("dataset")}
        values["steps" if random.random() < 0.8 else "epochs"] = random.randint(1, 50)
        return {name: values[name] for name in random.sample(list(values), len(values))}

    def _plain(self) -> dict[str, Any]:
        """Sections without components, with random values."""
        plain: dict[str, Any] = {}
        for name in _PLAIN:
            for _ in range(_TRIES if self._random.random() < 0.4 else 0):
                value = self._value(self._schema["properties"][name], self._schema["$defs"], name)
                try:
                    self._sections[name].validate_python(value)
                except ValidationError:
                    continue
                plain[name] = value
                break
        return plain

    def _use_axes(self, values: dict[str, Any]) -> None:
        """Give the axes that the job's strategies and schedule use two ranks each, if they use any."""
        used = {"pp"} if "pipeline" in values else set()
        for strategy in values.get("parallel", []):
            spec = self.registry.find("strategy", strategy["name"]).spec
            assert isinstance(spec, StrategySpec)
            used |= set(spec.axes)
        values["mesh"] = {axis: self._random.choice((1, 2)) for axis in sorted(used) if axis in AXES}

    def component(self, kind: str, name: str = "") -> dict[str, Any]:
        """Values of a random component of a kind, of this name if one is given, valid alone."""
        while True:
            entry = self._random.choice([e for e in self.registry.entries(kind) if name in ("", e.spec.key)])
            for _ in range(_TRIES):
                fields = self._fields(entry)
                if self._is_valid(entry, fields):
                    return {"name": entry.spec.key, **fields}

    def _fields(self, entry: Entry) -> dict[str, Any]:
        key = (entry.kind.name, str(entry))
        if key not in self._schemas:
            self._schemas[key] = config_schema(entry)
        schema = self._schemas[key]
        own = self._sizes(entry) if isinstance(entry.spec, ModelSpec) else {}
        required = schema.get("required", [])
        share = self._random.choice((0.0, 0.1, 0.3, 0.8))
        return own | {
            name: self._value(field, schema.get("$defs", {}), name)
            for name, field in schema["properties"].items()
            if name != "name" and name not in own and (name in required or self._random.random() < share)
        }

    def _sizes(self, entry: Entry) -> dict[str, Any]:
        """Fields of a model that others must fit: of its tiny config, with enough tokens for bytes."""
        assert isinstance(entry.spec, ModelSpec)
        if entry.spec.key in _MODELS or entry.spec.tiny is None:
            return _MODELS.get(entry.spec.key, {})
        config = entry.spec.tiny.load()()
        fields = config.model_dump(mode="json", include=config.model_fields_set - {"name"})
        return fields | {name: _SIZES[name] for name in ("vocab_size", "max_positions") if name in fields}

    def _is_valid(self, entry: Entry, fields: dict[str, Any]) -> bool:
        try:
            config = load_config(entry).model_validate(
                {"name": entry.spec.key, **fields}, context={"registry": self.registry}
            )
        except (ValidationError, D9dError):
            return False
        assert isinstance(config, PluginConfig)
        return True

    def _value(self, schema: dict[str, Any], definitions: dict[str, Any], name: str = "") -> Any:
        random = self._random
        if name in MEANINGFUL:
            return random.choice(MEANINGFUL[name])
        if "$ref" in schema:
            return self._value(definitions[schema["$ref"].rpartition("/")[2]], definitions, name)
        if "x-d9d-kind" in schema:
            return self.component(schema["x-d9d-kind"])
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self._value(random.choice(schema[several]), definitions, "")
        if "const" in schema or "enum" in schema:
            return schema.get("const", random.choice(schema.get("enum", [None])))
        make: dict[str, Callable[[], Any]] = {
            "integer": lambda: self._integer(schema),
            "number": lambda: self._number(schema),
            "boolean": lambda: random.random() < 0.5,
            "null": lambda: None,
            "string": lambda: random.choice(["x", "run-1", "1e3"]) if "pattern" in schema else random.choice(TEXTS),
            "array": lambda: self._list(schema, definitions),
            "object": lambda: self._mapping(schema, definitions),
        }
        kind = schema.get("type")
        return make[kind]() if kind else self._anything()

    def _integer(self, schema: dict[str, Any]) -> int:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        return self._random.choice((low, low + 1, low + 2, self._random.randint(low, low + 64)))

    def _number(self, schema: dict[str, Any]) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1e-9) + 1e-9)
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 10.0))
        tiny = low + (high - low) * 1e-7
        if self._random.random() < 0.03:
            return self._random.choice((math.inf, -math.inf, math.nan))
        return self._random.choice((low, high, tiny, self._random.uniform(low, high)))

    def _list(self, schema: dict[str, Any], definitions: dict[str, Any]) -> list[Any]:
        if "prefixItems" in schema:
            return [self._value(item, definitions) for item in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        count = self._random.randint(least, max(least, 2))
        return [self._value(schema.get("items", {}), definitions) for _ in range(count)]

    def _mapping(self, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
        if "properties" in schema:
            required = schema.get("required", [])
            return {
                name: self._value(field, definitions, name)
                for name, field in schema["properties"].items()
                if name in required or self._random.random() < 0.4
            }
        items = next(iter(schema.get("patternProperties", {}).values()), schema.get("additionalProperties"))
        names = self._random.sample(("a", "loss", "1e3", "null"), self._random.randint(0, 2))
        return {name: self._value(items if isinstance(items, dict) else {}, definitions) for name in names}

    def _anything(self) -> Any:
        return self._random.choice((1, 2.5, "x", None, True, [1, "1e3"], {"a": 1e-7}, math.inf, [math.nan]))
