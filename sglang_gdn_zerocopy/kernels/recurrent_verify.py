"""The gated delta rule over draft chains, from strided Q, K and V, with every sum in the order that stock takes it.

Two protocols: *snapshots* (the state after every token is kept) and *fold ring* (the raw inputs of every token are
kept, a later fold replays the accepted ones). In both the state pool itself is only read.

Two implementations with equal bits. ``portable`` is plain Triton with stock's tile, where Triton itself chooses the
order of the sums over K, as it does for stock. ``explicit`` is written in Gluon for sm_90: it spells the order out and
is free to keep most of a column in one thread.

Per token, in fp32 (``scale`` is K ** -0.5, ``n`` the l2norm over K)::

    g = -exp(A_log) * softplus(a + dt_bias);  beta = sigmoid(b)
    h *= exp(g);  v = beta * (v - h n(k));  h += v n(k)^T;  o = h n(q) * scale
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sglang_gdn_zerocopy.kernels.dependent_launch import is_sm90
from sglang_gdn_zerocopy.kernels.launch import Launch

HEAD_DIM = 128
"""The only K and V taken: all GDN models so far have it, and the order of the sums is known for it."""

_WARP = 32
_NORM_LEAF = 4
NORM_EPSILON = 1e-6
SOFTPLUS_THRESHOLD = 20.0
# The last axis of a CUDA grid.
_MAX_REQUESTS = 65535


class Inputs(NamedTuple):
    """The first arguments of ``recurrent_verify``, in order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor


class FoldRing(NamedTuple):
    """The buffers of the fold ring protocol; all are written, at rows [slot, :, token] with token < L."""

    raw_v: torch.Tensor
    """[slots, HV, L, V], any float type: v before the delta rule."""
    raw_k: torch.Tensor
    """[slots, H, L, K], any float type: k before the l2norm."""
    g: torch.Tensor
    """[slots, HV, L], fp32: log of the decay."""
    beta: torch.Tensor
    """[slots, HV, L], fp32."""


class Snapshots(NamedTuple):
    """The buffers of the snapshots protocol."""

    states: torch.Tensor
    """[rows, steps, HV, V, K], the state pool's type; written at [rows[n], token]. Its first two strides are free."""
    rows: torch.Tensor
    """[N], int32 or int64: the row of each request; below 0 nothing is kept."""


def kept_as(tensors: Sequence[torch.Tensor]) -> FoldRing | Snapshots:
    """The buffers of a call in order, as the record of their protocol."""
    return Snapshots(*tensors) if len(tensors) == len(Snapshots._fields) else FoldRing(*tensors)


@dataclass(frozen=True)
class Config:
    """How one launch is cut up."""

    implementation: str
    """``portable`` or ``explicit``."""
    columns: int
    """Value columns of a program."""
    warps: int
    lanes: int = 4
    """``explicit`` only: threads that share one column."""
    max_registers: int | None = None
    blocks: int = 1
    """``explicit`` only: blocks of ``columns`` that a program does one after another."""
    stores: str = ""
    """``explicit`` only: how snapshots are stored; ``cs`` as in PTX, ``ef`` to evict first."""


class Choice(NamedTuple):
    """A row of the table of configurations: the first that matches is taken."""

    protocol: str
    state_dtype: torch.dtype
    max_heads: int
    """Value heads of all requests together, N * HV: what there is to spread over the GPU."""
    config: Config


PORTABLE = Config("portable", 32, 1)
_ANY = 1 << 62

CHOICES: tuple[Choice, ...] = (
    Choice("ring", torch.float32, 96, Config("explicit", 32, 4)),
    Choice("ring", torch.float32, _ANY, Config("explicit", 64, 4, 4, 128)),
    Choice("ring", torch.bfloat16, 96, Config("explicit", 32, 4)),
    Choice("ring", torch.bfloat16, _ANY, Config("explicit", 64, 4, 4, 128)),
    Choice("snapshots", torch.float32, 512, Config("explicit", 32, 4, stores="cs")),
    Choice("snapshots", torch.float32, _ANY, Config("explicit", 8, 4, 16, stores="cs")),
    Choice("snapshots", torch.bfloat16, 96, Config("explicit", 8, 1)),
    Choice("snapshots", torch.bfloat16, _ANY, Config("explicit", 64, 4, 4, 128)),
)
"""Measured on an H200 with H=16, HV=32 and four draft tokens, for 1, 8, 32 and 64 requests."""


