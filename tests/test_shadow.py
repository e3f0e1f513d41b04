"""Shadow mode on the real stock 0.5.17 models, backend and kernels: equal kernels stay, a wrong one is left."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_gdn_zerocopy
from sglang_gdn_zerocopy import activation, bundled, forward
from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.kernels.conv_update import conv_update
from sglang_gdn_zerocopy.kernels.recurrent_verify import recurrent_verify
from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.comparison import poisoned_memory
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.shadow import Shadow, Touched
from tests.test_fused_conv import LAYER, NEXT, PACKED, counts, declined, world_of

pytestmark = pytest.mark.usefixtures("two_launches")

FOLD = Case("fold", model="qwen3_5", protocol=Protocol.FOLD_RING, ring_steps=4, num_v_heads=1, draft_tokens=2)
SNAPSHOTS = Case("next, snapshots", model="qwen3_next", num_v_heads=2, draft_tokens=2, slots=(2,))
PADDED = Case("padded", model="qwen3_5", num_v_heads=1, draft_tokens=2, slots=(2, -1), live=1)
WITH_TOKENS = Case("padded row with tokens", num_v_heads=1, draft_tokens=2, slots=(2, -1))
DENSE = Case("dense windows", model="qwen3_5", num_v_heads=1, draft_tokens=2, windows="dense", row_padding=0)

Switch = Callable[[int], None]


@pytest.fixture
def shadowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Switch]:
    """Switches the overlay on with every Nth call shadowed."""

    def switch(every: int) -> None:
        monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
        monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_SHADOW", str(every))
        monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_STATUS_DIR", str(tmp_path / "status"))
        activation._PROCESS.ledger.reset()
        sglang_gdn_zerocopy.activate()

    yield switch
    sglang_gdn_zerocopy.deactivate()
    activation._PROCESS.ledger.reporter = None


def compared() -> int:
    return counts().get(("shadow", "compared with stock"), 0)


def assert_stocks(harness: Harness, case: Case, world: Any, outputs: list[torch.Tensor]) -> None:
    """``outputs`` and the state of ``world`` are those of as many calls on stock."""
    sglang_gdn_zerocopy.deactivate()
    stock = world_of(case)
    for output in outputs:
        assert same_bits(output, harness.verify(stock))
    for name, tensor in stock.tensors.items():
        assert same_bits(world.tensors[name], tensor), name


@pytest.mark.parametrize(
    "case", [LAYER, NEXT, SNAPSHOTS, FOLD, PACKED, PADDED, WITH_TOKENS, DENSE], ids=lambda case: case.name
)
def test_equal_kernels_are_compared_and_stay(harness: Harness, shadowed: Switch, case: Case) -> None:
    shadowed(1)
    world = world_of(case)
    with poisoned_memory():
        outputs = [harness.verify(world) for _ in range(3)]
    assert compared() == 3
    assert declined() == []
    assert [reason for stage, reason in counts() if stage == "shadow"] == ["compared with stock"]
    assert sglang_gdn_zerocopy.status()["state"] == "installed"
    with poisoned_memory():
        assert_stocks(harness, case, world, outputs)


def test_every_nth_call_of_each_layer(harness: Harness, shadowed: Switch) -> None:
    shadowed(3)
    world = world_of(LAYER)
    for _ in range(7):
        harness.verify(world)
    assert compared() == 3
    other = world_of(LAYER)
    other.layer.layer_id = 1
    harness.verify(other)
    assert compared() == 4


def test_zero_is_never(harness: Harness, shadowed: Switch) -> None:
    shadowed(0)
    harness.verify(world_of(LAYER))
    assert compared() == 0


def wrong_conv(result: str) -> Callable[..., None]:
    real = conv_update

    def wrong(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        conv_state, slots, windows, packed, unpack = args[5], args[6], args[7], args[9], args[10]
        tensors = {"conv": conv_state[slots[0]], "intermediate_conv_window": windows[0, 0], "packed": packed}
        tensors |= {"z": unpack.z, "b": unpack.b, "a": unpack.a}
        tensors[result][(0,) * tensors[result].dim()] += 1

    return wrong


def wrong_recurrence(*args: Any, **kwargs: Any) -> torch.Tensor:
    output = recurrent_verify(*args, **kwargs)
    output.view(-1)[-1:] += 1
    return output


@pytest.mark.parametrize(
    ("case", "result"),
    [(LAYER, name) for name in ("conv", "intermediate_conv_window", "packed", "z", "b", "a")]
    + [(NEXT, name) for name in ("conv", "packed", "a")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_wrong_conv_is_found_saved_and_left(
    harness: Harness,
    shadowed: Switch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    case: Case,
    result: str,
) -> None:
    """The self-test runs the right kernel; the one of the real call is wrong in a single element."""
    shadowed(1)
    monkeypatch.setattr(bundled, "conv_update", wrong_conv(result))
    world = world_of(case)
    outputs = [harness.verify(world) for _ in range(2)]
    status = sglang_gdn_zerocopy.status()
    assert status["state"] == "fell back"
    assert compared() == 1
    (found,) = [reason for stage, reason in counts() if stage == "shadow" and reason.startswith("differs")]
    names = found.partition(": ")[2]
    if result != "packed":
        assert result in names
    else:
        # Packed QKV itself is nobody's result; what the recurrence makes of it is.
        assert "output" in names or "replayssm" in names or "intermediate_ssm" in names
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"shadow mode found {names} of layer 0 not to be stock's; its data is in " in errors[0]
    (path,) = (tmp_path / "status").glob("*.pt")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = torch.load(path, weights_only=True)
    assert record["differs"] == names
    assert (record["facts"]["release"], record["facts"]["draft_tokens"]) == ("0.5.17", "2")
    fresh = world_of(case)
    # A reproducer can be loaded without a GPU.
    assert {tensor.device.type for tensor in record["tensors"].values()} == {"cpu"}
    assert same_bits(record["tensors"]["projection"], fresh.projection.cpu())
    assert record["strides"]["projection"] == fresh.projection.stride()
    assert same_bits(record["tensors"]["conv[0]"], fresh.cache["conv"][0].cpu())
    assert same_bits(record["tensors"]["weight"], fresh.layer.conv_weights.cpu())
    # On again by a second plugin load: what was found holds.
    sglang_gdn_zerocopy.activate()
    assert sglang_gdn_zerocopy.status()["state"] == "fell back"
    before = harness.launches
    outputs.append(harness.verify(world))
    assert harness.launches == before + 3
    assert_stocks(harness, case, world, outputs)


@pytest.mark.parametrize("case", [LAYER, FOLD, NEXT, PACKED], ids=lambda case: case.name)
def test_a_wrong_recurrence_is_found_at_the_next_shadowed_call(
    harness: Harness, shadowed: Switch, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    shadowed(2)
    world = world_of(case)
    outputs = [harness.verify(world) for _ in range(2)]
    monkeypatch.setattr(bundled, "recurrent_verify", wrong_recurrence)
    outputs.append(harness.verify(world))
    assert sglang_gdn_zerocopy.status()["state"] == "fell back"
    assert ("shadow", "differs from stock: output") in counts()
    outputs.append(harness.verify(world))
    assert_stocks(harness, case, world, outputs)


def test_without_a_folder_it_still_falls_back(
    harness: Harness, shadowed: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadowed(1)
    monkeypatch.setattr(shadow_of(), "_folder", "")
    monkeypatch.setattr(bundled, "conv_update", wrong_conv("z"))
    harness.verify(world_of(LAYER))
    assert "its data was not saved: no SGLANG_GDN_ZEROCOPY_STATUS_DIR" in sglang_gdn_zerocopy.status()["reason"]


def test_a_folder_that_cannot_be_written_still_falls_back(
    harness: Harness, shadowed: Switch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shadowed(1)
    (tmp_path / "file").touch()
    monkeypatch.setattr(shadow_of(), "_folder", str(tmp_path / "file"))
    monkeypatch.setattr(bundled, "conv_update", wrong_conv("z"))
    harness.verify(world_of(LAYER))
    assert "its data could not be saved: FileExistsError" in sglang_gdn_zerocopy.status()["reason"]


def shadow_of() -> Shadow:
    installation = activation._PROCESS.installation
    assert installation is not None
    assert installation.overlay is not None
    assert installation.overlay._shadow is not None
    return installation.overlay._shadow


@pytest.mark.parametrize("allocation", range(1, 12))
def test_no_memory_at_any_point_leaves_a_right_answer(
    harness: Harness, shadowed: Switch, monkeypatch: pytest.MonkeyPatch, allocation: int
) -> None:
    """The clone that fails is one before our run, or one behind it; state is put back then and stock runs."""
    shadowed(1)
    world = world_of(LAYER)
    real, made = torch.Tensor.clone, 0

    def clone(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        if made == allocation:
            raise torch.OutOfMemoryError("drill")
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", clone)
        output = harness.verify(world)
    assert made >= allocation
    assert ("shadow", "not compared: OutOfMemoryError") in counts()
    assert_stocks(harness, LAYER, world, [output])


def test_an_error_in_our_run_is_undone_before_stock_runs(
    harness: Harness, shadowed: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadowed(1)
    real = forward.Overlay.recurrence
    world = world_of(LAYER)

    def broken(self: Any, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        real(self, wrapped, instance, args, kwargs)
        if forward._PLAN.get() is not None:
            world.tensors["conv_state"].fill_(7)
            raise SystemError("drill")
        return wrapped(*args, **kwargs)

    sglang_gdn_zerocopy.deactivate()
    monkeypatch.setattr(forward.Overlay, "recurrence", broken)
    shadowed(1)
    output = harness.verify(world)
    assert ("shadow", "not compared: SystemError") in counts()
    assert_stocks(harness, LAYER, world, [output])


class _Event:
    """A device that finishes when told to."""

    def __init__(self) -> None:
        self.finished = False
        self.waited = False

    def query(self) -> bool:
        return self.finished

    def synchronize(self) -> None:
        self.waited = self.finished = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[_Event]:
    """Comparisons are done when these say so, one a comparison."""
    made: list[_Event] = []
    real = Shadow._enqueue

    def enqueue(shadow: Shadow, entry: Any) -> None:
        real(shadow, entry)
        if entry.done is not None:
            entry.done.synchronize()
        entry.done = _Event()
        made.append(entry.done)

    monkeypatch.setattr(Shadow, "_enqueue", enqueue)
    return made


def touched_by(slots: list[int], starts: list[int]) -> Touched:
    """What a call of so many requests touches, but for its output."""
    indices = torch.tensor(slots, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)
    return Touched({"rows": torch.zeros(2, 4)}, torch.zeros(2, 1), {}, {}, {}, *indices)


TOUCHED = touched_by([0, 1], [0, 1, 2])


def one_call(shadow: Shadow, wrong: float) -> None:
    """A call of one layer whose output is ``wrong`` where stock's is 0."""
    assert shadow.due(0, torch.device("cpu"))
    shadow.run(0, {}, TOUCHED, {}, lambda: torch.full((1, 2, 1, 4), wrong), lambda: torch.zeros(1, 2, 1, 4))


