"""Jobs scaled down for verification: batch, length, evaluation and plugins."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from d9d_core.config import PluginConfig
from d9d_verify import layouts
from d9d_verify.layouts import Layout, scaled_values


def job(**changes: Any) -> Any:
    """Stand-in of a job."""
    values = {"model": "large", "pipeline": {"name": "1f1b", "layers": [1, 2]}, "evaluation": {"packs": 5}, "seed": 3}
    origins = [
        SimpleNamespace(distribution="acme", digest=None), SimpleNamespace(distribution="d9d-core", digest=None),
        SimpleNamespace(distribution="/x/mine.py", digest="ab"),
    ]  # fmt: skip
    known: dict[str, Any] = {
        "microbatch_size": 8, "microbatches": 4, "steps": 100, "epochs": None, "pipeline": "1f1b",
        "batch": SimpleNamespace(size=64), "checkpoint": SimpleNamespace(trainable_only=True),
        "registry": SimpleNamespace(plugins=origins), **changes,
    }  # fmt: skip
    return SimpleNamespace(resolved=lambda: {**values, **changes.get("values", {})}, **known)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, and a selection without a schedule."""
    model = SimpleNamespace(model_dump=lambda mode: "tiny")
    monkeypatch.setattr(layouts, "_tiny", lambda *_: model)
    monkeypatch.setattr(layouts, "_has_data", lambda _job, _selection, batch: batch <= 18)
    monkeypatch.setattr(layouts, "select", lambda *_: SimpleNamespace(schedule=None))


@pytest.mark.parametrize(
    ("changes", "meshes", "batch"),
    [
        ({}, [{}], {"size": 2 * 3, "microbatch": 2}),
        ({}, [{"dp_shard": 2}, {"dp_replicate": 3}], {"size": 6 * 2 * 3, "microbatch": 2}),
        ({"microbatch_size": 1, "microbatches": 1}, [{}], {"size": 2, "microbatch": 1}),
        ({"microbatches": 2}, [{"tp": 4}], {"size": 4, "microbatch": 2}),
        ({"batch": SimpleNamespace(size=11)}, [{"dp_shard": 2}], {"size": 12, "microbatch": 2}),
        ({"batch": SimpleNamespace(size=11)}, [{"dp_shard": 4}], {"size": 12, "microbatch": 1}),
        ({"batch": SimpleNamespace(size=12)}, [{"dp_shard": 2}], {"size": 12, "microbatch": 2}),
    ],
)
def test_all_layouts_share_a_small_batch_that_their_ranks_divide(
    changes: dict[str, Any], meshes: list[dict[str, int]], batch: dict[str, int]
) -> None:
    assert scaled_values(job(**changes), [Layout("x", mesh, []) for mesh in meshes], 4)["batch"] == batch


def test_what_only_the_whole_job_needs_is_left_out() -> None:
    values = scaled_values(job(), [Layout("x", {}, [])], 4)
    assert (values["model"], values["seed"], values["steps"]) == ("tiny", 3, 100)
    assert (values["pipeline"], values["evaluation"]) == ({"name": "1f1b"}, {"packs": 2})
    assert (values["trackers"], values["subscribers"], values["export"]) == ([], [], False)
    assert (values["loading"], values["checkpoint"]) == ({"weights": False}, {"trainable_only": True})
    assert values["plugins"] == {"allow": ["acme"], "files": ["/x/mine.py"]}
    other = {"pipeline": None, "evaluation": None}
    assert scaled_values(job(values=other), [Layout("x", {}, [])], 4).items() >= other.items()


@pytest.mark.parametrize(("packs", "kept"), [("all", 2), (1, 1), (2, 2), (3, 2)])
def test_an_evaluation_has_at_most_two_packs(packs: object, kept: int) -> None:
    values = {"evaluation": {"packs": packs}}
    assert scaled_values(job(values=values), [Layout("x", {}, [])], 4)["evaluation"] == {"packs": kept}


def test_a_job_has_as_many_steps_as_before_and_at_least_those_of_the_measurement() -> None:
    layout = [Layout("x", {}, [])]
    assert scaled_values(job(steps=2), layout, 4)["steps"] == 4
    values = scaled_values(job(steps=None, epochs=2.0), layout, 4)
    assert values["epochs"] == 2.0 * 6 / 64
    assert "steps" not in values


class Plain(PluginConfig):
    name: Literal["plain"] = "plain"
    layers: int = 3
    tied: bool = True
    theta: float = 3.0
    kind: str | None = None


class Nested(PluginConfig):
    name: Literal["nested"] = "nested"
    inner: dict[str, int] = {"layers": 3}

    def sizes(self) -> Mapping[str, int]:
        return self.inner

    def resized(self, sizes: Mapping[str, int]) -> PluginConfig:
        return Nested(inner={**self.inner, **sizes})


def test_sizes_of_a_model_are_its_whole_numbers_or_the_ones_that_it_states() -> None:
    assert layouts._sizes(Plain()) == layouts._sizes(Nested()) == {"layers": 3}