@triton.jit
def _l2norm(x, RECIPROCAL: tl.constexpr, EPSILON: tl.constexpr, LEAVES: tl.constexpr):
    squares = x * x
    if LEAVES:
        # Four in order first, as if they lay in one thread.
        even, odd = tl.split(tl.reshape(squares, (x.shape[0] // 4, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        squares = first + second + third + fourth
    root = tl.sqrt(tl.sum(squares) + EPSILON)
    if RECIPROCAL:
        return x * (1.0 / root)
    return x / root


@triton.jit
def step_token(
    b_h,
    b_q,
    b_k,
    b_v,
    p_a,
    p_b,
    decay_rate,
    dt_bias,
    i_v,
    i_hv,
    i_t,
    slot,
    row,
    o_k,
    o_v,
    o_state,
    p_out,
    p_snapshots,
    p_raw_v,
    p_raw_k,
    p_ring_g,
    p_ring_beta,
    stride_raw_v_slot,
    stride_raw_v_head,
    stride_raw_v_step,
    stride_raw_k_slot,
    stride_raw_k_head,
    stride_raw_k_step,
    stride_g_slot,
    stride_g_head,
    stride_g_step,
    stride_beta_slot,
    stride_beta_head,
    stride_beta_step,
    ring_length,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    RING: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    EPSILON: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """One token over the state ``b_h`` [K, BV], with everything that is stored for it; returns the state.

    LEAVES: q and k do not come straight from memory, so that the norms' order of summing, which is that of such a load
    in stock, has to be spelled out.
    """
    i_h = i_hv // (HV // H)
    x = tl.load(p_a).to(tl.float32) + dt_bias
    g = decay_rate * tl.where(x <= THRESHOLD, tl.log(1.0 + tl.exp(x)), x)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b).to(tl.float32)))

    # Nested here and below: the outer one is decided when compiling, and a joint one would not be.
    if RING:  # noqa: SIM102
        if slot >= 0 and i_t < ring_length:
            p_kept_v = p_raw_v + slot * stride_raw_v_slot + i_hv * stride_raw_v_head + i_t * stride_raw_v_step
            tl.store(p_kept_v + o_v, b_v.to(p_raw_v.dtype.element_ty))
            if i_v == 0:
                tl.store(p_ring_g + slot * stride_g_slot + i_hv * stride_g_head + i_t * stride_g_step, g)
                p_kept = p_ring_beta + slot * stride_beta_slot + i_hv * stride_beta_head + i_t * stride_beta_step
                tl.store(p_kept, beta)
                if i_hv % (HV // H) == 0:
                    p_kept_k = p_raw_k + slot * stride_raw_k_slot + i_h * stride_raw_k_head + i_t * stride_raw_k_step
                    tl.store(p_kept_k + o_k, b_k.to(p_raw_k.dtype.element_ty))

    b_q = _l2norm(b_q, RECIPROCAL, EPSILON, LEAVES) * scale
    b_k = _l2norm(b_k, RECIPROCAL, EPSILON, LEAVES)
    b_h *= tl.exp(g)
    b_v -= tl.sum(b_h * b_k[:, None], 0)
    b_v *= beta
    b_h += b_k[:, None] * b_v[None, :]
    b_o = tl.sum(b_h * b_q[:, None], 0)
    tl.store(p_out + o_v, b_o.to(p_out.dtype.element_ty))
    if not RING:  # noqa: SIM102
        if row >= 0:
            tl.store(p_snapshots + o_state, b_h.to(p_snapshots.dtype.element_ty))
    return b_h


@triton.jit
def _recurrent_verify_kernel(
    p_q,
    p_k,
    p_v,
    p_a,
    p_b,
    p_a_log,
    p_dt_bias,
    p_out,
    p_state,
    p_slots,
    p_starts,
    p_snapshots,
    p_rows,
    p_raw_v,
    p_raw_k,
    p_ring_g,
    p_ring_beta,
    scale,
    stride_q,
    stride_k,
    stride_v,
    stride_a,
    stride_b,
    stride_state,
    stride_snapshot_row,
    stride_snapshot_step,
    stride_raw_v_slot,
    stride_raw_v_head,
    stride_raw_v_step,
    stride_raw_k_slot,
    stride_raw_k_head,
    stride_raw_k_step,
    stride_g_slot,
    stride_g_head,
    stride_g_step,
    stride_beta_slot,
    stride_beta_head,
    stride_beta_step,
    ring_length,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    RING: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    EPSILON: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_v, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_h = i_hv // (HV // H)
    slot = tl.load(p_slots + i_n).to(tl.int64)
    begin = tl.load(p_starts + i_n).to(tl.int64)
    tokens = (tl.load(p_starts + i_n + 1).to(tl.int64) - begin).to(tl.int32)
    row = slot
    if not RING:
        row = tl.load(p_rows + i_n).to(tl.int64)
        p_snapshots += row * stride_snapshot_row + i_hv * (V * K)

    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    o_state = o_v[None, :] * K + o_k[:, None]
    p_q += begin * stride_q + i_h * K
    p_k += begin * stride_k + i_h * K
    p_v += begin * stride_v + i_hv * V
    p_a += begin * stride_a + i_hv
    p_b += begin * stride_b + i_hv
    p_out += (begin * HV + i_hv) * V

    b_h = tl.zeros([K, BV], dtype=tl.float32)
    if slot >= 0:
        b_h += tl.load(p_state + slot * stride_state + i_hv * (V * K) + o_state).to(tl.float32)
    decay_rate = -tl.exp(tl.load(p_a_log + i_hv).to(tl.float32))
    dt_bias = tl.load(p_dt_bias + i_hv).to(tl.float32)

    for i_t in range(tokens):
        b_q = tl.load(p_q + o_k).to(tl.float32)
        b_k = tl.load(p_k + o_k).to(tl.float32)
        b_v = tl.load(p_v + o_v).to(tl.float32)
        b_h = step_token(
            b_h,
            b_q,
            b_k,
            b_v,
            p_a,
            p_b,
            decay_rate,
            dt_bias,
            i_v,
            i_hv,
            i_t,
            slot,
            row,
            o_k,
            o_v,
            o_state,
            p_out,
            p_snapshots,
            p_raw_v,
            p_raw_k,
            p_ring_g,
            p_ring_beta,
            stride_raw_v_slot,
            stride_raw_v_head,
            stride_raw_v_step,
            stride_raw_k_slot,
            stride_raw_k_head,
            stride_raw_k_step,
            stride_g_slot,
            stride_g_head,
            stride_g_step,
            stride_beta_slot,
            stride_beta_head,
            stride_beta_step,
            ring_length,
            scale,
            H,
            HV,
            RING,
            RECIPROCAL,
            THRESHOLD,
            EPSILON,
            False,
        )
        if not RING:
            p_snapshots += stride_snapshot_step

        p_q += stride_q
        p_k += stride_k
        p_v += stride_v
        p_a += stride_a
        p_b += stride_b
        p_out += HV * V


@gluon.jit
def _sum_pairs(x, ROWS: gl.constexpr, LEAF: gl.constexpr, WIDTH: gl.constexpr, LANES: gl.constexpr):
    """Sum [ROWS, WIDTH] over WIDTH: leaves of LEAF in order, then pairs of leaves, the farthest apart first."""
    COUNT: gl.constexpr = WIDTH // LEAF
    x = gl.sum(gl.reshape(x, [ROWS, COUNT, LEAF]), 2)
    if COUNT >= 2 * LANES:
        x = gl.sum(gl.reshape(x, [ROWS, 2, COUNT // 2]), 1)
    if COUNT >= 4 * LANES:
        x = gl.sum(gl.reshape(x, [ROWS, 2, COUNT // 4]), 1)
    if COUNT >= 8 * LANES:
        x = gl.sum(gl.reshape(x, [ROWS, 2, COUNT // 8]), 1)
    if COUNT >= 16 * LANES:
        x = gl.sum(gl.reshape(x, [ROWS, 2, COUNT // 16]), 1)
    # What is left lies in LANES neighbouring threads, where a reduction is a butterfly from far to near.
    return gl.sum(x, 1)


@gluon.jit
def _l2norm_rows(
    x,
    ROWS: gl.constexpr,
    LEAF: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
    RECIPROCAL: gl.constexpr,
    EPSILON: gl.constexpr,
):
    total = _sum_pairs(x * x, ROWS, LEAF, WIDTH, 32)
    root = gl.sqrt(gl.convert_layout(total, gl.SliceLayout(1, LAYOUT)) + EPSILON)
    if RECIPROCAL:
        return x * (1.0 / root)[:, None]
    return x / root[:, None]


@gluon.jit
def _scalar(memory, LAYOUT: gl.constexpr):
    """The one element of a [1] piece of shared memory."""
    return gl.sum(memory.load(LAYOUT), 0)


@gluon.jit
def prepare_tokens(
    raw_q,
    raw_k,
    raw_v,
    raw_a,
    raw_b,
    raw_a_log,
    dt_bias,
    s_q,
    s_k,
    s_v,
    s_decay,
    s_beta,
    i_v,
    i_hv,
    slot,
    tokens,
    first,
    first_column,
    p_raw_v,
    p_raw_k,
    p_ring_g,
    p_ring_beta,
    stride_raw_v_slot,
    stride_raw_v_head,
    stride_raw_v_step,
    stride_raw_k_slot,
    stride_raw_k_head,
    stride_raw_k_step,
    stride_g_slot,
    stride_g_head,
    stride_g_step,
    stride_beta_slot,
    stride_beta_head,
    stride_beta_step,
    ring_length,
    scale,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    RING: gl.constexpr,
    RECIPROCAL: gl.constexpr,
    THRESHOLD: gl.constexpr,
    EPSILON: gl.constexpr,
    NORM_LEAF: gl.constexpr,
    ROW: gl.constexpr,
    VALUE: gl.constexpr,
    GATE: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Gates and norms of BT tokens from their raw inputs: into shared memory, and the raw ones into the ring.

    The raw inputs lie in ROW (q, k), VALUE (v, COLUMNS of it from ``first_column``) and GATE.
    """
    i_h = i_hv // (HV // H)
    o_k = gl.arange(0, K, gl.SliceLayout(0, ROW))[None, :]
    o_v = gl.arange(0, COLUMNS, gl.SliceLayout(0, VALUE))[None, :]
    i_k_row = gl.arange(0, BT, gl.SliceLayout(1, ROW))[:, None]
    i_v_row = gl.arange(0, BT, gl.SliceLayout(1, VALUE))[:, None]
    i_gate = gl.arange(0, BT, gl.SliceLayout(1, GATE))
    b_k = raw_k.to(gl.float32)
    b_v = raw_v.to(gl.float32)
    x = raw_a.to(gl.float32) + dt_bias
    g = -gl.exp(raw_a_log.to(gl.float32)) * gl.where(x <= THRESHOLD, gl.log(1.0 + gl.exp(x)), x)
    beta = 1.0 / (1.0 + gl.exp(-raw_b.to(gl.float32)))

    if RING:  # noqa: SIM102
        if slot >= 0:
            kept = gl.minimum(tokens, ring_length) - first
            p_kept_v = (
                p_raw_v + slot * stride_raw_v_slot + i_hv * stride_raw_v_head + first * stride_raw_v_step + first_column
            )
            o_kept_v = i_v_row * stride_raw_v_step + o_v
            gl.store(p_kept_v + o_kept_v, b_v.to(p_raw_v.dtype.element_ty), mask=i_v_row < kept)
            if i_v == 0:
                p_kept_g = p_ring_g + slot * stride_g_slot + i_hv * stride_g_head
                gl.store(p_kept_g + (first + i_gate) * stride_g_step, g, mask=i_gate < kept)
                p_kept_beta = p_ring_beta + slot * stride_beta_slot + i_hv * stride_beta_head
                gl.store(p_kept_beta + (first + i_gate) * stride_beta_step, beta, mask=i_gate < kept)
                if i_hv % (HV // H) == 0:
                    p_kept_k = p_raw_k + slot * stride_raw_k_slot + i_h * stride_raw_k_head + first * stride_raw_k_step
                    o_kept_k = i_k_row * stride_raw_k_step + o_k
                    gl.store(p_kept_k + o_kept_k, b_k.to(p_raw_k.dtype.element_ty), mask=i_k_row < kept)

    b_q = _l2norm_rows(raw_q.to(gl.float32), BT, NORM_LEAF, K, ROW, RECIPROCAL, EPSILON) * scale
    s_q.store(b_q)
    s_k.store(_l2norm_rows(b_k, BT, NORM_LEAF, K, ROW, RECIPROCAL, EPSILON))
    s_v.store(b_v)
    s_decay.store(gl.expand_dims(gl.exp(g), 1))
    s_beta.store(gl.expand_dims(beta, 1))
    # Here once, so that the compiler needs none in the loop over tokens.
    tl.debug_barrier()


@gluon.jit
def run_tokens(
    b_h,
    s_q_of,
    s_k_of,
    s_v_of,
    s_decay_of,
    s_beta_of,
    p_out_t,
    p_snapshot,
    stride_snapshot_step,
    row,
    count,
    i_b,
    o_column,
    o_state,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    BLOCKS: gl.constexpr,
    RING: gl.constexpr,
    LEAF: gl.constexpr,
    LANES: gl.constexpr,
    STATE: gl.constexpr,
    GATE: gl.constexpr,
    STORE_CACHE: gl.constexpr,
    STORE_EVICT: gl.constexpr,
):
    """``count`` prepared tokens over the state ``b_h`` of BV columns: outputs and snapshots.

    Returns the state and the pointers after them.
    """
    BY_K: gl.constexpr = gl.SliceLayout(0, STATE)
    BY_V: gl.constexpr = gl.SliceLayout(1, STATE)
    BY_TOKEN: gl.constexpr = gl.SliceLayout(1, GATE)
    for i_t in range(count):
        b_k_t = s_k_of.index(i_t).load(BY_K)[None, :]
        b_h *= _scalar(s_decay_of.index(i_t), BY_TOKEN)
        b_dot = _sum_pairs(b_h * b_k_t, BV, LEAF, K, LANES)
        b_v_t = s_v_of.index(i_t * BLOCKS + i_b).load(BY_V) - gl.convert_layout(b_dot, BY_V)
        b_v_t *= _scalar(s_beta_of.index(i_t), BY_TOKEN)
        b_h += b_k_t * b_v_t[:, None]
        b_o = _sum_pairs(b_h * s_q_of.index(i_t).load(BY_K)[None, :], BV, LEAF, K, LANES)
        gl.store(p_out_t + o_column, gl.convert_layout(b_o, BY_V).to(p_out_t.dtype.element_ty))
        p_out_t += HV * V
        if not RING:
            if row >= 0:
                b_kept = b_h.to(p_snapshot.dtype.element_ty)
                gl.store(p_snapshot + o_state, b_kept, cache_modifier=STORE_CACHE, eviction_policy=STORE_EVICT)
            p_snapshot += stride_snapshot_step
    return b_h, p_out_t, p_snapshot


@gluon.jit
def _recurrent_verify_explicit_kernel(
    p_q,
    p_k,
    p_v,
    p_a,
    p_b,
    p_a_log,
    p_dt_bias,
    p_out,
    p_state,
    p_slots,
    p_starts,
    p_snapshots,
    p_rows,
    p_raw_v,
    p_raw_k,
    p_ring_g,
    p_ring_beta,
    scale,
    stride_q,
    stride_k,
    stride_v,
    stride_a,
    stride_b,
    stride_state,
    stride_snapshot_row,
    stride_snapshot_step,
    stride_raw_v_slot,
    stride_raw_v_head,
    stride_raw_v_step,
    stride_raw_k_slot,
    stride_raw_k_head,
    stride_raw_k_step,
    stride_g_slot,
    stride_g_head,
    stride_g_step,
    stride_beta_slot,
    stride_beta_head,
    stride_beta_step,
    ring_length,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    RING: gl.constexpr,
    RECIPROCAL: gl.constexpr,
    THRESHOLD: gl.constexpr,
    EPSILON: gl.constexpr,
    OVERLAP: gl.constexpr,
    BT: gl.constexpr,
    LEAF: gl.constexpr,
    NORM_LEAF: gl.constexpr,
    LANES: gl.constexpr,
    BLOCKS: gl.constexpr,
    STORE_CACHE: gl.constexpr,
    STORE_EVICT: gl.constexpr,
    STATE: gl.constexpr,
    ROW: gl.constexpr,
    VALUE: gl.constexpr,
    GATE: gl.constexpr,
):
    i_v, i_hv, i_n = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_h = i_hv // (HV // H)
    slot = gl.load(p_slots + i_n).to(gl.int64)
    begin = gl.load(p_starts + i_n).to(gl.int64)
    tokens = (gl.load(p_starts + i_n + 1).to(gl.int64) - begin).to(gl.int32)
    row = slot
    if not RING:
        row = gl.load(p_rows + i_n).to(gl.int64)
        p_snapshots += row * stride_snapshot_row + i_hv * (V * K) + i_v * (BLOCKS * BV * K)

    BY_K: gl.constexpr = gl.SliceLayout(0, STATE)
    BY_V: gl.constexpr = gl.SliceLayout(1, STATE)
    BY_TOKEN: gl.constexpr = gl.SliceLayout(1, GATE)
    o_column = gl.arange(0, BV, BY_V)
    o_state = o_column[:, None] * K + gl.arange(0, K, BY_K)[None, :]
    o_k = gl.arange(0, K, gl.SliceLayout(0, ROW))[None, :]
    o_v = gl.arange(0, BLOCKS * BV, gl.SliceLayout(0, VALUE))[None, :]
    i_k_row = gl.arange(0, BT, gl.SliceLayout(1, ROW))[:, None]
    i_v_row = gl.arange(0, BT, gl.SliceLayout(1, VALUE))[:, None]
    i_gate = gl.arange(0, BT, BY_TOKEN)

    # What the kernel before this one does not write is read before that one has ended; it is needed last.
    first_column = i_v * (BLOCKS * BV)
    p_state += slot * stride_state + i_hv * (V * K) + first_column * K
    raw_h = gl.load(p_state + o_state, mask=slot >= 0, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    p_q += begin * stride_q + i_h * K
    p_k += begin * stride_k + i_h * K
    p_v += begin * stride_v + i_hv * V + first_column
    p_a += begin * stride_a + i_hv
    p_b += begin * stride_b + i_hv
    p_out += (begin * HV + i_hv) * V + first_column

    # Written as [BT, n], read a token at a time as [n].
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_q = gl.allocate_shared_memory(gl.float32, [BT, K], TILE)
    s_k = gl.allocate_shared_memory(gl.float32, [BT, K], TILE)
    s_v = gl.allocate_shared_memory(gl.float32, [BT, BLOCKS * BV], TILE)
    s_decay = gl.allocate_shared_memory(gl.float32, [BT, 1], TILE)
    s_beta = gl.allocate_shared_memory(gl.float32, [BT, 1], TILE)
    s_q_of = s_q._reinterpret(gl.float32, [BT, K], LINE)
    s_k_of = s_k._reinterpret(gl.float32, [BT, K], LINE)
    s_v_of = s_v._reinterpret(gl.float32, [BT * BLOCKS, BV], LINE)
    s_decay_of = s_decay._reinterpret(gl.float32, [BT, 1], LINE)
    s_beta_of = s_beta._reinterpret(gl.float32, [BT, 1], LINE)

    if BLOCKS > 1:
        s_state = gl.allocate_shared_memory(p_state.dtype.element_ty, [BV, K], TILE)

    for i_b in range(BLOCKS):
        b_h = raw_h.to(gl.float32)
        if BLOCKS > 1:
            # The next block's state is on its way while this one's tokens run.
            p_state += BV * K
            present = (slot >= 0) & (i_b + 1 < BLOCKS)
            async_copy.async_copy_global_to_shared(s_state, p_state + o_state, mask=present)
            async_copy.commit_group()
        p_out_t = p_out + i_b * BV
        # With a ring there are no snapshots; the pointer is a stand-in that a loop can carry.
        p_snapshot = p_out if RING else p_snapshots + i_b * (BV * K)

        for first in range(0, tokens, BT):
            # All blocks share what is prepared, unless there are more tokens than it holds.
            if (i_b == 0) | (tokens > BT):
                left = tokens - first
                raw_q = gl.load(p_q + ((first + i_k_row) * stride_q + o_k), mask=i_k_row < left, other=0.0)
                raw_k = gl.load(p_k + ((first + i_k_row) * stride_k + o_k), mask=i_k_row < left, other=0.0)
                raw_v = gl.load(p_v + ((first + i_v_row) * stride_v + o_v), mask=i_v_row < left, other=0.0)
                raw_a = gl.load(p_a + (first + i_gate) * stride_a, mask=i_gate < left, other=0.0)
                raw_b = gl.load(p_b + (first + i_gate) * stride_b, mask=i_gate < left, other=0.0)
                raw_a_log = gl.load(p_a_log + i_hv)
                dt_bias = gl.load(p_dt_bias + i_hv).to(gl.float32)
                prepare_tokens(
                    raw_q,
                    raw_k,
                    raw_v,
                    raw_a,
                    raw_b,
                    raw_a_log,
                    dt_bias,
                    s_q,
                    s_k,
                    s_v,
                    s_decay,
                    s_beta,
                    i_v,
                    i_hv,
                    slot,
                    tokens,
                    first,
                    first_column,
                    p_raw_v,
                    p_raw_k,
                    p_ring_g,
                    p_ring_beta,
                    stride_raw_v_slot,
                    stride_raw_v_head,
                    stride_raw_v_step,
                    stride_raw_k_slot,
                    stride_raw_k_head,
                    stride_raw_k_step,
                    stride_g_slot,
                    stride_g_head,
                    stride_g_step,
                    stride_beta_slot,
                    stride_beta_head,
                    stride_beta_step,
                    ring_length,
                    scale,
                    H,
                    HV,
                    K,
                    BT,
                    RING,
                    RECIPROCAL,
                    THRESHOLD,
                    EPSILON,
                    NORM_LEAF,
                    ROW,
                    VALUE,
                    GATE,
                    BLOCKS * BV,
                )

            if first == 0:
                # As stock, which adds the state to zeros: no -0.
                b_h += 0.0
            b_h, p_out_t, p_snapshot = run_tokens(
                b_h,
                s_q_of,
                s_k_of,
                s_v_of,
                s_decay_of,
                s_beta_of,
                p_out_t,
                p_snapshot,
                stride_snapshot_step,
                row,
                gl.minimum(tokens - first, BT),
                i_b,
                o_column,
                o_state,
                HV,
                K,
                V,
                BV,
                BLOCKS,
                RING,
                LEAF,
                LANES,
                STATE,
                GATE,
                STORE_CACHE,
                STORE_EVICT,
            )

        if BLOCKS > 1:
            async_copy.wait_group(0)
            raw_h = s_state.load(STATE)


def _bases(start: int, end: int, axis: int) -> list[list[int]]:
    """Unit vectors start, 2 * start, ... below end of one axis of a [V, K] tile."""
    found = []
    while start < end:
        found.append([start, 0] if axis == 0 else [0, start])
        start *= 2
    return found


@cache
def explicit_layouts(config: Config, leaf: int) -> dict[str, Any]:
    """The layouts of the explicit kernel as its keyword arguments, for a state whose leaves are ``leaf`` of K long.

    ``ValueError`` when the program has not at least one column for each group of lanes.
    """
    groups = _WARP // config.lanes
    per_thread, rest = divmod(config.columns, groups * config.warps)
    if rest or not per_thread:
        raise ValueError(f"{config} leaves {groups * config.warps} groups of lanes without a column each")
    in_lanes = leaf * config.lanes
    state = gl.DistributedLinearLayout(
        reg_bases=[*_bases(1, leaf, 1), *_bases(1, per_thread, 0), *_bases(in_lanes, HEAD_DIM, 1)],
        lane_bases=[*_bases(leaf, in_lanes, 1), *_bases(per_thread, per_thread * groups, 0)],
        warp_bases=_bases(per_thread * groups, config.columns, 0),
        block_bases=[],
        shape=[config.columns, HEAD_DIM],
    )
    vector = min(8, config.columns)
    across = min(_WARP, config.columns * config.blocks // vector)
    return {
        "BLOCKS": config.blocks,
        "STORE_CACHE": ".cs" if config.stores == "cs" else "",
        "STORE_EVICT": "evict_first" if config.stores == "ef" else "",
        "LEAF": leaf,
        "NORM_LEAF": _NORM_LEAF,
        "LANES": config.lanes,
        "STATE": state,
        "ROW": gl.BlockedLayout([1, _NORM_LEAF], [1, _WARP], [config.warps, 1], [1, 0]),
        "VALUE": gl.BlockedLayout([1, vector], [_WARP // across, across], [config.warps, 1], [1, 0]),
        "GATE": gl.BlockedLayout([1, 1], [_WARP, 1], [config.warps, 1], [1, 0]),
    }


def recurrent_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    kept: FoldRing | Snapshots,
    *,
    reciprocal_norm: bool,
    overlap: bool = False,
    config: Config | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Verify N chains of draft tokens and return the output [1, rows, HV, V] in the type of ``q``.

    ``q``, ``k`` [1, rows, H, K] and ``v`` [1, rows, HV, V]: any float type, any stride from token to token, dense
    inside one. ``a``, ``b`` [..., rows, HV], any row stride. ``a_log``, ``dt_bias`` [HV]. ``state`` [slots, HV, V, K],
    fp32, bf16 or fp16, any pitch between slots, only read. ``slots`` [>= N], int32 or int64: the slot of each request;
    below 0 its state is zero and its ring is not written. ``starts`` [N + 1], int32 or int64: the first row of each
    request and the end; an empty one writes nothing. ``kept`` is written: see ``FoldRing`` and ``Snapshots``.
    ``reciprocal_norm``: x * (1 / norm) as stock does it from 0.5.22, before that x / norm. ``overlap``: launch it as a
    programmatic dependent of the kernel before it, which must not write ``state``, ``slots``, ``starts`` or the rows of
    ``kept``: they are read early. ``config``: instead of what ``choose`` says. ``launch``: what
    :func:`recurrent_launch` said for such arguments before; nothing is checked again then.

    Raises ``ValueError`` before anything is written for what it does not take.
    """
    if launch is None:
        inputs = Inputs(q, k, v, a, b, a_log, dt_bias, state, slots, starts)
        launch = recurrent_launch(inputs, kept, reciprocal_norm=reciprocal_norm, overlap=overlap, config=config)
    out = torch.empty(launch.output, dtype=q.dtype, device=q.device)
    if not launch.grid:
        return out
    kernel = _recurrent_verify_explicit_kernel if launch.explicit else _recurrent_verify_kernel
    kernel[launch.grid](
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
        out,
        state,
        slots,
        starts,
        *kept_buffers(kept),
        *launch.numbers,
        **launch.constants,
    )
    return out


def recurrent_launch(
    inputs: Inputs,
    kept: FoldRing | Snapshots,
    *,
    reciprocal_norm: bool,
    overlap: bool = False,
    config: Config | None = None,
) -> Launch:
    """The launch of :func:`recurrent_verify` on such arguments; ``ValueError`` for what that does not take."""
    q, k, v, a, b, _, _, state, _, starts = inputs
    _, rows, H, K = k.shape
    HV, V = v.shape[2:]
    N = starts.shape[0] - 1
    _check_inputs(*inputs)
    protocol, measures = kept_measures(kept, state, N, H)
    if config is None:
        config = choose(protocol, state.dtype, N * HV, q.device)
    options = launch_options(config, state, 4 if rows <= 4 * N else 8)
    if overlap:
        options["launch_pdl"] = True
    constants = {
        "H": H,
        "HV": HV,
        "K": K,
        "V": V,
        "BV": config.columns,
        "RING": protocol == "ring",
        "RECIPROCAL": reciprocal_norm,
        "THRESHOLD": SOFTPLUS_THRESHOLD,
        "EPSILON": NORM_EPSILON,
        "OVERLAP": overlap,
        **options,
    }
    strides = (q.stride(1), k.stride(1), v.stride(1), a.stride(-2), b.stride(-2), state.stride(0))
    return Launch(
        grid=(V // (config.columns * config.blocks), HV, N) if N and rows else (),
        numbers=(K**-0.5, *strides, *measures),
        constants=constants,
        explicit=config.implementation == "explicit",
        output=tuple(v.shape),
    )


def kept_buffers(kept: FoldRing | Snapshots) -> tuple[torch.Tensor | None, ...]:
    """The kernels' arguments for what is kept: snapshots, their rows, then the ring's four; None for the others'."""
    return (None, None, *kept) if isinstance(kept, FoldRing) else (*kept, None, None, None, None)


def kept_measures(kept: FoldRing | Snapshots, state: torch.Tensor, N: int, H: int) -> tuple[str, tuple[int, ...]]:
    """The protocol, and the strides of each of :func:`kept_buffers` in the same order with the length of the ring;
    ``ValueError`` for what does not fit ``state``."""
    if isinstance(kept, FoldRing):
        length = _check_ring(kept, H, state.shape[1])
        return "ring", (0, 0, *(n for buffer in kept for n in buffer.stride()[:3]), length)
    _check_snapshots(kept, state, N)
    return "snapshots", (*kept.states.stride()[:2], *(0,) * 13)


def launch_options(config: Config, state: torch.Tensor, tokens: int) -> dict[str, Any]:
    """The keyword arguments of a launch that come from ``config``; an explicit one prepares ``tokens`` at a time."""
    options: dict[str, Any] = {"num_warps": config.warps}
    if config.implementation == "explicit":
        options |= explicit_layouts(config, 16 // state.element_size())
        options["BT"] = tokens
        if config.max_registers is not None:
            options["maxnreg"] = config.max_registers
    elif config.implementation != "portable" or config.warps != 1:
        raise ValueError(f"{config} is neither an explicit one nor a portable one with one warp")
    return options


def choose(protocol: str, state_dtype: torch.dtype, heads: int, device: torch.device) -> Config:
    """From ``CHOICES`` on sm_90, stock's own tile everywhere else; ``heads`` is N * HV, see ``Choice``."""
    if is_sm90(device):
        for choice in CHOICES:
            if (choice.protocol, choice.state_dtype) == (protocol, state_dtype) and heads <= choice.max_heads:
                return choice.config
    return PORTABLE


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)


def _dense(tensor: torch.Tensor, axes: int) -> bool:
    """Whether the last ``axes`` axes lie in memory one after another; an axis of size 1 has no say."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-axes:]), reversed(tensor.stride()[-axes:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    _, rows, H, K = k.shape
    HV, V = v.shape[2:]
    _require((K, V) == (HEAD_DIM, HEAD_DIM), f"head dims {K} and {V}, only {HEAD_DIM} is taken")
    _require(H > 0 and HV % H == 0, f"{HV} value heads do not divide among {H} key heads")
    _require(q.shape == k.shape == (1, rows, H, K), f"q is {tuple(q.shape)}, k is {tuple(k.shape)}")
    _require(v.shape == (1, rows, HV, V), f"v is {tuple(v.shape)}, k has {rows} rows")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _require(_dense(tensor, 2), f"{name} has strides {tensor.stride()}")
    check_recurrence(rows, HV, a, b, a_log, dt_bias, state, slots, starts)


def check_recurrence(
    rows: int,
    HV: int,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """``ValueError`` for what :func:`recurrent_verify` does not take beside q, k and v."""
    N = starts.shape[0] - 1
    _require(0 <= N <= _MAX_REQUESTS, f"{N} requests")
    for name, tensor, axes in (("state", state, 3), ("a", a, 1), ("b", b, 1)):
        _require(_dense(tensor, axes), f"{name} has strides {tensor.stride()}")
    for name, tensor in (("a", a), ("b", b)):
        _require(tensor.shape[-2:] == (rows, HV) and tensor.numel() == rows * HV, f"{name} is {tuple(tensor.shape)}")
    for name, tensor, least in (
        ("a_log", a_log, HV),
        ("dt_bias", dt_bias, HV),
        ("slots", slots, N),
        ("starts", starts, 1),
    ):
        _require(tensor.dim() == 1 and tensor.shape[0] >= least, f"{name} is {tuple(tensor.shape)}")
        _require(_dense(tensor, 1), f"{name} has stride {tensor.stride()}")
    _require(state.shape[1:] == (HV, HEAD_DIM, HEAD_DIM), f"state is {tuple(state.shape)}")
    _require(state.dtype in (torch.float32, torch.bfloat16, torch.float16), f"state is {state.dtype}")
    # With less the compiler would load stock's state in smaller pieces and add in another order.
    aligned = state.data_ptr() % 16 == 0 and (state.shape[0] == 1 or state.stride(0) % 16 == 0)
    _require(aligned, f"state is not aligned: pitch {state.stride(0)}")


def _check_ring(ring: FoldRing, H: int, HV: int) -> int:
    """The ring's length."""
    length = ring.raw_v.shape[2]
    for name, buffer, heads, inner in (
        ("raw_v", ring.raw_v, HV, (HEAD_DIM,)),
        ("raw_k", ring.raw_k, H, (HEAD_DIM,)),
        ("g", ring.g, HV, ()),
        ("beta", ring.beta, HV, ()),
    ):
        _require(buffer.shape[1:] == (heads, length, *inner), f"{name} of the ring is {tuple(buffer.shape)}")
        _require(not inner or _dense(buffer, 1), f"{name} of the ring has strides {buffer.stride()}")
    _require(
        ring.g.dtype == ring.beta.dtype == torch.float32, f"gates of the ring are {ring.g.dtype}, {ring.beta.dtype}"
    )
    return length


def _check_snapshots(snapshots: Snapshots, state: torch.Tensor, N: int) -> None:
    states, rows = snapshots
    _require(states.dim() == 5 and states.shape[2:] == state.shape[1:], f"snapshots are {tuple(states.shape)}")
    _require(states.dtype == state.dtype, f"snapshots are {states.dtype}, the state is {state.dtype}")
    _require(_dense(states, 3), f"snapshots have strides {states.stride()}")
    _require(
        rows.dim() == 1 and rows.shape[0] >= N and _dense(rows, 1), f"rows of the snapshots are {tuple(rows.shape)}"
    )


def recurrent_verify_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One request in plain torch and in fp64: output [T, HV, V], states [T, HV, V, K], g and beta [T, HV].

    ``q``, ``k`` [T, H, K], ``v`` [T, HV, V], ``a``, ``b`` [T, HV], ``state`` [HV, V, K]. Nothing is written. The
    formula is the gated delta rule of https://arxiv.org/abs/2412.06464 with the gate of Mamba 2.
    """
    q, k, v, a, b, a_log, dt_bias, h = (x.double() for x in (q, k, v, a, b, a_log, dt_bias, state))
    ratio = v.shape[1] // k.shape[1]
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias, threshold=SOFTPLUS_THRESHOLD)
    beta = b.sigmoid()
    q, k = (x / (x.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(ratio, 1) for x in (q * q.shape[-1] ** -0.5, k))
    outputs, states = [], []
    for i_t in range(q.shape[0]):
        h = h * g[i_t].exp()[:, None, None]
        delta = (v[i_t] - torch.einsum("hvk,hk->hv", h, k[i_t])) * beta[i_t][:, None]
        h = h + delta[:, :, None] * k[i_t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", h, q[i_t]))
        states.append(h)
    return torch.stack(outputs), torch.stack(states), g, beta
