"""Assembly of a frozen model in addition to the trained model, such as a reference model or a teacher."""

from __future__ import annotations

from dataclasses import replace

from d9d_core.errors import BuildError, JobError
from d9d_core.first_pass import FirstPass, PassModel
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection, judged, select
from d9d_core.peft import SwitchesOff
from d9d_core.plugin import StrategySpec
from d9d_core.registry.capabilities import Chosen
from d9d_core.registry.registry import Registry

from d9d_engine.compose.assemble import Assembly, assemble
from d9d_engine.compose.root import Root


def settle_first_pass(chosen: FirstPass, assembly: Assembly) -> PassModel:
    """Choose the model of a first pass if the task leaves the choice open.

    Raises:
        JobError: the task asks for the model without adapter, but the job has no fine-tuning method that can be
            switched off.
    """
    removable = isinstance(assembly.peft, SwitchesOff)
    if chosen.by == "frozen":
        return "without_adapter" if removable else "copy"
    if chosen.by == "without_adapter" and not removable:
        why = (
            "has no 'peft'" if assembly.peft is None else "has a fine-tuning method that trains the model's own tensors"
        )
        raise JobError(
            f"{chosen.where}: 'without_adapter' runs the model with its fine-tuning method switched off, but the job "
            f"{why}; use copy or stored"
        )
    return chosen.by


def assemble_frozen(
    root: Root[JobConfig, Selection], chosen: FirstPass, by: PassModel
) -> tuple[Root[JobConfig, Selection], Assembly]:
    """Assemble a frozen model on the meta device, in the same layout as the trained model.

    Args:
        root: job of the trained model in this process.
        chosen: first pass that the task asks for.
        by: ``copy`` or ``other``.

    Returns:
        Root of the job with the frozen model, and its assembly.

    Raises:
        JobError: the layout does not fit the frozen model.
        BuildError: the layout does not fit the frozen model.
    """
    if by == "copy":
        return root, assemble(root, trains=False)
    registry = root.registry
    frozen = root.job.model_copy(update={"model": chosen.other, "peft": None})
    try:
        model = select(frozen, registry).model
        usable = [one for one in frozen.parallel if _suits(registry, one.selector, model)]
        frozen = frozen.model_copy(update={"parallel": usable})
        resolution = judged(select(frozen, registry), registry, root.resolution.judge.circumstances)
        beside = replace(root, job=frozen, resolution=resolution)
        return beside, assemble(beside, trains=False)
    except (JobError, BuildError) as error:
        raise type(error)(f"{chosen.where}: {error}") from error


def _suits(registry: Registry, selector: str, model: Chosen) -> bool:
    """Whether a model has all that a strategy requires of it, such as experts."""
    spec = registry.find("strategy", selector).spec
    assert isinstance(spec, StrategySpec)
    return {token for token in spec.requires if token.startswith("model:")} <= set(model.spec.provides)
