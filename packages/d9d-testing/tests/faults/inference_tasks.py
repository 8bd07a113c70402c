"""Inference tasks with one fault each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from d9d_core.task import StageInputs
from d9d_testing.suites.inference.task import InferenceTaskSuite
from torch import Tensor


class Means:
    """The mean of each sample's outputs."""

    columns = {"row": "number of the row", "mean": "mean of its outputs"}

    def check(self, model: Any, facts: Any) -> None: ...

    def inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        return StageInputs(first={"x": microbatch["x"]})

    def process(self, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"mean": outputs["y"].mean(1)}

    def rows(self, kept: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"row": kept["rows"].tolist(), "mean": kept["mean"].tolist()}

    def tally(self, rows: Any) -> dict[str, float]:
        return {"rows": float(len(rows["row"])), "mean": float(sum(rows["mean"]))}

    def finalize(self, sums: Any) -> dict[str, float]:
        return {"mean": sums["mean"] / sums["rows"]}


class Sound(InferenceTaskSuite):
    target = "log_probs"
    task: Callable[[], Any] = Means

    def build(self, *_arguments: Any, **_fields: Any) -> Any:
        return type(self).task()

    def case(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        x = torch.arange(12.0).view(4, 3)
        return {"y": x.sin()}, {"x": x, "rows": torch.arange(4)}


def with_(**changes: Any) -> dict[str, Any]:
    return {"task": type("Changed", (Means,), changes)}


def relative(self: Means, kept: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"row": kept["rows"].tolist(), "mean": (kept["mean"] - kept["mean"].max()).tolist()}


def remembering(self: Any, kept: Mapping[str, Tensor]) -> dict[str, Any]:
    self.seen = getattr(self, "seen", 0) + 1
    return {"row": kept["rows"].tolist(), "mean": [value + self.seen for value in kept["mean"].tolist()]}


def checking(self: Means, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if outputs["y"].isnan().any():
        raise ValueError("the model returns NaN")
    return Means.process(self, outputs, microbatch)


def selecting(self: Means, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    y = outputs["y"]
    return {"mean": y[y < 2].view_as(y).mean(1)}


def centered(self: Means, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"mean": outputs["y"].mean(1) - outputs["y"].mean()}


def over_rows(self: Means, outputs: Mapping[str, Tensor], microbatch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"mean": outputs["y"].mean(1) * (microbatch["rows"].min() >= 0)}


def by_class(self: Means, rows: Any) -> dict[str, float]:
    classes = [int(value > 0) for value in rows["mean"]]
    return {**Means.tally(self, rows), **{f"of_{kind}": float(classes.count(kind)) for kind in set(classes)}}


FAULTS = {
    "no column of rows": (with_(columns={"mean": "mean"}), "the first one must be 'row'"),
    "a column without words": (with_(columns={"row": "number", "mean": " "}), "has no description"),
    "inputs are a mapping": (with_(inputs=lambda self, microbatch: {"x": microbatch["x"]}), "not StageInputs"),
    "one number is kept for all": (
        with_(process=lambda self, outputs, _m: {"mean": outputs["y"].mean()}), "the first dimension is 4",
    ),
    "numbers are kept": (
        with_(process=lambda self, outputs, _m: {"mean": outputs["y"].mean(1).tolist()}), "keep tensors",
    ),
    "another column is returned": (
        with_(rows=lambda self, kept: {"row": kept["rows"].tolist(), "average": kept["mean"].tolist()}),
        "columns declares",
    ),
    "a value is missing": (
        with_(rows=lambda self, kept: {"row": kept["rows"].tolist(), "mean": kept["mean"].tolist()[1:]}),
        "not equally long",
    ),
    "rows are counted anew": (
        with_(rows=lambda self, kept: {**Means.rows(self, kept), "row": list(range(1, 1 + len(kept["rows"])))}),
        "",
    ),
    "rows are relative to each other": (with_(rows=relative), "differs if rows() gets the samples in two halves"),
    "outputs are relative to each other": (with_(process=centered), "differs if process() gets the samples in two"),
    "fillers clear the others": (with_(process=over_rows), "differs if the other samples are fillers"),
    "rows depend on how many were asked for": (with_(rows=remembering), "differs"),
    "the tally is a mean": (
        with_(tally=lambda self, rows: {"mean": sum(rows["mean"]) / len(rows["mean"])}), "return sums, not means",
    ),
    "the tally is no float": (with_(tally=lambda self, rows: {"rows": len(rows["row"])}), "not a float"),
    "looks for NaN on the host": (with_(process=checking), ""),
    "selects outputs by a mask": (with_(process=selecting), "process() reads values on the host (aten::index)"),
    "tallies name the classes that occur": (with_(tally=by_class), ""),
    "values are tensors": (
        with_(rows=lambda self, kept: {"row": kept["rows"].tolist(), "mean": list(kept["mean"])}),
        "",
    ),
    "the final value is a text": (with_(finalize=lambda self, sums: {"mean": str(sums["mean"])}), "as a str"),
}  # fmt: skip
