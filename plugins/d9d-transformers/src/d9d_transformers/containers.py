"""Language models inside larger models, such as models of images and text; d9d trains only the language model.

A larger model may compute text in another way than its language model does: without the factor of the logits, or with
attention to later tokens of a prompt. The larger model and its language model are compared on the meta device, and such
larger models are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from d9d_core.errors import BuildError

from d9d_transformers.head import measured
from d9d_transformers.library import base_of, container_model, native_config
from d9d_transformers.structure import masked_calls


def check_container(model_type: str, native: Any) -> None:
    """Check that a larger model computes text like a language model of transformers.

    Args:
        model_type: type of the larger model.
        native: the language model, on the meta device.

    Raises:
        BuildError: the larger model computes text in another way, or cannot be examined.
    """
    whole = _whole(model_type, native)
    base = base_of(native)[1]
    where = f"model.config: a {model_type}"
    if type(whole.get_decoder()) is not type(base):
        inside, alone = type(whole.get_decoder()).__name__, type(base).__name__
        raise BuildError(f"{where} computes text by {inside}, not by {alone}, so d9d cannot train its language model")
    if _logits(whole) != _logits(native):
        raise BuildError(f"{where} changes logits in another way than its language model alone, which d9d would train")
    if list(masked_calls(base_of(whole)[1]).values()) != list(masked_calls(base).values()):
        raise BuildError(f"{where} has other attention masks than its language model alone, which d9d would train")


def name_inside(model_type: str, native: Any) -> str:
    """Name of the language model's base (the model without its head) inside a larger model of this type."""
    whole = _whole(model_type, native)
    decoder = whole.get_decoder()
    names = {module: path for path, module in whole.named_modules()}
    return str(names[decoder])


def _whole(model_type: str, native: Any) -> Any:
    """Larger model around a language model, with its other parts at their default sizes, on the meta device."""
    config = native_config({"model_type": model_type, "text_config": native.config.to_dict()})
    with torch.device("meta"):
        return container_model(config).eval()


def _logits(native: Any) -> dict[str, Any]:
    names = {module: path for path, module in native.named_modules()}
    output = native.get_output_embeddings()
    return measured(native, names[output], output)
