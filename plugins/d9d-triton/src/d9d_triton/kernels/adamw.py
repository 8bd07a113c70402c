"""Kernels of AdamW steps, see :mod:`d9d_triton.adamw`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_step(
    table,
    factors,
    keys,
    gate,
    count,
    lr,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW kernel: bias corrections of each tensor; if the gate is true, increments step counts and generators.

    Args:
        table: int64, a column for each of n tensors. Rows: addresses of parameter, gradient, first and second moment,
            step count, generator and first position, then the number of elements. Without stochastic rounding, the
            generator and first position are left out; with master weights, the address of their lower bits follows the
            address of the step count.
        factors: float32 [2, n], out: learning rate / bias correction of the average; 1 / bias correction of the
            squares.
        keys: int64 [n], out: generator states before this step.
        gate: bool [1]: whether the step is taken.
        count: n.
        lr: learning rate.
        LOG2_BETA1: base-2 logarithm of beta1.
        LOG2_BETA2: base-2 logarithm of beta2.
        STOCHASTIC: whether to round stochastically, with generators.
        BLOCK: number of tensors that one program handles.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = index < count
    opened = tl.load(gate) != 0
    steps = tl.load(table + 4 * count + index, mask=known, other=0).to(tl.pointer_type(tl.float32))
    taken = tl.load(steps, mask=known, other=0.0) + 1
    # Computed in float64, because in float32 1 - beta ** n would lose most of its digits in the first steps.
    wide = taken.to(tl.float64)
    first = 1 - tl.exp2(wide * LOG2_BETA1)
    second = 1 - tl.exp2(wide * LOG2_BETA2)
    tl.store(factors + index, (lr / first).to(tl.float32), mask=known)
    tl.store(factors + count + index, (1 / second).to(tl.float32), mask=known)
    if opened:
        tl.store(steps, taken, mask=known)
    if STOCHASTIC:
        places = tl.load(table + 5 * count + index, mask=known, other=0).to(tl.pointer_type(tl.int64))
        key = tl.load(places, mask=known, other=0)
        tl.store(keys + index, key, mask=known)
        if opened:
            tl.store(places, key * 6364136223846793005 + 1442695040888963407, mask=known)


@triton.jit
def update_weights(
    table,
    owners,
    firsts,
    factors,
    keys,
    gate,
    divisor,
    count,
    keep,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    DIVIDES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASTERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW kernel: update one block of one tensor; for the table see :func:`count_step`.

    With ``MASTERS``, a bfloat16 weight and its int16 lower bits together form a float32 master weight.
    """
    if tl.load(gate) != 0:
        owner = tl.load(owners + tl.program_id(0)).to(tl.int64)
        begin = (tl.program_id(0) - tl.load(firsts + owner)).to(tl.int64) * BLOCK
        weights = tl.load(table + owner).to(tl.pointer_type(WEIGHT))
        gradients = tl.load(table + count + owner).to(tl.pointer_type(GRADIENT))
        averages = tl.load(table + 2 * count + owner).to(tl.pointer_type(MOMENT))
        squares = tl.load(table + 3 * count + owner).to(tl.pointer_type(MOMENT))
        weights, gradients, averages, squares = weights + begin, gradients + begin, averages + begin, squares + begin
        if ALIGNED:
            weights = tl.multiple_of(weights, 16)
            gradients = tl.multiple_of(gradients, 16)
            averages = tl.multiple_of(averages, 16)
            squares = tl.multiple_of(squares, 16)
        lower = weights
        if MASTERS:
            lower = tl.load(table + 5 * count + owner).to(tl.pointer_type(tl.int16)) + begin
            if ALIGNED:
                lower = tl.multiple_of(lower, 16)
        key = begin
        position = begin.to(tl.uint32)
        if STOCHASTIC:
            key = tl.load(keys + owner)
            start = tl.load(table + 6 * count + owner).to(tl.pointer_type(tl.uint32))
            position += tl.load(start)
            size = tl.load(table + 7 * count + owner)
        else:
            size = tl.load(table + (6 if MASTERS else 5) * count + owner)
        step_size = tl.load(factors + owner)
        inverse = tl.load(factors + count + owner)
        scale = step_size
        if DIVIDES:
            scale = 1 / tl.load(divisor)
        # Masked loads are not vectorized, so only the last block of a tensor has a mask.
        if begin + BLOCK <= size:
            _update_block(
                weights, gradients, averages, squares, lower, BLOCK, position, key, step_size, inverse, scale, keep,
                one_minus_beta1, beta2, one_minus_beta2, eps, WEIGHT, MOMENT, DIVIDES, STOCHASTIC, MASTERS, False,
                BLOCK,
            )  # fmt: skip
        else:
            _update_block(
                weights, gradients, averages, squares, lower, (size - begin).to(tl.int32), position, key, step_size,
                inverse, scale, keep, one_minus_beta1, beta2, one_minus_beta2, eps, WEIGHT, MOMENT, DIVIDES,
                STOCHASTIC, MASTERS, True, BLOCK,
            )  # fmt: skip