def test_comparisons_are_read_when_the_device_is_done_and_only_a_few_are_outstanding(events: list[_Event]) -> None:
    gave_up: list[str] = []
    shadow = Shadow(1, "", Ledger(), gave_up.append)
    one_call(shadow, 1)
    one_call(shadow, 0)
    assert gave_up == []
    assert not any(event.waited for event in events)
    one_call(shadow, 0)
    # A third one: the oldest is waited for, and it is the one that differs.
    assert [event.waited for event in events] == [True, False, False]
    assert len(gave_up) == 1
    assert not shadow.due(0, torch.device("cpu"))


def test_two_differences_are_counted_and_the_first_one_is_told(events: list[_Event]) -> None:
    gave_up: list[str] = []
    ledger = Ledger()
    shadow = Shadow(1, "", ledger, gave_up.append)
    one_call(shadow, 1)
    one_call(shadow, 2)
    for event in events:
        event.finished = True
    assert not shadow.due(0, torch.device("cpu"))
    assert ledger.counts["shadow", "differs from stock: output"] == 2
    assert len(gave_up) == 1


@pytest.mark.parametrize("case", [LAYER, FOLD, NEXT, PACKED], ids=lambda case: case.name)
def test_a_difference_that_is_read_before_a_call_leaves_that_call_to_stock(
    harness: Harness, shadowed: Switch, monkeypatch: pytest.MonkeyPatch, events: list[_Event], case: Case
) -> None:
    shadowed(2)
    monkeypatch.setattr(bundled, "recurrent_verify", wrong_recurrence)
    world = world_of(case)
    outputs = [harness.verify(world)]
    assert sglang_gdn_zerocopy.status()["state"] == "installed"
    events[0].finished = True
    outputs.append(harness.verify(world))
    assert sglang_gdn_zerocopy.status()["state"] == "fell back"
    assert compared() == len(events) == 1
    assert_stocks(harness, case, world, outputs)


