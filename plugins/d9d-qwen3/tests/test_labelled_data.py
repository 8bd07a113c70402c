"""The README's data with labels: its job learns and resumes, and classification is the same in every layout."""

from __future__ import annotations

import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from d9d_core.job_file.document import Document
from d9d_testing.layouts import Harness, assert_passed
from d9d_verify.layouts import Layout

README = Path(__file__).parents[1] / "README.md"
PLUGINS = ("d9d_nn.plugin", "d9d_testing.toy.plugin", "d9d_qwen3.plugin")
ONE = Layout("one process", {}, ())
#: The second pack has no label at all.
BATCH, UNLABELLED = 8, range(8, 16)


@pytest.fixture
def example(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The plugin's path, and the job on samples of which each class has a letter of its own."""
    plugin, job = re.findall(r"^```\w+\n((?:# labelled\.py|plugins:).*?)^```$", README.read_text(), re.DOTALL | re.M)
    generator, lines = random.Random(0), []
    for index in range(50):
        label = index % 3
        text = "abc"[label] * generator.randint(1, 9) + "z" * generator.randint(0, 9)
        lines.append(f"{-100 if index in UNLABELLED or index % 7 == 0 else label}\t{text}")
    (tmp_path / "labelled.py").write_text(plugin)
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "samples.tsv").write_text("\n".join(lines))
    values = Document.read(tmp_path / "job.yaml").values
    del values["plugins"]
    values["model"] |= {"hidden_size": 32, "intermediate_size": 48}
    values["data"] |= {"file": str(tmp_path / "samples.tsv"), "sequence_length": 12}
    values |= {"device": "cpu", "trackers": [], "export": False, "batch": {"size": BATCH, "microbatch": 2}}
    return str(tmp_path / "labelled.py"), values | {"optimizer": {"name": "toy_optimizer", "lr": 0.1}}


@pytest.mark.thorough
def test_the_example_learns_and_a_pack_without_labels_is_zero(example: tuple[str, dict[str, Any]]) -> None:
    plugin, values = example
    (measured,) = Harness(values, (*PLUGINS, plugin), steps=40).measure([ONE])
    losses, norms = measured.series("loss"), measured.series("grad_norm")
    assert losses[0] == pytest.approx(1.1, abs=0.1)
    assert losses[1] == norms[1] == 0
    assert max(losses[-4:]) < 0.5


@pytest.mark.thorough
def test_the_example_resumes_where_it_stood(example: tuple[str, dict[str, Any]]) -> None:
    plugin, values = example
    verdict = Harness(values, (*PLUGINS, plugin), steps=6).compare_resumed(ONE, ONE)
    assert_passed([verdict])


#: A head that does not train, means of layers, a split and tied vocabulary: parts that are not in the blocks.
MODEL = {
    "vocab_size": 260,
    "added_tokens": 4,
    "tie_embeddings": True,
    "heads": {
        "words": {"kind": "causal_lm"},
        "topic": {"kind": "classification", "num_classes": 3, "pooling": "mean", "layers": [0, -1]},
        "spare": {"kind": "classification", "num_classes": 2},
    },
}


@pytest.mark.full
@pytest.mark.skipif(find_spec("d9d_parallel") is None, reason="needs d9d-parallel")
def test_classification_is_the_same_in_every_layout(example: tuple[str, dict[str, Any]]) -> None:
    plugin, values = example
    values |= {"model": values["model"] | MODEL, "task": {"name": "classification", "head": "topic"}}
    checkpointed: list[Any] = ["fsdp", "activation_checkpointing", {"name": "compile", "backend": "aot_eager"}]
    layouts = [
        Layout("fsdp 2, recomputed and compiled", {"dp_shard": 2}, checkpointed),
        Layout("replicate 2, heads apart", {"dp_replicate": 2}, [{"name": "replicate", "ignore": ["heads.*"]}]),
        Layout("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ["hsdp"]),
    ]
    assert_passed(Harness(values, (*PLUGINS, "d9d_parallel.plugin", plugin)).compare(layouts))
