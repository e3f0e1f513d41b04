"""Unpack, causal conv, conv windows and packed QKV of one target verify, in one launch.

Every channel is on its own: nothing is reduced across channels, so the bits do not depend on how channels are spread
over programs. A thread holds a quad, four neighbouring channels, because a quad's cells lie side by side in every
buffer: four 16-bit cells make one 8-byte access wherever rows are aligned to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_gdn_zerocopy.kernels.dependent_launch import starts_early
from sglang_gdn_zerocopy.kernels.launch import Launch

_QUAD = 4


class Tile(NamedTuple):
    """Quads (four channels each) and warps of one program; ``swap``: threads swap what they store.

    With the swap each store covers whole sectors, at the price of a trip through shared memory.
    """

    quads: int
    warps: int
    swap: bool = False


class Unpack(NamedTuple):
    """The parts of a projection beside QKV, and where they go.

    ``ba`` [rows, 2 * HV], any row stride, is read. ``z`` [rows, HV, V], ``b`` and ``a`` [rows, HV], all dense, are
    written. ``interleaved`` tells the projection's layout: False is [all q | all k | all v | all z] with
    [all b | all a], True repeats [q | k | v | z] and [b | a] for every key head.
    """

    ba: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    interleaved: bool
    num_k_heads: int
    head_k_dim: int


@triton.jit
def load4(p_base, o_word, mask, PACKED: tl.constexpr):
    """Elements 4 * o_word to 4 * o_word + 3, as four tensors."""
    if PACKED:
        word = tl.load(p_base.to(tl.pointer_type(tl.uint64), bitcast=True) + o_word, mask, other=0)
        element = p_base.dtype.element_ty
        return (
            word.to(tl.uint16).to(element, bitcast=True),
            (word >> 16).to(tl.uint16).to(element, bitcast=True),
            (word >> 32).to(tl.uint16).to(element, bitcast=True),
            (word >> 48).to(tl.uint16).to(element, bitcast=True),
        )
    else:
        p_first = p_base + o_word * 4
        return (
            tl.load(p_first, mask, other=0.0),
            tl.load(p_first + 1, mask, other=0.0),
            tl.load(p_first + 2, mask, other=0.0),
            tl.load(p_first + 3, mask, other=0.0),
        )


@triton.jit
def _word(v0, v1, v2, v3):
    # Four 16-bit values side by side, the first one in the lowest bits.
    low = v0.to(tl.uint16, bitcast=True).to(tl.uint64) | (v1.to(tl.uint16, bitcast=True).to(tl.uint64) << 16)
    high = v2.to(tl.uint16, bitcast=True).to(tl.uint64) | (v3.to(tl.uint16, bitcast=True).to(tl.uint64) << 16)
    return low | (high << 32)


@triton.jit
def store4(p_base, o_word, v0, v1, v2, v3, mask, PACKED: tl.constexpr):
    """The reverse of ``load4``."""
    if PACKED:
        tl.store(p_base.to(tl.pointer_type(tl.uint64), bitcast=True) + o_word, _word(v0, v1, v2, v3), mask)
    else:
        p_first = p_base + o_word * 4
        tl.store(p_first, v0, mask)
        tl.store(p_first + 1, v1, mask)
        tl.store(p_first + 2, v2, mask)
        tl.store(p_first + 3, v3, mask)


@triton.jit
def _store_swapped(p_base, i_first, words, live, CELLS: tl.constexpr, QUADS: tl.constexpr, LAST: tl.constexpr):
    # Threads swap their words first, so that neighbours store neighbours: whole 32-byte sectors in one go.
    PLACES: tl.constexpr = 8 if CELLS > 4 else 4
    if CELLS > 4:
        low = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
        high = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
        grid = tl.join(low, high)
    else:
        grid = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    flat = tl.reshape(grid, (QUADS * PLACES,))
    o_word = tl.arange(0, QUADS * PLACES)
    inside = o_word < QUADS * CELLS
    source = tl.where(inside, o_word // CELLS * PLACES + o_word % CELLS, 0)
    swapped = tl.gather(flat, source, 0)
    o_word += i_first * CELLS
    p_word = p_base.to(tl.pointer_type(tl.uint64), bitcast=True) + o_word
    tl.store(p_word, swapped, inside & (o_word < LAST * CELLS) & live)


@triton.jit
def _store_quads(
    p_base,
    o_quad,
    mask,
    i_first,
    live,
    cells,
    CELLS: tl.constexpr,
    PACKED: tl.constexpr,
    STORE: tl.constexpr,
    QUADS: tl.constexpr,
    LAST: tl.constexpr,
):
    # ``cells`` holds CELLS cells of each of a quad's four channels; they lie one channel after the other. STORE
    # "swap" takes the program's first quad, the number of all quads and whether anything is stored from i_first, LAST
    # and live, the others take the quads from o_quad and mask; "words" keeps to what Gluon can do as well.
    if PACKED and STORE == "swap" and CELLS > 2 and CELLS <= 8:
        words = ()
        for i in tl.static_range(CELLS):
            words = words + (_word(cells[4 * i], cells[4 * i + 1], cells[4 * i + 2], cells[4 * i + 3]),)
        for _ in tl.static_range(8 - CELLS):
            # Fills the places up to a power of two; nobody reads them.
            words = words + (words[0],)
        _store_swapped(p_base, i_first, words, live, CELLS, QUADS, LAST)
    elif PACKED and STORE != "words" and CELLS % 2 == 0:
        for i in tl.static_range(0, CELLS, 2):
            # Two words at an even word offset: one 16-byte store.
            low = _word(cells[4 * i], cells[4 * i + 1], cells[4 * i + 2], cells[4 * i + 3])
            high = _word(cells[4 * i + 4], cells[4 * i + 5], cells[4 * i + 6], cells[4 * i + 7])
            o_words = (o_quad * CELLS + i)[:, None] + tl.arange(0, 2)[None, :]
            p_words = p_base.to(tl.pointer_type(tl.uint64), bitcast=True) + o_words
            tl.store(p_words, tl.join(low, high), mask[:, None])
    else:
        for i in tl.static_range(CELLS):
            store4(
                p_base,
                o_quad * CELLS + i,
                cells[4 * i],
                cells[4 * i + 1],
                cells[4 * i + 2],
                cells[4 * i + 3],
                mask,
                PACKED,
            )


@triton.jit
def _window(sequence, FIRST: tl.constexpr, CELLS: tl.constexpr):
    # Cells FIRST to FIRST + CELLS - 1 of each channel's input sequence, channel after channel.
    cells = ()
    for c in tl.static_range(4):
        for i in tl.static_range(CELLS):
            cells = cells + (sequence[(FIRST + i) * 4 + c],)
    return cells


@triton.jit
def inputs_of_quads(state, tokens, W: tl.constexpr):
    """The inputs of each channel, oldest first: W - 1 cells of state, then the draft tokens.

    ``state`` holds a quad's cells channel after channel, ``tokens`` cell after cell, as does the result: cell i of
    channel c is [4 * i + c].
    """
    sequence = ()
    for i in tl.static_range(W - 1):
        for c in tl.static_range(4):
            sequence = sequence + (state[c * (W - 1) + i],)
    return sequence + tokens


@triton.jit
def convolve_quads(sequence, weight, start, p_out, t: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr):
    """Token t of a quad's four channels, in the type that ``p_out`` points to; ``start``: what each sum starts from."""
    out = ()
    for c in tl.static_range(4):
        acc = start[c]
        for i in tl.static_range(W):
            # Oldest tap first; the product is rounded to the operands' type before the sum.
            acc += sequence[(t + i) * 4 + c] * weight[c * W + i]
        if SILU:
            acc = acc / (1 + tl.exp(-acc))
        out = out + (acc.to(p_out.dtype.element_ty),)
    return out


