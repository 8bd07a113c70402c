"""Effects of strategies follow their configs."""

from __future__ import annotations

from d9d_core.cost import AttentionShape, Exchange, OpCost
from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.compile.config import CompileConfig
from d9d_parallel.context_parallel.costs import AttentionCosts
from d9d_parallel.costs import alternatives, checkpointed, compiled, replicated, sharded
from d9d_parallel.data_parallel.config import FsdpConfig, ReplicateConfig


def test_resharding_gathers_parameters_for_forward_and_backward() -> None:
    assert sharded(FsdpConfig()).gathers == "twice"
    assert sharded(FsdpConfig(reshard_after_forward=False)).gathers == "once"
    assert replicated(ReplicateConfig()).gathers == "once"


def test_what_waits_for_the_last_microbatch_is_said() -> None:
    assert replicated(ReplicateConfig()).reduces == "each"
    assert sharded(FsdpConfig(defer="all_reduce")).reduces == "replicas_last"
    assert sharded(FsdpConfig(defer="everything")).reduces == "last"


def test_replicas_are_reduced_in_place_unless_something_asks_for_fsdp2() -> None:
    assert replicated(ReplicateConfig(defer="everything")).in_place
    assert not replicated(ReplicateConfig(compute_dtype="bfloat16")).in_place
    assert not sharded(FsdpConfig()).in_place


def test_formats_of_computation_and_reduction_are_those_of_the_config() -> None:
    effect = sharded(FsdpConfig(compute_dtype="bfloat16", reduce_dtype="float32"))
    assert (effect.compute_width, effect.reduce_width) == (2, 4)


def test_effects_of_several_strategies_add_up() -> None:
    both = compiled(CompileConfig()) | checkpointed(ActivationCheckpointingConfig(every=2)) | sharded(FsdpConfig())
    assert (both.compiled, both.recomputed, both.shards) == (True, 0.5, True)


def test_kept_attention_counts() -> None:
    assert checkpointed(ActivationCheckpointingConfig(save=("aten.mm", "attention"))).keeps_attention
    assert not checkpointed(ActivationCheckpointingConfig(save=("aten.mm",))).keeps_attention


def test_only_inductor_fuses() -> None:
    assert not compiled(CompileConfig(backend="aot_eager")).compiled


def test_alternatives_communicate_less_and_are_no_settings_that_the_job_has() -> None:
    config = FsdpConfig()
    tried = [(other.defer, sharded(other).gathers) for other in alternatives(config)]  # type: ignore[arg-type]
    assert tried == [("everything", "twice"), ("everything", "once")]
    assert alternatives(ReplicateConfig(defer="everything")) == []


def test_gathered_latents_are_sent_instead_of_keys_and_values_which_each_rank_computes() -> None:
    shape = AttentionShape(rows=10, query_heads=4, key_value_heads=4, features=16, width=2, latent=12, expanded=72)
    cost = AttentionCosts("all_gather", None)(OpCost("attention", "attention", kept=5.0, attention=shape), 3)
    sent = 3 * 2 * 10 * 12
    assert cost.exchanges == (Exchange("all_gather", "cp", sent),)
    assert cost.backward_exchanges == (Exchange("reduce_scatter", "cp", sent),)
    attention, product, _copies = cost.ops
    assert attention.kept == 5 + 2 * (2 * 2 * 10 * 4 * 16)
    assert (product.kind, product.flops, product.backward_flops) == ("product", 2 * 20 * 12 * 72, 4 * 20 * 12 * 72)
