"""Backend of the op ``gated_delta_rule``: chunks of 64 positions, in parallel except for the scan over their states.

For a head, with the symbols of :mod:`d9d_nn.ops.gated_delta_rule` (Yang et al. 2024, section 3.3): q is a chunk's
normalised queries times ``D_k^-1/2``, k its normalised keys, S the state before the chunk, ``decay[t, s]`` the decay
from position s to a later position t of the same document, ``r[t]`` the decay of S until position t (0 unless t
continues the document of the previous chunk), ``e[s]`` the decay from s to the chunk's end, and

    A[t, s] = beta[t] decay[t, s] k[t] . k[s]  for s < t      T = (1 + A)^-1
    P[t, s] = decay[t, s] q[t] . k[s]          for s <= t     W = T beta r k,  U = T beta V

the forward computes

    changes = U - W S        outputs = r q S + P changes        next S = r[last] S + (e k)^T changes

and the backward, with dO the gradient of the outputs and dS the gradient of the next state,

    d changes = P^T dO + e k dS        previous dS = r[last] dS + (r q)^T dO - W^T d changes
    X = T^T d changes                  d(beta V) = X, and A has the gradient -X changes^T below its diagonal.

X is the gradient of the right side of the system ``(1 + A) changes = beta (V - r k S)``. All other gradients follow
from these; the gradients of decays are sums over pairs of positions. The forward keeps only its inputs and T; the
backward recomputes W, U, the states and the changes. States and changes have the dtype of the values in memory, sums
are float32.

Products read queries and keys as they are in memory: the norms are factors of the products' results. No kernel uses
atomics, and the host reads nothing from the device.

Shapes: B samples, S positions, K key heads, N value heads (a multiple of K), D_k and D_v features of a key and value
head, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from d9d_core.kernel import OpSignature
from torch import Tensor

from d9d_triton.kernels.gated_delta_rule import compute_outputs, pass_states, solve_chunks
from d9d_triton.kernels.gated_delta_rule_backward import differentiate, pass_gradients, prepare_gradients
from d9d_triton.launch import OPTIONS, check_floats, on_device
from d9d_triton.support import MOST_HEAD_FEATURES

#: Positions of a chunk. The kernels invert blocks of 16 rows and merge them twice.
CHUNK = 64
#: Smallest number of features of a key in the kernels' memory: the smallest dimension of a matrix product in Triton.
_LEAST_FEATURES = 16
#: Columns of values that an iteration of a kernel handles, and columns of the states that a program of a scan holds.
#: Features of values are padded to a multiple of the first number, so each divides them and all reads are inside of the
#: tensors. Heads of fewer features have 64 columns, too: with a BLOCK of 32, compute_outputs stopped with an illegal
#: memory access on an H200 (Triton 3.6, 2026-11). Its addresses are inside of the tensors; the reason was not found.
_BLOCK, _COLUMNS = 64, 32
#: Most features of a head for which numbers of stages were measured.
_MEASURED = 128
#: Bytes of shared memory of a program on Hopper and on Blackwell of data centers, which have 227 KiB. With less, loads
#: are not stored ahead in more stages than the least.
_ROOM = 200 * 1024
#: Precision of products of float32 matrices: three products of tensor cores, which together have the precision of
#: float32. Without tensor cores ("ieee"), Triton took minutes to compile a kernel.
_FLOAT32 = "tf32x3"


def build(_signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend ``triton`` of the op ``gated_delta_rule``; its function is the same for every signature."""
    return gated_delta_rule


def build_from(_signature: OpSignature) -> Callable[..., tuple[Tensor, Tensor]]:
    """Build the backend ``triton`` of the op ``gated_delta_rule_from``; all signatures have the same function."""
    return gated_delta_rule_from


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Gated delta rule by Triton, see :func:`d9d_nn.ops.gated_delta_rule.gated_delta_rule`.

    Args:
        query: [B, S, K, D_k], of any strides; read in the dtype of ``value``.
        key: [B, S, K, D_k], of any strides; read in the dtype of ``value``.
        value: [B, S, N, D_v], of any strides.
        decay: [B, S, N].
        beta: [B, S, N].
        documents: int64 [B, S]; ``None`` if a sample is one document.

    Returns:
        [B, S, N, D_v] in the dtype of ``value``, contiguous.

    Raises:
        TypeError: the kernels do not support the dtype of a tensor.
        ValueError: the shapes do not fit together, or a head has more than 256 features.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    if documents is not None:
        documents = documents.to(value.device)
    out: Tensor = chunked_rule(None, query, key, value, decay, beta, documents)[0]
    return out


