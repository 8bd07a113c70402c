"""Models of a conformance suite: building, initialisation, splitting, export, and example inputs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec
from d9d_core.traits import HasBlocks, LateInit, modules_with
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.format import HuggingFaceFormat
from d9d_weights.hugging_face.writer import ModelWriter
from torch import Tensor, nn

#: Target of a position without a loss.
IGNORE = -100


def on_meta(spec: ModelSpec, config: Any, stage: Stage = Stage()) -> nn.Module:  # noqa: B008 - Stage is frozen
    """Build a stage on the meta device, like the framework."""
    with torch.device("meta"):
        built = spec.build.load()(config, stage)
    assert isinstance(built, nn.Module)
    return built


def initialised(
    spec: ModelSpec,
    config: Any,
    seed: int = 0,
    stage: Stage = Stage(),  # noqa: B008 - Stage is frozen
) -> nn.Module:
    """Tiny model, or a stage of it, on the CPU; each module is initialised from its own seed."""
    model = on_meta(spec, config, stage).to_empty(device="cpu")
    for name, module in modules_with(model, LateInit).items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            module.reset_parameters()
    return model


def random_model(spec: ModelSpec, config: Any) -> nn.Module:
    """Full tiny model with weights far from their initial values, also in norms and biases, so that no terms cancel."""
    model = initialised(spec, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2, generator=generator)
    return model


def export_to(directory: Path, form: HuggingFaceFormat, config: Any, model: nn.Module, dtype: str) -> None:
    """Write a model in Hugging Face layout, like a job at its end."""
    state = {name: p.detach() for name, p in model.named_parameters()}
    graph = StateGraph(form.exporter(config), specs_of(state))
    export_model(ModelWriter(directory, graph.specs), graph, state, ModelFiles(form.config_json(config, dtype)))


def split(spec: ModelSpec, config: Any, whole: nn.Module) -> list[nn.Module]:
    """Two stages with copies of the full model's tensors."""
    stages = [on_meta(spec, config, Stage(index, 2)).to_empty(device="cpu") for index in range(2)]
    source = dict(tensors_of(whole))
    for stage in stages:
        with torch.no_grad():
            for name, tensor in tensors_of(stage):
                assert name in source, f"a stage has '{name}', but the full model has no such tensor"
                tensor.copy_(source[name])
    return stages


def microbatch(config: Any) -> dict[str, Tensor]:
    """Two samples of twelve positions with documents of different lengths and ignored targets, int64 [B, S] each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, 12), generator=generator)
    targets = torch.randint(config.vocab_size, (2, 12), generator=generator)
    lengths = ((5, 7), (1, 8, 3))
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths])
    positions = torch.stack([torch.cat([torch.arange(length) for length in n]) for n in lengths])
    last_of_document = torch.cat((documents[:, 1:] != documents[:, :-1], torch.ones(2, 1, dtype=torch.bool)), dim=1)
    targets[last_of_document] = IGNORE
    return {"tokens": tokens, "targets": targets, "documents": documents, "positions": positions}


def require(spec: ModelSpec, *tokens: str) -> None:
    """Skip the test if the model does not claim all of these capabilities."""
    if missing := set(tokens) - spec.provides:
        pytest.skip(f"{spec.name} does not claim {', '.join(sorted(missing))}")


def poison(module: nn.Module) -> None:
    """Fill every parameter and buffer with a value that initialisation never gives."""
    with torch.no_grad():
        for _, tensor in tensors_of(module):
            tensor.fill_(poison_value(tensor))


def poison_value(tensor: Tensor) -> float:
    """Value that initialisation never gives, for the dtype of a tensor; for bool, which has none, 1."""
    if tensor.is_floating_point():
        return float("nan")
    return 1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def is_poisoned(tensor: Tensor) -> bool:
    """Whether a tensor still contains values of :func:`poison`."""
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    # A bool cannot be poisoned: initialisation may give both values.
    return tensor.dtype != torch.bool and bool((tensor == poison_value(tensor)).any())


def tensors_of(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def submodule(module: object, name: str) -> nn.Module:
    """Submodule with a qualified name, of a module that was found by its trait."""
    assert isinstance(module, nn.Module)
    return module.get_submodule(name)


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits of a microbatch, without gradients."""
    with torch.no_grad():
        logits: Tensor = model(**{name: tensor for name, tensor in batch.items() if name != "targets"})["logits"]
    return logits


def count_blocks(model: nn.Module) -> int:
    """Number of blocks of all modules with blocks."""
    return sum(len(module.blocks()) for module in modules_with(model, HasBlocks).values())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameter name -> gradient, for parameters that have one."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
