"""Compares kernels with their float64 references on randomly drawn shapes, and prints a table.

    uv run python tools/kernel_campaign.py --shapes 1000
    uv run python tools/kernel_campaign.py normed_rope.triton attention.flex --device cuda --seed 7

Each shape is drawn with a dtype and must pass the checks of the conformance suite for kernels: values, gradients (also
an expanded gradient of one element), non-contiguous inputs, and inputs that must not be modified. Without a GPU, Triton
kernels are interpreted. Exit status 1 if a call fails or a kernel accepted no call.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.suites.support.ops import KNOWN_OPS, Op

OURS = [f"{op}.triton" for op in (
    "rms_norm", "add_rms_norm", "silu_mul", "swiglu", "rope", "normed_rope", "attention_inputs", "permute", "unpermute",
    "linear_cross_entropy", "adamw",
)]  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Outcome:
    """Outcome of one kernel's campaign.

    Attributes:
        passed: number of calls that passed.
        refused: number of calls that the kernel does not support.
        failures: error messages, with the index of the shape.
    """

    passed: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)


def suite_of(target: str, device: str, random: Random) -> KernelSuite:
    """Conformance suite of a kernel that makes one random call."""
    known = KNOWN_OPS[target.partition(".")[0]]
    assert known.at_random is not None
    call = known.at_random(random)

    class OneCall(KernelSuite):
        def op(self) -> Op:
            return replace(known, calls=lambda: [call])

    OneCall.target, OneCall.device, OneCall.dtypes = target, device, (random.choice(DTYPES),)
    OneCall.gradients = len(call.constants) < sum(tensor.is_floating_point() for tensor in call.inputs.values())
    return OneCall()


def compare(target: str, device: str, shapes: int, seed: int) -> Outcome:
    """Compare one kernel on a number of shapes."""
    found = Outcome()
    for number in range(shapes):
        draw = Random(f"{seed}:{target}:{number}")  # noqa: S311 - no secrets
        suite = suite_of(target, device, draw)
        where, signature, _ = next(iter(suite.calls()))
        if not suite.decision(signature).accept:
            found.refused += 1
            continue
        tests = [suite.test_values_are_those_of_the_reference, suite.test_inputs_are_only_read]
        if suite.gradients:
            tests += [suite.test_gradients_are_those_of_the_reference, suite.test_inputs_need_not_be_contiguous]
        try:
            for test in tests:
                test()
            found.passed += 1
        except (AssertionError, ValueError, RuntimeError, TypeError) as error:
            found.failures.append(f"{target}, shape {number}: {where}:\n    {error}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign for the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=OURS, help="op.backend; by default, all of d9d-triton")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", type=int, default=1000, help="of each kernel")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    unknown = [target for target in asked.targets if target.partition(".")[0] not in KNOWN_OPS]
    if unknown:
        parser.error(f"no call is defined for {', '.join(unknown)}; known ops: {', '.join(sorted(KNOWN_OPS))}")
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    print(f"{'kernel':32}{'passed':>8}{'refused':>9}{'failed':>8}{'seconds':>9}", flush=True)
    failures, nothing = [], False
    for target in asked.targets:
        began = time.monotonic()
        found = compare(target, asked.device, asked.shapes, asked.seed)
        taken = time.monotonic() - began
        print(f"{target:32}{found.passed:8}{found.refused:9}{len(found.failures):8}{taken:9.0f}", flush=True)
        failures += found.failures
        nothing |= not found.passed
    print("\n".join(failures))
    return 1 if failures or nothing else 0


if __name__ == "__main__":
    sys.exit(main())
