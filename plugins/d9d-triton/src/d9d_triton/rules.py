"""Priorities of the kernels for layers, in eager and in compiled code. Imports no Triton.

A compiler fuses an op's reference with the operations around it, but calls a custom kernel as it is, which may turn one
pass over memory into two. So a kernel that wins in eager code may lose in compiled code. The numbers were measured on
an H200, where a copy moves 4.27 TB/s. If new measurements differ, change the priorities in this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from d9d_core.kernel import Decision, OpSignature

from d9d_triton.support import PRIORITY, decide

#: Priority of a kernel that is used only if a job names it: the reference also has priority 0 and is preferred.
BY_NAME = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """Priorities of the Triton kernel of one op.

    Attributes:
        eager: priority and reason in eager code.
        compiled: priority and reason in compiled code.
    """

    eager: tuple[int, str]
    compiled: tuple[int, str]


RULES: Mapping[str, Rule] = {
    "rms_norm": Rule(
        eager=(PRIORITY, "one pass in each direction; torch's fused norm reaches 1.7 TB/s in its backward"),
        compiled=(
            BY_NAME,
            "inductor fuses norms with neighbouring operations, in a third of the time; used only if the job names it",
        ),
    ),
    "add_rms_norm": Rule(
        eager=(PRIORITY, "addition and norm in one pass each way; the reference takes two each"),
        compiled=(
            PRIORITY,
            "one pass backward for both gradients, where inductor takes two: 342.6 ms for a dense step, not 345.3",
        ),
    ),
    "silu_mul": Rule(
        eager=(PRIORITY, "one pass in each direction; without a compiler the reference reaches 2.4 TB/s"),
        compiled=(BY_NAME, "inductor reaches 4.3 TB/s, as much as a copy; used only if the job names it"),
    ),
    "swiglu": Rule(
        eager=(PRIORITY, "one product for the gradient of the input, one for the gate and up weight gradients"),
        compiled=(
            PRIORITY,
            "one product for the gradient of the input, not two and their sum: 340.1 ms a step, not 341.2",
        ),
    ),
    "rope": Rule(
        eager=(PRIORITY, "one launch and one pass for queries and keys; the reference takes many"),
        compiled=(
            BY_NAME,
            "inductor fuses rotations with the norms before them, in half the time; used only if the job names it",
        ),
    ),
    "normed_rope": Rule(
        eager=(PRIORITY, "one launch each way, where two norms and a rotation take three"),
        compiled=(PRIORITY, "one launch each way, 0.15 ms for a layer where inductor's kernels take 0.33"),
    ),
    "attention_inputs": Rule(
        eager=(PRIORITY, "one product for the gradient of the rows, where three projections need three and two sums"),
        compiled=(
            PRIORITY,
            "one product for the gradient of the rows, not three and their sum: 341.2 ms a step, not 342.6",
        ),
    ),
    "low_rank_linear": Rule(
        eager=(PRIORITY, "products add in place, where the reference adds updates and gradients in passes over memory"),
        compiled=(PRIORITY, "products add in place: 512 ms for a step of Qwen3-8B with LoRA, where inductor takes 540"),
    ),
    "permute": Rule(
        eager=(PRIORITY, "copies as the reference does; sums their gradients in one pass, not in one per choice"),
        compiled=(BY_NAME, "inductor sums the gradients in one pass, too; used only if the job names it"),
    ),
    "unpermute": Rule(
        eager=(PRIORITY, "one pass in each direction; the reference takes one per choice"),
        compiled=(BY_NAME, "inductor fuses the passes of the reference; used only if the job names it"),
    ),
}
_STORES_NOTHING = (
    "activation checkpointing cannot save products inside this op (save: [aten.mm]); used only if the job names it"
)
#: Largest number of features of a norm: a program holds whole rows of x, of the gradients, and of the weight in
#: registers.
MOST_FEATURES = 16384


def rms_norm(signature: OpSignature) -> Decision:
    """Accept calls of ``rms_norm`` and ``add_rms_norm`` whose rows fit into the registers of a program."""
    decision, features = by_rule(signature), signature.static.get("features", 1)
    if decision.accept and features > MOST_FEATURES:
        return Decision(False, f"a program holds whole rows: at most {MOST_FEATURES} features, not {features}")
    return decision


def joint(signature: OpSignature) -> Decision:
    """Accept ops of several products by the op's rule; in checkpointed blocks, a job must name the backend.

    Selective activation checkpointing names operators whose outputs are kept; it cannot see the products inside a
    custom op.
    """
    decision = by_rule(signature)
    if decision.accept and signature.checkpointed:
        return Decision(True, _STORES_NOTHING, BY_NAME)
    return decision


def low_rank_linear(signature: OpSignature) -> Decision:
    """Accept ``low_rank_linear`` by its rule; where checkpointing stores products, a job must name the backend."""
    decision = by_rule(signature)
    if decision.accept and signature.storing:
        return Decision(True, _STORES_NOTHING, BY_NAME)
    return decision


def by_rule(signature: OpSignature) -> Decision:
    """Accept calls of an op with the priority of its rule, if Triton kernels can run."""
    rule = RULES[signature.op]
    priority, reason = rule.compiled if signature.compiled else rule.eager
    return decide(signature, reason, priority=priority)