@triton.jit
def _update_block(
    weights,
    gradients,
    averages,
    squares,
    lower,
    size,
    position,
    key,
    step_size,
    inverse,
    scale,
    keep,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    WEIGHT: tl.constexpr,
    MOMENT: tl.constexpr,
    DIVIDES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASTERS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offset = tl.arange(0, BLOCK)
    inside = offset < size if MASKED else None
    if MASTERS:
        upper = tl.load(weights.to(tl.pointer_type(tl.int16)) + offset, mask=inside).to(tl.int32) << 16
        weight = (upper + tl.load(lower + offset, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        weight = tl.load(weights + offset, mask=inside).to(tl.float32)
    gradient = tl.load(gradients + offset, mask=inside).to(tl.float32)
    average = tl.load(averages + offset, mask=inside).to(tl.float32)
    square = tl.load(squares + offset, mask=inside).to(tl.float32)
    if DIVIDES:
        gradient = gradient * scale
    average += (gradient - average) * one_minus_beta1
    square = square * beta2 + gradient * gradient * one_minus_beta2
    weight = weight * keep - step_size * average / (tl.sqrt(square * inverse) + eps)
    rounds_weight: tl.constexpr = STOCHASTIC and WEIGHT == tl.bfloat16
    rounds_moment: tl.constexpr = STOCHASTIC and MOMENT == tl.bfloat16
    if rounds_weight or rounds_moment:
        random = _mix((position + offset.to(tl.uint32)) ^ _folded(key))
    if rounds_weight:
        tl.store(weights.to(tl.pointer_type(tl.int16)) + offset, rounded(weight, random & 0xFFFF), mask=inside)
    elif MASTERS:
        upper, distance = divided(weight)
        tl.store(weights.to(tl.pointer_type(tl.int16)) + offset, upper, mask=inside)
        tl.store(lower + offset, distance, mask=inside)
    else:
        tl.store(weights + offset, weight.to(WEIGHT), mask=inside)
    if rounds_moment:
        # The second moments need other random bits than the first moments: mix again with the inverted key.
        other = _mix(random ^ _folded(~key))
        tl.store(averages.to(tl.pointer_type(tl.int16)) + offset, rounded(average, random >> 16), mask=inside)
        tl.store(squares.to(tl.pointer_type(tl.int16)) + offset, rounded(square, other & 0xFFFF), mask=inside)
    else:
        tl.store(averages + offset, average.to(MOMENT), mask=inside)
        tl.store(squares + offset, square.to(MOMENT), mask=inside)


@triton.jit
def _folded(key):
    """Fold the int64 state of a random generator to 32 bits, see :func:`d9d_optim.optimizer.rounding.hashed`."""
    return _mix(_mix(key.to(tl.uint32)) + (key >> 32).to(tl.uint32))


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounded(value, noise):
    """Bits of the stochastically rounded bfloat16, as int16, see :func:`d9d_optim.optimizer.rounding.rounded`."""
    bits = value.to(tl.uint32, bitcast=True)
    up = bits + noise
    # A carry into an all-ones exponent would turn a finite number into infinity; infinities get no noise either.
    chosen = tl.where((up & 0x7F800000) == 0x7F800000, bits, up)
    # The mantissa bits of a NaN may all be in the part that is cut off.
    chosen = tl.where(value != value, bits | 0x400000, chosen)
    return (chosen >> 16).to(tl.int16)


@triton.jit
def divided(value):
    """Bits of the nearest bfloat16 and the distance to it, int16, see :class:`d9d_optim.optimizer.adamw.AdamW`."""
    bits = value.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    distance = bits - (upper << 16)
    nan = value != value
    return tl.where(nan, (bits >> 16) | 0x40, upper).to(tl.int16), tl.where(nan, 0, distance).to(tl.int16)
