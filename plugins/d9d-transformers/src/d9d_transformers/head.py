"""Head of a language model of transformers: its module, and the operations on hidden states and logits around it.

Shapes: B samples, S positions, H features, V vocabulary entries.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.errors import BuildError
from torch import Tensor, nn

from d9d_transformers.library import base_of

_POSITIONS = 3


@dataclass(frozen=True)
class Head:
    """Head that maps hidden states to ``x = scale * hidden @ weight.T``, or to ``softcap * tanh(x / softcap)``.

    Attributes:
        name: name of the module.
        embedding: qualified name of the embedding.
        features: H.
        vocabulary: V.
        std: standard deviation of the initial weights.
        tied: whether the head shares the embedding's weight.
        scale: factor of the logits.
        softcap: soft cap of the logits; ``None`` for no cap.
    """

    name: str
    embedding: str
    features: int
    vocabulary: int
    std: float
    tied: bool
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, native: Any) -> Head:
        """Find the facts about the head of a language model, without reading weights.

        Raises:
            BuildError: the head is no linear layer without bias, a weight is tied to something other than the head, or
                the model does more to logits than to multiply them by a number.
        """
        kind = type(native).__name__
        output: nn.Module = native.get_output_embeddings()
        embedding: nn.Module = native.get_input_embeddings()
        names = {module: path for path, module in native.named_modules()}
        if type(output) is not nn.Linear or getattr(output, "bias", None) is not None or "." in names[output]:
            raise BuildError(
                f"model.config: the head of {kind} is {type(output).__name__}, but d9d supports only a linear layer "
                "without bias"
            )
        tied = dict(native.all_tied_weights_keys)
        mine = f"{names[output]}.weight", f"{names[embedding]}.weight"
        if others := sorted(f"{a} = {b}" for a, b in tied.items() if (a, b) != mine):
            raise BuildError(
                f"model.config: {kind} ties {', '.join(others)}; d9d can tie only the head to the embedding"
            )
        return cls(
            name=names[output],
            embedding=names[embedding],
            features=output.in_features,
            vocabulary=output.out_features,
            std=float(getattr(native.config, "initializer_range", None) or 0.02),
            tied=bool(tied),
            **measured(native, names[output], output),
        )


class _Outputs(dict[str, Tensor]):
    """Stand-in for the outputs of a model without its head; holds only the last hidden states."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


class _Given(nn.Module):
    """Stand-in for a module, which returns a stored value and keeps its first argument.

    It copies the attributes that are numbers from the module that it replaces.
    """

    def __init__(self, value: Any, replaced: nn.Module, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        for name, number in vars(replaced).items():
            if isinstance(number, int | float):
                setattr(self, name, number)
        self.value, self.seen, self.weight = value, None, weight

    def forward(self, *args: Any, **_: Any) -> Any:
        self.seen = args[0] if args else None
        return self.value


def measured(native: Any, name: str, output: nn.Linear) -> dict[str, Any]:
    """Measure the factor and the soft cap of a head, by a forward with random hidden states and random logits.

    Returns:
        The fields ``scale`` and ``softcap`` of :class:`Head`.

    Raises:
        BuildError: the model does more to hidden states or logits than to multiply them by a number.
    """
    kind = type(native).__name__
    with torch.device("cpu"), torch.no_grad():
        draws = torch.Generator().manual_seed(0)
        wide: dict[str, Any] = {"generator": draws, "dtype": torch.float32}  # whatever the default dtype is
        hidden = torch.randn(1, _POSITIONS, output.in_features, **wide)
        logits = 30 * torch.randn(1, _POSITIONS, output.out_features, **wide)
        shell = copy.copy(native)
        # nn.Module keeps its submodules here; assigning one would replace the model's own.
        shell._modules = dict(native._modules)  # noqa: SLF001
        head = _Given(logits, output, nn.Parameter(torch.ones(1)))
        prefix, base = base_of(native)
        shell._modules |= {prefix: _Given(_Outputs(last_hidden_state=hidden), base), name: head}  # noqa: SLF001
        tokens = torch.zeros(1, _POSITIONS, dtype=torch.int64)
        try:
            found = shell(input_ids=tokens, use_cache=False).logits
        except Exception as error:  # forwards of models raise anything
            raise BuildError(f"model.config: the head of {kind} cannot be examined: {error}") from error
        softcap = getattr(native.config.get_text_config(), "final_logit_softcapping", None)
        expected = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        before, after = _ratio(head.seen, hidden), _ratio(found, expected)
    if before is None or after is None or (softcap is not None and after != 1):
        what = "hidden states before" if before is None else "logits after"
        raise BuildError(
            f"model.config: {kind} changes {what} its head by more than a factor or a soft cap, which d9d does not "
            "support"
        )
    return {"scale": before * after, "softcap": softcap}


def _ratio(found: Tensor | None, given: Tensor) -> float | None:
    """Constant factor between two tensors; ``None`` if no number is a factor of all elements."""
    if found is None or found.shape != given.shape:
        return None
    ratio = (found.flatten() @ given.flatten() / given.square().sum()).item()
    ratio = 1.0 if math.isclose(ratio, 1.0, rel_tol=1e-6) else ratio
    return ratio if torch.allclose(found, ratio * given, rtol=1e-5, atol=1e-6) else None
