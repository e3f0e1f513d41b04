"""A whole target verify in one launch: unpack, causal conv, conv windows and the gated delta rule.

What ``conv_update`` and ``recurrent_verify`` do in two launches, with their bits, for batches so small that the second
launch and the way through memory between the two cost more than doing some work twice: each program, some value columns
of one value head of one request, convolves q and k of its key head again. Whatever programs have in common is written
by one of them: windows and raw k of a key head by the first column tile of its first value head, gates and beta of a
value head by its first column tile.

Two implementations with equal bits, as in ``recurrent_verify``: ``portable`` in plain Triton, ``explicit`` in Gluon for
sm_90.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_gdn_zerocopy.kernels.conv_update import (
    Unpack,
    check_conv,
    check_unpack,
    convolve_quads,
    fits_words,
    inputs_of_quads,
    load4,
    projection_b,
    projection_word,
    projection_z_word,
    require,
    store4,
    store_windows,
)
from sglang_gdn_zerocopy.kernels.dependent_launch import is_sm90
from sglang_gdn_zerocopy.kernels.launch import Launch
from sglang_gdn_zerocopy.kernels.recurrent_verify import (
    HEAD_DIM,
    NORM_EPSILON,
    PORTABLE,
    SOFTPLUS_THRESHOLD,
    Choice,
    Config,
    FoldRing,
    Snapshots,
    check_recurrence,
    kept_buffers,
    kept_measures,
    launch_options,
    prepare_tokens,
    run_tokens,
    step_token,
)

MOST_TOKENS = 8
"""Draft tokens of a request that the explicit implementation takes."""

CHOICES: tuple[Choice, ...] = (
    Choice("ring", torch.float32, 32, Config("explicit", 32, 4)),
    Choice("ring", torch.float32, 2048, Config("explicit", 64, 4, 4, 128)),
    Choice("ring", torch.bfloat16, 32, Config("explicit", 32, 4, 8)),
    Choice("ring", torch.bfloat16, 1024, Config("explicit", 64, 4)),
    Choice("snapshots", torch.float32, 256, Config("explicit", 32, 4, 8, stores="cs")),
    Choice("snapshots", torch.float32, 2048, Config("explicit", 16, 4, 16, stores="cs")),
    Choice("snapshots", torch.bfloat16, 32, Config("explicit", 32, 4)),
    Choice("snapshots", torch.bfloat16, 512, Config("explicit", 64, 4)),
    Choice("snapshots", torch.bfloat16, 2048, Config("explicit", 32, 4, 8)),
)
"""The first row that matches is taken; where none does, two launches are faster or nobody has measured.

