"""The kernels of the loss, compiled for GPUs that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Compiled outside of this process, in which Triton interprets. Prints what a line of PTX must have for each kernel.
SCRIPT = """
import itertools
import triton
from d9d_triton.linear_cross_entropy import kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"targets": "*i64", "ranks": "*i64", **dict.fromkeys(("losses", "peaks", "totals", "grad_losses"), "*fp32")}

def compiled(kernel, capability, dtype, aligned, **constants):
    types = {**POINTERS, "logits": dtype, "own": dtype, "ignored": "i32", "sections": "i32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    attrs = {(kernel.arg_names.index("logits"),): [["tt.divisibility", 16]]} if aligned else {}
    source = ASTSource(kernel, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(kernels._OPTIONS))

def report(name, capability, dtype, words, found):
    wide = sum("ld.global.v4" in line for line in found.asm["ptx"].splitlines())
    print(name, capability, dtype, words, "cubin" in found.asm and len(found.asm["cubin"]) > 0, wide, sep=",")

for capability, dtype, words in (
    (90, "*bf16", 151936), (90, "*fp16", 151936), (90, "*fp32", 151936), (90, "*bf16", 50257), (90, "*bf16", 1),
    (80, "*bf16", 32000), (100, "*bf16", 32000),
):
    block = kernels._block(words)
    sizes = {"WORDS": words, "STRIDE": kernels.columns(words), "BLOCK": block}
    for ranked in (False, True):
        found = compiled(kernels._take_statistics, capability, dtype, True, RANKED=ranked, **sizes)
        report(f"statistics {ranked}", capability, dtype, words, found)
    found = compiled(kernels._differentiate, capability, dtype, True, BLOCKS=kernels._BLOCKS, **sizes)
    report("gradient", capability, dtype, words, found)
"""


def test_all_kernels_compile_and_read_rows_of_any_length_in_wide_loads() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split(",") for line in done.stdout.splitlines()]
    assert len(rows) == 21
    for name, _, _, words, built, wide in rows:
        assert built == "True", name
        assert int(wide) > 0 or int(words) == 1, f"{name} of {words} words reads no 16 bytes at once"
