"""Files of low-rank adapters, in the format of the ``peft`` library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_core.traits import HasBanks, modules_with
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.mappers import Rename, Transpose
from d9d_weights.graph.merging import Unstack
from d9d_weights.hugging_face.adapter_config import check_adapter_config, module_values
from torch import nn

from d9d_peft.config import LowRankConfig
from d9d_peft.lora.linear import LORA_A, LORA_B
from d9d_peft.lora.merging import TERMS

#: Prefix of module names in an adapter file.
_PREFIX = "base_model.model."
_WEIGHT = ".weight"


def modules_of(layers: Iterable[str], published: Mapping[str, str]) -> dict[str, str]:
    """Names of the adapted modules in published models, by the names of the layers in d9d.

    Raises:
        CheckpointError: the weight of a layer is not one tensor in published files.
    """
    found = {layer: published.get(f"{layer}{_WEIGHT}", "") for layer in layers}
    if other := [layer for layer, name in found.items() if not name.endswith(_WEIGHT)]:
        raise CheckpointError(
            f"published files do not have the weight of '{other[0]}' as one tensor, so an adapter file cannot hold "
            "its update; export the merged model, or exclude that layer"
        )
    return {layer: name.removesuffix(_WEIGHT) for layer, name in found.items()}


def check_no_expert(stage: nn.Module, modules: Iterable[str]) -> None:
    """Check that the ``peft`` library does not mistake an adapted layer for a matrix of experts.

    For models in which transformers stacks the matrices of experts, the library recognises these matrices only by the
    last part of their names, and loses the updates of other layers with such a name.

    Raises:
        CheckpointError: the last part of an adapted layer's name is the name of an expert matrix.
    """
    banks = {bank for owner in modules_with(stage, HasBanks).values() for bank in owner.banks()}
    for module in modules:
        if module.rpartition(".")[2] in banks:
            raise CheckpointError(
                f"the peft library would take '{module}' for a matrix of experts, because of its name, and lose its "
                "update; exclude such layers, or export the merged model"
            )


def experts_of(stage: nn.Module, published: Mapping[str, str], config: LowRankConfig) -> dict[str, tuple[int, str]]:
    """For each adapted parameter of stacked expert weights, the number of experts and an expert's module in files.

    The module's name has ``*`` instead of the expert's number. A file has an update for each matrix of each expert,
    because published files store a matrix for each expert. If transformers stacks the experts of a layer in one tensor,
    the ``peft`` library stacks the updates; then the library needs updates of all expert weights of the layer, with
    ``r`` and ``alpha`` of the config, and does not support the scale of rsLoRA.

    Raises:
        CheckpointError: some expert weights of a layer have no update, a pattern changes their rank or alpha, the scale
            is rsLoRA's, or published files do not have a matrix per expert.
    """
    found: dict[str, tuple[int, str]] = {}
    for name, owner in modules_with(stage, HasBanks).items():
        banks, terms = owner.banks(), owner.bank_terms()
        for bank in terms:
            there = published.get(f"{name}.{bank}", "")
            if lacking := sorted(banks.keys() - terms.keys()):
                raise CheckpointError(
                    f"the peft library joins the experts' {', '.join(banks)}, so an adapter needs updates of all or "
                    f"none; add {', '.join(lacking)} to peft.targets, or export the merged model"
                )
            own = config.rank_of(f"{name}.{bank}"), config.alpha_of(f"{name}.{bank}")
            if own != (config.r, config.alpha):
                raise CheckpointError(
                    f"the peft library joins the LoRA matrices of all experts and knows their rank and alpha by r and "
                    f"lora_alpha only, but a pattern selects '{name}.{bank}'; correct peft.rank_pattern and "
                    "peft.alpha_pattern, or export the merged model"
                )
            if config.rs_lora:
                raise CheckpointError(
                    "the peft library joins the LoRA matrices of all experts to a matrix of higher rank, for which "
                    "rs_lora gives another scale; remove rs_lora and choose alpha, or export the merged model"
                )
            if "*" not in there or not there.endswith(_WEIGHT):
                raise CheckpointError(
                    f"published files do not have a matrix of '{name}.{bank}' for each expert, so an adapter file "
                    "cannot hold their updates; export the merged model, or exclude experts"
                )
            found[f"{name}{TERMS}{bank}"] = banks[bank].shape[0], there.removesuffix(_WEIGHT)
    return found


def modules_of_experts(pattern: str, count: int) -> list[str]:
    """Names of the modules of all experts, in order."""
    return [pattern.replace("*", str(number)) for number in range(count)]


def config_json(
    config: LowRankConfig, modules: Mapping[str, str], experts: Iterable[str] = (), saved: Iterable[str] = ()
) -> dict[str, Any]:
    """Contents of the ``adapter_config.json`` of LoRA files.

    Args:
        config: config of the method.
        modules: names of the adapted modules in published models, by the names of the layers in d9d.
        experts: names of the adapted experts' modules in published models. The library supports no dropout for them.
        saved: names, in published models, of the parameters of ``modules_to_save``.
    """
    experts = list(experts)
    # In the library, a key of rank_pattern or alpha_pattern also selects modules whose names end with a dot and the
    # key, unless the key begins with ^.
    ends = {name[place + 1 :] for name in modules.values() for place, character in enumerate(name) if character == "."}
    keys = {ours: f"^{there}" if there in ends else there for ours, there in modules.items()}
    ranks = {key: config.rank_of(ours) for ours, key in keys.items()}
    alphas = {key: config.alpha_of(ours) for ours, key in keys.items()}
    return {
        "peft_type": "LORA",
        "target_modules": sorted([*modules.values(), *experts]),
        "r": config.r,
        "lora_alpha": config.alpha,
        "use_rslora": config.rs_lora,
        "rank_pattern": {key: rank for key, rank in ranks.items() if rank != config.r},
        "alpha_pattern": {key: alpha for key, alpha in alphas.items() if alpha != config.alpha},
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None,
        "lora_dropout": 0.0 if experts else config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def exporter(
    layers: Mapping[str, tuple[str, Mapping[str, tuple[str, bool]]]],
    banks: Mapping[str, tuple[int, str]],
    saved: Mapping[str, str],
) -> Mapper:
    """Mapper from d9d's names of LoRA tensors to the names in adapter files.

    Args:
        layers: for each adapted layer, the name of the module in published models, and its tensors as in
            :attr:`d9d_peft.lora.linear.Adapted.lora_files`.
        banks: for each adapted parameter of expert weights, the number of experts and the name of an expert's module in
            published models, with ``*`` instead of the expert's number.
        saved: for each parameter of ``modules_to_save``, its name in published models.
    """
    mappers: list[Mapper] = [Rename(ours, f"{_PREFIX}{theirs}") for ours, theirs in saved.items()]
    for ours, (theirs, tensors) in layers.items():
        for name, (there, transposed) in tensors.items():
            source, target = f"{ours}.{name}", f"{_PREFIX}{theirs}.{there}"
            mappers.append(Transpose(source, to=target) if transposed else Rename(source, target))
    for term, (count, pattern) in banks.items():
        for factor in (LORA_A, LORA_B):
            names = [f"{_PREFIX}{one}.{factor}{_WEIGHT}" for one in modules_of_experts(pattern, count)]
            mappers.append(Transpose(f"{term}.{factor}") >> Unstack(f"{term}.{factor}", names))
    return Parallel(*mappers)


def check_config(config: LowRankConfig, data: Mapping[str, Any], names: Iterable[str], use_dora: bool = False) -> None:
    """Check the ``adapter_config.json`` of LoRA files, and the names of their tensors, against a config.

    Raises:
        CheckpointError: the adapter is not of low rank, has another rank or scale, lacks magnitudes, contradicts its
            tensors, or has features that the method does not support.
    """
    if data.get("peft_type") != "LORA":
        raise CheckpointError(
            f"the adapter has peft_type {data.get('peft_type')!r}, but the job's peft is '{config.name}'; set peft to "
            "the adapter's method"
        )
    if use_dora and not data.get("use_dora"):
        raise CheckpointError(
            "the adapter has no magnitudes (use_dora), but peft is 'dora'; use 'lora' with this adapter"
        )
    wanted = {"r": config.r, "lora_alpha": config.alpha, "use_rslora": config.rs_lora}
    fields = {"r": "r", "lora_alpha": "alpha", "use_rslora": "rs_lora"}
    there = {field: data.get(field, False) for field in wanted}
    if other := [fields[field] for field, value in wanted.items() if there[field] != value]:
        values = ", ".join(f"peft.{fields[field]}: {value!r}" for field, value in there.items())
        raise CheckpointError(
            f"the adapter's {', '.join(other)} differ from the job's; set the adapter's values: {values}"
        )
    compared = [*wanted, "rank_pattern", "alpha_pattern", "modules_to_save", *(["use_dora"] if use_dora else [])]
    check_adapter_config(data, names, method=config.name, compared=compared)


def check_patterns(config: LowRankConfig, data: Mapping[str, Any], modules: Iterable[tuple[str, str]]) -> None:
    """Check rank and alpha of each module of an adapter against a config.

    Args:
        config: config of the method, whose ``r`` and ``alpha`` equal the adapter's.
        data: contents of ``adapter_config.json``.
        modules: for each target, its name and the name of its module in published models.

    Raises:
        CheckpointError: the rank or alpha of a module differs, or a pattern of the adapter cannot be evaluated.
    """
    pairs = list(modules)
    compared: tuple[tuple[str, str, float, Callable[[str], float]], ...] = (
        ("rank_pattern", "rank", config.r, config.rank_of),
        ("alpha_pattern", "alpha", config.alpha, config.alpha_of),
    )
    for field, what, default, of in compared:
        there = module_values(data, field, [module for _, module in pairs], default)
        other = [(ours, module) for ours, module in pairs if there[module] != of(ours)]
        if other:
            (first, module), wanted = other[0], {ours: there[module] for ours, module in other}
            values = ", ".join(f"{ours}: {value}" for ours, value in list(wanted.items())[:4])
            more = f", and {len(wanted) - 4} more" if len(wanted) > 4 else ""
            raise CheckpointError(
                f"the adapter's {what} for '{module}' is {there[module]}, but the job's is {of(first)}; set the "
                f"adapter's values: peft.{field}: {{{values}}}{more}"
            )