Measured on an H200 with H=16, HV=32 and four draft tokens, for 1, 2, 4, 8, 16, 32 and 64 requests.
"""


@triton.jit
def _input(p_x, p_state, o_x, o_channel, i, live, stride_x, W: tl.constexpr):
    # Input i of these channels, oldest first: W - 1 cells of conv state, then the draft tokens.
    old = tl.load(p_state + o_channel * (W - 1) + i, live & (i < W - 1), other=0.0)
    new = tl.load(p_x + (i - (W - 1)) * stride_x + o_x, i >= W - 1, other=0.0)
    return tl.where(i < W - 1, old, new)


@triton.jit
def _convolve(
    p_x,
    p_state,
    p_weight,
    p_bias,
    o_x,
    o_channel,
    i_t,
    live,
    stride_x,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    # As convolve_quads, for any channels; rounded to the activations' type, as fp32.
    acc = tl.load(p_bias + o_channel).to(tl.float32) if HAS_BIAS else tl.zeros(o_channel.shape, dtype=tl.float32)
    for i in tl.static_range(W):
        value = _input(p_x, p_state, o_x, o_channel, i_t + i, live, stride_x, W)
        acc += value * tl.load(p_weight + o_channel * W + i)
    if SILU:
        acc = acc / (1 + tl.exp(-acc))
    return acc.to(p_x.dtype.element_ty).to(tl.float32)


@triton.jit
def _store_window(
    p_window,
    p_x,
    p_state,
    o_x,
    o_channel,
    i_t,
    live,
    stride_x,
    W: tl.constexpr,
    PITCH: tl.constexpr,
):
    for i in tl.static_range(W - 1):
        value = _input(p_x, p_state, o_x, o_channel, i_t + 1 + i, live, stride_x, W)
        tl.store(p_window + o_channel * PITCH + i, value, live)


@triton.jit
def _conv_verify_kernel(
    p_x,
    p_a,
    p_b,
    p_weight,
    p_bias,
    p_conv,
    p_slots,
    p_windows,
    p_window_rows,
    p_z,
    p_kept_a,
    p_kept_b,
    p_a_log,
    p_dt_bias,
    p_out,
    p_state,
    p_starts,
    p_snapshots,
    p_rows,
    p_raw_v,
    p_raw_k,
    p_ring_g,
    p_ring_beta,
    scale,
    stride_x,
    stride_a,
    stride_b,
    stride_conv,
    stride_windows,
    stride_window_rows,
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
    T: tl.constexpr,
    W: tl.constexpr,
    WINDOW_STEPS: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    UNPACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
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
    LEAVES: tl.constexpr,
):
    i_v, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    D: tl.constexpr = (2 * H + HV) * K
    RATIO: tl.constexpr = HV // H
    STEP: tl.constexpr = 1 if OVERLAPPING else D * (W - 1)
    PITCH: tl.constexpr = WINDOW_STEPS + W - 2 if OVERLAPPING else W - 1
    i_h = i_hv // RATIO
    first_row = i_n.to(tl.int64) * T
    slot = tl.load(p_slots + i_n).to(tl.int64)
    tokens = (tl.load(p_starts + i_n + 1).to(tl.int64) - tl.load(p_starts + i_n).to(tl.int64)).to(tl.int32)
    window_row = tl.load(p_window_rows + i_n * stride_window_rows).to(tl.int64)
    live = slot >= 0
    row = slot
    if not RING:
        row = tl.load(p_rows + i_n).to(tl.int64)
        p_snapshots += row * stride_snapshot_row + i_hv * (V * K)

    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    o_state = o_v[None, :] * K + o_k[:, None]
    first_q = i_h * K
    first_k = (H + i_h) * K
    first_v = 2 * H * K + i_hv * V
    # A head's channels lie side by side in a row of the projection as well.
    x_q = projection_word(first_q // 4, H, K, RATIO * V, INTERLEAVED) * 4 + o_k
    x_k = projection_word(first_k // 4, H, K, RATIO * V, INTERLEAVED) * 4 + o_k
    x_v = projection_word(first_v // 4, H, K, RATIO * V, INTERLEAVED) * 4 + o_v
    p_x += first_row * stride_x
    p_conv += slot * stride_conv
    p_windows += window_row * stride_windows
    p_a += first_row * stride_a + i_hv
    p_b += first_row * stride_b + i_hv
    if UNPACK:
        x_z = projection_z_word(i_hv * (V // 4), D, K, RATIO * V, INTERLEAVED) * 4 + o_v
        o_b = projection_b(i_hv, RATIO, INTERLEAVED)
        p_b += o_b - i_hv
        p_a += o_b + (RATIO if INTERLEAVED else HV) - i_hv
    o_out = (first_row * HV + i_hv) * V + o_v
    o_gate = first_row * HV + i_hv

    b_h = tl.zeros([K, BV], dtype=tl.float32)
    if live:
        b_h += tl.load(p_state + slot * stride_state + i_hv * (V * K) + o_state).to(tl.float32)
    decay_rate = -tl.exp(tl.load(p_a_log + i_hv).to(tl.float32))
    dt_bias = tl.load(p_dt_bias + i_hv).to(tl.float32)

    for i_t in range(T):
        p_window = p_windows + i_t * STEP
        if i_v == 0:
            if i_hv % RATIO == 0:
                _store_window(p_window, p_x, p_conv, x_q, first_q + o_k, i_t, live, stride_x, W, PITCH)
                _store_window(p_window, p_x, p_conv, x_k, first_k + o_k, i_t, live, stride_x, W, PITCH)
            if UNPACK:
                tl.store(p_kept_a + o_gate + i_t * HV, tl.load(p_a + i_t * stride_a))
                tl.store(p_kept_b + o_gate + i_t * HV, tl.load(p_b + i_t * stride_b))
        _store_window(p_window, p_x, p_conv, x_v, first_v + o_v, i_t, live, stride_x, W, PITCH)
        if UNPACK:
            tl.store(p_z + o_out + i_t * (HV * V), tl.load(p_x + i_t * stride_x + x_z))
        if i_t < tokens:
            b_q = _convolve(p_x, p_conv, p_weight, p_bias, x_q, first_q + o_k, i_t, live, stride_x, W, HAS_BIAS, SILU)
            b_k = _convolve(p_x, p_conv, p_weight, p_bias, x_k, first_k + o_k, i_t, live, stride_x, W, HAS_BIAS, SILU)
            b_v = _convolve(p_x, p_conv, p_weight, p_bias, x_v, first_v + o_v, i_t, live, stride_x, W, HAS_BIAS, SILU)
            b_h = step_token(
                b_h,
                b_q,
                b_k,
                b_v,
                p_a + i_t * stride_a,
                p_b + i_t * stride_b,
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
                p_out + (first_row + i_t) * (HV * V) + i_hv * V,
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
                LEAVES,
            )
        if not RING:
            p_snapshots += stride_snapshot_step


@gluon.jit
def _stack_rows(rows, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    # COUNT (4 or 8) rows of WIDTH as [COUNT, WIDTH].
    if COUNT == 8:
        low = gl.join(gl.join(rows[0], rows[4]), gl.join(rows[2], rows[6]))
        high = gl.join(gl.join(rows[1], rows[5]), gl.join(rows[3], rows[7]))
        stacked = gl.join(low, high)
    else:
        stacked = gl.join(gl.join(rows[0], rows[2]), gl.join(rows[1], rows[3]))
    return gl.permute(gl.reshape(stacked, [WIDTH, COUNT]), [1, 0])


@gluon.jit
def _conv_verify_explicit_kernel(
    p_x,
    p_a,
    p_b,
    p_weight,
    p_bias,
    p_conv,
    p_slots,
    p_windows,
    p_window_rows,
    p_z,
    p_kept_a,
    p_kept_b,
    p_a_log,
    p_dt_bias,
    p_out,
    p_state,
    p_starts,
    p_snapshots,
    p_rows,
    p_raw_v,
    p_raw_k,
    p_ring_g,
    p_ring_beta,
    scale,
    stride_x,
    stride_a,
    stride_b,
    stride_conv,
    stride_windows,
    stride_window_rows,
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
    T: gl.constexpr,
    W: gl.constexpr,
    WINDOW_STEPS: gl.constexpr,
    OVERLAPPING: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    UNPACK: gl.constexpr,
    INTERLEAVED: gl.constexpr,
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
    X_PACKED: gl.constexpr,
    PARAM_PACKED: gl.constexpr,
    CONV_PACKED: gl.constexpr,
    WINDOW_PACKED: gl.constexpr,
    Z_PACKED: gl.constexpr,
    QUADS: gl.constexpr,
    QUAD: gl.constexpr,
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
    D: gl.constexpr = (2 * H + HV) * K
    RATIO: gl.constexpr = HV // H
    KW: gl.constexpr = K // 4
    VW: gl.constexpr = BV // 4
    i_h = i_hv // RATIO

    # The program's quads of channels, spread over all threads: q, k, its columns of v and, to be copied only, of z.
    o_local = gl.arange(0, QUADS, QUAD)
    first_word = i_hv * (V // 4) + i_v * VW
    o_quad = gl.where(
        o_local < KW,
        i_h * KW + o_local,
        gl.where(o_local < 2 * KW, (H + i_h - 1) * KW + o_local, (H - 1) * (2 * KW) + first_word + o_local),
    )
    in_conv = o_local < 2 * KW + VW
    in_x = in_conv
    o_x = o_quad
    if UNPACK:
        in_x = o_local < 2 * KW + 2 * VW
        o_z = first_word + o_local - (2 * KW + VW)
        o_x = gl.where(
            in_conv,
            projection_word(o_quad, H, K, RATIO * V, INTERLEAVED),
            projection_z_word(o_z, D, K, RATIO * V, INTERLEAVED),
        )

    # No kernel of a forward pass writes the weights, so they may be read before the one in front has ended.
    weight = ()
    for i in gl.static_range(W):
        weight = weight + load4(p_weight, o_quad * W + i, in_conv, PARAM_PACKED)
    start = ()
    if HAS_BIAS:
        bias = load4(p_bias, o_quad, in_conv, PARAM_PACKED)
        for c in gl.static_range(4):
            start = start + (bias[c].to(gl.float32),)
    else:
        for _ in gl.static_range(4):
            start = start + (gl.zeros([QUADS], gl.float32, QUAD),)
    raw_a_log = gl.load(p_a_log + i_hv)
    dt_bias = gl.load(p_dt_bias + i_hv).to(gl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # The state comes first, since it is needed last: it is on its way while the conv runs. The barrier keeps it there;
    # without, the assembler puts arithmetic of the conv, with all that it waits for, in front.
    slot = gl.load(p_slots + i_n).to(gl.int64)
    window_row = gl.load(p_window_rows + i_n * stride_window_rows).to(gl.int64)
    tokens = (gl.load(p_starts + i_n + 1).to(gl.int64) - gl.load(p_starts + i_n).to(gl.int64)).to(gl.int32)
    tokens = gl.minimum(tokens, T)
    row = slot
    if not RING:
        row = gl.load(p_rows + i_n).to(gl.int64)
    # A padded row has no slot: nothing of the pools is read or written for it.
    live = slot >= 0
    first_column = i_v * BV
    o_column = gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_state = o_column[:, None] * K + gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    p_state += slot * stride_state + i_hv * (V * K) + first_column * K
    raw_h = gl.load(p_state + o_state, mask=live, other=0.0)
    tl.debug_barrier()

    # All loads before the first store.
    p_conv += slot * stride_conv
    old = ()
    for i in gl.static_range(W - 1):
        old = old + load4(p_conv, o_quad * (W - 1) + i, in_conv & live, CONV_PACKED)
    first_row = i_n.to(gl.int64) * T
    p_x += first_row * stride_x
    draft = ()
    for t in gl.static_range(T):
        draft = draft + load4(p_x + t * stride_x, o_x, in_x, X_PACKED)
    i_gate = gl.arange(0, BT, gl.SliceLayout(1, GATE))
    o_b = i_hv
    o_a = i_hv
    if UNPACK:
        o_b = projection_b(i_hv, RATIO, INTERLEAVED)
        o_a = o_b + (RATIO if INTERLEAVED else HV)
    p_a += first_row * stride_a + o_a
    p_b += first_row * stride_b + o_b
    raw_a = gl.load(p_a + i_gate * stride_a, mask=i_gate < T, other=0.0)
    raw_b = gl.load(p_b + i_gate * stride_b, mask=i_gate < T, other=0.0)

    # Convolved channels as [token, q | k | v | unused].
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_raw = gl.allocate_shared_memory(p_out.dtype.element_ty, [BT, 4 * QUADS], TILE)
    sequence = inputs_of_quads(old, draft, W)
    rows = ()
    for t in gl.static_range(BT):
        if t < T:
            out = convolve_quads(sequence, weight, start, p_out, t, W, SILU)
            pairs = gl.join(gl.join(out[0], out[2]), gl.join(out[1], out[3]))
            rows = rows + (gl.reshape(pairs, [4 * QUADS]),)
        else:
            # Fills up the power of two; nobody reads it.
            rows = rows + (rows[0],)
    # In one go: the compiler puts a barrier between two stores to one piece of memory.
    s_raw.store(_stack_rows(rows, BT, 4 * QUADS))

    shared = (i_v == 0) & (i_hv % RATIO == 0)
    in_windows = in_conv & (shared | (o_local >= 2 * KW)) & live
    store_windows(
        p_windows + window_row * stride_windows,
        o_quad,
        in_windows,
        0,
        live,
        sequence,
        T,
        D,
        W,
        WINDOW_STEPS,
        OVERLAPPING,
        WINDOW_PACKED,
        "words",
        QUADS,
    )
    if UNPACK:
        p_z += first_row * (HV * V)
        for t in gl.static_range(T):
            store4(
                p_z + t * (HV * V),
                o_z,
                draft[4 * t],
                draft[4 * t + 1],
                draft[4 * t + 2],
                draft[4 * t + 3],
                in_x & (o_local >= 2 * KW + VW),
                Z_PACKED,
            )
        if i_v == 0:
            o_gate = first_row * HV + i_hv + i_gate * HV
            gl.store(p_kept_a + o_gate, raw_a, mask=i_gate < T)
            gl.store(p_kept_b + o_gate, raw_b, mask=i_gate < T)

    s_q = gl.allocate_shared_memory(gl.float32, [BT, K], TILE)
    s_k = gl.allocate_shared_memory(gl.float32, [BT, K], TILE)
    s_v = gl.allocate_shared_memory(gl.float32, [BT, BV], TILE)
    s_decay = gl.allocate_shared_memory(gl.float32, [BT, 1], TILE)
    s_beta = gl.allocate_shared_memory(gl.float32, [BT, 1], TILE)
    prepare_tokens(
        s_raw.slice(0, K, 1).load(ROW),
        s_raw.slice(K, K, 1).load(ROW),
        s_raw.slice(2 * K, BV, 1).load(VALUE),
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
        0,
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
        BV,
    )
    # As stock, which adds the state to zeros: no -0.
    b_h = raw_h.to(gl.float32) + 0.0
    p_out += (first_row * HV + i_hv) * V + first_column
    # With a ring there are no snapshots; the pointer is a stand-in that a loop can carry.
    p_snapshot = p_out
    if not RING:
        p_snapshot = p_snapshots + (row * stride_snapshot_row + i_hv * (V * K) + first_column * K)
    run_tokens(
        b_h,
        s_q._reinterpret(gl.float32, [BT, K], LINE),
        s_k._reinterpret(gl.float32, [BT, K], LINE),
        s_v._reinterpret(gl.float32, [BT, BV], LINE),
        s_decay._reinterpret(gl.float32, [BT, 1], LINE),
        s_beta._reinterpret(gl.float32, [BT, 1], LINE),
        p_out,
        p_snapshot,
        stride_snapshot_step,
        row,
        tokens,
        0,
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
    # No other piece of shared memory in its place, which would cost a barrier.
    s_raw._keep_alive()


@cache
def _uncapped(config: Config) -> Config:
    return replace(config, max_registers=None)


def choose(
    protocol: str, state_dtype: torch.dtype, heads: int, draft_tokens: int, device: torch.device
) -> Config | None:
    """From ``CHOICES`` on sm_90; None where ``conv_update`` and ``recurrent_verify`` are to be launched one by one.

    ``heads`` is N * HV, see ``Choice``.
    """
    if draft_tokens > MOST_TOKENS or not is_sm90(device):
        return None
    for choice in CHOICES:
        if (choice.protocol, choice.state_dtype) == (protocol, state_dtype) and heads <= choice.max_heads:
            # The cap on registers was found with four tokens; with more of them the compiler would spill.
            return choice.config if draft_tokens <= 4 else _uncapped(choice.config)
    return None


def conv_verify(
    x: torch.Tensor,
    draft_tokens: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    windows: torch.Tensor,
    window_rows: torch.Tensor,
    unpack: Unpack | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    starts: torch.Tensor,
    kept: FoldRing | Snapshots,
    *,
    reciprocal_norm: bool,
    overlap: bool = False,
    config: Config | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Verify N chains of T = ``draft_tokens`` tokens from the projection on; returns the output [1, N * T, HV, V].

    ``x`` to ``window_rows`` and ``unpack``: as ``conv_update`` takes them, with W * [(2 * H + HV) * 128] weights and
    dense ``slots``. ``a``, ``b`` [..., N * T, HV], any row stride: None with ``unpack``, whose ``ba`` has them.
    ``a_log`` to ``kept``, ``reciprocal_norm``: as ``recurrent_verify`` takes them. Of request n, rows n * T to
    n * T + T - 1 are convolved whatever ``starts`` [N + 1] says; starts[n + 1] - starts[n], which must be T or 0, of
    them go through the recurrence, and starts[n] must be n * T for a request that has any. ``slots`` are those of
    both. A request with slot -1 writes no windows and no ring, and output rows that mean nothing.

    Writes ``windows`` and, with ``unpack``, its z, b and a as ``conv_update`` does; ``kept`` as ``recurrent_verify``
    does. Unlike there ``conv_state`` is only read (programs share its channels, so none may write it): whoever needs it
    must take it from the windows of the accepted tokens. The output has ``x``'s dtype.

    ``overlap``: launch it as a programmatic dependent of the kernel before it, which must not write ``weight``,
    ``bias``, ``a_log`` or ``dt_bias``: they are read early. ``config``: instead of what ``choose`` says, where it says
    None the portable one. ``launch``: what :func:`one_launch` said for such arguments before; nothing is checked again
    then.

    Raises ``ValueError`` before anything is written for what it does not take.
    """
    if launch is None:
        launch = one_launch(
            x,
            draft_tokens,
            weight,
            bias,
            silu,
            conv_state,
            slots,
            windows,
            window_rows,
            unpack,
            a,
            b,
            a_log,
            dt_bias,
            state,
            starts,
            kept,
            reciprocal_norm=reciprocal_norm,
            overlap=overlap,
            config=config,
        )
    out = torch.empty(launch.output, dtype=x.dtype, device=x.device)
    if not launch.grid:
        return out
    if unpack is None:
        raw_a, raw_b, z, kept_a, kept_b = a, b, None, None, None
    else:
        raw_a, raw_b, z, kept_a, kept_b = unpack.ba, unpack.ba, unpack.z, unpack.a, unpack.b
    kernel = _conv_verify_explicit_kernel if launch.explicit else _conv_verify_kernel
    kernel[launch.grid](
        x,
        raw_a,
        raw_b,
        weight,
        bias,
        conv_state,
        slots,
        windows,
        window_rows,
        z,
        kept_a,
        kept_b,
        a_log,
        dt_bias,
        out,
        state,
        starts,
        *kept_buffers(kept),
        *launch.numbers,
        **launch.constants,
    )
    return out


