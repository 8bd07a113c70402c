"""Frozen model beside the trained one, such as the reference of preference tuning or a teacher."""

from __future__ import annotations

from d9d_core.errors import BuildError, JobError
from d9d_core.first_pass import FirstPass, PassModel
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection, check_capabilities, select
from d9d_core.peft import SwitchesOff
from d9d_core.plugin import StrategySpec
from d9d_core.registry.capabilities import Chosen, Circumstances
from d9d_core.registry.registry import Registry

from d9d_engine.compose.assemble import Assembly, assemble
from d9d_engine.distributed.mesh import Topology


def settle_first_pass(chosen: FirstPass, assembly: Assembly) -> PassModel:
    """Model that runs a first pass, where the task leaves it open.

    Raises:
        JobError: the job has no fine-tuning method whose terms can be switched off.
    """
    removable = isinstance(assembly.peft, SwitchesOff)
    if chosen.by == "frozen":
        return "without_adapter" if removable else "copy"
    if chosen.by == "without_adapter" and not removable:
        why = (
            "has no 'peft'" if assembly.peft is None else "has a fine-tuning method that trains the model's own tensors"
        )
        raise JobError(
            f"{chosen.where}: 'without_adapter' is the model without the terms of a fine-tuning method, but the job "
            f"{why}; use copy or stored"
        )
    return chosen.by


def assemble_frozen(
    job: JobConfig, registry: Registry, topology: Topology, around: Circumstances, chosen: FirstPass, by: PassModel
) -> tuple[JobConfig, Selection, Assembly]:
    """Assemble a frozen model beside the trained one, on the meta device, in the same layout.

    Args:
        job: of the trained model.
        registry: meaning of its names.
        topology: this process among others.
        around: what capabilities are judged against.
        chosen: the task's choice.
        by: ``copy`` or ``other``.

    Returns:
        The job with that model, its records, and the model.

    Raises:
        JobError: the layout does not suit that model.
        BuildError: likewise.
    """
    if by == "copy":
        selection = select(job, registry)
        return job, selection, assemble(job, selection, registry, topology, around, trains=False)
    frozen = job.model_copy(update={"model": chosen.other, "peft": None})
    try:
        model = select(frozen, registry).model
        usable = [one for one in frozen.parallel if _suits(registry, one.selector, model)]
        frozen = frozen.model_copy(update={"parallel": usable})
        selection = select(frozen, registry)
        check_capabilities(selection, registry, around)
        return frozen, selection, assemble(frozen, selection, registry, topology, around, trains=False)
    except (JobError, BuildError) as error:
        raise type(error)(f"{chosen.where}: {error}") from error


def _suits(registry: Registry, selector: str, model: Chosen) -> bool:
    """Whether a strategy finds in a model what it needs; experts are not in every one."""
    spec = registry.find("strategy", selector).spec
    assert isinstance(spec, StrategySpec)
    return {token for token in spec.requires if token.startswith("model:")} <= set(model.spec.provides)
