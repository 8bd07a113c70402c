"""Text output of ``d9d check`` and ``d9d explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d9d_core.cli.output import length_of, mesh_line
from d9d_core.config import ModelConfig
from d9d_core.errors import D9dError
from d9d_core.job_file.found_model import find_model
from d9d_core.registry.registry import REFERENCE
from d9d_core.terminal.console import console_for, key_value_table
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from d9d_engine.compose.kernels import KernelChoice
    from d9d_engine.compose.plan import Plan
    from d9d_engine.job import Job

GIB = 2**30


def print_plan(job: Job, plan: Plan) -> None:
    """Print the summary of a plan and its warnings, for ``d9d check`` and ``d9d explain``."""
    from d9d_engine.cli.stages import pipeline_line  # imports torch; an invalid job fails before

    console = console_for()
    table = key_value_table()
    total, trained = plan.parameters
    table.add_row("mesh", mesh_line(job))
    table.add_row("model", f"{plan.selection.model.entry}: {total:,} parameters, {trained:,} of them train")
    if plan.pretrained:
        table.add_row("weights", plan.pretrained)
    memory = plan.memory
    parts = (memory.parameters, memory.gradients, memory.optimizer)
    table.add_row(
        "memory",
        f"{memory.total / GIB:.3f} GiB without activations{_rank_of(job, plan)} "
        "(parameters {:.3f}, gradients {:.3f}, optimizer {:.3f}".format(*(part / GIB for part in parts))
        + (f", frozen model {memory.frozen / GIB:.3f})" if memory.frozen else ")")
        + (f", and {memory.host / GIB:.3f} GiB of host memory" if memory.host else ""),
    )
    table.add_row("step", f"{job.batch.size} samples, {job.microbatches} microbatch(es) of {job.microbatch_size}")
    table.add_row("run", length_of(job))
    if job.pipeline:
        table.add_row("pipeline", pipeline_line(job, plan))
    program = " ".join(str(action) for action in plan.program[:8])
    table.add_row("program", program + (" ..." if len(plan.program) > 8 else ""))
    if plan.flops_per_token:
        table.add_row("FLOPs", f"{plan.flops_per_token:.4g} per token")
    for verdict in plan.verdicts:
        if verdict.satisfied is None:
            table.add_row("undecided", f"{verdict.chosen.where} needs {verdict.token}: {verdict.reason}")
    console.print(table)
    for warning in plan.warnings:
        console.print(Text.assemble(("warning", "yellow"), f": {warning}"))


def _weights_say(job: Job, location: str) -> str:
    """Line for ``d9d explain``: the model that the pretrained weights select, and why."""
    try:
        selector, reason = find_model(location, job.registry)
    except D9dError as error:
        return f"model: named by the job; {error}"
    same = "found for" if selector == job.model.selector else f"named by the job; {selector} is found for"
    return f"model: {same} {location}: {reason}"


def print_explanation(job: Job, plan: Plan) -> None:
    """Print for ``d9d explain`` a plan's components, their plugins and effects, and the reasons for choices."""
    from d9d_engine.cli.stages import pipeline_line, print_stages

    console = console_for()
    _heading(console, "parts")
    table = Table(box=None, show_header=False)
    for chosen in plan.selection.all():
        table.add_row(f"  {chosen.where}", chosen.spec.name, str(chosen.entry.origin), chosen.spec.summary)
    console.print(table)
    if isinstance(job.model, ModelConfig) and job.model.pretrained is not None:
        console.print(Text(f"  {_weights_say(job, str(job.model.pretrained))}"))
    if job.pipeline:
        _heading(console, f"stages of {pipeline_line(job, plan)}")
        print_stages(console, job, plan)
    rank = plan.collectives.rank
    here = f" (on rank {rank})" if job.mesh.pp > 1 or rank else ""
    _heading(console, f"strategies, in order of application{here}")
    for chosen, applied in plan.assembly.applied:
        console.print(f"  {chosen.spec.name}: {_several(applied.modules)}")
        for note in applied.notes:
            console.print(f"    {note}", markup=False, highlight=False)
    if not plan.assembly.applied:
        console.print("  none")
    _heading(console, "kernels")
    for choice in plan.kernels:
        print_kernel(console, choice)
    _heading(console, "optimizer groups")
    for name, facts in plan.groups.items():
        settings = ", ".join(f"{key} {value}" for key, value in facts.items() if key != "parameters")
        names = _several(tuple(facts.get("parameters", ())))
        console.print(f"  {name}: {settings}: {names}")
    _heading(console, "capabilities")
    for verdict in plan.verdicts:
        console.print(f"  {verdict.chosen.where} {verdict.token}: {verdict.reason}")
    if not plan.verdicts:
        console.print("  none are required")
    _heading(console, f"gradient reductions{here}")
    rows = plan.assembly.ownership.table()
    for axis, owned_by, parameters in rows:
        console.print(f"  over {axis} by {owned_by}: {_several(parameters)}")
    if not rows:
        console.print(f"  none: {job.mesh}")
    print_communication(console, job, plan)
    print_plan(job, plan)


