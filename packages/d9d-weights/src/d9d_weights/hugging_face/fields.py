"""Fields of ``config.json``: which are read, which change nothing, and which are refused.

The README of d9d-qwen3 shows the same as a table, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.errors import CheckpointError

__all__ = ["HARMLESS", "ONLY", "READ", "check_fields"]

#: Fields that become part of our config.
READ = frozenset(
    {
        "architectures", "attention_bias", "d9d", "head_dim", "hidden_size", "id2label", "initializer_range",
        "intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers", "model_type",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_labels", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window",
        "vocab_size",
    }
)  # fmt: skip

#: Fields that change nothing of what is computed here, whatever they say, by what they are about.
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

#: Fields that are refused unless they say what is computed here anyway.
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
    "auto_map": "the files bring model code of their own; take a model without, or remove it if that computes alike",
    "quantization_config": "these weights are quantized; take the weights that they were made from",
}
#: A value in a message is cut to so many characters.
_SHOWN = 80


def check_fields(
    data: Mapping[str, Any], model: str, read: frozenset[str], more: Mapping[str, tuple[Any, ...]]
) -> None:
    """Check the fields of a ``config.json``: refuse what it says and we would not do.

    Fields that are null say nothing.

    Args:
        data: the ``config.json``.
        model: our name of the model, for messages.
        read: fields that become part of its config.
        more: fields beside :data:`ONLY` that are refused unless they have one of these values.

    Raises:
        CheckpointError: a field is unknown, or has a value that is not computed here; names field, value and way out.
    """
    known, only = read.union(*HARMLESS.values()), {**ONLY, **more}
    for name, value in data.items():
        if value is None or name in known:
            continue
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        if name not in only:
            raise CheckpointError(
                f"config.json: {name} is {shown}, a field that {model} here does not know; if it changes nothing of "
                "what the model computes, remove it, else take another model"
            )
        if value not in only[name]:
            values = " or ".join(map(repr, only[name])) or "null"
            advice = _ADVICE.get(name, f"{model} here computes {values} only; take a model that has that")
            raise CheckpointError(f"config.json: {name} is {shown}; {advice}")
