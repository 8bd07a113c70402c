"""Loss curves of the same job in several settings: the default kernels, the references of all ops, and float8.

    python tools/bench/loss_curves.py                                    fast, reference and fp8-rowwise; three seeds
    python tools/bench/loss_curves.py --moe --settings fast reference
    python tools/bench/loss_curves.py --settings fast fp8-rowwise fp8-blockwise fp8-tensorwise --seeds 5

A Qwen3 learns English and Python from the texts of the Python installation, with documents packed into samples: on CUDA
a model of 12 layers of 1,024 features, in seconds per curve; elsewhere a tiny model. For each seed, the settings share
initial weights and data. A difference between settings is relevant only if it is larger than the noise, the standard
deviation of the first setting's losses over seeds. Needs d9d-data, d9d-optim, d9d-qwen3 and for float8 d9d-fp8; the
result is one JSON file, and a picture where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job

PLUGINS = ("d9d_nn", "d9d_data", "d9d_optim", "d9d_parallel", "d9d_moe", "d9d_qwen3")
OPTIONAL = ("d9d_triton", "d9d_cublas", "d9d_flash_attention", "d9d_quack", "d9d_fp8")
SOURCES = ["python:topics", "python:docstrings", "python:sources"]
FLOAT8 = "fp8-"
SETTINGS = (
    "fast",
    "reference",
    *(f"{FLOAT8}{recipe}" for recipe in ("rowwise", "rowwise_gw_hp", "tensorwise", "blockwise")),
)
#: Window of the moving average: single losses depend more on their batch than on the setting.
WINDOW = 10
Curves = Mapping[str, Sequence[Sequence[float]]]

_CUDA = {"hidden": 1024, "layers": 12, "heads": 8, "vocabulary": 4096, "length": 1024, "samples": 16, "lr": 6e-4}
_CPU = {"hidden": 128, "layers": 2, "heads": 2, "vocabulary": 512, "length": 64, "samples": 8, "lr": 3e-3}


def values_of(options: argparse.Namespace, setting: str, seed: int, directory: str) -> dict[str, Any]:
    """Values of the job of one curve, without the choice of kernels."""
    cuda = options.device == "cuda"
    float8 = setting.startswith(FLOAT8)
    strategies: list[dict[str, Any]] = []
    kernels: dict[str, str] = {}
    if float8:
        strategies.append({"name": "fp8", "recipe": setting.removeprefix(FLOAT8), "emulate": not cuda})
        if options.moe:
            kernels["grouped_linear"] = "fp8" if cuda else "fp8_emulated"
    if cuda and setting != "reference":
        strategies.append({"name": "compile"})
    model: dict[str, Any] = {
        "name": "qwen3", "vocab_size": options.vocabulary, "hidden_size": options.hidden, "num_layers": options.layers,
        "num_attention_heads": options.heads, "num_key_value_heads": max(1, options.heads // 2), "head_dim": 128,
        "max_positions": options.length, "tie_embeddings": True,
    }  # fmt: skip
    if options.moe:
        model |= {
            "name": "qwen3_moe", "num_experts": 16, "experts_per_token": 4, "moe_intermediate_size": options.hidden,
            "balancing": [{"name": "auxiliary_loss", "coefficient": 0.01}],
        }  # fmt: skip
    else:
        model["intermediate_size"] = 3 * options.hidden
    return {
        "run": {"dir": directory},
        "device": options.device,
        "seed": seed,
        "steps": options.steps,
        "batch": {"size": options.samples},
        "parallel": strategies,
        "kernels": kernels,
        "precision": {"parameters": "bfloat16"} if options.precision == "bfloat16" else {"autocast": "bfloat16"},
        "model": model,
        "task": "causal_lm",
        "data": {
            "name": "text", "sources": SOURCES if cuda else SOURCES[:1], "sequence_length": options.length,
            "tokenizer": {"bpe": options.vocabulary},
        },
        "optimizer": {"name": "adamw", "lr": options.lr, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        "lr_schedule": {"name": "cosine", "warmup_steps": options.steps // 10},
        "gradient_clipping": {"max_norm": 1.0},
        "trackers": [],
        "export": False,
    }  # fmt: skip


def curve_of(options: argparse.Namespace, setting: str, seed: int) -> list[float]:
    """Losses of all steps."""
    here = [name for name in OPTIONAL if find_spec(name)]
    registry = Registry.of(*(importlib.import_module(f"{name}.plugin") for name in (*PLUGINS, *here)))
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as directory:
        values = values_of(options, setting, seed, directory)
        if setting == "reference":
            ops = {choice.op for choice in Job.from_values(values, registry=registry).plan().kernels}
            values["kernels"] = dict.fromkeys(sorted(ops), "reference")
        with Job.from_values(values, registry=registry).build(lambda _: None) as trainer:
            losses: list[float] = torch.stack([result.loss for result in trainer.steps()]).tolist()
    return losses


def smooth(losses: Sequence[float], step: int) -> float:
    """Mean loss of the window that ends with a step, counted from 1."""
    return statistics.fmean(losses[max(0, step - WINDOW) : step])


def compared(curves: Curves, steps: Sequence[int]) -> dict[str, Any]:
    """Mean losses of each setting, and their distance from the first setting's.

    Args:
        curves: setting -> the losses of each seed.
        steps: steps at which losses are compared.

    Returns:
        ``noise``, the standard deviation of the first setting's losses over seeds, root mean square over the steps;
        absent with one seed. For each setting ``losses``, means over seeds. For each setting except the first also
        ``differences`` from the first setting, means over the pairs of one seed; ``largest``, the largest difference;
        and ``over_noise``, the largest difference divided by the noise of such a mean.
    """
    base, *others = curves
    at = {name: [[smooth(curve, step) for step in steps] for curve in found] for name, found in curves.items()}
    seeds = len(at[base])
    result: dict[str, Any] = {"steps": list(steps), "base": base, "settings": {}}
    noise = None
    if seeds > 1:
        noise = statistics.fmean(statistics.variance(column) for column in zip(*at[base], strict=True)) ** 0.5
        result["noise"] = noise
    for name in (base, *others):
        entry: dict[str, Any] = {"losses": [statistics.fmean(column) for column in zip(*at[name], strict=True)]}
        if name != base:
            pairs = [
                [mine - its for mine, its in zip(*rows, strict=True)] for rows in zip(at[name], at[base], strict=True)
            ]
            entry["differences"] = [statistics.fmean(column) for column in zip(*pairs, strict=True)]
            entry["largest"] = max(entry["differences"], key=abs)
            if noise:
                entry["over_noise"] = abs(entry["largest"]) / (noise / seeds**0.5)
        result["settings"][name] = entry
    return result


def table_of(result: Mapping[str, Any]) -> str:
    """Text of a comparison."""
    lines = [f"{'step':>16}" + "".join(f"{step:>9}" for step in result["steps"])]
    for name, entry in result["settings"].items():
        lines.append(f"{name:>16}" + "".join(f"{loss:9.4f}" for loss in entry["losses"]))
    for name, entry in result["settings"].items():
        if "differences" in entry:
            lines.append(f"{name + ' -':>16}" + "".join(f"{loss:+9.4f}" for loss in entry["differences"]))
    if "noise" in result:
        lines.append(f"noise of a seed: {result['noise']:.4f}")
    for name, entry in result["settings"].items():
        if "largest" in entry:
            over = f", {entry['over_noise']:.2f} of the noise of a mean over seeds" if "over_noise" in entry else ""
            lines.append(f"{name} against {result['base']}: at most {entry['largest']:+.4f}{over}")
    return "\n".join(lines)


def draw(curves: Curves, path: Path) -> None:
    """Draw the means over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, found in curves.items():
        means = [statistics.fmean(column) for column in zip(*found, strict=True)]
        axes.plot([smooth(means, step) for step in range(1, len(means) + 1)], label=name, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, mean of {WINDOW} steps")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Train all curves and compare them."""
    options = _options()
    curves: dict[str, list[list[float]]] = {name: [] for name in options.settings}
    for seed in range(options.seeds):  # alternates settings, so that an interrupted run has complete seeds of all
        for setting in options.settings:
            started = time.perf_counter()
            curves[setting].append(curve_of(options, setting, seed))
            final = smooth(curves[setting][-1], options.steps)
            print(f"seed {seed}, {setting}: {final:.4f} in {time.perf_counter() - started:.0f} s", flush=True)
    steps = [options.steps * part // 6 for part in range(1, 7)]
    result = compared(curves, steps)
    print(table_of(result))
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    name = f"{'moe' if options.moe else 'dense'}-{options.precision}"
    options.folder.mkdir(parents=True, exist_ok=True)
    facts = {"device": machine, "torch": torch.__version__, "options": {**vars(options), "folder": str(options.folder)}}
    path = options.folder / f"{name}.json"
    path.write_text(json.dumps({**facts, **result, "curves": curves}, indent=1) + "\n", "utf-8")
    print(f"written: {path}")
    if find_spec("matplotlib"):
        draw(curves, path.with_suffix(".svg"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Loss curves of one job in several settings.")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["fast", "reference", f"{FLOAT8}rowwise"])
    parser.add_argument(
        "--moe", action="store_true", help="experts in all layers, in float8 too where linear layers are"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--precision", choices=("autocast", "bfloat16"), default="autocast", help="of the parameters")
    parser.add_argument("--folder", type=Path, default=Path("runs", "loss-curves"), help="where the results go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in _CPU.items():
        parser.add_argument(f"--{name}", type=type(value), help=f"by default {_CUDA[name]} on CUDA, else {value}")
    options = parser.parse_args()
    for name, value in (_CUDA if options.device == "cuda" else _CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    main()
