"""Decisions about the ops of layers, for code that runs as written and for compiled code. Imports no Triton.

A compiler fuses an op's reference with the operations around it, and calls a kernel of ours as it is: one pass over
memory may become two. So what wins in code that runs as written may lose in compiled code. The numbers are of an H200,
where a copy moves 4.27 TB/s. This is the one place to change when a measurement says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from d9d_core.kernel import Decision, OpSignature

from d9d_triton.support import PRIORITY, decide

#: By name only: the reference, priority 0, stays.
BY_NAME = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one op.

    Attributes:
        eager: priority and reason where the module runs as written.
        compiled: priority and reason where it is compiled.
    """

    eager: tuple[int, str]
    compiled: tuple[int, str]


RULES: Mapping[str, Rule] = {
    "rms_norm": Rule(
        eager=(PRIORITY, "one pass in each direction; torch's fused norm reaches 1.7 TB/s in its backward"),
        compiled=(BY_NAME, "inductor fuses norms with what is around them, in a third of the time; by name only"),
    ),
    "add_rms_norm": Rule(
        eager=(PRIORITY, "addition and norm in one pass each way, where they take two each"),
        compiled=(
            PRIORITY,
            "one pass backward for both gradients, where inductor takes two: 342.6 ms a dense step, not 345.3",
        ),
    ),
    "silu_mul": Rule(
        eager=(PRIORITY, "one pass in each direction; without a compiler the reference reaches 2.4 TB/s"),
        compiled=(BY_NAME, "inductor reaches 4.3 TB/s, as much as a copy; by name only"),
    ),
    "swiglu": Rule(
        eager=(PRIORITY, "gradients of gate and up are one product for the input and one for weights; keeps no gate"),
        compiled=(
            PRIORITY,
            "one product for the gradient of the input, not two and their sum: 340.1 ms a step, not 341.2",
        ),
    ),
    "rope": Rule(
        eager=(PRIORITY, "one launch and one pass for queries and keys, which take the reference many"),
        compiled=(BY_NAME, "inductor fuses rotations with the norms before them, in half the time; by name only"),
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
    "permute": Rule(
        eager=(PRIORITY, "copies as the reference does; their gradients are summed in one pass, not in one per choice"),
        compiled=(BY_NAME, "inductor sums the gradients in one pass, too; by name only"),
    ),
    "unpermute": Rule(
        eager=(PRIORITY, "one pass in each direction, which takes the reference one per choice"),
        compiled=(BY_NAME, "inductor fuses the passes of the reference; by name only"),
    ),
}
#: A program of a norm holds whole rows in registers: x, gradients, the weight, the sum of its gradient.
MOST_FEATURES = 16384


def rms_norm(signature: OpSignature) -> Decision:
    """Accept rows that fit into registers."""
    decision, features = by_rule(signature), signature.static.get("features", 1)
    if decision.accept and features > MOST_FEATURES:
        return Decision(False, f"a program holds whole rows: at most {MOST_FEATURES} features, not {features}")
    return decision


def joint(signature: OpSignature) -> Decision:
    """Accept by the op's rule; in checkpointed blocks by name only.

    There, a job may say by the names of operators which products are kept, and those inside of an op have none.
    """
    decision = by_rule(signature)
    if decision.accept and signature.checkpointed:
        reason = "checkpointing finds no products inside of it to keep (save: [aten.mm]); by name only"
        return Decision(True, reason, BY_NAME)
    return decision


def by_rule(signature: OpSignature) -> Decision:
    """Accept with the priority of the op's rule, where Triton kernels run at all."""
    rule = RULES[signature.op]
    priority, reason = rule.compiled if signature.compiled else rule.eager
    return decide(signature, reason, priority=priority)