def gated_delta_rule_from(
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule by Triton from a given state, see :func:`d9d_nn.ops.gated_delta_rule.chunked_from`.

    Args:
        state: state that the first document of each sample continues, [B, N, D_k, D_v]; read as float32.
        query: [B, S, K, D_k], of any strides; read in the dtype of ``value``.
        key: [B, S, K, D_k], of any strides; read in the dtype of ``value``.
        value: [B, S, N, D_v], of any strides.
        decay: [B, S, N].
        beta: [B, S, N].
        documents: int64 [B, S]; ``None`` if a sample is one document.

    Returns:
        Outputs [B, S, N, D_v] and the state after the last position [B, N, D_k, D_v]; float32, contiguous.

    Raises:
        TypeError: the kernels do not support the dtype of a tensor.
        ValueError: the shapes do not fit together, or a head has more than 256 features.
    """
    query, key, state = query.to(value.dtype), key.to(value.dtype), state.to(torch.float32)
    if documents is not None:
        documents = documents.to(value.device)
    out, _, last = chunked_rule(state, query, key, value, decay, beta, documents)
    return out, last


@torch.library.custom_op("d9d_triton::gated_delta_rule", mutates_args=())
def chunked_rule(
    state: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Custom op behind :func:`gated_delta_rule` and, with a state, :func:`gated_delta_rule_from`.

    Returns:
        Outputs; T [B * N * chunks, C, C], which the backward reads; the last state, empty without ``state``.
    """
    _check("gated_delta_rule" if state is None else "gated_delta_rule_from", query, key, value, decay, beta, documents)
    _check_state(state, key, value)
    out, solved, last = _outputs(state, value)
    if not value.numel() or not key.numel():
        return out.zero_(), solved.zero_(), last if state is None else last.copy_(state)
    call = _Call.of(state, query, key, value, decay, beta, documents)
    scan = _Scan.empty(call, value)
    with on_device(value):
        solve_chunks[(call.programs,)](
            solved, scan.corrections, scan.changes, scan.ends, scan.keeps, call.key, call.value, call.decay, call.beta,
            call.documents, *call.sizes, *call.key.stride()[:3], *call.value.stride()[:3], **call.tile,
            MERGE=_FLOAT32 if value.dtype == torch.float32 else "tf32", **call.launch("solve"),
        )  # fmt: skip
        states = _pass_states(call, scan, last)
        compute_outputs[(call.programs,)](
            out, states, scan.changes, call.query, call.key, call.decay, call.documents, call.scale, *call.sizes,
            *call.query.stride()[:3], *call.key.stride()[:3], **call.tile, **call.launch("outputs"),
        )  # fmt: skip
    return out, solved, last


@torch.library.custom_op("d9d_triton::gated_delta_rule_backward", mutates_args=())
def chunked_rule_backward(
    grad: Tensor,
    grad_last: Tensor | None,
    solved: Tensor,
    state: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gated delta rule by Triton: gradients of :func:`gated_delta_rule` and :func:`gated_delta_rule_from`.

    Args:
        grad: [B, S, N, D_v], gradient of the output; of any strides, expanded ones too.
        grad_last: float32 [B, N, D_k, D_v], gradient of the last state; ``None`` for zeros, and without ``state``.
        solved: [B * N * chunks, C, C], T of the forward.
        state: float32 [B, N, D_k, D_v], the first state; ``None`` for zeros.
        query: [B, S, K, D_k].
        key: [B, S, K, D_k].
        value: [B, S, N, D_v].
        decay: [B, S, N].
        beta: [B, S, N].
        documents: int64 [B, S]; ``None`` if a sample is one document.

    Returns:
        The gradients of state (empty without ``state``), query, key, value, decay and beta, in their dtypes,
        contiguous.
    """
    grad_state = _state_like(state, value)
    found = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value, decay, beta))
    grad_query, grad_key, grad_value, grad_decay, grad_beta = found
    if not value.numel() or not key.numel():
        zeros = (grad_query.zero_(), grad_key.zero_(), grad_value.zero_(), grad_decay.zero_(), grad_beta.zero_())
        return grad_state.zero_() if grad_last is None else grad_state.copy_(grad_last), *zeros
    call = _Call.of(state, query, key, value, decay, beta, documents)
    if grad_last is None and state is not None:
        grad_last = torch.zeros_like(grad_state)
    scan, grad = _Scan.empty(call, value), _dense(grad)
    grad_changes, reads = torch.empty_like(scan.changes), torch.empty_like(scan.ends)
    strides = [*grad.stride()[:3], *call.query.stride()[:3], *call.key.stride()[:3]]
    with on_device(value):
        prepare_gradients[(call.programs,)](
            grad_changes, scan.corrections, scan.changes, scan.ends, scan.keeps, reads, grad, solved, call.query,
            call.key, call.value, call.decay, call.beta, call.documents, call.scale, *call.sizes, *strides,
            *call.value.stride()[:3], **call.tile, **call.launch("prepare"),
        )  # fmt: skip
        states = _pass_states(call, scan, torch.empty_like(grad_state))
        grad_states = torch.empty_like(states)
        pass_gradients[(call.scan_programs,)](
            grad_states, grad_state, grad_changes, scan.corrections, scan.ends, scan.keeps, reads,
            grad_state if grad_last is None else grad_last.contiguous(), grad, call.query, call.key, *call.sizes,
            *strides, **call.scan, **call.launch("pass_gradients"),
        )  # fmt: skip
        # gradients of queries and keys by each value head, [B, S, N, D_k]
        own = call.shared == 1
        by_head = [value.new_empty(*value.shape[:3], key.shape[-1]) for _ in range(0 if own else 2)]
        of_query, of_key = (grad_query, grad_key) if own else by_head
        differentiate[(call.programs,)](
            of_query, of_key, grad_value, grad_decay, grad_beta, grad, states, grad_states, scan.changes, grad_changes,
            solved, call.query, call.key, call.value, call.decay, call.beta, call.documents, call.scale, *call.sizes,
            *strides, *call.value.stride()[:3], **call.tile, BEGUN=state is not None, **call.launch("differentiate"),
        )  # fmt: skip
    if not own:
        for by_each, total in ((of_query, grad_query), (of_key, grad_key)):
            torch.sum(by_each.view(*key.shape[:3], call.shared, key.shape[3]), 3, out=total)
    return grad_state, grad_query, grad_key, grad_value, grad_decay, grad_beta


@dataclass(frozen=True, slots=True)
class _Call:
    """Inputs in the form that the kernels take, and sizes of the launches.

    Attributes:
        state: float32 [B, N, D_k, D_v], contiguous, the first state; any tensor if it is zero.
        query: [B, S, K, D_k] with adjacent features.
        key: [B, S, K, D_k] with adjacent features.
        value: [B, S, N, D_v] with adjacent features.
        decay: [B, S, N], contiguous.
        beta: [B, S, N], contiguous.
        documents: int64 [B, S], contiguous; any tensor if there are none.
        sizes: S, chunks of a sample, and N.
        heads: value heads of all samples.
        keys: features of a key in the kernels' memory.
        values: features of a value in the kernels' memory.
        scan: compile-time sizes of the kernels of the scans.
        tile: compile-time sizes of the other kernels.
    """

    state: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    documents: Tensor
    sizes: tuple[int, int, int]
    heads: int
    keys: int
    values: int
    scan: dict[str, Any]
    tile: dict[str, Any]

    @classmethod
    def of(
        cls,
        state: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        documents: Tensor | None,
    ) -> _Call:
        """Copy inputs where their strides require it, and choose tiles by the numbers of features."""
        samples, length, heads, of_values = value.shape
        of_keys = key.shape[3]
        keys = max(_LEAST_FEATURES, 1 << (of_keys - 1).bit_length())
        values = (of_values + _BLOCK - 1) // _BLOCK * _BLOCK
        tile = {
            "SHARED": heads // key.shape[2], "KEY_DIM": of_keys, "VALUE_DIM": of_values, "KEYS": keys,
            "VALUES": values, "C": CHUNK, "PRECISION": _FLOAT32,
        }  # fmt: skip
        decay = decay.contiguous()
        return cls(
            decay if state is None else state.contiguous(), _dense(query), _dense(key), _dense(value), decay,
            beta.contiguous(), decay if documents is None else documents.contiguous(),
            (length, _chunks(length), heads), samples * heads, keys, values,
            tile | {"BLOCK": _COLUMNS, "BEGUN": state is not None},
            tile | {"BLOCK": _BLOCK, "DOCUMENTS": documents is not None},
        )  # fmt: skip

    @property
    def programs(self) -> int:
        """Chunks of all heads."""
        return self.heads * self.sizes[1]

    @property
    def scan_programs(self) -> int:
        """Blocks of columns of the states of all heads."""
        return self.heads * (self.values // _COLUMNS)

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value.shape[2] // self.key.shape[2]

    @property
    def scale(self) -> float:
        """Factor of the normalised queries."""
        return float(self.key.shape[3] ** -0.5)

    def launch(self, kernel: str) -> dict[str, Any]:
        """Number of warps and of software pipelining stages of a kernel, and compiler options."""
        wide = self.keys > _MEASURED
        warps = (16 if wide else 8) if kernel == "differentiate" else (8 if wide else 4)
        room, narrow = _has_room(self.value), self.value.itemsize == 2
        stages = 2 if kernel == "pass_states" and not wide and (narrow or room) else 1
        if narrow and not wide and room:
            # the fastest of the choices that were measured on an H200 for heads of 128 features in bfloat16
            stages = {"pass_states": 3, "pass_gradients": 2}.get(kernel, stages)
            if kernel == "differentiate" and self.values <= _MEASURED:
                stages = 2
        return {"num_warps": warps, "num_stages": stages, **OPTIONS}


@dataclass(frozen=True, slots=True)
class _Scan:
    """Inputs of the scan over chunks, H = B N heads, M chunks, K and V padded features.

    Attributes:
        corrections: [H, M, C, K], W.
        changes: [H, M, C, V], U; the scan replaces it by the changes.
        ends: float32 [H, M, C], factors of the changes in the next state.
        keeps: float32 [H, M], factors of the states in the next states.
    """

    corrections: Tensor
    changes: Tensor
    ends: Tensor
    keeps: Tensor

    @classmethod
    def empty(cls, call: _Call, value: Tensor) -> _Scan:
        """Uninitialized memory."""
        places = (call.heads, call.sizes[1])
        return cls(
            value.new_empty(*places, CHUNK, call.keys),
            value.new_empty(*places, CHUNK, call.values),
            value.new_empty(*places, CHUNK, dtype=torch.float32),
            value.new_empty(places, dtype=torch.float32),
        )


def _pass_states(call: _Call, scan: _Scan, last: Tensor) -> Tensor:
    """Run the scan: return the state before each chunk [H, M, K, V], complete the changes, and store the last state."""
    states = scan.changes.new_empty(call.heads, call.sizes[1], call.keys, call.values)
    pass_states[(call.scan_programs,)](
        states, last, scan.changes, scan.corrections, scan.ends, scan.keeps, call.state, call.key, *call.sizes,
        *call.key.stride()[:3], **call.scan, **call.launch("pass_states"),
    )  # fmt: skip
    return states


def _dense(x: Tensor) -> Tensor:
    """Tensor whose features are adjacent in memory; a copy if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_room(value: Tensor) -> bool:
    """Whether a program on the device of a tensor has the shared memory of the GPU on which stages were measured."""
    return value.is_cuda and _room_of(value.device) >= _ROOM


@cache
def _room_of(device: torch.device) -> int:
    """Bytes of shared memory of a program; remembered, because the call takes microseconds."""
    room: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return room


def _outputs(state: Tensor | None, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized outputs [B, S, N, D_v], T [B * N * chunks, C, C], and last state."""
    samples, length, heads, _ = value.shape
    out = value.new_empty(value.shape, dtype=value.dtype if state is None else torch.float32)
    return out, value.new_empty(samples * heads * _chunks(length), CHUNK, CHUNK), _state_like(state, value)


def _state_like(state: Tensor | None, value: Tensor) -> Tensor:
    """Uninitialized float32 tensor of the shape of a state; empty without a state."""
    return value.new_empty(0 if state is None else state.shape, dtype=torch.float32)


def _chunks(length: int) -> int:
    """Chunks of a sample of S positions."""
    return (length + CHUNK - 1) // CHUNK


def _check(
    op: str, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Tensor | None
) -> None:
    """Raise an error for dtypes that the kernels would misread, and shapes for which they would read out of bounds."""
    check_floats(op, query=query, key=key, value=value, decay=decay, beta=beta)
    samples, length, heads, _ = value.shape
    of_keys = (samples, length, key.shape[2], key.shape[3])
    fits = (
        query.shape == key.shape == of_keys
        and key.shape[2] > 0
        and heads % key.shape[2] == 0
        and decay.shape == beta.shape == value.shape[:3]
        and (documents is None or documents.shape == value.shape[:2])
    )
    if not fits:
        tensors = (query, key, value, decay, beta, *(() if documents is None else (documents,)))
        raise ValueError(
            f"{op}.triton: the shapes are {', '.join(str(list(x.shape)) for x in tensors)}; query and key "
            "must be [B, S, K, D_k], value [B, S, N, D_v] with N a multiple of K, decay and beta [B, S, N], documents "
            "[B, S]"
        )
    for name, x in (("key_dim", key), ("value_dim", value)):
        if x.shape[-1] > MOST_HEAD_FEATURES:
            raise ValueError(
                f"{op}.triton: {name} is {x.shape[-1]}, but a program holds at most {MOST_HEAD_FEATURES} features; set "
                f"'kernels: {{{op}: {'chunked' if op == 'gated_delta_rule' else 'reference'}}}' in the job"
            )


def _check_state(state: Tensor | None, key: Tensor, value: Tensor) -> None:
    """Raise an error for a first state that the kernels would misread."""
    shape = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    if state is not None and (state.shape != shape or state.dtype != torch.float32):
        raise ValueError(
            f"gated_delta_rule_from.triton: the state is {state.dtype} {list(state.shape)}; it must be float32 "
            f"[B, N, D_k, D_v], here {list(shape)}"
        )


@chunked_rule.register_fake
def _fake(
    state: Tensor | None,
    _query: Tensor,
    _key: Tensor,
    value: Tensor,
    _decay: Tensor,
    _beta: Tensor,
    _documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(state, value)


@chunked_rule_backward.register_fake
def _fake_backward(
    _grad: Tensor,
    _grad_last: Tensor | None,
    _solved: Tensor,
    state: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    _documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_state = _state_like(state, value)
    query, key, value, decay, beta = (x.new_empty(x.shape) for x in (query, key, value, decay, beta))
    return grad_state, query, key, value, decay, beta


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # T has no gradient; zeros would be as large as T
    ctx.save_for_backward(output[1], *inputs)


def _backward(
    ctx: Any, grad: Tensor | None, _of_solved: Tensor | None, grad_last: Tensor | None
) -> tuple[Tensor | None, ...]:
    solved, state, *inputs = ctx.saved_tensors
    if state is None:
        grad_last = None  # the last state is empty
    if grad is None and grad_last is None:
        return (None,) * 7
    if grad is None:
        value = inputs[2]
        grad = value.new_zeros(()).expand(value.shape)
    found = chunked_rule_backward(grad, grad_last, solved, state, *inputs)
    return (*(x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)), None)


chunked_rule.register_autograd(_backward, setup_context=_keep)
