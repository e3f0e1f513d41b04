"""Conv and recurrence in one launch on the real stock 0.5.17 models, backend and kernels, in the Triton interpreter.

Without a GPU the table of choices never says so; here it is made to, with the portable implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_gdn_zerocopy
from sglang_gdn_zerocopy import activation, bundled, forward
from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.calls import Plan
from sglang_gdn_zerocopy.forward import TOGETHER
from sglang_gdn_zerocopy.kernels import conv_verify as kernel
from sglang_gdn_zerocopy.kernels.recurrent_verify import PORTABLE, Inputs
from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.comparison import poisoned_memory
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.records import CallShape, Protocol, Route
from sglang_gdn_zerocopy.self_test import one_launch as self_test
from tests.conftest import DEVICE
from tests.test_fused_conv import LAYER, NEXT, PACKED, Twin, counts, declined, world_of

RING = Case("ring", protocol=Protocol.FOLD_RING, ring_steps=4, num_v_heads=1, draft_tokens=2, slots=(1, 3))
PADDED = Case("padded", model="qwen3_5", num_v_heads=1, draft_tokens=2, slots=(2, -1), live=1)
CASES = pytest.mark.parametrize("case", [LAYER, NEXT, PACKED, RING, PADDED], ids=lambda case: case.name)
# For what can go wrong: both protocols, with a model's unpack put off and without.
DRILLED = pytest.mark.parametrize("case", [LAYER, RING], ids=lambda case: case.name)
RECURRENCE = "fused_sigmoid_gating_delta_rule_update"

pytestmark = pytest.mark.usefixtures("chosen", "switched_on", "poisoned")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(kernel, "choose", lambda *args: PORTABLE)


@pytest.fixture
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def assert_as_stock(twin: Twin, conv_state: bool) -> None:
    """Every result has stock's bits; the conv state too, or it is as it was before."""
    sglang_gdn_zerocopy.deactivate()
    stock, fresh = world_of(twin.case), world_of(twin.case)
    assert same_bits(twin.output, twin.harness.verify(stock))
    for name, tensor in stock.tensors.items():
        expected = fresh.tensors[name] if name == "conv_state" and not conv_state else tensor
        assert same_bits(twin.world.tensors[name], expected), name


@CASES
def test_one_launch(harness: Harness, case: Case) -> None:
    twin = Twin(harness, case)
    assert counts()[TOGETHER] == 1
    assert counts()["self-test", "one-launch kernel equals stock's"] == 1
    assert ("recurrence", "bundled") not in counts()
    assert not [stage for stage, _ in counts() if stage == "conv"]
    assert declined() == []
    # No other launch up to packed QKV.
    assert twin.launches == 1
    assert_as_stock(twin, conv_state=False)


@pytest.mark.parametrize("route", Route, ids=lambda route: route.name)
def test_a_conv_waits_where_its_own_recurrence_takes_it_along(harness: Harness, route: Route) -> None:
    """On other routes stock's code reads packed QKV behind the conv."""
    overlay = activation._PROCESS.installation.overlay  # type: ignore[union-attr]  # switched on
    assert overlay is not None
    world = world_of(PACKED)
    packed, batch = world.mixed_qkv, harness.forward_batch(world)
    rows, dim = packed.shape
    shape = overlay._adapt.shape_of(harness.backend(world), world.layer, batch, rows, dim, packed.dtype)
    assert isinstance(shape, CallShape)
    waits = overlay._to_wait_for(Plan(shape, route, None), packed.device)
    assert (waits is not None) is (route is Route.BUNDLED)


