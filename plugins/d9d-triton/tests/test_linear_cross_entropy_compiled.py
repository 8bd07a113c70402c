"""Compiled code of the loss, looked at without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

#: Compiles outside of this process, in which Triton interprets. Prints the wide loads and stores of each kernel.
SCRIPT = """
from d9d_triton.kernels import linear_cross_entropy as kernels
from d9d_triton.linear_cross_entropy import passes
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"targets": "*i64", "ranks": "*i64", **dict.fromkeys(("losses", "peaks", "totals", "grad_losses"), "*fp32")}

def show(launcher, dtype, words, own=None, most=passes._BLOCK, **constants):
    kernel = launcher.kernel
    constants |= {"WORDS": words, "STRIDE": passes.columns(words), "BLOCK": passes._block(words, most)}
    types = {**POINTERS, "logits": dtype, "own": own or dtype, "ignored": "i32", "sections": "i32", "first": "i32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index("logits"),): [["tt.divisibility", 16]]}
    source = ASTSource(kernel, signature, constants, aligned)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(passes._OPTIONS)).asm["ptx"].splitlines()
    print(*(sum(f"{way}.global.v4" in line for line in code) for way in ("ld", "st")))

for dtype in ("*bf16", "*fp32"):
    for words in (151936, 50257):
        show(kernels.take_statistics, dtype, words, RANKED=True)
        show(kernels.differentiate, dtype, words, BLOCKS=passes._BLOCKS)
    for words in (11712, 11392, 4097):
        show(kernels.include_words, dtype, words, "*fp32", passes._CHUNK_BLOCK)
        show(kernels.differentiate, dtype, words, most=passes._CHUNK_BLOCK, BLOCKS=3)
        show(kernels.count_above, dtype, words, "*fp32", passes._CHUNK_BLOCK)
"""


def test_rows_of_any_length_are_read_and_written_sixteen_bytes_at_once() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wide = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(wide) == 2 * (2 * 2 + 3 * 3)
    assert all(loads for loads, _ in wide), wide
    for of_dtype in (wide[:13], wide[13:]):
        assert all(stores for _, stores in (*of_dtype[1:4:2], *of_dtype[5::3])), wide
