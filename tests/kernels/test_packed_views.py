"""Views of packed QKV: the bits of the copy, the storage of the source."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_gdn_zerocopy.kernels.packed_views import packed_views

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 8, 64, 96, 128]))


@given(sizes=SIZES, padding=st.integers(0, 33), offset=st.integers(0, 9))
def test_values_are_the_copys_and_storage_is_the_sources(
    sizes: tuple[int, int, int, int], padding: int, offset: int
) -> None:
    rows, H, HV, dim = sizes
    width = (2 * H + HV) * dim
    buffer = torch.randn(offset + rows * (width + padding))
    packed = buffer[offset:].view(rows, width + padding)[:, :width]
    views = packed_views(packed, H, H, HV, dim, dim, dim)
    starts = (0, H * dim, 2 * H * dim)
    for view, heads, start in zip(views, (H, H, HV), starts, strict=True):
        assert view.shape == (1, rows, heads, dim)
        expected = packed[:, start : start + heads * dim].contiguous().view(1, rows, heads, dim)
        assert torch.equal(view, expected)
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert view.data_ptr() == packed.data_ptr() + start * packed.element_size()
        if rows > 1:
            assert view.stride(1) == width + padding


def test_unequal_head_dims() -> None:
    packed = torch.randn(3, 2 * 8 + 2 * 8 + 3 * 16)
    query, key, value = packed_views(packed, 2, 2, 3, 8, 8, 16)
    assert torch.equal(query.flatten(2)[0], packed[:, :16])
    assert torch.equal(key.flatten(2)[0], packed[:, 16:32])
    assert torch.equal(value.flatten(2)[0], packed[:, 32:])


def test_a_row_that_is_not_dense_is_refused() -> None:
    with pytest.raises(ValueError, match="stride 5"):
        packed_views(torch.randn(4 * 8, 5).t()[:, : 4 * 8], 1, 1, 2, 8, 8, 8)


def test_a_width_that_is_not_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="33 wide, its heads make 32"):
        packed_views(torch.randn(5, 33), 1, 1, 2, 8, 8, 8)
