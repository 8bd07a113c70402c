"""Fields of ``config.json``: fields that d9d reads, fields that have no effect in d9d, and fields that d9d refuses.

The README of d9d-qwen3 has the same table, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.errors import CheckpointError

__all__ = ["HARMLESS", "ONLY", "READ", "check_fields"]

#: Fields that become part of d9d's config.
READ = frozenset(
    {
        "architectures", "attention_bias", "d9d", "head_dim", "hidden_size", "id2label", "initializer_range",
        "intermediate_size", "is_causal", "layer_types", "max_position_embeddings", "max_window_layers", "model_type",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_labels", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window",
        "vocab_size",
    }
)  # fmt: skip

#: Topic -> fields that have no effect on the computation here, with any value.
HARMLESS: Mapping[str, frozenset[str]] = {
    "files": frozenset(
        {
            "_commit_hash", "_name_or_path", "dtype", "tokenizer_class", "torch_dtype", "transformers_version",
            "unsloth_fixed", "unsloth_version",
        }
    ),
    "tokens": frozenset(
        {"bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "prefix", "sep_token_id"}
    ),
    "how transformers computes": frozenset(
        {
            "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
            "_experts_implementation", "attn_implementation", "chunk_size_feed_forward", "is_decoder",
            "output_attentions", "output_hidden_states", "return_dict", "tf_legacy_loss", "torchscript", "use_bfloat16",
            "use_cache",
        }
    ),
    "how to train": frozenset(
        {"finetuning_task", "label2id", "output_router_logits", "problem_type", "router_aux_loss_coef",
         "task_specific_params"}
    ),
    "how to generate": frozenset(
        {
            "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
            "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
            "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
            "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
            "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature",
            "top_k", "top_p", "typical_p",
        }
    ),
}  # fmt: skip

#: Field -> values with which d9d's model computes the same as transformers' model; other values are refused.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_dropout": (0,),
    "auto_map": ({},),
    "cross_attention_hidden_size": (),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "pruned_heads": ({},),
    "quantization_config": ({},),
    "shared_expert_intermediate_size": (0,),
    "tie_encoder_decoder": (False,),
}

_ADVICE: Mapping[str, str] = {
    "attention_dropout": "no attention is dropped here; set it to 0",
    "auto_map": "the files contain their own model code; take a model without such code, or remove "
    "auto_map if d9d's model computes the same results",
    "quantization_config": "these weights are quantized; take the weights that they were made from",
}
#: Largest number of characters of a value that a message shows.
_SHOWN = 80


def check_fields(
    data: Mapping[str, Any], model: str, read: frozenset[str], more: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse fields of a ``config.json`` whose effect d9d does not implement. Fields that are null are ignored.

    Args:
        data: contents of ``config.json``.
        model: d9d's name of the model, for messages.
        read: fields that become part of d9d's config.
        more: accepted values of further fields by field name, in addition to :data:`ONLY`.

    Raises:
        CheckpointError: a field is unknown, or has a value that d9d does not implement; the text names field, value and
            a solution.
    """
    known, only = read.union(*HARMLESS.values()), {**ONLY, **more}
    for name, value in data.items():
        if value is None or name in known:
            continue
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        if name not in only:
            raise CheckpointError(
                f"config.json: {name} is {shown}, a field that is unknown to {model} here; if it does not affect the "
                "model's results, remove it, else take another model"
            )
        if value not in only[name]:
            values = " or ".join(map(repr, only[name])) or "null"
            advice = _ADVICE.get(name, f"{model} here supports {values} only; take a model with this value")
            raise CheckpointError(f"config.json: {name} is {shown}; {advice}")
