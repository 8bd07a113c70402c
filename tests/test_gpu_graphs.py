"""Blocks as CUDA graphs: the same training, step for step, and errors for jobs that may not record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import D9dError
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer

Write = Callable[..., Path]
GRAPHS = {"name": "compile", "cudagraphs": True}
COPYING = {"name": "replicate", "compute_dtype": "bfloat16"}


def build(write: Write, name: str, **sections: Any) -> Trainer:
    sections = {"precision": {"parameters": "bfloat16"}, "device": "cuda", "export": False} | sections
    return Job.load(write(name, **sections)).build(lambda _: None)


# torch 2.11's Inductor, when it is imported.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"device": "cpu"}, "needs CUDA, and the model is on cpu"),
        ({"mesh": {"dp_shard": 2}, "parallel": ["fsdp", GRAPHS]}, "gathers or copies the parameters"),
        ({"mesh": {"dp_replicate": 2}, "parallel": [COPYING, GRAPHS]}, "gathers or copies the parameters"),
        ({"mesh": {"pp": 2}, "pipeline": "1f1b"}, "2 pipeline stages"),
    ],
    ids=["cpu", "fsdp", "replicate", "pipeline"],
)
@pytest.mark.parametrize("how", [GRAPHS, {"name": "compile", "mode": "reduce-overhead"}], ids=["field", "mode"])
def test_a_job_that_may_not_record_is_refused_when_it_is_planned(
    small_job: Write, sections: dict[str, Any], why: str, how: dict[str, Any]
) -> None:
    parallel = [how if one is GRAPHS else one for one in sections.get("parallel", [GRAPHS])]
    path = small_job(**{"device": "cuda", **sections, "parallel": parallel})
    with pytest.raises(D9dError, match=rf"parallel\[\d\]: strategy 'compile' is to capture CUDA graphs, but .*{why}"):
        Job.load(path).plan()


needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch's own, deprecations inside of Inductor
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def graphs() -> int:
    """Number of graphs that torch holds."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    nodes, count = [] if manager is None else list(manager.get_roots()), 0
    while nodes:
        node = nodes.pop()
        count += 1
        nodes += [child for children in node.children.values() for child in children]
    return count


class TestOnAGpu:
    pytestmark = needs_cuda

    @pytest.fixture(autouse=True)
    def _fresh_compiler(self) -> Any:
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.parametrize(
        "sections",
        [
            {"batch": {"size": 4, "microbatch": 4}},
            {"batch": {"size": 4, "microbatch": 2}},
            {"batch": {"size": 6, "microbatch": 2}, "gradients": {"accumulate": "float32"}},
            {"parallel": ["activation_checkpointing"]},
            {"evaluation": {"every": 2, "packs": 2}},
        ],
        ids=["one microbatch", "two", "three in float32", "checkpointing", "evaluations between"],
    )
    def test_training_is_the_one_without_graphs(self, small_job: Write, sections: dict[str, Any]) -> None:
        found = []
        others = sections.get("parallel", [])
        if "evaluation" in sections:
            data = json.loads(small_job("data").read_text())["data"]
            sections = {"evaluation": {**sections["evaluation"], "data": data}}
        for name, compile_ in (("plain", {"name": "compile"}), ("graphs", GRAPHS)):
            torch.compiler.reset()
            trainer = build(small_job, name, **{**sections, "parallel": [*others, compile_]})
            steps = []
            for step in range(6):
                result = trainer.step(step, trainer.prefetcher.next())
                steps.append((result.loss.item(), result.grad_norm.item()))
                if trainer.evaluator is not None and step % 2:
                    steps.append((trainer.evaluator.run()["eval/loss"], 0.0))
            recorded = graphs()
            assert (recorded > 0) == (compile_ is GRAPHS)
            found.append((steps, {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}))
        torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(found[1][1], found[0][1], rtol=2e-2, atol=2e-3)

    def test_after_two_steps_nothing_is_recorded_any_more_and_no_step_waits(self, small_job: Write) -> None:
        trainer = build(small_job, "steady", parallel=[GRAPHS])
        for step in range(3):  # warms up, records, replays for the first time
            trainer.step(step, trainer.prefetcher.next())
        recorded = graphs()
        assert recorded >= 2 * 2 * 2  # forward and backward of 2 blocks, for each of 2 microbatches
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(3, 6):
                trainer.step(step, trainer.prefetcher.next())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert graphs() == recorded
