"""Config of the dataset ``dataset``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from d9d_core.config import LoadsCode, PluginConfig
from pydantic import Field, field_validator, model_validator

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class DatasetConfig(PluginConfig):
    """Map-style or iterable dataset of PyTorch or Hugging Face, made by a function of yours."""

    name: Literal["dataset"] = "dataset"
    """Selects the plugin."""
    build: Annotated[str, LoadsCode()]
    """Function ``package.module:function`` that returns the dataset; its items map names to numbers, lists of numbers,
    arrays or tensors."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    collate: Annotated[str | None, LoadsCode()] = None
    """Function ``package.module:function`` that makes a microbatch of a list of items, instead of stacking and padding:
    a mapping from names to arrays or tensors [B, ...]."""
    padding: dict[str, int | float] = {}
    """One-dimensional fields of varying length -> value of the padding, such as ``{tokens: 0, targets: -100}``."""
    side: Literal["left", "right"] = "right"
    """Side of the padding."""
    pad_multiple: int = Field(default=1, ge=1)
    """Divisor of the length of a microbatch: the longest sample is rounded up to a multiple."""
    shuffle: bool = True
    """Visit the items of each epoch in a random order drawn from the seed; false keeps the order of the dataset, as an
    iterable dataset needs."""
    bucket_window: int | None = Field(default=None, ge=1)
    """Items sorted by size at a time, a multiple of the batch size; null for no sorting. The size of an item is the
    dataset's ``sort_key(index)``, or else the length of the first field in ``padding``."""
    workers: int = Field(default=0, ge=0)
    """Processes that build packs ahead, each with its own copy of the dataset; 0 builds packs in this process."""

    @field_validator("build", "collate")
    @classmethod
    def _names_a_function(cls, name: str | None) -> str | None:
        if name is not None and not _FUNCTION.fullmatch(name):
            raise ValueError(f"'{name[:80]}' does not name a function; write package.module:function")
        return name

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        for name in ("padding", "side", "pad_multiple"):
            if self.collate is not None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with collate, which makes the microbatches; remove one")
        return self