def test_nothing_is_shadowed_nor_read_under_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    shadow = Shadow(1, "", Ledger(), lambda reason: None)
    monkeypatch.setattr(shadow, "_outstanding", "asked")
    assert not shadow.due(0, torch.device("cuda"))
    capturing = False
    monkeypatch.setattr(shadow, "_outstanding", [])
    assert shadow.due(0, torch.device("cuda"))


def test_one_output_tensor_for_both_ways_is_still_compared() -> None:
    """A caller may hand in the tensor that the output goes to."""
    gave_up: list[str] = []
    shadow = Shadow(1, "", Ledger(), gave_up.append)
    output = torch.zeros(1, 2, 1, 4)
    answer = shadow.run(0, {}, TOUCHED, {}, lambda: output.fill_(1), lambda: output.fill_(2))
    assert answer is output
    assert torch.equal(output, torch.full_like(output, 2))
    assert len(gave_up) == 1


@pytest.mark.parametrize(
    ("slots", "starts", "wrong_row", "found"),
    [
        ([0, 1], [0, 2, 4], 3, True),
        ([0, -1], [0, 2, 4], 3, False),
        ([0, 1], [0, 2, 2], 3, False),
        ([0, -1], [0, 2, 2], 1, True),
    ],
)
def test_only_rows_that_stock_defines_are_compared(
    slots: list[int], starts: list[int], wrong_row: int, found: bool
) -> None:
    """Two requests of two rows; without a slot, or behind the last request, a row holds what was there before."""
    gave_up: list[str] = []
    shadow = Shadow(1, "", Ledger(), gave_up.append)
    mine = torch.zeros(1, 4, 1, 8)
    mine[0, wrong_row, 0, 5] = -0.0
    shadow.run(0, {}, touched_by(slots, starts), {}, lambda: mine, lambda: torch.zeros(1, 4, 1, 8))
    assert bool(gave_up) is found


@pytest.mark.parametrize(
    "mine", [torch.zeros(2, 1, 4), torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 4, dtype=torch.half)]
)
def test_an_output_of_another_kind_differs(mine: torch.Tensor) -> None:
    """Also where its elements, spread over stock's shape, are all the same."""
    gave_up: list[str] = []
    shadow = Shadow(1, "", Ledger(), gave_up.append)
    shadow.run(0, {}, TOUCHED, {}, lambda: mine, lambda: torch.zeros(1, 2, 1, 4))
    assert len(gave_up) == 1
    assert gave_up[0].startswith("shadow mode found output of layer 0")
