"""Jobs of benchmarks as rows of a table, and the parts of these jobs."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

# Models of the comparison with other libraries.
sys.path.append(str(Path(__file__).parent / "compare"))

from d9d_core.registry.registry import Registry
from random_tokens import Synthetic
from settings import BETAS, CLIP, DECAY, LR, MODELS

PLUGINS = (
    "d9d_nn",
    "d9d_optim",
    "d9d_parallel",
    "d9d_pipeline",
    "d9d_moe",
    "d9d_qwen3",
    "d9d_qwen3_next",
    "d9d_llama",
    "d9d_peft",
)
#: Optional packages, used if installed, as in a job.
OPTIONAL = ("d9d_triton", "d9d_grouped_gemm", "d9d_flash_attention", "d9d_quack", "d9d_cublas")
#: Large models that no other library trains here.
LARGE: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": {**MODELS["moe-5.6b"], "num_layers": 48},
    "qwen3-32b": {
        **MODELS["dense-2b"], "hidden_size": 5120, "intermediate_size": 25_600, "num_layers": 64,
        "num_attention_heads": 64,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """Job of a benchmark.

    Attributes:
        model: name in :data:`settings.MODELS` or :data:`LARGE`.
        samples: samples of a step; of each data-parallel rank, if there are several.
        length: positions of a sample.
        microbatch: samples of a forward; all of a rank's, if absent.
        layers: number of layers; by default the model's own.
        compiled: whether blocks are compiled.
        recomputed: whether activations are computed again in the backward.
        optimizer: name of the optimizer.
        precision: ``bfloat16`` or ``float32``: format of parameters and states; ``autocast``: float32, cast to
            bfloat16.
        peft: fine-tuning method; its values as in a job file.
        mesh: axes with several ranks, and their sizes.
        parallel: strategies of the layout, by name or as in a job file.
        schedule: schedule of the pipeline.
        document: positions of each of the documents that are packed into samples; a sample is one, if absent.
    """

    model: str
    samples: int
    length: int
    microbatch: int | None = None
    layers: int | None = None
    compiled: bool = False
    recomputed: bool = False
    optimizer: str = "adamw"
    precision: Literal["bfloat16", "float32", "autocast"] = "bfloat16"
    peft: tuple[tuple[str, Any], ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    parallel: tuple[str | Mapping[str, Any], ...] = ()
    schedule: str | None = None
    document: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        """Row from values that went through JSON, which has no tuples."""
        pairs = {name: tuple(map(tuple, values[name])) for name in ("peft", "mesh")}
        return cls(**{**values, **pairs, "parallel": tuple(values["parallel"])})

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return math.prod(size for axis, size in self.mesh if axis != "ep")

    @property
    def only_transfers(self) -> bool:
        """Whether stages exchange nothing but activations and their gradients, while other streams compute."""
        return self.schedule == "1f1b" and self.ranks == dict(self.mesh)["pp"]

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.samples * self.data_parallel * self.length

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks."""
        return math.prod(size for axis, size in self.mesh if axis in ("dp_replicate", "dp_shard"))

    @property
    def name(self) -> str:
        """Name in tables: ``dense-2b 4x4096 compiled sgd``."""
        parts = [self.model, f"{self.samples}x{self.length}"]
        parts += [f"by {self.microbatch}"] if self.microbatch else []
        parts += [f"{self.layers} layers"] if self.layers else []
        parts += [f"documents of {self.document}"] if self.document else []
        parts += ["compiled"] * self.compiled + ["recomputed"] * self.recomputed
        parts += [self.optimizer] if self.optimizer != "adamw" else []
        parts += [self.precision] if self.precision != "bfloat16" else []
        parts += [str(value) for key, value in self.peft if key == "name"]
        parts += [f"{axis}={size}" for axis, size in self.mesh]
        parts += [one if isinstance(one, str) else _described(one) for one in self.parallel]
        return " ".join([*parts, *([self.schedule] if self.schedule else [])])

    def values(self, directory: str, device: str) -> dict[str, Any]:
        """Values of the job file."""
        model = {**{**MODELS, **LARGE}[self.model], "max_positions": self.length}
        if self.layers is not None:
            model["num_layers"] = self.layers
        autocast = {"autocast": "bfloat16"} if self.precision == "autocast" else {}
        wide = self.precision in ("autocast", "float32")
        values: dict[str, Any] = {
            "run": {"dir": directory},
            "device": device,
            "steps": 10_000,
            "mesh": dict(self.mesh),
            "batch": {"size": self.samples * self.data_parallel, "microbatch": self.microbatch or self.samples},
            "parallel": [
                *self.parallel, *["activation_checkpointing"] * self.recomputed, *["compile"] * self.compiled
            ],
            "precision": {"parameters": "float32" if wide else "bfloat16", **autocast},
            "model": model,
            "task": "causal_lm",
            "data": {
                "name": "random_tokens", "vocab_size": model["vocab_size"], "sequence_length": self.length,
                "document": self.document,
            },
            "optimizer": _optimizer(self.optimizer),
            "gradient_clipping": {"max_norm": CLIP},
            "trackers": [],
            "export": False,
        }  # fmt: skip
        schedule = {"pipeline": self.schedule} if self.schedule else {}
        return values | schedule | ({"peft": dict(self.peft)} if self.peft else {})


