"""The random tensors of one case: projection, gates, weights, state, snapshots or rings, conv windows."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sglang_gdn_zerocopy.lab.cases import TREE_PARENTS, Case
from sglang_gdn_zerocopy.records import Protocol

HEAD_DIM = 128
CONV_WIDTH = 4


@dataclass
class World:
    """Everything that one call reads or writes, by name. ``tensors`` covers all of it, storages included."""

    case: Case
    tensors: dict[str, torch.Tensor]
    layer: SimpleNamespace
    cache: dict[str, Any]
    metadata: SimpleNamespace
    cursors: dict[str, torch.Tensor]
    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    projection: torch.Tensor
    projection_ba: torch.Tensor


def build_world(case: Case, seed: int, device: str, low_parts: bool) -> World:
    """Fresh tensors for ``case`` on ``device``. The same ``seed`` gives the same bits.

    Buffers that a verify writes start as NaN, so that a value that nothing wrote is seen. ``low_parts``: the
    circular ring keeps low parts beside keys and values (SGLang 0.5.20 and later, 16-bit activations).
    """
    make = _Maker(seed, device)
    activation, state = getattr(torch, case.activation_dtype), getattr(torch, case.state_dtype)
    H, HV, T = case.num_k_heads, case.num_v_heads, case.draft_tokens
    Ta, pool = case.buffer_steps or T, case.pool_slots
    rows, dim = case.num_requests * T, (2 * H + HV) * HEAD_DIM

    # A projection holds z behind (or, interleaved, between) packed QKV; a case without model uses its first part.
    wide = dim + HV * HEAD_DIM if case.model else dim
    packed = make.normal("mixed_qkv", (rows, wide + case.row_padding), activation)
    # Gates arrive as the two halves of one projection.
    gates = make.normal("gates", (rows, 2 * HV + (case.row_padding if case.model else 0)), activation)
    layer = SimpleNamespace(
        layer_id=0,
        num_q_heads=H,
        num_k_heads=H,
        num_v_heads=HV,
        head_q_dim=HEAD_DIM,
        head_k_dim=HEAD_DIM,
        head_v_dim=HEAD_DIM,
        q_dim=H * HEAD_DIM,
        k_dim=H * HEAD_DIM,
        v_dim=HV * HEAD_DIM,
        conv_weights=make.normal("conv_weights", (dim, CONV_WIDTH), activation),
        bias=make.normal("conv_bias", (dim,), activation) if case.bias else None,
        activation="silu",
        A_log=make.normal("A_log", (HV,), torch.float32),
        dt_bias=make.normal("dt_bias", (HV,), torch.float32),
    )
    cache: dict[str, Any] = {
        "conv": [make.normal("conv_state", (pool, dim, CONV_WIDTH - 1), activation)],
        "temporal": make.normal("state", (pool, HV, HEAD_DIM, HEAD_DIM), state),
        "intermediate_conv_window": [_windows(make, case, Ta, dim, activation)],
        "intermediate_ssm": None,
    }
    cursors: dict[str, torch.Tensor] = {}
    if case.protocol is Protocol.SNAPSHOTS:
        cache["intermediate_ssm"] = make.poison("snapshots", (case.pool_requests, Ta, HV, HEAD_DIM, HEAD_DIM), state)
    elif case.protocol is Protocol.FOLD_RING:
        L = case.ring_steps
        cache["replayssm_rawv"] = make.poison("ring_v", (pool, HV, L, HEAD_DIM), activation)
        cache["replayssm_rawk"] = make.poison("ring_k", (pool, H, L, HEAD_DIM), activation)
        cache["replayssm_g"] = make.poison("ring_g", (pool, HV, L), torch.float32)
        cache["replayssm_beta"] = make.poison("ring_beta", (pool, HV, L), torch.float32)
    else:
        cursors = _circular_ring(make, cache, case, activation, low_parts)
    return World(
        case=case,
        tensors=make.tensors,
        layer=layer,
        cache=cache,
        metadata=_metadata(make, case),
        cursors=cursors,
        mixed_qkv=packed[:, :dim],
        a=gates[:, :HV],
        b=gates[:, HV:],
        projection=packed[:, :wide],
        projection_ba=gates[:, : 2 * HV],
    )


class _Maker:
    """Draws named tensors from one generator."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device
        self.tensors: dict[str, torch.Tensor] = {}

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors[name] = tensor.to(self._device)
        return self.tensors[name]

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.keep(name, torch.randn(shape, generator=self._generator).to(dtype))

    def poison(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.keep(name, torch.full(shape, float("nan"), dtype=dtype))

    def integers(self, name: str, values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.keep(name, torch.tensor(values, dtype=dtype))


def _windows(make: _Maker, case: Case, steps: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    taps = CONV_WIDTH - 1
    if case.windows == "dense":
        return make.poison("windows", (case.pool_requests, steps, dim, taps), dtype)
    # Consecutive windows share all but one tap, so each cell is stored once.
    cells = steps + taps - 1
    storage = make.poison("windows", (case.pool_requests, dim, cells), dtype)
    return storage.as_strided((case.pool_requests, steps, dim, taps), (dim * cells, 1, cells, 1))


def _circular_ring(
    make: _Maker, cache: dict[str, Any], case: Case, dtype: torch.dtype, low_parts: bool
) -> dict[str, torch.Tensor]:
    H, HV, L, pool = case.num_k_heads, case.num_v_heads, case.ring_steps, case.pool_slots
    # History that earlier steps left in the ring: real values, since the verify reads them.
    keys, values = (pool, H, L, HEAD_DIM), (pool, HV, L, HEAD_DIM)
    cache["replayssm_d"] = make.normal("ring_d", values, dtype)
    cache["replayssm_k"] = make.normal("ring_k", keys, dtype)
    cache["replayssm_g"] = make.keep("ring_g", -make.normal("ring_g", (pool, HV, L), torch.float32).abs())
    if low_parts:
        keep_low = dtype != torch.float32
        cache["replayssm_rawv"] = make.normal("ring_v_low", values, dtype) if keep_low else None
        cache["replayssm_rawk"] = make.normal("ring_k_low", keys, dtype) if keep_low else None
        cache["replayssm_beta"] = None
    else:
        cache["replayssm_rawv"] = make.normal("ring_v", values, dtype)
        cache["replayssm_rawk"] = make.normal("ring_raw_k", keys, dtype)
        cache["replayssm_beta"] = make.normal("ring_beta", (pool, HV, L), torch.float32).sigmoid_()
    # Cursors at the start, in the middle and near the end of the ring; one slot in five is due for a flush.
    turns = [slot % 5 for slot in range(pool)]
    positions, bases, flushes = [0, 5, L - 2, 3, 1], [0, L - 1, 4, 9, 2], [0, 0, 0 if low_parts else 1, 0, 0]
    return {
        "replayssm_write_pos": make.integers("write_pos", [positions[turn] for turn in turns]),
        "replayssm_cache_base": make.integers("cache_base", [bases[turn] % L for turn in turns]),
        "replayssm_is_flush": make.integers("is_flush", [flushes[turn] for turn in turns], torch.int8),
    }


def _metadata(make: _Maker, case: Case) -> SimpleNamespace:
    T = case.draft_tokens
    starts = [min(i, case.live_requests) * T for i in range(case.num_requests + 1)]
    metadata = SimpleNamespace(
        query_start_loc=make.integers("query_start_loc", starts),
        mamba_cache_indices=make.integers("slots", case.slots),
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_parent_token=None,
        has_mamba_track_mask=False,
    )
    if case.tree:
        children, siblings = _links(TREE_PARENTS)
        requests = case.num_requests
        metadata.retrieve_next_token = make.integers("next_token", [children] * requests)
        metadata.retrieve_next_sibling = make.integers("next_sibling", [siblings] * requests)
        metadata.retrieve_parent_token = make.integers("parent_token", [TREE_PARENTS] * requests)
    return metadata


def _links(parents: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, -1 for none."""
    children, siblings = [-1] * len(parents), [-1] * len(parents)
    for node in reversed(range(1, len(parents))):
        siblings[node] = children[parents[node]]
        children[parents[node]] = node
    return children, siblings
