"""Contender torchtitan 0.2: its Qwen3 and its compilation of blocks, by its public names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from contender import Contender, NotHereError, installed
from plain_loop import Microbatch, dtype_of, training_step
from settings import RECIPE, Setting
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """Minimal tokenizer for masks: the token at the end of each document."""

    eos_id: int


def build(setting: Setting, device: torch.device) -> Contender:
    """Contender with compiled blocks and a compiled loss; packed documents by flex attention.

    Raises:
        NotHereError: torchtitan is not installed, its version has other names, or it does not support the setting.
    """
    return _build(setting, device, "full")


def build_selective(setting: Setting, device: torch.device) -> Contender:
    """Contender whose checkpointed blocks keep the same outputs as its Qwen3: attention, and every second product."""
    if not setting.checkpointed:
        raise NotHereError("nothing is computed again at this length")
    return _build(setting, device, "selective")


def _build(setting: Setting, device: torch.device, checkpointing: str) -> Contender:
    versions = installed("torchtitan")
    if setting.lora:
        raise NotHereError("LoRA is compared with peft only")
    try:
        from torchtitan.config.job_config import ActivationCheckpoint, Compile
        from torchtitan.distributed.activation_checkpoint import apply_ac
        from torchtitan.models.llama3.infra.parallelize import apply_compile as apply_compile_to_llama
        from torchtitan.models.llama4.infra.parallelize import apply_compile
        from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list  # the contender's own default
    except ImportError as error:
        if error.name and not error.name.startswith("torchtitan"):
            raise NotHereError(f"torchtitan needs {error.name}, which is not installed") from None
        raise NotHereError(f"torchtitan {versions['torchtitan']} has other names than 0.2: {error}") from None
    packed, name = setting.data == "packed", setting.model_values["name"]
    masked = packed or name == "gpt_oss"
    if masked and device.type != "cuda":
        raise NotHereError("flex attention trains on CUDA only")
    with torch.device("meta"):
        model = _model(setting, packed)
    model.to_empty(device=device)
    with torch.no_grad(), device:
        model.init_weights(buffer_device=device)
    if setting.width == 2:
        for parameter in model.parameters():  # except the angles of rotary positions
            parameter.data = parameter.data.to(dtype_of(setting))
    if setting.precision == "fp8":
        versions |= installed("torchao")
        _convert(model)
    model.train()
    if setting.checkpointed:
        chosen = ActivationCheckpoint(mode=checkpointing, selective_ac_option="op")
        apply_ac(model, chosen, model_compile_enabled=True, op_sac_save_list=_op_sac_save_list)
    compiling = Compile(enable=True, components=["model", "loss"], backend=setting.backend)
    if name == "llama":
        apply_compile_to_llama(model, compiling)
    else:
        apply_compile(model, compiling, False)
    loss_function = torch.compile(_loss, backend=setting.backend)
    tokenizer = _Tokenizer(setting.model_values["vocab_size"] - 1)

    def loss_of(microbatch: Microbatch) -> Tensor:
        more: dict[str, Any] = {}
        if masked:
            more["attention_masks"] = model.get_attention_masks(microbatch["tokens"], tokenizer)
        if packed and name != "gpt_oss":  # whose rotations count from the start of the sample
            more["positions"] = microbatch["positions"]
        loss: Tensor = loss_function(model(microbatch["tokens"], **more), microbatch["targets"])
        return loss

    step = training_step(model, loss_of, setting, device)
    return Contender(step, sum(parameter.numel() for parameter in model.parameters()), versions)


def _model(setting: Setting, packed: bool) -> Any:
    from torchtitan.models.gpt_oss import GptOssModel, GptOssModelArgs
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs

    match setting.model_values["name"]:
        case "llama":
            return Transformer(TransformerModelArgs(**_llama_sizes(setting, packed)))
        case "gpt_oss":
            return GptOssModel(GptOssModelArgs(**_gpt_oss_sizes(setting, packed)))
        case "qwen3" | "qwen3_moe":
            return Qwen3Model(Qwen3ModelArgs(**_sizes(setting, packed)))
        case name:
            raise NotHereError(f"torchtitan 0.2 has no {name}")


def _convert(model: nn.Module) -> None:
    """Convert the linear layers of blocks to float8 by torchao, as torchtitan's own converter does."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def chosen(module: nn.Module, name: str) -> bool:
        inside = name.startswith("layers.") and ".router." not in name
        return inside and isinstance(module, nn.Linear) and not any(size % 16 for size in module.weight.shape)

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(RECIPE), module_filter_fn=chosen)


def _sizes(setting: Setting, packed: bool) -> dict[str, Any]:
    from torchtitan.models.moe import MoEArgs

    values = setting.model_values
    sizes: dict[str, Any] = {
        "dim": values["hidden_size"],
        "n_layers": values["num_layers"],
        "n_heads": values["num_attention_heads"],
        "n_kv_heads": values["num_key_value_heads"],
        "head_dim": values["head_dim"],
        "vocab_size": values["vocab_size"],
        "max_seq_len": setting.length,
        "enable_weight_tying": values.get("tie_embeddings", False),
    }
    if packed:
        sizes |= {"attn_type": "flex", "attn_mask_type": "block_causal"}
    if values["name"] == "qwen3":
        return sizes | {"hidden_dim": values["intermediate_size"]}
    experts = MoEArgs(
        num_experts=values["num_experts"], num_shared_experts=0, top_k=values["experts_per_token"],
        score_func="softmax", route_norm=True, score_before_experts=False, load_balance_coeff=None,
    )  # fmt: skip
    inside = values["moe_intermediate_size"]
    return sizes | {"hidden_dim": inside, "moe_enabled": True, "moe_inter_dim": inside, "moe_args": experts}


def _llama_sizes(setting: Setting, packed: bool) -> dict[str, Any]:
    """Sizes of torchtitan's Llama, whose features inside are 8 / 3 of the hidden ones, times a factor, rounded up."""
    values = setting.model_values
    hidden, inside = values["hidden_size"], values["intermediate_size"]
    attention = {"attn_type": "flex", "attn_mask_type": "block_causal"} if packed else {}
    return attention | {
        "dim": hidden,
        "n_layers": values["num_layers"],
        "n_heads": values["num_attention_heads"],
        "n_kv_heads": values["num_key_value_heads"],
        "vocab_size": values["vocab_size"],
        "ffn_dim_multiplier": inside / (8 * hidden / 3),
        "multiple_of": math.gcd(inside, 1024),
        "rope_theta": values.get("rope_theta", 10_000.0),
        "max_seq_len": setting.length,
    }


def _gpt_oss_sizes(setting: Setting, packed: bool) -> dict[str, Any]:
    """Sizes of torchtitan's gpt-oss, whose other sizes are gpt-oss-20b's by default."""
    from torchtitan.models.moe import MoEArgs

    config = setting.config()
    experts = MoEArgs(
        num_experts=config.num_experts, num_shared_experts=0, top_k=config.experts_per_token, score_func="softmax",
        route_norm=True, gate_bias=True, score_before_experts=False, load_balance_coeff=None,
    )  # fmt: skip
    return {
        "n_layers": config.num_layers, "max_seq_len": setting.length, "moe_args": experts,
        "attn_mask_type": "block_causal" if packed else "causal",
    }  # fmt: skip


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
