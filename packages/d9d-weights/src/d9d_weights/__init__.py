"""State graphs and streaming of model weights: Hugging Face and safetensors files, into any sharding and out of it.

A state graph says how the names and layouts of two forms of a model correspond, before any tensor is read:

    from d9d_weights.graph.graph import StateGraph
    from d9d_weights.graph.mappers import Rename
    from d9d_weights.graph.merging import Stack

Names are imported when they are used, so that importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_weights.files.atomic import move, sync_tree
    from d9d_weights.files.lock import LocksUnsupportedError, lock_file
    from d9d_weights.graph.base import Mapper, Parallel, Sequential
    from d9d_weights.graph.compose import Connect, Prefix, Shard
    from d9d_weights.graph.compute import Compute
    from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
    from d9d_weights.graph.groups import Group
    from d9d_weights.graph.mappers import Cast, Distribute, Gather, Identity, Rename, Squeeze, Transpose, Unsqueeze
    from d9d_weights.graph.merging import Chunk, Concatenate, Stack, Unstack
    from d9d_weights.graph.select import Copy, Drop, Either, Explained, Fresh, Select, Share
    from d9d_weights.hugging_face.adapter import AdapterFormat, MergesTensors
    from d9d_weights.hugging_face.adapter_config import check_adapter_config
    from d9d_weights.hugging_face.convert import convert
    from d9d_weights.hugging_face.directory import ModelDirectory
    from d9d_weights.hugging_face.export import ModelFiles, export_model
    from d9d_weights.hugging_face.format import HuggingFaceFormat
    from d9d_weights.hugging_face.load import check_duplicates, load_tensors
    from d9d_weights.hugging_face.tokenizer_bounds import check_tokenizer
    from d9d_weights.hugging_face.writer import ModelWriter
    from d9d_weights.sharding.model_tensors import model_tensors
    from d9d_weights.sharding.stage_holders import StageHolders
    from d9d_weights.templates.process import TemplateError, TemplateLimits, TemplateProcess

#: Module of each name; they are imported when they are used.
_LAZY = {
    "move": "d9d_weights.files.atomic",
    "sync_tree": "d9d_weights.files.atomic",
    "LocksUnsupportedError": "d9d_weights.files.lock",
    "lock_file": "d9d_weights.files.lock",
    "Mapper": "d9d_weights.graph.base",
    "Parallel": "d9d_weights.graph.base",
    "Sequential": "d9d_weights.graph.base",
    "Connect": "d9d_weights.graph.compose",
    "Prefix": "d9d_weights.graph.compose",
    "Shard": "d9d_weights.graph.compose",
    "Compute": "d9d_weights.graph.compute",
    "StateGraph": "d9d_weights.graph.graph",
    "map_tensors": "d9d_weights.graph.graph",
    "specs_of": "d9d_weights.graph.graph",
    "Group": "d9d_weights.graph.groups",
    "Cast": "d9d_weights.graph.mappers",
    "Distribute": "d9d_weights.graph.mappers",
    "Gather": "d9d_weights.graph.mappers",
    "Identity": "d9d_weights.graph.mappers",
    "Rename": "d9d_weights.graph.mappers",
    "Squeeze": "d9d_weights.graph.mappers",
    "Transpose": "d9d_weights.graph.mappers",
    "Unsqueeze": "d9d_weights.graph.mappers",
    "Chunk": "d9d_weights.graph.merging",
    "Concatenate": "d9d_weights.graph.merging",
    "Stack": "d9d_weights.graph.merging",
    "Unstack": "d9d_weights.graph.merging",
    "Copy": "d9d_weights.graph.select",
    "Drop": "d9d_weights.graph.select",
    "Either": "d9d_weights.graph.select",
    "Explained": "d9d_weights.graph.select",
    "Fresh": "d9d_weights.graph.select",
    "Select": "d9d_weights.graph.select",
    "Share": "d9d_weights.graph.select",
    "convert": "d9d_weights.hugging_face.convert",
    "ModelDirectory": "d9d_weights.hugging_face.directory",
    "AdapterFormat": "d9d_weights.hugging_face.adapter",
    "MergesTensors": "d9d_weights.hugging_face.adapter",
    "ModelFiles": "d9d_weights.hugging_face.export",
    "export_model": "d9d_weights.hugging_face.export",
    "HuggingFaceFormat": "d9d_weights.hugging_face.format",
    "check_adapter_config": "d9d_weights.hugging_face.adapter_config",
    "check_duplicates": "d9d_weights.hugging_face.load",
    "load_tensors": "d9d_weights.hugging_face.load",
    "check_tokenizer": "d9d_weights.hugging_face.tokenizer_bounds",
    "ModelWriter": "d9d_weights.hugging_face.writer",
    "model_tensors": "d9d_weights.sharding.model_tensors",
    "StageHolders": "d9d_weights.sharding.stage_holders",
    "TemplateError": "d9d_weights.templates.process",
    "TemplateLimits": "d9d_weights.templates.process",
    "TemplateProcess": "d9d_weights.templates.process",
}

__all__ = [
    "AdapterFormat",
    "Cast",
    "Chunk",
    "Compute",
    "Concatenate",
    "Connect",
    "Copy",
    "Distribute",
    "Drop",
    "Either",
    "Explained",
    "Fresh",
    "Gather",
    "Group",
    "HuggingFaceFormat",
    "Identity",
    "LocksUnsupportedError",
    "Mapper",
    "MergesTensors",
    "ModelDirectory",
    "ModelFiles",
    "ModelWriter",
    "Parallel",
    "Prefix",
    "Rename",
    "Select",
    "Sequential",
    "Shard",
    "Share",
    "Squeeze",
    "Stack",
    "StageHolders",
    "StateGraph",
    "TemplateError",
    "TemplateLimits",
    "TemplateProcess",
    "Transpose",
    "Unsqueeze",
    "Unstack",
    "check_adapter_config",
    "check_duplicates",
    "check_tokenizer",
    "convert",
    "export_model",
    "load_tensors",
    "lock_file",
    "map_tensors",
    "model_tensors",
    "move",
    "specs_of",
    "sync_tree",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
