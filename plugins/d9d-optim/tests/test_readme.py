"""The optimizer that the README writes keeps what an optimizer promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Definitions of the README's block."""
    (block,) = [b for b in re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.M) if "Signum" in b]
    found: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, "README.md", "exec", dont_inherit=True), found)
    return found


def signum(names: dict[str, Any], dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    parameters = {
        "weight": nn.Parameter(torch.randn(3, 2, dtype=dtype)),
        "bias": nn.Parameter(torch.ones(3, dtype=dtype)),
    }
    optimizer = names["Signum"](names["SignumConfig"](lr=0.1, **settings), parameters)
    optimizer.init_state()
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    return optimizer, parameters  # type: ignore[return-value]


@pytest.mark.thorough
def test_it_updates_by_the_sign_of_the_average(names: dict[str, Any]) -> None:
    optimizer, parameters = signum(names, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer.step(torch.tensor(True))
    for name, decay in (("weight", 0.5), ("bias", 0.0)):
        gradient = parameters[name].grad
        assert gradient is not None
        expected = before[name] - 0.1 * (gradient.sign() + decay * before[name])
        torch.testing.assert_close(parameters[name].detach(), expected)
        torch.testing.assert_close(optimizer.state()[f"{name}/exp_avg"], 0.1 * gradient)


@pytest.mark.parametrize("state_dtype", ["parameter", "float32"])
def test_where_the_gate_is_false_every_bit_stays_even_with_nan(names: dict[str, Any], state_dtype: str) -> None:
    optimizer, parameters = signum(names, torch.bfloat16, state_dtype=state_dtype)
    optimizer.step(torch.tensor(True))
    kept = {**parameters, **optimizer.state()}
    before = {name: tensor.detach().clone() for name, tensor in kept.items()}
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step(torch.tensor(False))
    assert all(torch.equal(before[name], tensor) for name, tensor in kept.items())
    assert optimizer.state()["weight/exp_avg"].dtype == (torch.float32 if state_dtype == "float32" else torch.bfloat16)


def test_measured_losses_name_steps_and_version_and_agree() -> None:
    paragraphs = [" ".join(text.split()) for text in README.read_text("utf-8").split("\n\n")]
    measured = [text for text in paragraphs if "quickstart" in text and re.search(r"loss .*\d\.\d{3}", text)]
    assert len(measured) == 4
    assert all(re.search(r"\d+ steps.* torch 2\.\d+", text) for text in measured)
    # All but the first, which is a mean over seeds, compare with one run of AdamW.
    final = {value for text in measured[1:] for value in re.findall(r"(?:AdamW[^.;]* it is|and) (4\.\d{3})", text)}
    assert len(final) == 1
