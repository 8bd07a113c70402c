"""Checks of a model in one process: parity with transformers, documents packed in a sample, export and import.

Shapes: S positions, V vocabulary size.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from d9d_core.model import SeesOneDocument
from d9d_core.plugin import ModelSpec
from d9d_core.traits import modules_with
from d9d_engine.compose.initialise import initialise
from d9d_weights.graph.graph import map_tensors
from torch import Tensor, nn
from torch.nn import functional

from d9d_verify.certify.certificate import Cell

_FIRST, _LENGTH = 7, 16
#: Largest differences of logits and of gradients, relative to the largest number, that rounding explains.
_ROUNDING, _GRADIENTS = 1e-5, 1e-4
#: A gradient with only elements below this fraction of the model's largest gradient element is compared relative to
#: this fraction of the largest element, not to its own largest element.
_ZERO = 1e-3
#: Allowed change of a document's logits when another document of the sample changes, relative to the largest logit. Not
#: zero, because the other document's routing changes how products of experts are rounded.
_LEAK = 1e-6


def packing(stage: nn.Module) -> Cell:
    """Check that a document packed with another one gives the same outputs as the document alone.

    Args:
        stage: whole language model, under the meta device.
    """
    if isinstance(stage, SeesOneDocument) and (mixers := stage.token_mixers()):
        return Cell("packed", "refused", f"{mixers[0]} mixes tokens by something other than attention")
    model = _initialised(stage).eval()
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
    if leak > _LEAK:
        return Cell("packed", "differs", f"a document changes its neighbour's logits by {leak:.1e}")
    off = _deviation(packed, alone)
    return Cell("packed", "exact" if off < _ROUNDING else "differs", f"alone and packed: {off:.1e}")


def parity(stage: nn.Module, spec: ModelSpec, config: Any) -> Cell:
    """Check that transformers' own model, with the exported weights, has the same logits and gradients.

    Args:
        stage: whole language model, under the meta device.
        spec: record of the model.
        config: config of the stage.
    """
    name = "transformers"
    if spec.hugging_face is None or importlib.util.find_spec(name) is None:
        why = (
            "the model has no Hugging Face format"
            if spec.hugging_face is None
            else "transformers is not installed; d9d-transformers brings it"
        )
        return Cell(name, "not applicable", why)
    form, model = spec.hugging_face.load()(), _initialised(stage)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))
    tokens, targets = (torch.randint(8, 64, (2, _LENGTH), generator=draws) for _ in range(2))
    try:
        theirs = _of_transformers(form, config, model.state_dict())
        expected = theirs(input_ids=tokens, use_cache=False).logits
        loss = functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.autograd.backward(loss)
    except Exception as error:  # models of transformers raise exceptions of any type
        return Cell(name, "differs", f"transformers does not compute the exported model: {error}".splitlines()[0])
    off = _deviation(expected.detach(), _logits(model, tokens=tokens).detach())
    model(tokens=tokens, targets=targets)["token_loss"].sum().backward()
    grads = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    grads |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    mine = map_tensors(form.exporter(config), grads)
    theirs_by_name = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None and name in mine}
    # A gradient that is zero by construction, such as of a router with one expert, consists of rounding errors only.
    least = _ZERO * max((grad.abs().max().item() for grad in theirs_by_name.values()), default=1.0)
    worst = max((_deviation(grad, mine[name], least) for name, grad in theirs_by_name.items()), default=math.inf)
    exact = off < _ROUNDING and worst < _GRADIENTS
    text = f"logits: {off:.1e}, {len(theirs_by_name)} gradients: {worst:.1e}"
    return Cell(name, "exact" if exact else "differs", text)


def _of_transformers(form: Any, config: Any, state: dict[str, Tensor]) -> Any:
    """Load exported weights into transformers' implementation of the model.

    Raises:
        ValueError: the export lacks weights of the transformers model, or has weights that the model does not have.
    """
    transformers: Any = importlib.import_module("transformers")  # transformers is optional: only this check needs it
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as directory:
        tensors = map_tensors(form.exporter(config), {name: tensor.detach() for name, tensor in state.items()})
        tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
        (Path(directory) / "config.json").write_text(json.dumps(form.config_json(config, "float32")))
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    if wrong := [*told["missing_keys"], *told["unexpected_keys"]]:
        raise ValueError(f"export and transformers model have different tensors: {', '.join(map(str, wrong[:3]))}")
    return model


def _initialised(stage: nn.Module) -> nn.Module:
    model = stage.to_empty(device="cpu")
    initialise(model, 0, torch.device("cpu"))
    return model


def export(stage: nn.Module, spec: ModelSpec, config: Any) -> Cell:
    """Check that export and import restore the weights bit for bit, and the config.

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


def _deviation(a: Tensor, b: Tensor, least: float = 1e-30) -> float:
    """Largest absolute difference, relative to the largest magnitude in ``a``, which counts as at least ``least``."""
    return ((a - b).abs().max() / a.abs().max().clamp(min=least)).item()
