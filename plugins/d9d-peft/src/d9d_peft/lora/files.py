"""Files of low-rank adapters, as the ``peft`` library writes and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from d9d_core.extend import CheckpointError
from d9d_weights import Mapper, Parallel, Rename, Transpose

from d9d_peft.config import LowRankConfig

#: Before the names of a model's modules in an adapter's file.
_PREFIX = "base_model.model."
_WEIGHT = ".weight"


def modules_of(layers: Iterable[str], published: Mapping[str, str]) -> dict[str, str]:
    """Names of adapted layers -> names of the same modules in published models.

    Raises:
        CheckpointError: a layer's weight is no tensor of its own there.
    """
    found = {layer: published.get(f"{layer}{_WEIGHT}", "") for layer in layers}
    if other := [layer for layer, name in found.items() if not name.endswith(_WEIGHT)]:
        raise CheckpointError(
            f"published files do not hold the weight of '{other[0]}' as it is, so an adapter's file has no place for "
            "its term; export the merged model, or exclude that layer"
        )
    return {layer: name.removesuffix(_WEIGHT) for layer, name in found.items()}


def config_json(config: LowRankConfig, modules: Mapping[str, str]) -> dict[str, Any]:
    """Contents of ``adapter_config.json``; modules as :func:`modules_of` names them."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "target_modules": sorted(modules.values()),
        "r": config.r,
        "lora_alpha": config.alpha,
        "use_rslora": config.rs_lora,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def exporter(layers: Mapping[str, tuple[str, Mapping[str, tuple[str, bool]]]]) -> Mapper:
    """Mapper from our names to those in the file.

    Args:
        layers: name of an adapted layer -> name of the module in published models, and its tensors as
            :attr:`d9d_peft.lora.linear.Adapted.lora_files` has them.
    """
    mappers: list[Mapper] = []
    for ours, (theirs, tensors) in layers.items():
        for name, (there, transposed) in tensors.items():
            source, target = f"{ours}.{name}", f"{_PREFIX}{theirs}.{there}"
            mappers.append(Transpose(source, to=target) if transposed else Rename(source, target))
    return Parallel(*mappers)


def check_config(config: LowRankConfig, data: Mapping[str, Any], use_dora: bool = False) -> None:
    """Compare a config with an ``adapter_config.json``.

    Raises:
        CheckpointError: the adapter is none of low rank, has another rank or scale, lacks magnitudes, or has parts that
            we do not have.
    """
    if data.get("peft_type") != "LORA":
        raise CheckpointError(f"it is an adapter of the kind {data.get('peft_type')!r}, and peft is '{config.name}'")
    if use_dora and not data.get("use_dora"):
        raise CheckpointError("it has no magnitudes (use_dora), and peft is 'dora'; start 'lora' from it")
    wanted = {"r": config.r, "lora_alpha": config.alpha, "use_rslora": config.rs_lora}
    names = {"r": "r", "lora_alpha": "alpha", "use_rslora": "rs_lora"}
    there = {field: data.get(field, False) for field in wanted}
    if other := [names[field] for field, value in wanted.items() if there[field] != value]:
        values = ", ".join(f"peft.{names[field]}: {value!r}" for field, value in there.items())
        raise CheckpointError(f"its {', '.join(other)} differ from the job's; the adapter has {values}")
    known = {"use_dora"} if use_dora else set()
    unknown = [field for field, harmless in _MUST_BE.items() if data.get(field) not in harmless and field not in known]
    if unknown:
        values = ", ".join(f"{field}={data[field]!r}" for field in unknown)
        raise CheckpointError(f"it has {values}, which peft '{config.name}' has not")


#: Fields of the library that change what is computed -> values with which they do not.
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}),
}
