"""Declaration of the fine-tuning methods."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import PeftSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_peft_methods() -> Iterator[PeftSpec]:
    """Declare the fine-tuning methods, which a job selects by the name in its section ``peft``."""
    yield PeftSpec(
        name="lora",
        summary="Low-rank updates of linear layers, embeddings, heads and experts; the model itself is frozen.",
        config=Ref("d9d_peft.config:LoraConfig"),
        build=Ref("d9d_peft.lora.method:Lora"),
        cost=Ref("d9d_peft.costs:lora"),
    )
    yield PeftSpec(
        name="dora",
        summary="Low-rank updates of the directions of weights, and trained magnitudes; the model itself is frozen.",
        config=Ref("d9d_peft.config:DoraConfig"),
        build=Ref("d9d_peft.lora.dora:Dora"),
        cost=Ref("d9d_peft.costs:dora"),
    )
    yield PeftSpec(
        name="full_tune",
        summary="Trains all parameters of some layers; the others are frozen.",
        config=Ref("d9d_peft.config:FullTuneConfig"),
        build=Ref("d9d_peft.full_tune:FullTune"),
        cost=Ref("d9d_peft.costs:full_tune"),
    )
    yield PeftSpec(
        name="stack",
        summary="Several methods on one model.",
        config=Ref("d9d_peft.config:StackConfig"),
        build=Ref("d9d_peft.stack:Stack"),
        composite=True,
        cost=Ref("d9d_peft.costs:stack"),
    )
    yield PeftSpec(
        name="ia3",
        summary="Learned scales of activations, one for each feature; the model itself is frozen.",
        config=Ref("d9d_peft.ia3.config:Ia3Config"),
        build=Ref("d9d_peft.ia3.method:Ia3"),
        cost=Ref("d9d_peft.costs:ia3"),
    )
