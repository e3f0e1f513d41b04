"""What is read of a call of stock's conv and recurrence. Anything but a target-verify chain's own is refused: no
argument that stock would have honoured is passed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_gdn_zerocopy.upstream import adapter
from sglang_gdn_zerocopy.upstream.releases import (
    CONV_ARGUMENTS,
    CONV_KEYWORDS,
    RECURRENCE_FIXED,
    RECURRENCE_INPUTS,
    RECURRENCE_RING,
    RECURRENCE_SNAPSHOTS,
)

N, T, D = 2, 3, 8
INDICES = [name for name in CONV_KEYWORDS if not name.startswith("retrieve_")]
LINKS = [name for name in CONV_KEYWORDS if name.startswith("retrieve_")]


def conv_call() -> tuple[list[Any], dict[str, Any]]:
    """Arguments as stock's forward passes them; ``x`` is a view of packed rows."""
    packed = torch.randn(N * T, D)
    x = packed.view(N, T, D).transpose(1, 2)
    tensors = {name: torch.empty(N) for name in INDICES}
    return [x, torch.empty(N, D, 3), torch.empty(D, 4), None, "silu"], {**tensors, **dict.fromkeys(LINKS)}


def test_a_chains_conv() -> None:
    args, kwargs = conv_call()
    read = adapter.read_conv_call(tuple(args), kwargs)
    by_name = adapter.read_conv_call((), {**dict(zip(CONV_ARGUMENTS, args, strict=True)), **kwargs})
    assert [id(read.x), id(read.conv_state), id(read.weight)] == [id(arg) for arg in args[:3]]
    assert by_name[2:] == read[2:]
    assert (read.bias, read.silu) == (None, True)
    assert read.slots is kwargs["conv_state_indices"]
    assert read.windows is kwargs["intermediate_conv_window"]
    assert read.window_rows is kwargs["intermediate_state_indices"]
    assert read.rows.shape == (N * T, D)
    assert read.rows.data_ptr() == read.x.data_ptr()


@pytest.mark.parametrize(("activation", "silu"), [("silu", True), ("swish", True), (True, True), (None, False)])
def test_activations_of_the_conv(activation: Any, silu: bool) -> None:
    args, kwargs = conv_call()
    assert adapter.read_conv_call((*args[:4], activation), kwargs).silu is silu


@pytest.mark.parametrize(
    ("extra", "change", "says"),
    [
        ((7,), {}, "called with more arguments"),
        ((), {"pad_slot_id": -1, "block_size": 8}, "called with block_size, pad_slot_id"),
        *[((), {name: torch.zeros(N, T)}, "draft tree") for name in LINKS],
        *[((), {name: None}, "without one of its tensors") for name in INDICES],
    ],
)
def test_another_conv_is_refused(extra: tuple[Any, ...], change: dict[str, Any], says: str) -> None:
    args, kwargs = conv_call()
    with pytest.raises(ValueError, match=says):
        adapter.read_conv_call((*args, *extra), {**kwargs, **change})


@pytest.mark.parametrize(("place", "value"), [(0, None), (0, torch.empty(N * T, D)), (1, None), (2, None)])
def test_a_conv_without_its_tensors_is_refused(place: int, value: Any) -> None:
    args, kwargs = conv_call()
    args[place] = value
    with pytest.raises(ValueError, match="without one of its tensors"):
        adapter.read_conv_call(tuple(args), kwargs)


def test_rows_are_packed_where_the_conv_reads_all_of_it() -> None:
    args, kwargs = conv_call()
    packed = adapter.read_conv_call(tuple(args), kwargs).rows
    assert adapter.read_conv_call(tuple(args), kwargs, packed).rows is packed


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + 1,
        lambda x: x[:1],
        lambda x: x.as_strided((N, D, T), (D, 1, N * D)),
        lambda x: x.view(torch.int32),
    ],
    ids=["copy", "part", "other order", "other type"],
)
def test_rows_are_those_of_the_call_where_it_reads_something_else(other: Any) -> None:
    args, kwargs = conv_call()
    packed = adapter.read_conv_call(tuple(args), kwargs).rows
    changed = other(args[0])
    if not changed.transpose(1, 2).is_contiguous():
        # Rows of requests that lie between each other are no rows of a dense tensor.
        with pytest.raises(RuntimeError, match="view"):
            adapter.read_conv_call((changed, *args[1:]), kwargs, packed)
        return
    rows = adapter.read_conv_call((changed, *args[1:]), kwargs, packed).rows
    assert rows is not packed
    assert torch.equal(rows, changed.transpose(1, 2).reshape(-1, D))


def recurrence_call(ring: bool) -> dict[str, Any]:
    """Keyword arguments as stock passes them."""
    names = (*RECURRENCE_INPUTS, *(RECURRENCE_RING if ring else RECURRENCE_SNAPSHOTS))
    return {**{name: torch.empty(1) for name in names}, **RECURRENCE_FIXED, "cache_ring": ring, "cache_steps": 4}


@pytest.mark.parametrize("ring", [False, True])
def test_a_chains_recurrence(ring: bool) -> None:
    kwargs = recurrence_call(ring)
    read = adapter.read_recurrence_call((), kwargs)
    assert [id(x) for x in read.inputs] == [id(kwargs[name]) for name in RECURRENCE_INPUTS]
    names = RECURRENCE_RING if ring else RECURRENCE_SNAPSHOTS
    assert [id(x) for x in read.kept] == [id(kwargs[name]) for name in names]
    # Equal to a value that stock keeps fixed is good enough.
    assert adapter.read_recurrence_call((), {**kwargs, "softplus_beta": 1}) is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_packed_qkv": True, "beta_is_sigmoid": 1}, "called with beta_is_sigmoid, use_packed_qkv"),
        *[({name: "other"}, f"called with {name}='other'") for name in RECURRENCE_FIXED],
        *[({name: None}, "without one of its tensors") for name in (*RECURRENCE_INPUTS, *RECURRENCE_SNAPSHOTS)],
    ],
)
def test_another_recurrence_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        adapter.read_recurrence_call((), {**recurrence_call(ring=False), **change})


@pytest.mark.parametrize("name", RECURRENCE_RING)
def test_a_ring_without_a_buffer_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="without one of its tensors"):
        adapter.read_recurrence_call((), {**recurrence_call(ring=True), name: None})


def test_a_positional_recurrence_is_refused() -> None:
    with pytest.raises(ValueError, match="called with positional arguments"):
        adapter.read_recurrence_call((torch.empty(1),), recurrence_call(ring=False))