def one_launch(
    x: torch.Tensor,
    draft_tokens: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    windows: torch.Tensor,
    window_rows: torch.Tensor,
    unpack: Unpack | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    starts: torch.Tensor,
    kept: FoldRing | Snapshots,
    *,
    reciprocal_norm: bool,
    overlap: bool = False,
    config: Config | None = None,
) -> Launch:
    """The launch of :func:`conv_verify` on such arguments; ``ValueError`` for what that does not take."""
    rows, (dim, width), N = x.shape[0], weight.shape, starts.shape[0] - 1
    require(slots.shape[0] == N, f"{slots.shape[0]} slots for {N} requests")
    overlapping = check_conv(x, rows, draft_tokens, weight, bias, conv_state, slots, windows, window_rows)
    if unpack is not None:
        require(a is None and b is None, "a and b are given beside a projection that has them")
        check_unpack(x, dim, unpack)
        a, b, raw_a, raw_b = unpack.a, unpack.b, unpack.ba, unpack.ba
        H, K, (HV, V) = unpack.num_k_heads, unpack.head_k_dim, unpack.z.shape[1:]
    else:
        if a is None or b is None:
            raise ValueError("neither a projection nor a and b")
        raw_a, raw_b = a, b
        HV, K, V = a.shape[-1], HEAD_DIM, HEAD_DIM
        H = (dim // K - HV) // 2
    require((K, V) == (HEAD_DIM, HEAD_DIM), f"head dims {K} and {V}, only {HEAD_DIM} is taken")
    require(H > 0 and HV % H == 0 and dim == (2 * H + HV) * K, f"{dim} channels are not those of {HV} value heads")
    check_recurrence(rows, HV, a, b, a_log, dt_bias, state, slots, starts)
    protocol, measures = kept_measures(kept, state, N, H)
    if config is None:
        config = choose(protocol, state.dtype, N * HV, draft_tokens, x.device) or PORTABLE
    options = launch_options(config, state, 4 if draft_tokens <= 4 else MOST_TOKENS)
    if config.implementation == "portable":
        # The interpreter has an order of its own, the same one wherever the numbers come from.
        options["LEAVES"] = isinstance(_conv_verify_kernel, triton.JITFunction)
    if config.implementation == "explicit":
        require(config.blocks == 1, f"{config} has more than one block")
        require(draft_tokens <= MOST_TOKENS, f"{config} takes {MOST_TOKENS} draft tokens, not {draft_tokens}")
        # Columns of z only where there is a projection that has them.
        quads = (2 * K + config.columns * (1 if unpack is None else 2)) // 4
        quads = max(triton.next_power_of_2(quads), 32 * config.warps)
        options |= {
            "X_PACKED": fits_words(x, x.stride(0)),
            "PARAM_PACKED": fits_words(weight) and (bias is None or fits_words(bias)),
            "CONV_PACKED": fits_words(conv_state, conv_state.stride(0)),
            "WINDOW_PACKED": fits_words(windows, windows.stride(0)),
            "Z_PACKED": unpack is not None and fits_words(unpack.z),
            "QUADS": quads,
            "QUAD": gl.BlockedLayout([1], [32], [config.warps], [0]),
        }
    if overlap:
        options["launch_pdl"] = True
    constants = {
        "T": draft_tokens,
        "W": width,
        "WINDOW_STEPS": windows.shape[1],
        "OVERLAPPING": overlapping,
        "HAS_BIAS": bias is not None,
        "SILU": silu,
        "UNPACK": unpack is not None,
        "INTERLEAVED": unpack is not None and unpack.interleaved,
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
    strides = (
        x.stride(0),
        raw_a.stride(-2),
        raw_b.stride(-2),
        conv_state.stride(0),
        windows.stride(0),
        window_rows.stride(0),
        state.stride(0),
    )
    return Launch(
        grid=(V // config.columns, HV, N) if rows else (),
        numbers=(K**-0.5, *strides, *measures),
        constants=constants,
        explicit=config.implementation == "explicit",
        output=(1, rows, HV, V),
    )
