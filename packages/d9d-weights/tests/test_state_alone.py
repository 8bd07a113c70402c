"""``d9d state`` is of use where d9d-engine is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ALONE = """
import sys
sys.modules["d9d_engine"] = None
from d9d_core.registry.registry import Registry
from d9d_weights.state.command import app
from d9d_weights.state.tensors import Conversion, convert_state, diff_states, show_state
registry = Registry.of("d9d_weights.plugin")
source, target = sys.argv[1:]
show_state(source, registry, None, False)
print(convert_state(Conversion(source, target, None, 10**9, 1), registry))
print(diff_states(source, target, 0.0, True))
"""


@pytest.mark.thorough
def test_a_model_is_shown_converted_and_compared_without_the_engine(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "copy"
    source.mkdir()
    save_file({"weight": torch.arange(6.0).view(2, 3)}, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text("{}")
    command = [sys.executable, "-c", ALONE, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 tensors, 6 numbers" in done.stdout
    assert done.stdout.endswith("True\n")
    assert torch.equal(load_file(target / "model.safetensors")["weight"], torch.arange(6.0).view(2, 3))