@triton.jit
def store_windows(
    p_windows,
    o_quad,
    mask,
    i_first,
    live,
    sequence,
    T: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    WINDOW_STEPS: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    PACKED: tl.constexpr,
    STORE: tl.constexpr,
    QUADS: tl.constexpr,
):
    """The windows of all T tokens, in either layout; for STORE see ``_store_quads``."""
    if OVERLAPPING:
        # Window t is cells t + 1 to t + W - 1: consecutive windows share all but one cell, stored once.
        if T == WINDOW_STEPS:
            CELLS: tl.constexpr = T + W - 2
            cells = _window(sequence, 1, CELLS)
            _store_quads(p_windows, o_quad, mask, i_first, live, cells, CELLS, PACKED, STORE, QUADS, D // 4)
        else:
            PITCH: tl.constexpr = WINDOW_STEPS + W - 2
            for c in tl.static_range(4):
                for i in tl.static_range(T + W - 2):
                    tl.store(p_windows + (o_quad * 4 + c) * PITCH + i, sequence[(1 + i) * 4 + c], mask)
    else:
        for t in tl.static_range(T):
            p_step = p_windows + t * D * (W - 1)
            cells = _window(sequence, t + 1, W - 1)
            _store_quads(p_step, o_quad, mask, i_first, live, cells, W - 1, PACKED, STORE, QUADS, D // 4)


@triton.jit
def projection_word(
    o_quad,
    H: tl.constexpr,
    K: tl.constexpr,
    GROUP_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Where a quad of packed QKV lies in a row of the projection, in words."""
    if INTERLEAVED:
        KW: tl.constexpr = K // 4
        VW: tl.constexpr = GROUP_V // 4
        GROUP: tl.constexpr = 2 * KW + 2 * VW
        in_k = o_quad - H * KW
        in_v = o_quad - 2 * H * KW
        o_q = o_quad // KW * GROUP + o_quad % KW
        o_k = in_k // KW * GROUP + KW + in_k % KW
        o_v = in_v // VW * GROUP + 2 * KW + in_v % VW
        return tl.where(o_quad < H * KW, o_q, tl.where(o_quad < 2 * H * KW, o_k, o_v))
    else:
        return o_quad


@triton.jit
def projection_z_word(
    o_z,
    D: tl.constexpr,
    K: tl.constexpr,
    GROUP_V: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Where a quad of z lies in a row of the projection, in words."""
    if INTERLEAVED:
        VW: tl.constexpr = GROUP_V // 4
        return o_z // VW * (K // 2 + 2 * VW) + K // 2 + VW + o_z % VW
    else:
        return D // 4 + o_z


@triton.jit
def projection_b(o_head, RATIO: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where b of a value head lies in a row of the gates."""
    if INTERLEAVED:
        return o_head // RATIO * 2 * RATIO + o_head % RATIO
    else:
        return o_head


@triton.jit
def _conv_update_kernel(
    p_x,
    p_ba,
    p_weight,
    p_bias,
    p_state,
    p_slots,
    p_windows,
    p_window_rows,
    p_packed,
    p_z,
    p_b,
    p_a,
    x_stride,
    ba_stride,
    state_stride,
    slots_stride,
    windows_stride,
    window_rows_stride,
    T: tl.constexpr,
    D: tl.constexpr,
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
    NP2_HV: tl.constexpr,
    X_PACKED: tl.constexpr,
    PARAM_PACKED: tl.constexpr,
    STATE_PACKED: tl.constexpr,
    WINDOW_PACKED: tl.constexpr,
    OUT_PACKED: tl.constexpr,
    PDL: tl.constexpr,
    SWAP: tl.constexpr,
    QUADS: tl.constexpr,
):
    i_request = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    CONV_BLOCKS: tl.constexpr = (D // 4 + QUADS - 1) // QUADS
    GROUP_V: tl.constexpr = HV // H * V
    p_x += i_request * T * x_stride

    if i_block < CONV_BLOCKS:
        o_quad = i_block * QUADS + tl.arange(0, QUADS)
        in_dim = o_quad < D // 4
        # No kernel of a forward pass writes the weights, so they may be read before the one in front has ended.
        weight = ()
        for i in tl.static_range(W):
            weight = weight + load4(p_weight, o_quad * W + i, in_dim, PARAM_PACKED)
        if HAS_BIAS:
            bias = load4(p_bias, o_quad, in_dim, PARAM_PACKED)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

        # Only the state has to wait for the slot; the tokens are on their way meanwhile.
        slot = tl.load(p_slots + i_request * slots_stride).to(tl.int64)
        window_row = tl.load(p_window_rows + i_request * window_rows_stride).to(tl.int64)
        o_x = projection_word(o_quad, H, K, GROUP_V, INTERLEAVED)
        tokens = ()
        for i in tl.static_range(T):
            tokens = tokens + load4(p_x + i * x_stride, o_x, in_dim, X_PACKED)
        p_state += slot * state_stride
        p_windows += window_row * windows_stride
        # A padded row has no slot: it is read and written nowhere.
        mask = in_dim & (slot >= 0)
        state = ()
        for i in tl.static_range(W - 1):
            state = state + load4(p_state, o_quad * (W - 1) + i, mask, STATE_PACKED)

        sequence = inputs_of_quads(state, tokens, W)
        start = ()
        for c in tl.static_range(4):
            start = start + (bias[c].to(tl.float32) if HAS_BIAS else tl.zeros((QUADS,), dtype=tl.float32),)
        p_packed += i_request * T * D
        for t in tl.static_range(T):
            out = convolve_quads(sequence, weight, start, p_packed, t, W, SILU)
            store4(p_packed + t * D, o_quad, out[0], out[1], out[2], out[3], mask, OUT_PACKED)

        i_first = i_block * QUADS
        live = slot >= 0
        STORE: tl.constexpr = "swap" if SWAP else "pairs"
        store_windows(
            p_windows,
            o_quad,
            mask,
            i_first,
            live,
            sequence,
            T,
            D,
            W,
            WINDOW_STEPS,
            OVERLAPPING,
            WINDOW_PACKED,
            STORE,
            QUADS,
        )
        # One program holds the channel, and its old state was read above.
        cells = _window(sequence, T, W - 1)
        _store_quads(p_state, o_quad, mask, i_first, live, cells, W - 1, STATE_PACKED, STORE, QUADS, D // 4)
    elif UNPACK:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        o_z = (i_block - CONV_BLOCKS) * QUADS + tl.arange(0, QUADS)
        in_z = o_z < HV * V // 4
        o_source = projection_z_word(o_z, D, K, GROUP_V, INTERLEAVED)
        p_z += i_request * T * HV * V
        # All loads before the first store: the compiler keeps their order, since pointers may alias.
        z = ()
        for t in tl.static_range(T):
            z = z + load4(p_x + t * x_stride, o_source, in_z, X_PACKED)
        if i_block == CONV_BLOCKS:
            o_head = tl.arange(0, NP2_HV)
            in_heads = o_head < HV
            o_b = projection_b(o_head, HV // H, INTERLEAVED)
            # One block of the row, or of the key head, after the b that belong to it.
            o_a = o_b + (HV // H if INTERLEAVED else HV)
            p_ba += i_request * T * ba_stride
            gates = ()
            for t in tl.static_range(T):
                gates = gates + (tl.load(p_ba + t * ba_stride + o_b, in_heads),)
                gates = gates + (tl.load(p_ba + t * ba_stride + o_a, in_heads),)
            o_row = i_request * T * HV + o_head
            for t in tl.static_range(T):
                tl.store(p_b + o_row + t * HV, gates[2 * t], in_heads)
                tl.store(p_a + o_row + t * HV, gates[2 * t + 1], in_heads)
        for t in tl.static_range(T):
            store4(p_z + t * HV * V, o_z, z[4 * t], z[4 * t + 1], z[4 * t + 2], z[4 * t + 3], in_z, OUT_PACKED)


# (largest number of requests, tile): the first row that holds the batch is used; the last one serves all else.
# From the sweep in benchmarks/.
_TILES = (
    (48, Tile(32, 1)),
    (1 << 62, Tile(64, 2, swap=True)),
)


def choose_tile(num_requests: int) -> Tile:
    """The tile for a batch of ``num_requests``. Any tile gives the same bits."""
    return next(tile for limit, tile in _TILES if num_requests <= limit)


def windows_overlap(windows: torch.Tensor) -> bool:
    """Whether the steps of one channel share cells; raises ``ValueError`` for a layout that is neither form."""
    _, steps, dim, cells = windows.shape
    strides = windows.stride()[1:]
    if strides == (1, steps + cells - 1, 1):
        return True
    if strides == (dim * cells, cells, 1):
        return False
    raise ValueError(f"conv windows of shape {tuple(windows.shape)} have strides {windows.stride()}")


def require(holds: bool, message: str) -> None:
    """``ValueError`` with ``message`` unless it holds."""
    if not holds:
        raise ValueError(message)


def fits_words(tensor: torch.Tensor, *strides: int) -> bool:
    """Whether four cells of ``tensor`` can be moved as one aligned 8-byte word; ``strides`` are in elements."""
    return tensor.element_size() == 2 and tensor.data_ptr() % 8 == 0 and all(stride % _QUAD == 0 for stride in strides)


def conv_update(
    x: torch.Tensor,
    draft_tokens: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    windows: torch.Tensor,
    window_rows: torch.Tensor,
    packed: torch.Tensor,
    unpack: Unpack | None = None,
    tile: Tile | None = None,
    *,
    launch: Launch | None = None,
) -> None:
    """Causal conv over every request's draft tokens, and all that belongs to it, in one launch.

    For N requests of T = ``draft_tokens`` and D channels of width W (2 to 4):

    ``x`` [N * T, >= D]: rows of packed QKV, or of a whole projection with ``unpack``; any row stride, dense rows.
    ``weight`` [D, W] dense; ``bias`` [D] or None; ``silu`` applies x / (1 + exp(-x)) to the fp32 sum.
    ``conv_state`` [slots, D, W - 1], any slot pitch; ``slots`` [N] integers, negative for a padded row.
    ``windows`` [rows, >= T, D, W - 1], dense or overlapping; ``window_rows`` [N] integers.
    ``packed`` [N * T, D] dense, of ``x``'s dtype.

    Writes ``packed`` (post-conv QKV), ``windows`` (step t: the W - 1 inputs up to token t), ``conv_state`` (the last
    W - 1 inputs) and, with ``unpack``, its z, b and a. A row without slot leaves its part of packed, windows and
    state unwritten. Products have the operands' dtype and are summed in fp32 from the bias or zero, oldest tap first.

    ``launch``: what :func:`conv_launch` said for such arguments before; nothing is checked again then.

    Raises ``ValueError`` before anything is written when shapes, strides or dtypes are not of this kind.
    """
    if launch is None:
        launch = conv_launch(
            x, draft_tokens, weight, bias, silu, conv_state, slots, windows, window_rows, packed, unpack, tile
        )
    if unpack is None:
        ba, z, b, a = x, packed, packed, packed
    else:
        ba, z, b, a = unpack.ba, unpack.z, unpack.b, unpack.a
    _conv_update_kernel[launch.grid](
        x,
        ba,
        weight,
        weight if bias is None else bias,
        conv_state,
        slots,
        windows,
        window_rows,
        packed,
        z,
        b,
        a,
        *launch.numbers,
        **launch.constants,
    )


def conv_launch(
    x: torch.Tensor,
    draft_tokens: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    windows: torch.Tensor,
    window_rows: torch.Tensor,
    packed: torch.Tensor,
    unpack: Unpack | None = None,
    tile: Tile | None = None,
) -> Launch:
    """The launch of :func:`conv_update` on such arguments; ``ValueError`` for what that does not take."""
    rows, dim = packed.shape
    width = weight.shape[1]
    num_requests = slots.shape[0]
    require(packed.dtype == x.dtype, "x and packed QKV differ in dtype")
    require(packed.is_contiguous(), "packed QKV is not dense")
    overlapping = check_conv(x, rows, draft_tokens, weight, bias, conv_state, slots, windows, window_rows)
    require(weight.shape[0] == dim, f"the weight has {weight.shape[0]} channels, packed QKV {dim}")
    tile = tile or choose_tile(num_requests)
    num_k_heads = num_v_heads = head_k_dim = head_v_dim = 1
    if unpack is not None:
        num_k_heads, head_k_dim = unpack.num_k_heads, unpack.head_k_dim
        num_v_heads, head_v_dim = unpack.z.shape[1:]
        check_unpack(x, dim, unpack)
    blocks = triton.cdiv(dim // _QUAD, tile.quads)
    if unpack is not None:
        blocks += triton.cdiv(num_v_heads * head_v_dim // _QUAD, tile.quads)
    outputs = [packed] if unpack is None else [packed, unpack.z]
    pdl = starts_early(x.device)
    constants: dict[str, Any] = {
        "T": draft_tokens,
        "D": dim,
        "W": width,
        "WINDOW_STEPS": windows.shape[1],
        "OVERLAPPING": overlapping,
        "HAS_BIAS": bias is not None,
        "SILU": silu,
        "UNPACK": unpack is not None,
        "INTERLEAVED": unpack is not None and unpack.interleaved,
        "H": num_k_heads,
        "HV": num_v_heads,
        "K": head_k_dim,
        "V": head_v_dim,
        "NP2_HV": triton.next_power_of_2(num_v_heads),
        "X_PACKED": fits_words(x, x.stride(0)),
        "PARAM_PACKED": fits_words(weight) and (bias is None or fits_words(bias)),
        "STATE_PACKED": fits_words(conv_state, conv_state.stride(0)),
        "WINDOW_PACKED": fits_words(windows, windows.stride(0)),
        "OUT_PACKED": all(fits_words(output) for output in outputs),
        "PDL": pdl,
        "SWAP": tile.swap,
        "QUADS": tile.quads,
        "num_warps": tile.warps,
    }
    if pdl:
        constants["launch_pdl"] = True
    strides = (
        x.stride(0),
        unpack.ba.stride(0) if unpack else 0,
        conv_state.stride(0),
        slots.stride(0),
        windows.stride(0),
        window_rows.stride(0),
    )
    return Launch((num_requests, blocks), strides, constants)


def check_conv(
    x: torch.Tensor,
    rows: int,
    draft_tokens: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    windows: torch.Tensor,
    window_rows: torch.Tensor,
) -> bool:
    """``ValueError`` for what :func:`conv_update` does not take; otherwise whether the windows overlap."""
    dim, width = weight.shape
    num_requests = slots.shape[0]
    require(2 <= width <= 4, f"conv width {width} is not 2 to 4")
    require(dim % _QUAD == 0, f"{dim} channels are no multiple of {_QUAD}")
    require(rows == num_requests * draft_tokens, f"{rows} rows are not {num_requests} requests x {draft_tokens} tokens")
    require(x.shape[0] == rows and x.shape[1] >= dim and x.stride(1) == 1, "x has no dense row for each token")
    require(x.dtype == windows.dtype, "x and conv windows differ in dtype")
    require(x.dtype.is_floating_point and x.dtype.itemsize in (2, 4), f"activations are {x.dtype}")
    require(weight.is_contiguous(), "the weight is not dense")
    require(bias is None or (tuple(bias.shape) == (dim,) and bias.is_contiguous()), "bias is not dense [D]")
    require(tuple(conv_state.shape[1:]) == (dim, width - 1), f"conv state has shape {tuple(conv_state.shape)}")
    require(conv_state.stride()[1:] == (width - 1, 1), f"conv state has strides {conv_state.stride()}")
    require(conv_state.dtype == x.dtype, f"conv state is {conv_state.dtype}, activations are {x.dtype}")
    require(tuple(windows.shape[2:]) == (dim, width - 1), f"conv windows have shape {tuple(windows.shape)}")
    require(windows.shape[1] >= draft_tokens, f"conv windows hold {windows.shape[1]} steps, not {draft_tokens}")
    require(tuple(window_rows.shape) == (num_requests,), "not one window row for each request")
    return windows_overlap(windows)


def check_unpack(x: torch.Tensor, dim: int, unpack: Unpack) -> None:
    """``ValueError`` for a projection ``x`` or an ``unpack`` that does not fit ``dim`` channels."""
    rows = x.shape[0]
    num_v_heads, head_v_dim = unpack.z.shape[1:]
    heads = (rows, num_v_heads)
    require(num_v_heads % unpack.num_k_heads == 0, f"{num_v_heads} value heads for {unpack.num_k_heads} key heads")
    qk_dim = 2 * unpack.num_k_heads * unpack.head_k_dim
    require(dim == qk_dim + num_v_heads * head_v_dim, f"packed QKV is {dim} wide, which its heads do not make")
    require(x.shape[1] == dim + num_v_heads * head_v_dim, f"a projection row has {x.shape[1]} elements")
    require(
        unpack.head_k_dim % _QUAD == 0 and head_v_dim % _QUAD == 0,
        f"head sizes {unpack.head_k_dim} and {head_v_dim} are no multiples of {_QUAD}",
    )
    require(tuple(unpack.ba.shape) == (rows, 2 * num_v_heads) and unpack.ba.stride(1) == 1, "ba has no dense rows")
    require(tuple(unpack.b.shape) == heads and tuple(unpack.a.shape) == heads, "b or a is not [rows, HV]")
    dense = unpack.z.is_contiguous() and unpack.b.is_contiguous() and unpack.a.is_contiguous()
    require(dense and unpack.z.shape[0] == rows, "z, b or a is not dense")
    require(unpack.z.dtype == x.dtype and unpack.b.dtype == unpack.a.dtype == unpack.ba.dtype, "dtypes differ")


def conv_update_ref(
    x: torch.Tensor,
    draft_tokens: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    windows: torch.Tensor,
    window_rows: torch.Tensor,
    packed: torch.Tensor,
    unpack: Unpack | None = None,
) -> None:
    """:func:`conv_update` in plain torch: the same arguments, the same tensors written, request by request."""
    dim, width = weight.shape
    if unpack is not None:
        x, unpack_z, unpack_b, unpack_a = _unpack_ref(x, unpack)
        unpack.z.copy_(unpack_z)
        unpack.b.copy_(unpack_b)
        unpack.a.copy_(unpack_a)
    for request, (slot, window_row) in enumerate(zip(slots.tolist(), window_rows.tolist(), strict=True)):
        if slot < 0:
            continue
        first = request * draft_tokens
        tokens = x[first : first + draft_tokens, :dim]
        # [W - 1 + T, D], oldest first.
        sequence = torch.cat([conv_state[slot].T, tokens])
        for t in range(draft_tokens):
            acc = torch.zeros(dim, device=x.device) if bias is None else bias.float()
            for i in range(width):
                acc = acc + sequence[t + i] * weight[:, i]
            packed[first + t] = acc / (1 + torch.exp(-acc)) if silu else acc
            windows[window_row, t] = sequence[t + 1 : t + width].T
        conv_state[slot] = sequence[draft_tokens:].T


def _unpack_ref(x: torch.Tensor, unpack: Unpack) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed QKV, z, b and a of a projection."""
    rows = x.shape[0]
    num_v_heads, head_v_dim = unpack.z.shape[1:]
    key, value = unpack.num_k_heads * unpack.head_k_dim, num_v_heads * head_v_dim
    if not unpack.interleaved:
        z = x[:, 2 * key + value :].view(rows, num_v_heads, head_v_dim)
        return x[:, : 2 * key + value], z, unpack.ba[:, :num_v_heads], unpack.ba[:, num_v_heads:]
    widths = [unpack.head_k_dim] * 2 + [value // unpack.num_k_heads] * 2
    q, k, v, z = x.view(rows, unpack.num_k_heads, sum(widths)).split(widths, dim=2)
    b, a = unpack.ba.view(rows, unpack.num_k_heads, -1).chunk(2, dim=2)
    packed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
    return packed, z.flatten(1).view(rows, num_v_heads, head_v_dim), b.flatten(1), a.flatten(1)