def _described(strategy: Mapping[str, Any]) -> str:
    """Name of a strategy with its given fields: ``fsdp(reduce_dtype=float32)``."""
    return f"{strategy['name']}({', '.join(f'{key}={value}' for key, value in strategy.items() if key != 'name')})"


def _optimizer(name: str) -> dict[str, Any]:
    """Section ``optimizer``; ``stochastic_adamw narrow`` keeps moments in the parameters' dtype."""
    name, _, narrow = name.partition(" ")
    more: dict[str, Any] = {"betas": list(BETAS)} if name in ("adamw", "stochastic_adamw") else {}
    more |= {"state_dtype": "parameter"} if narrow else {}
    return {"name": name, "lr": LR, "weight_decay": DECAY, **more}


#: LoRA of rank 16.
LORA = (("name", "lora"), ("r", 16), ("alpha", 32))
#: Rows of different kinds come first, so that a few rows cover most of them.
ROWS = (
    Row("dense-2b", 4, 4096, compiled=True),
    Row("moe-5.6b", 4, 4096, compiled=True),
    Row("dense-0.6b", 4, 4096),
    Row("dense-1.7b", 8, 4096, compiled=True, recomputed=True),
    Row("dense-1.7b", 4, 4096, compiled=True, precision="autocast"),
    Row("dense-2b", 4, 4096, compiled=True, peft=LORA),
    Row("moe-5.6b", 8, 1024, optimizer="stochastic_adamw"),
    Row("dense-2b", 1, 16_384, recomputed=True, optimizer="sgd"),
    Row("dense-1.7b", 8, 4096, microbatch=2),
    Row("dense-0.6b", 1, 1024, compiled=True),
    Row("moe-5.6b", 1, 16_384, recomputed=True, compiled=True),
    Row("dense-0.6b", 4, 1024, precision="float32"),
    Row("dense-2b", 8, 1024, optimizer="stochastic_adamw"),
    Row("moe-5.6b", 2, 4096, layers=4, optimizer="sgd", precision="autocast"),
    Row("dense-2b", 8, 4096, recomputed=True, peft=LORA),
    Row("dense-0.6b", 2, 16_384, compiled=True),
    Row("dense-0.6b", 4, 4096, optimizer="muon"),
    Row("dense-1.7b", 1, 16_384),
)
#: A few small rows, which a CPU trains in seconds.
TINY = (
    Row("tiny", 2, 64),
    Row("tiny-moe", 2, 64, optimizer="sgd", precision="float32"),
    Row("tiny", 4, 32, microbatch=2, recomputed=True, peft=LORA),
)


def registry() -> Registry:
    """Registry of the plugins that these jobs use."""
    found = [name for name in OPTIONAL if find_spec(name)]
    return Registry.of(*(importlib.import_module(f"{name}.plugin") for name in (*PLUGINS, *found)), Synthetic())
