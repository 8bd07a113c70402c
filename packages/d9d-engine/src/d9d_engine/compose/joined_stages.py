"""Module that joins the stages of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


def joined_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Join stages into one module with the tensor names of the full model; a single stage is returned as is."""
    return stages[0] if len(stages) == 1 else JoinedStages(stages)


class JoinedStages(nn.Module):
    """Joined stages of a model, for access to modules and tensors by name; has no forward.

    Modules, parameters and buffers have their names of the full model. If several stages have a module or tensor of the
    same name, such as a tied embedding, the name refers to the first stage; :meth:`modules` yields the modules of all
    stages.

    Args:
        stages: stages in pipeline order.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Modules of all stages with their names; each stage itself has the empty name."""
        memo = set() if memo is None else memo
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all stages; of several parameters with one name, only the one in the first stage."""
        return _first(stage.named_parameters(prefix, recurse, remove_duplicate) for stage in self._stages)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers of all stages; of several buffers with one name, only the one in the first stage."""
        return _first(stage.named_buffers(prefix, recurse, remove_duplicate) for stage in self._stages)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """State dict of all stages; of several entries with one name, only the one in the first stage."""
        return {k: v for stage in reversed(self._stages) for k, v in stage.state_dict(*args, **kwargs).items()}

    def get_submodule(self, target: str) -> nn.Module:
        """Module of this name, from the first stage that has it.

        Raises:
            AttributeError: no stage has such a module.
        """
        return self._find(lambda stage: stage.get_submodule(target), f"module '{target}'")

    def get_parameter(self, target: str) -> nn.Parameter:
        """Parameter of this name, from the first stage that has it.

        Raises:
            AttributeError: no stage has such a parameter.
        """
        return self._find(lambda stage: stage.get_parameter(target), f"parameter '{target}'")

    def get_buffer(self, target: str) -> Tensor:
        """Buffer of this name, from the first stage that has it.

        Raises:
            AttributeError: no stage has such a buffer.
        """
        return self._find(lambda stage: stage.get_buffer(target), f"buffer '{target}'")

    def _find(self, get: Callable[[nn.Module], T], what: str) -> T:
        for stage in self._stages:
            with suppress(AttributeError):
                return get(stage)
        raise AttributeError(f"no pipeline stage of this rank has the {what}")

    @property
    def _stages(self) -> list[nn.Module]:
        return list(self.stages)


def _first(groups: Any) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for group in groups:
        for name, value in group:
            if name not in seen:
                seen.add(name)
                yield name, value
