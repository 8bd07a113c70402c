"""Contenders: their names, and the interface of a contender's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from settings import Setting
from torch import Tensor


class NotHereError(Exception):
    """A contender is not installed, or does not support the setting; the message says which."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Contender that is ready to train.

    Attributes:
        step: forward, loss, backward, clipping and update of the next microbatch; returns the loss, on the device.
        parameters: number of the model's parameters, without the parameters of LoRA.
        trained: number of trained parameters, if some are frozen.
        versions: versions of its libraries.
        remarks: notes for readers of the table.
        optimizer_bytes: bytes of a parameter, its gradient and states that the optimizer reads and writes; by default
            seven numbers of the parameters' width.
    """

    step: Callable[[], Tensor]
    parameters: int
    versions: Mapping[str, str] = field(default_factory=dict)
    remarks: str = ""
    optimizer_bytes: int | None = None
    trained: int | None = None


Build = Callable[[Setting, torch.device], Contender]

#: Name -> its title in tables, and the function that builds it.
CONTENDERS: Mapping[str, tuple[str, str]] = {
    "d9d": ("d9d", "ours:build"),
    "d9d-eager": ("d9d without compile", "ours:build_eager"),
    "d9d-masters": ("d9d, master weights", "ours:build_masters"),
    "d9d-attention-kept": ("d9d, attention kept", "ours:build_attention_kept"),
    "d9d-fewer-blocks": ("d9d, 20 blocks checkpointed", "ours:build_fewer_blocks"),
    "d9d-transformers": ("d9d-transformers", "ours:build_transformers"),
    "transformers": ("transformers, SDPA", "with_transformers:build"),
    "transformers-flex": ("transformers, flex", "with_transformers:build_flex"),
    "transformers-flex-compile": ("transformers, flex, torch.compile", "with_transformers:build_flex_compiled"),
    "transformers-compile": ("transformers + torch.compile", "with_transformers:build_compiled"),
    "liger": ("transformers + Liger", "with_transformers:build_liger"),
    "torchtitan": ("torchtitan", "with_torchtitan:build"),
    "torchtitan-selective": ("torchtitan, selective", "with_torchtitan:build_selective"),
}
#: Contenders of a table by default.
DEFAULT = ("d9d", "transformers", "transformers-compile", "liger", "torchtitan")
#: Contenders that support float8.
FLOAT8 = ("d9d", "torchtitan")
#: Contenders that train LoRA.
LORA = ("d9d", "transformers", "liger")


def builder_of(name: str) -> Build:
    """Function that builds a contender: one of :data:`CONTENDERS`, or ``module:function``."""
    module, _, function = (CONTENDERS[name][1] if name in CONTENDERS else name).partition(":")
    build: Build = getattr(import_module(module), function)
    return build


def title_of(name: str) -> str:
    """Name of a contender in tables."""
    return CONTENDERS[name][0] if name in CONTENDERS else name


def installed(*names: str) -> dict[str, str]:
    """Installed versions of distributions.

    Raises:
        NotHereError: one is not installed.
    """
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            raise NotHereError(f"{name} is not installed") from None
    return found
