"""Q, K and V as views of the packed post-conv tensor: the step that replaces the copy. No launch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


def packed_views(
    mixed_qkv: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    num_v_heads: int,
    head_q_dim: int,
    head_k_dim: int,
    head_v_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views [1, T, heads, dim] of ``mixed_qkv`` [T, q | k | v], any row stride, any dtype. Nothing is written.

    Raises ``ValueError`` when a row is not dense (stride 1) or is not as wide as the heads say.
    """
    shape, stride = mixed_qkv.shape, mixed_qkv.stride()
    q, k, v = _parts(shape, stride, num_q_heads, num_k_heads, num_v_heads, head_q_dim, head_k_dim, head_v_dim)
    offset = mixed_qkv.storage_offset()
    return (
        mixed_qkv.as_strided(q.size, q.stride, offset),
        mixed_qkv.as_strided(k.size, k.stride, offset + k.offset),
        mixed_qkv.as_strided(v.size, v.stride, offset + v.offset),
    )


class _Part(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@lru_cache(maxsize=1024)
def _parts(
    shape: tuple[int, int],
    stride: tuple[int, int],
    num_q_heads: int,
    num_k_heads: int,
    num_v_heads: int,
    head_q_dim: int,
    head_k_dim: int,
    head_v_dim: int,
) -> list[_Part]:
    # Where the views lie, from sizes alone: torch itself says it, of a tensor without memory.
    widths = [num_q_heads * head_q_dim, num_k_heads * head_k_dim, num_v_heads * head_v_dim]
    rows, width = shape
    if width != sum(widths):
        raise ValueError(f"packed QKV is {width} wide, its heads make {sum(widths)}")
    if width > 1 and stride[1] != 1:
        raise ValueError(f"packed QKV has stride {stride[1]} inside a row, not 1")
    query, key, value = torch.split(torch.empty_strided(shape, stride, device="meta"), widths, dim=1)
    views = (
        query.view(1, rows, num_q_heads, head_q_dim),
        key.view(1, rows, num_k_heads, head_k_dim),
        value.view(1, rows, num_v_heads, head_v_dim),
    )
    return [_Part(tuple(view.shape), view.stride(), int(view.storage_offset())) for view in views]
