"""Checks of a model that need one process: documents in one sample, and weights to files and back.

Shapes: S positions, V words of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from d9d_core.plugin import ModelSpec
from d9d_core.traits import modules_with
from d9d_engine.compose.initialise import initialise
from d9d_weights.graph.graph import map_tensors
from torch import Tensor, nn

from d9d_verify.certify.certificate import Cell

_FIRST, _LENGTH = 7, 16
#: Largest difference of logits, relative to the largest logit, that rounding explains.
_ROUNDING = 1e-5


def packing(stage: nn.Module) -> Cell:
    """Check that a document in a sample does not depend on its neighbour, and is computed as it is alone.

    Args:
        stage: whole language model, under the meta device.
    """
    model = stage.to_empty(device="cpu")
    initialise(model, 0, torch.device("cpu"))
    model.eval()
    draws = torch.Generator().manual_seed(0)
    tokens, others = (torch.randint(8, (1, _LENGTH), generator=draws) for _ in range(2))
    others[:, _FIRST:] = tokens[:, _FIRST:]
    places = torch.arange(_LENGTH)
    documents = (places >= _FIRST).long().unsqueeze(0)
    positions = torch.where(places < _FIRST, places, places - _FIRST).unsqueeze(0)
    with torch.no_grad():
        packed, changed = (
            _logits(model, tokens=ids, documents=documents, positions=positions)[:, _FIRST:] for ids in (tokens, others)
        )
        alone = _logits(model, tokens=tokens[:, _FIRST:])
    leak = _deviation(packed, changed)
    if leak:
        return Cell("packed", "differs", f"a document changes its neighbour's logits by {leak:.1e}")
    off = _deviation(packed, alone)
    return Cell("packed", "exact" if off < _ROUNDING else "differs", f"alone and packed: {off:.1e}")


def export(stage: nn.Module, spec: ModelSpec, config: Any) -> Cell:
    """Check that weights go to files and back bit for bit, and that the config does.

    Args:
        stage: whole model, under the meta device.
        spec: record of the model.
        config: config of the stage.
    """
    if spec.hugging_face is None:
        return Cell("export", "not applicable", "the model has no Hugging Face format")
    form = spec.hugging_face.load()()
    draws = torch.Generator().manual_seed(0)
    state = {name: torch.randn(p.shape, generator=draws) for name, p in stage.named_parameters()}
    stored = form.config_from_json(form.config_json(config, "float32"))
    read = map_tensors(form.importer(config, stored), map_tensors(form.exporter(config), state))
    same = read.keys() == state.keys() and all(torch.equal(read[name], state[name]) for name in state)
    if not same or stored != config:
        return Cell("export", "differs", "weights" if not same else "the config")
    return Cell("export", "exact", f"{len(state)} tensors bit for bit")


def has_trait(stage: nn.Module, trait: type) -> bool:
    """Whether a module of a model has a trait."""
    return bool(modules_with(stage, trait))


def _logits(model: nn.Module, **inputs: Tensor) -> Tensor:
    logits: Tensor = model(**inputs)["logits"]
    return logits


def _deviation(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item()
