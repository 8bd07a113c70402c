"""Contender d9d: a job as users write it."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from contender import Contender, NotHereError, installed
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from microbatches import ComparedPlugin
from settings import ALPHA, BETAS, CLIP, DECAY, LR, PLUGINS, RANK, RECIPE, Setting
from torch import Tensor

REQUIRED = (
    "d9d_nn", "d9d_optim", "d9d_parallel", "d9d_moe", "d9d_peft", "d9d_transformers", *sorted(set(PLUGINS.values())),
)  # fmt: skip
#: Optional packages, used if installed, as in a job.
OPTIONAL = ("d9d_triton", "d9d_grouped_gemm", "d9d_flash_attention", "d9d_fp8", "d9d_quack", "d9d_cublas", "d9d_fla")
#: Bytes per parameter: reads parameter, gradient and lower bits (2 each), moments (4 each); writes all but the
#: gradient.
BYTES_WITH_MASTERS = 14 + 12


def build(setting: Setting, device: torch.device) -> Contender:
    """Contender with compiled blocks."""
    return _build(setting, device, [{"name": "compile", "backend": setting.backend}])


def build_transformers(setting: Setting, device: torch.device) -> Contender:
    """Contender with compiled blocks of transformers' model, by d9d-transformers."""
    values = setting.files().config_json(setting.config(), "bfloat16")
    return _build(
        setting,
        device,
        [{"name": "compile", "backend": setting.backend}],
        model={"name": "transformers", "config": values},
    )


def build_eager(setting: Setting, device: torch.device) -> Contender:
    """Contender without compilation."""
    return _build(setting, device, [])


def build_masters(setting: Setting, device: torch.device) -> Contender:
    """Contender with master weights instead of autocast: bfloat16 parameters, lower bits in the optimizer."""
    if setting.precision != "autocast":
        raise NotHereError("master weights are another way to train float32 ones: give --precision autocast")
    return _build(setting, device, [{"name": "compile", "backend": setting.backend}], masters=True)


def build_attention_kept(setting: Setting, device: torch.device) -> Contender:
    """Contender whose checkpointed blocks keep the outputs of attention."""
    if not setting.checkpointed:
        raise NotHereError("nothing is computed again at this length")
    return _build(setting, device, [{"name": "compile", "backend": setting.backend}], {"save": ["attention"]})


def build_fewer_blocks(setting: Setting, device: torch.device) -> Contender:
    """Contender that checkpoints the first 20 blocks only, and keeps the outputs of attention there."""
    if not setting.checkpointed:
        raise NotHereError("nothing is computed again at this length")
    chosen = {"match": ["layers.?", "layers.1?"], "save": ["attention"]}
    return _build(setting, device, [{"name": "compile", "backend": setting.backend}], chosen)


def _build(
    setting: Setting,
    device: torch.device,
    strategies: list[dict[str, Any]],
    checkpointing: Mapping[str, Any] = MappingProxyType({}),
    *,
    masters: bool = False,
    model: dict[str, Any] | None = None,
) -> Contender:
    recomputed = [{"name": "activation_checkpointing", **checkpointing}] if setting.checkpointed else []
    with tempfile.TemporaryDirectory() as directory:
        trainer = _job(setting, device, recomputed + strategies, directory, masters, model).build(lambda _: None)
    numbers = count()

    def step() -> Tensor:
        # Steps of a training run; between two steps the loop logs, evaluates and saves, unlike the other contenders.
        loss: Tensor = trainer.step(next(numbers), trainer.prefetcher.next()).loss
        return loss

    # Mark the phases of a profiled step as the loop does, so that the table by kind recognises the optimizer.
    trainer.step.ranges.on = True
    kernels = sorted({f"{slot.op} {slot.backend}" for slot in _slots(trainer.stage) if slot.backend != "reference"})
    named = dict(trainer.stage.named_parameters())
    parameters = sum(parameter.numel() for name, parameter in named.items() if "lora_" not in name)
    trained = (
        sum(parameter.numel() for parameter in named.values() if parameter.requires_grad) if setting.lora else None
    )
    moved = BYTES_WITH_MASTERS if masters else None
    return Contender(step, parameters, installed("d9d-engine"), ", ".join(kernels), moved, trained)


def _job(
    setting: Setting,
    device: torch.device,
    strategies: list[dict[str, Any]],
    directory: str,
    masters: bool,
    model: dict[str, Any] | None,
) -> Job:
    float8 = []
    if setting.precision == "fp8":
        installed("d9d-fp8")
        float8 = [{"name": "fp8", "recipe": RECIPE, "emulate": device.type != "cuda"}]
    autocast = setting.precision == "autocast" and not masters
    values = {
        "run": {"dir": directory},
        "device": device.type,
        "steps": 10_000,
        "batch": {"size": setting.samples},
        "parallel": float8 + strategies,
        "precision": {"autocast": "bfloat16"} if autocast else {"parameters": "bfloat16"},
        "model": setting.model_values if model is None else model,
        "task": "causal_lm",
        "data": {
            "name": "compared", "model": setting.model, "sequence_length": setting.length,
            "samples": setting.samples, "data": setting.data,
        },
        "optimizer": {
            "name": "adamw", "lr": LR, "weight_decay": DECAY, "betas": list(BETAS), "master_weights": masters,
        },
        "peft": {"name": "lora", "r": RANK, "alpha": ALPHA} if setting.lora else None,
        "gradient_clipping": {"max_norm": CLIP},
        "trackers": [],
        "export": False,
    }  # fmt: skip
    found = [name for name in OPTIONAL if find_spec(name)]
    plugins = [importlib.import_module(f"{name}.plugin") for name in (*REQUIRED, *found)]
    return Job.from_values(values, registry=Registry.of(*plugins, ComparedPlugin()))


def _slots(stage: torch.nn.Module) -> list[Any]:
    from d9d_core.traits import HasOps, modules_with

    return [slot for module in modules_with(stage, HasOps).values() for slot in module.op_slots().values()]
