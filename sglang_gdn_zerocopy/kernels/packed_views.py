"""Q, K and V as views of the packed post-conv tensor: the step that replaces the copy. No launch."""

from __future__ import annotations

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
    widths = [num_q_heads * head_q_dim, num_k_heads * head_k_dim, num_v_heads * head_v_dim]
    rows, width = mixed_qkv.shape
    if width != sum(widths):
        raise ValueError(f"packed QKV is {width} wide, its heads make {sum(widths)}")
    if width > 1 and mixed_qkv.stride(1) != 1:
        raise ValueError(f"packed QKV has stride {mixed_qkv.stride(1)} inside a row, not 1")
    query, key, value = torch.split(mixed_qkv, widths, dim=1)
    return (
        query.view(1, rows, num_q_heads, head_q_dim),
        key.view(1, rows, num_k_heads, head_k_dim),
        value.view(1, rows, num_v_heads, head_v_dim),
    )