def print_communication(console: Console, job: Job, plan: Plan) -> None:
    """Print for ``d9d explain`` the placements of parameters and the collectives of a step and of a log entry."""
    if job.mesh.world_size == 1:
        return
    from d9d_engine.compose.communication.rows import grouped

    found = plan.collectives
    _heading(console, f"parameters on rank {found.rank}, and where their other parts are")
    table = Table(box=None, show_header=False)
    for placed in plan.placements:
        count = f"{placed.count} x " if placed.count > 1 else ""
        frozen = "" if placed.trained else ", frozen"
        table.add_row(f"  {placed.pattern}", f"{count}{list(placed.shape)}", f"{placed.placement}{frozen}")
    console.print(table)
    steps = (("a step", found.entries), (f"a log entry, each {job.logging.every} step(s)", found.logged))
    for what, entries in steps:
        if not entries:
            continue
        _heading(console, f"collectives of {what} on rank {found.rank}")
        table = Table("  by", "kind", "over", "ranks", "calls", "bytes each", "what", box=None)
        for row in grouped(entries):
            table.add_row(f"  {row.source}", *row.cells())
        console.print(table)
    kinds = [f"{calls} {kind} {size:,} bytes" for kind, (calls, size) in found.total.items()]
    average = ", on average" if any(entry.collective.every > 1 for entry in found.entries) else ""
    console.print(f"  in a step{average}: {'; '.join(kinds) or 'none'}", highlight=False)
    if any(entry.collective.approximate for entry in found.entries):
        console.print("  ~: depends on values of the step, such as the choices of a router", highlight=False)
    if any(entry.collective.bytes is None for entry in found.entries):
        console.print("  ?: sizes that depend on the data; they are not in the sums", highlight=False)
    console.print("  not listed: collectives of evaluations and checkpoints", highlight=False)
    for line in found.unknown:
        console.print(Text.assemble(("  not listed: ", "yellow"), line))


def _rank_of(job: Job, plan: Plan) -> str:
    """Text such as `` on rank 3`` for numbers that differ between ranks; empty if all ranks are equal."""
    rank = plan.collectives.rank
    return f" on rank {rank}" if rank else " on the first rank" if job.pipeline else ""


#: Printed for a backend with priority 0 or less, unless its reason says it already.
_BY_NAME = "used only if the job names it"


def print_kernel(console: Console, choice: KernelChoice) -> None:
    """Print the chosen backend of an op, and the answer of every backend."""
    supplied = f" ({choice.supplied_by})" if choice.supplied_by else ""
    rule = "" if choice.rule is None else f"[{choice.rule}]"
    asked = f", asked for by kernels.{choice.op}{rule}," if choice.requested else ""
    compiled = ", compiled" if choice.compiled else ""
    text = f"  {choice.op}: {choice.backend}{supplied}{asked} at {_several(choice.sites)}{compiled}"
    console.print(text, markup=False, highlight=False)
    for name, decision in choice.considered.items():
        answer = "refuses"
        if decision.accept:
            answer = f"accepts, priority {decision.priority}"
            if decision.priority <= 0 and name != REFERENCE and _BY_NAME not in decision.reason:
                answer = f"{answer}, {_BY_NAME}"
        console.print(f"    {name} {answer}: {decision.reason}", markup=False, highlight=False)


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def _several(names: tuple[str, ...]) -> str:
    # The root module has an empty name.
    shown = ", ".join(name or "(the model itself)" for name in names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
