"""Choice of the head that a task trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from d9d_core.config import closest
from d9d_core.errors import JobError
from d9d_core.types import State
from torch import Tensor

from d9d_nn.heads.config import PluginHeadConfig
from d9d_nn.heads.hidden_states import HIDDEN_STATES

T = TypeVar("T")


def choose_head(model: Any, kind: str, name: str | None, where: str = "task.head") -> Any | None:
    """Choose the head that a task reads, as its config; ``None`` if the model's config lists no heads.

    Args:
        model: the model's config, with heads by name in ``heads`` if it lists them.
        kind: kind of head that the task needs; heads of plugins are accepted, whatever their kind.
        name: name of the head; may be ``None`` if the model has only one head.
        where: field of the job file that gives the name.

    Raises:
        JobError: there is no such head, the head is of another kind, or the model has several heads and no name is
            given.
    """
    heads = getattr(model, "heads", None)
    if not isinstance(heads, Mapping):
        if name is not None:
            raise JobError(f"{where}: the model lists no heads, so there is no head '{name}'; leave {where} out")
        return None
    kinds = ", ".join(f"{other} ({head.kind})" for other, head in heads.items())
    if name is None and len(heads) > 1:
        raise JobError(f"{where}: the model has several heads, name one of kind {kind}: {kinds}")
    if name is None:
        (name,) = heads
    elif name not in heads:
        near = closest(name, heads)
        hint = f"did you mean '{near}'? " if near else ""
        raise JobError(f"{where}: the model has no head '{name}'; {hint}it has: {kinds}")
    # A plugin's head of any kind is accepted, because it may return the output that the task reads.
    if heads[name].kind != kind and not isinstance(heads[name], PluginHeadConfig):
        raise JobError(
            f"{where}: the task needs a head of kind {kind}, the model has: {kinds}; "
            f"add {{kind: {kind}}} to model.heads, or choose another task"
        )
    return heads[name]


def further_depths(model: Any) -> int:
    """Number of further tokens that a model predicts in training (``mtp.depths``); 0 without multi-token prediction.

    Args:
        model: the model's config.
    """
    depths = getattr(getattr(model, "mtp", None), "depths", 0)
    return depths if isinstance(depths, int) else 0


def check_next_tokens_only(model: Any, task: str) -> None:
    """Refuse a model that predicts further tokens, for a task that does not train them.

    Args:
        model: the model's config.
        task: name of the task.

    Raises:
        JobError: the model predicts further tokens.
    """
    if depths := further_depths(model):
        raise JobError(
            f"model.mtp: depths is {depths}, but task '{task}' trains no further tokens; set model.mtp.depths to 0, or "
            "use the task causal_lm"
        )


def read_output(outputs: Mapping[str, T], key: str, head: str | None) -> T:
    """Read one output of the chosen head; the name has no prefix if there is only one head.

    Raises:
        JobError: the model did not return this output.
    """
    for found in (key,) if head is None else (f"{head}/{key}", key):
        if found in outputs:
            return outputs[found]
    raise JobError(f"task: the model did not return '{key}'; it returned: {', '.join(outputs) or 'nothing'}")


def observed_states(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Observation ``hidden_states`` of the first head of this kind, without its gradient; empty without such a head."""
    found = next((value for name, value in outputs.items() if name.rpartition("/")[2] == HIDDEN_STATES), None)
    return {} if found is None else {HIDDEN_STATES: found.detach()}


def exceeded(model: Any, facts: State, where: str = "model") -> list[str]:
    """Messages, one line each, if the data has more token ids or positions than the model.

    A limit is compared only if both the model's config and the data state it.

    Args:
        model: config of the model.
        facts: facts about the data, by name.
        where: field of the job file with the model's config.
    """
    return [
        f"{where}.{field}: the model has {have} {what}, the data has {need}; "
        f"set {where}.{field} to {need} or more, or {otherwise}"
        for field, fact, what, otherwise in (
            ("vocab_size", "vocab_size", "token ids", "give the data a smaller vocabulary"),
            ("max_positions", "sequence_length", "positions", "lower data.sequence_length"),
        )
        if isinstance(have := getattr(model, field, None), int)
        and isinstance(need := facts.get(fact), int)
        and need > have
    ]


def check_language_model(model: Any, kind: str, head: str | None, facts: State) -> None:
    """Find the head that a task reads, and check that the model covers the data's token ids and positions, if stated.

    Args:
        model: config of the model.
        kind: kind of head that the task needs.
        head: name of the head, if given.
        facts: facts about the data, by name.

    Raises:
        JobError: the head cannot be found, or the data has token ids or positions that the model does not have.
    """
    choose_head(model, kind, head)
    if problems := exceeded(model, facts):
        raise JobError("\n".join(problems))
