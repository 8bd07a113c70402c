"""Contenders over transformers: SDPA, flex attention, torch.compile, and Liger's kernels; LoRA by peft."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from contender import Contender, NotHereError, installed
from plain_loop import Microbatch, dtype_of, training_step, visible
from settings import ALPHA, RANK, Setting
from torch import Tensor


def build(setting: Setting, device: torch.device) -> Contender:
    """Contender in eager mode with PyTorch's SDPA; packed documents by a mask of S x S."""
    return _build(setting, device, "sdpa", installed("transformers"))


def build_compiled(setting: Setting, device: torch.device) -> Contender:
    """Contender whose model and loss are compiled by torch.compile."""
    return _build(setting, device, "sdpa", installed("transformers"), compiled=True)


def build_flex(setting: Setting, device: torch.device) -> Contender:
    """Contender with flex attention: packed documents by a block mask."""
    if device.type != "cuda":
        raise NotHereError("flex attention trains on CUDA only")
    return _build(setting, device, "flex_attention", installed("transformers"))


def build_flex_compiled(setting: Setting, device: torch.device) -> Contender:
    """Contender with flex attention, whose model and loss are compiled by torch.compile."""
    if device.type != "cuda":
        raise NotHereError("flex attention trains on CUDA only")
    return _build(setting, device, "flex_attention", installed("transformers"), compiled=True)


def build_liger(setting: Setting, device: torch.device) -> Contender:
    """Contender with Liger's kernels, including its loss."""
    versions = installed("transformers", "liger-kernel")
    if device.type != "cuda":
        raise NotHereError("Liger's kernels need a GPU")
    from liger_kernel import transformers as liger

    getattr(liger, f"apply_liger_kernel_to_{setting.model_values['name']}")()
    return _build(setting, device, "sdpa", versions)


def _build(
    setting: Setting, device: torch.device, attention: str, versions: dict[str, str], compiled: bool = False
) -> Contender:
    if setting.precision == "fp8":
        raise NotHereError("float8 is compared with torchtitan only")
    model = _model(setting, device, attention)
    if setting.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters, trained = sum(parameter.numel() for parameter in model.parameters()), None
    if setting.lora:
        versions = versions | installed("peft")
        model = _with_lora(model, setting)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    model.train()
    if compiled:
        model.compile(backend=setting.backend)
    mask_of = _mask if attention == "sdpa" else partial(_block_mask, torch.compile(_create()))

    def loss_of(microbatch: Microbatch) -> Tensor:
        targets = microbatch["targets"]
        packed = {}
        if "documents" in microbatch:
            packed = {"attention_mask": mask_of(microbatch["documents"]), "position_ids": microbatch["positions"]}
        out = model(input_ids=microbatch["tokens"], labels=targets, shift_labels=targets, use_cache=False, **packed)
        loss: Tensor = out.loss
        return loss

    step = training_step(model, loss_of, setting, device)
    return Contender(step, parameters, versions, trained=trained)


def _with_lora(model: Any, setting: Setting) -> Any:
    """Model with frozen weights, and LoRA on all linear layers but the head."""
    import peft

    if setting.checkpointed:
        model.enable_input_require_grads()
    terms = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, terms, autocast_adapter_dtype=False)


def _model(setting: Setting, device: torch.device, attention: str) -> Any:
    """Transformers model of the same sizes as d9d's."""
    import transformers

    dtype = dtype_of(setting)
    values = setting.files().config_json(setting.config(), str(dtype).removeprefix("torch."))
    theirs: Any = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    has_experts = setting.model_values["name"] in ("qwen3_moe", "gpt_oss")
    experts = {"experts_implementation": "grouped_mm"} if has_experts else {}
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            theirs, dtype=dtype, attn_implementation=attention, **experts
        )


def _mask(documents: Tensor) -> Tensor:
    return visible(documents)


def _create() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask


def _block_mask(create: Any, documents: Tensor) -> Any:
    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (query >= key) & (documents[sample, query] == documents[sample, key])

    samples, length = documents.shape
    return create(seen, samples, None, length, length, device=documents.device)