def packed_and_parts(rows: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Packed QKV with one key head and two value heads of 4, and q, k, v as views of it."""
    packed = torch.randn(rows, 16, device=DEVICE)
    return packed, [part.view(1, rows, -1, 4) for part in torch.split(packed, [4, 4, 8], dim=1)]


@pytest.mark.parametrize("rows", [1, 3])
def test_views_of_all_of_packed_qkv(rows: int) -> None:
    packed, parts = packed_and_parts(rows)
    assert forward._reads_all_of(packed, Inputs(*parts, *[packed] * 7))
    if rows == 1:
        # A single row has no next one to be that far away.
        parts = [part.as_strided(part.shape, (7, 7, 4, 1), part.storage_offset()) for part in parts]
        assert forward._reads_all_of(packed, Inputs(*parts, *[packed] * 7))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.clone(),
        lambda part: part.view(torch.int32),
        lambda part: part[:, :2],
        lambda part: part.as_strided(part.shape, (0, 8, 4, 1), part.storage_offset()),
        lambda part: part[..., :3],
    ],
    ids=["copy", "other type", "fewer rows", "other rows", "a part of it"],
)
def test_other_inputs_than_all_of_packed_qkv(place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    packed, parts = packed_and_parts()
    parts[place] = change(parts[place])
    assert not forward._reads_all_of(packed, Inputs(*parts, *[packed] * 7))


def test_parts_in_another_order_are_not_all_of_packed_qkv() -> None:
    packed, (q, k, v) = packed_and_parts()
    assert not forward._reads_all_of(packed, Inputs(k, q, v, *[packed] * 7))


def test_the_same_elements_of_memory() -> None:
    x = torch.arange(6, dtype=torch.int32, device=DEVICE)
    assert forward._same(x, x.view(2, 3))
    for other in (x.clone(), x[1:], x[:5], x.view(torch.float32)):
        assert not forward._same(x, other)


@pytest.fixture(params=["output", "windows", "kept", "z", "b", "a", "conv_state"])
def one_result_wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the self-test, a kernel that writes all but one result right."""
    real = kernel.conv_verify

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        conv_state, windows, unpack, kept = args[5], args[7], args[9], args[16]
        results = {"output": output, "windows": windows, "kept": kept[0], "conv_state": conv_state}
        results |= {"z": unpack.z, "b": unpack.b, "a": unpack.a}
        results[request.param][0].add_(1)
        return output

    monkeypatch.setattr(self_test, "conv_verify", wrong)
    return str(request.param)


@pytest.mark.parametrize("case", [LAYER, NEXT], ids=lambda case: case.name)
def test_a_failed_self_test_leaves_two_launches(harness: Harness, one_result_wrong: str, case: Case) -> None:
    twin = Twin(harness, case)
    names = {"windows": "conv windows", "kept": "states" if case is LAYER else "raw_v", "conv_state": "conv state"}
    named = names.get(one_result_wrong, one_result_wrong)
    assert declined() == [f"self-test of the bundled one-launch kernel: {named} is not stock's; stock's kernel instead"]
    assert twin.launches == 1
    assert counts()["recurrence", "bundled"] == 1
    assert counts()["conv", "fused with the unpack"] == 1
    assert_as_stock(twin, conv_state=True)


def explode(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("drill")


@DRILLED
@pytest.mark.parametrize("where", ["self-test", "launch", "reading the call"])
def test_whatever_fails_before_the_launch(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, case: Case, where: str
) -> None:
    if where == "self-test":
        monkeypatch.setattr(bundled, "one_launch_difference", explode)
    elif where == "launch":
        monkeypatch.setattr(bundled, "conv_verify", explode)
    else:
        monkeypatch.setattr(bundled, "OneLaunchShape", explode)
    twin = Twin(harness, case)
    assert twin.launches == 1
    assert counts()["recurrence", "bundled"] == 1
    assert "one launch failed, stock takes over: RuntimeError: drill" in declined()
    assert_as_stock(twin, conv_state=True)


@DRILLED
@pytest.mark.parametrize("stage", ["conv_update", "recurrent_verify"])
def test_the_other_kernels_fail_as_well(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, case: Case, stage: str
) -> None:
    """Then it is stock's conv, late, or stock's recurrence, and packed QKV is where everybody looks for it."""
    monkeypatch.setattr(bundled, "conv_verify", explode)
    monkeypatch.setattr(bundled, stage, explode)
    twin = Twin(harness, case)
    assert len(declined()) == 2
    assert_as_stock(twin, conv_state=True)


@DRILLED
@pytest.mark.parametrize("answer", [False, True], ids=["seen", "not seen"])
def test_somebody_elses_recurrence(harness: Harness, monkeypatch: pytest.MonkeyPatch, case: Case, answer: bool) -> None:
    """It must find packed QKV written, so no conv waits for it. Were that overlooked, it is said and not repeated."""
    kernels = importlib.import_module(harness.module.TritonGDNKernel.__module__)
    overlay = activation._PROCESS.installation.overlay  # type: ignore[union-attr]
    assert overlay is not None
    places = (kernels, importlib.import_module(vars(kernels)[RECURRENCE].__module__))
    raw = vars(kernels)[RECURRENCE].__wrapped__
    for module in places:
        monkeypatch.setattr(module, RECURRENCE, lambda *args, **kwargs: raw(*args, **kwargs))
    if answer:
        monkeypatch.setattr(overlay, "_readers", [lambda: True])
    twin = Twin(harness, case)
    assert TOGETHER not in counts()
    late = [text for text in declined() if "a conv waited for a recurrence that did not come" in text]
    assert len(late) == answer
    if answer:
        # From then on nothing waits.
        twin = Twin(harness, case)
        assert sum(n for (stage, reason), n in counts().items() if stage == "declined" and reason == late[0]) == 1
    monkeypatch.undo()
    assert_as_stock(twin, conv_state=True)


def test_a_copy_that_fails_reads_what_stock_would(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "packed_views", explode)
    twin = Twin(harness, LAYER)
    assert "copy failed, stock takes over: RuntimeError: drill" in declined()
    assert TOGETHER not in counts()
    assert_as_stock(twin, conv_state=True)


def test_other_tensors_than_packed_qkv(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q that is no view of packed QKV, gates that are not the unpack's: two launches."""
    for check in ("_reads_all_of", "_same"):
        with monkeypatch.context() as patch:
            patch.setattr(forward, check, lambda *args: False)
            twin = Twin(harness, LAYER)
        assert TOGETHER not in counts()
        assert_as_stock(twin, conv_state=True)
        sglang_gdn_zerocopy.activate()


def test_the_recurrence_left_to_stock(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_gdn_zerocopy.deactivate()
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_KERNELS", "conv")
    sglang_gdn_zerocopy.activate()
    twin = Twin(harness, LAYER)
    assert counts()["conv", "fused with the unpack"] == 1
    assert TOGETHER not in counts()
    assert_as_stock(twin, conv_state=True)


@DRILLED
@pytest.mark.parametrize("touches", [False, True], ids=["right", "touches the conv state"])
def test_shadow_mode(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: Case, touches: bool
) -> None:
    """The conv state is stock's after a shadowed call, and has to be left alone by ours."""
    sglang_gdn_zerocopy.deactivate()
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_SHADOW", "1")
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_STATUS_DIR", str(tmp_path))
    sglang_gdn_zerocopy.activate()
    real: Callable[..., Any] = kernel.conv_verify

    def touching(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        args[5][int(args[6][0]), 0, 0] += 1
        return output

    if touches:
        monkeypatch.setattr(bundled, "conv_verify", touching)
    twin = Twin(harness, case)
    assert counts()[TOGETHER] == 1
    assert counts()["shadow", "compared with stock"] == 1
    found = [reason for stage, reason in counts() if stage == "shadow" and reason.startswith("differs")]
    assert found == (["differs from stock: conv[0]"] if touches else [])
    assert_as_stock(twin, conv_state=True)
    activation._PROCESS.ledger.reporter = None
