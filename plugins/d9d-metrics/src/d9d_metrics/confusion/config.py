"""Config of the metric ``confusion``: the problem type, the observations to count, and the statistics."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Annotated, Literal, Self

from d9d_core.config import LoadsCode, PluginConfig, Section
from pydantic import Field, PositiveInt, field_validator, model_validator

Statistic = Literal["accuracy", "precision", "recall", "f1", "fbeta", "function"]
Average = Literal["micro", "macro", "weighted", "per_class"]
Probability = Annotated[float, Field(ge=0, le=1)]
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class BinaryProblem(Section):
    """Binary problem: each sample is positive or negative."""

    kind: Literal["binary"] = "binary"
    """Selects the problem."""
    threshold: Probability = 0.5
    """A sample is predicted positive if its probability is greater than this."""


class MulticlassProblem(Section):
    """Multiclass problem: each sample belongs to one of several classes."""

    kind: Literal["multiclass"] = "multiclass"
    """Selects the problem."""
    num_classes: Annotated[int, Field(ge=2)]
    """Number of classes, C."""
    top_k: PositiveInt | None = None
    """A target counts as predicted if it is among this many highest scores; null considers only the highest."""

    @field_validator("top_k")
    @classmethod
    def _some_are_left(cls, top_k: int | None, info: object) -> int | None:
        classes = getattr(info, "data", {}).get("num_classes")
        if top_k is not None and classes is not None and top_k >= classes:
            raise ValueError(f"{top_k} is not below the number of classes, {classes}; choose a smaller number")
        return top_k


class MultilabelProblem(Section):
    """Multilabel problem: each of several labels applies to a sample or not."""

    kind: Literal["multilabel"] = "multilabel"
    """Selects the problem."""
    num_classes: PositiveInt
    """Number of labels, C."""
    threshold: Probability = 0.5
    """A label is predicted if its probability is greater than this."""


Problem = Annotated[BinaryProblem | MulticlassProblem | MultilabelProblem, Field(discriminator="kind")]


class ConfusionConfig(PluginConfig):
    """Metric: statistics of true and false positives and negatives."""

    name: Literal["confusion"] = "confusion"
    """Selects the plugin."""
    problem: Problem
    """``binary``, or ``{kind: binary, threshold: 0.5}``, ``{kind: multiclass, num_classes: C, top_k: null}`` or
    ``{kind: multilabel, num_classes: C, threshold: 0.5}``."""
    statistics: tuple[Statistic, ...] = ("accuracy",)
    """Statistics to compute: any of ``accuracy``, ``precision``, ``recall``, ``f1``, ``fbeta`` and ``function``."""
    averages: tuple[Average, ...] | None = None
    """Averages over classes: any of ``micro``, ``macro``, ``weighted`` and ``per_class``; ``[macro]`` by default. Not
    for binary problems, which have one class."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Weight of the recall in ``fbeta``, relative to the precision."""
    function: Annotated[str, LoadsCode()] | None = None
    """Function ``package.module:function`` of the float64 tensors ``(tp, fp, tn, fn)``, [C] or 0-d, that returns a
    tensor of their shape."""
    zero_division: Literal["zero", "one", "nan"] = "zero"
    """Value of a statistic whose denominator is zero; ``nan`` leaves it out of averages."""
    predictions: str = "class_logits"
    """Observation of the scores [..., C], or [...] for a binary problem; or of predicted classes, as integers."""
    targets: str = "labels"
    """Observation of the classes: integers [...] or [..., 1], -100 to ignore a sample; or one-hot [..., C]."""
    scores: Literal["logits", "probabilities"] = "logits"
    """Kind of the scores; a sigmoid turns logits into the probabilities that thresholds are compared with."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in series, ``<statistic>/<class>``; their numbers by default."""
    prefix: str = ""
    """Prefix of the names of the series, such as ``toxicity/``."""

    @property
    def reads(self) -> Set[str]:
        """Names of the observations to read."""
        return {self.predictions, self.targets}

    @field_validator("problem", mode="before")
    @classmethod
    def _may_be_its_kind_alone(cls, problem: object) -> object:
        return {"kind": problem} if isinstance(problem, str) else problem

    @field_validator("statistics", "averages")
    @classmethod
    def _something_is_computed(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        # A length constraint in the field's type would also call a list empty whose entries are all invalid.
        if names is not None and not names:
            raise ValueError("the list is empty; give at least one name, or remove the field")
        return names

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, function: str | None) -> str | None:
        if function is not None and not _FUNCTION.fullmatch(function):
            raise ValueError(f"'{function[:80]}' does not name a function; write package.module:function")
        return function

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for field, statistic in (("beta", "fbeta"), ("function", "function")):
            given, wanted = getattr(self, field) is not None, statistic in self.statistics
            if wanted and not given:
                raise ValueError(f"the statistic '{statistic}' needs the field '{field}'; set it")
            if given and not wanted:
                raise ValueError(f"'{field}' has no effect; add '{statistic}' to statistics, or remove '{field}'")
        if isinstance(self.problem, BinaryProblem):
            if self.averages is not None:
                raise ValueError("a binary problem has one class, so there is nothing to average; remove averages")
            if self.class_names:
                raise ValueError("a binary problem has no series for each class; remove class_names")
        elif self.class_names:
            names, classes = len(set(self.class_names)), self.problem.num_classes
            if names != classes or len(self.class_names) != classes:
                raise ValueError(f"class_names has {names} different names for {classes} classes; give one per class")
        return self
