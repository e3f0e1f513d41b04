"""The fused conv route on the real stock 0.5.17 model, backend and kernels, in the Triton interpreter.

Each failure that the route can meet is made to happen, and the answers have to stay stock's.
"""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch

import sglang_gdn_zerocopy
from sglang_gdn_zerocopy import activation, bundled
from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.calls import Origin, PutOff
from sglang_gdn_zerocopy.forward import Overlay
from sglang_gdn_zerocopy.kernels.conv_update import Tile, conv_update
from sglang_gdn_zerocopy.lab.cases import Case, on_gpu
from sglang_gdn_zerocopy.lab.comparison import poisoned_memory
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.world import World, build_world
from sglang_gdn_zerocopy.records import CallShape, Decision, Protocol, Route
from sglang_gdn_zerocopy.self_test import conv as conv_test
from sglang_gdn_zerocopy.self_test.memo import SelfTest
from sglang_gdn_zerocopy.upstream import adapter
from sglang_gdn_zerocopy.upstream.releases import CONV_FUNCTION, COPY_FUNCTION, MODELS, PATH, RECURRENCE_FUNCTION
from tests.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("two_launches")

LAYER = Case("layer", model="qwen3_5", num_v_heads=2, draft_tokens=2, slots=(1, 3))
NEXT = Case("next", model="qwen3_next", protocol=Protocol.FOLD_RING, ring_steps=4, draft_tokens=2, slots=(2,))
PACKED = Case("packed", num_v_heads=1, draft_tokens=2, slots=(1, 3))


def world_of(case: Case, seed: int = 3) -> World:
    on_device = case if DEVICE == "cpu" else on_gpu(case)[0]
    return build_world(on_device, seed, DEVICE, low_parts=False)


def counts() -> dict[tuple[str, str], int]:
    return {(str(r["stage"]), str(r["reason"])): int(str(r["count"])) for r in sglang_gdn_zerocopy.status()["counts"]}


def declined() -> list[str]:
    return [reason for stage, reason in counts() if stage == "declined"]


class Twin:
    """One call with the overlay, and the same on stock afterwards."""

    def __init__(self, harness: Harness, case: Case) -> None:
        self.harness, self.world, self.case = harness, world_of(case), case
        before = harness.launches
        self.output = harness.verify(self.world)
        self.launches = harness.launches - before

    def equals_stock(self) -> bool:
        """Compare with stock; the overlay is off afterwards."""
        sglang_gdn_zerocopy.deactivate()
        stock = world_of(self.case)
        output = self.harness.verify(stock)
        names = stock.tensors
        return same_bits(self.output, output) and all(
            same_bits(self.world.tensors[name], stock.tensors[name]) for name in names
        )


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("case", [LAYER, NEXT], ids=lambda case: case.name)
def test_one_launch_up_to_packed_qkv(harness: Harness, case: Case) -> None:
    twin = Twin(harness, case)
    assert twin.launches == 1
    assert counts()[("conv", "fused with the unpack")] == 1
    assert counts()[("self-test", "conv kernel equals stock's")] == 1
    # The self-test is remembered.
    harness.verify(world_of(case, 5))
    assert counts()[("self-test", "conv kernel equals stock's")] == 1
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
def test_a_backend_called_with_packed_qkv(harness: Harness) -> None:
    twin = Twin(harness, PACKED)
    assert twin.launches == 1
    assert counts()[("conv", "fused")] == 1
    assert twin.equals_stock()


@pytest.fixture(params=["windows", "conv state", "packed", "z", "b", "a"])
def one_result_wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel that writes all but one result right."""
    real = conv_update

    def wrong(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        conv_state, windows, packed, unpack = args[5], args[7], args[9], args[10]
        results = {"windows": windows, "conv state": conv_state, "packed": packed}
        if unpack is not None:
            results |= {"z": unpack.z, "b": unpack.b, "a": unpack.a}
        results[request.param][0].add_(1)

    monkeypatch.setattr(conv_test, "conv_update", wrong)
    return str(request.param)


@pytest.mark.usefixtures("switched_on")
def test_a_failed_self_test_names_the_result_and_leaves_views(
    harness: Harness, one_result_wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    twin = Twin(harness, LAYER)
    # Stock's unpack and conv, or where only the unpack was wrong stock's unpack and the bundled conv; no copy.
    assert twin.launches == 2
    named = {"windows": "conv windows", "packed": "packed QKV"}.get(one_result_wrong, one_result_wrong)
    first = f"self-test of the bundled conv kernel: {named} is not stock's; stock's kernel instead"
    assert first in declined()
    assert any(first in record.message for record in caplog.records)
    before = counts()[("declined", first)]
    harness.verify(world_of(LAYER, 4))
    # Remembered: neither tested nor said again.
    assert counts()[("declined", first)] == before
    assert sum(first in record.message for record in caplog.records) == 1
    assert twin.equals_stock()


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_the_self_test_can_be_skipped(harness: Harness, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_SELFTEST", wanted)
    sglang_gdn_zerocopy.activation._PROCESS.ledger.reset()
    sglang_gdn_zerocopy.activate()
    twin = Twin(harness, LAYER)
    assert twin.launches == 1
    assert ("self-test", "conv kernel equals stock's") in counts() or wanted == "0"
    assert (("self-test", "conv kernel equals stock's") in counts()) is (wanted == "1")
    assert twin.equals_stock()


def test_nothing_is_compared_inside_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_gdn_zerocopy.ledger import Ledger

    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    compared: list[object] = []

    def compare() -> str:
        compared.append(1)
        return ""

    x = torch.empty(4, 512)
    shape = conv_test.conv_shape(2, 2, x, torch.empty(512, 4), None, True, x, x, None)
    test = SelfTest(Ledger(), enabled=True)
    asked = shape._replace(device=torch.device("cuda"))
    assert not test.passed(asked, compare)
    assert compared == []
    # Not remembered as a failure: the next eager call compares.
    capturing = False
    assert test.passed(asked, compare)
    assert test.passed(asked, compare)
    assert len(compared) == 1
    assert test.passed(asked._replace(tile=Tile(64, 2)), compare)
    assert len(compared) == 2


@pytest.mark.usefixtures("switched_on")
def test_a_launch_that_fails_leaves_the_call_to_stock(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(bundled, "conv_update", explode)
    twin = Twin(harness, LAYER)
    assert twin.launches == 2
    assert declined() == ["conv failed, stock takes over: RuntimeError: no kernel image"]
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
def test_other_code_on_the_way_gets_stocks_unpack(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, _ = PATH[0]
    attention = getattr(importlib.import_module(module), name)
    real, seen = attention.forward, []

    def around(self: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: Any, b: Any) -> Any:
        seen.append(mixed_qkv.clone())
        return real(self, forward_batch, mixed_qkv, a, b)

    monkeypatch.setattr(attention, "forward", around)
    twin = Twin(harness, LAYER)
    # What it saw was unpacked; the conv behind it is still the bundled one.
    assert same_bits(seen[0], twin.world.projection[:, : seen[0].shape[1]])
    assert twin.launches == 2
    assert ("unpack", "left to stock: other code stands between the model and the backend") in counts()
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("before_us", [False, True])
def test_other_code_around_the_unpack_gets_stocks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, before_us: bool
) -> None:
    site = MODELS[0]
    module = importlib.import_module(site.module)
    if before_us:
        sglang_gdn_zerocopy.deactivate()
    inner, seen = vars(module)[site.unpack_function], []

    def around(*args: Any) -> Any:
        results = inner(*args)
        seen.append(results[0].clone())
        return results

    monkeypatch.setattr(module, site.unpack_function, around)
    if before_us:
        sglang_gdn_zerocopy.activate()
    twin = Twin(harness, LAYER)
    assert same_bits(seen[0], twin.world.projection[:, : seen[0].shape[1]])
    assert twin.launches == 2
    assert twin.equals_stock()
    monkeypatch.undo()
    sglang_gdn_zerocopy.deactivate()


@pytest.mark.parametrize("stage", ["conv", "copy", "recurrence"])
def test_what_others_put_there_before_us_is_left_to_them(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A plain function, which says nothing of what it stands for."""
    names = {"conv": CONV_FUNCTION, "copy": COPY_FUNCTION, "recurrence": RECURRENCE_FUNCTION}
    holder = sys.modules[harness.module.TritonGDNKernel.__module__] if stage == "recurrence" else harness.module
    inner, calls = vars(holder)[names[stage]], []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(stage)
        return inner(*args, **kwargs)

    monkeypatch.setattr(holder, names[stage], theirs)
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    activation._PROCESS.ledger.reset()
    sglang_gdn_zerocopy.activate()
    twin = Twin(harness, LAYER)
    reached = calls.count(stage)
    hooked = [reason for reason in declined() if reason.startswith(f"the {stage} was hooked by code of {__file__}")]
    assert twin.equals_stock()
    assert (reached, len(hooked)) == (1, 1)


@pytest.mark.usefixtures("switched_on")
def test_another_tensor_than_was_handed_out_is_filled_first(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a custom op would: the same storage in another object."""
    monkeypatch.setattr(adapter, "packed_of", lambda args, kwargs: kwargs["mixed_qkv"][:])
    twin = Twin(harness, LAYER)
    assert twin.launches == 2
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
def test_a_route_that_changes_in_between_is_filled_first(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    adapt = adapter.Adapter.__call__

    def not_ours(self: Any, *args: Any) -> Any:
        adapt(self, *args)
        return Decision(Route.UPSTREAM, "changed its mind")

    monkeypatch.setattr(adapter.Adapter, "__call__", not_ours)
    # For the objects that it was decided for it would not be asked again.
    monkeypatch.setattr(PutOff, "is_for", lambda *args: False)
    twin = Twin(harness, LAYER)
    assert twin.launches == 3
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("case", [LAYER, NEXT], ids=lambda case: case.name)
def test_switched_off_while_an_unpack_is_put_off(harness: Harness, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """By another thread, say: the backend's call finds the overlay off, and packed QKV as nobody has written it."""
    real = Overlay._put_off

    def switched_off_behind(self: Overlay, *args: Any) -> Any:
        put_off = real(self, *args)
        self.live = False
        return put_off

    monkeypatch.setattr(Overlay, "_put_off", switched_off_behind)
    with poisoned_memory():
        twin = Twin(harness, case)
    assert twin.launches == 3
    assert twin.equals_stock()


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("other", ["", "backend", "layer", "forward_batch", "mixed_qkv", "foo"])
def test_a_projections_decision_is_for_its_own_call(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Reused for the very objects that it was made for; any other call is decided anew."""
    overlay = sglang_gdn_zerocopy.activation._PROCESS.installation.overlay  # type: ignore[union-attr]  # switched on
    assert overlay is not None
    world, asked = world_of(PACKED), []
    backend, batch, packed = harness.backend(world), harness.forward_batch(world), world.mixed_qkv
    shape = overlay._adapt.shape_of(backend, world.layer, batch, packed.shape[0], packed.shape[1], packed.dtype)
    assert isinstance(shape, CallShape)
    origin = Origin(backend, world.layer, batch, shape, overlay.routes.decide(shape))
    unpack: Any = None
    put_off = PutOff(origin, packed, packed, unpack, lambda: None, ())
    adapt = adapter.Adapter.__call__

    def counted(self: Any, *args: Any) -> Any:
        asked.append(args)
        return adapt(self, *args)

    monkeypatch.setattr(adapter.Adapter, "__call__", counted)
    kwargs = {"layer": world.layer, "forward_batch": batch, "mixed_qkv": packed, "a": world.a, "b": world.b}
    if other in kwargs:
        kwargs[other] = packed[:] if other == "mixed_qkv" else copy.copy(kwargs[other])
    elif other == "foo":
        kwargs[other] = 1
    plan = overlay._plan(harness.backend(world) if other == "backend" else backend, (), kwargs, put_off)
    assert len(asked) == bool(other)
    assert (plan is None) is (other == "foo")
    if plan is not None:
        assert plan.shape == shape
        assert (plan.put_off is put_off) is (other != "mixed_qkv")


@pytest.mark.usefixtures("switched_on")
def test_a_projection_that_nobody_unpacks_is_said_and_ends_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = sglang_gdn_zerocopy.activation._PROCESS.installation.overlay  # type: ignore[union-attr]  # switched on
    assert overlay is not None
    world = world_of(LAYER)
    backend = harness.backend(world)
    monkeypatch.setattr(adapter.StockPath, "backend_of", lambda self, layer: backend)
    layer = harness.model_layer(world)
    vars(layer)["attn"] = _Elsewhere(world.layer)
    batch = harness.forward_batch(world)
    layer.forward(world.projection, batch)
    assert any("a projection was never unpacked" in reason for reason in declined())
    before = harness.launches
    layer.forward(world.projection, batch)
    assert harness.launches == before + 1


class _Elsewhere:
    """An attention layer that reaches no GDN backend."""

    def __init__(self, layer: Any) -> None:
        vars(self).update(vars(layer))

    def __call__(self, forward_batch: Any, mixed_qkv: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        rows = mixed_qkv.shape[0]
        return torch.zeros(1, rows, 2, 128, dtype=mixed_qkv.dtype)


@pytest.mark.usefixtures("switched_on")
def test_a_policy_may_ask_for_views(harness: Harness) -> None:
    class ViewsOnly:
        @sglang_gdn_zerocopy.hookimpl
        def gdn_zerocopy_route(self, shape: Any) -> Decision:
            return Decision(Route.VIEWS, "views are enough")

    overlay = sglang_gdn_zerocopy.activation._PROCESS.installation.overlay  # type: ignore[union-attr]  # switched on
    assert overlay is not None
    overlay.routes.register(ViewsOnly(), "views only")
    twin = Twin(harness, LAYER)
    assert twin.launches == 2
    assert ("snapshots target verify -> views", "views are enough") in counts()
    assert twin.equals_stock()


@pytest.mark.usefixtures("views_only")
def test_without_bundled_kernels_only_the_copy_goes(harness: Harness) -> None:
    assert not sglang_gdn_zerocopy.status()["bundled_kernels"]
    twin = Twin(harness, LAYER)
    assert twin.launches == 2
    assert twin.equals_stock()


def test_off_puts_every_raw_function_back(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def raw() -> list[Any]:
        found = [vars(harness.module)["causal_conv1d_update"], vars(harness.module.GDNAttnBackend)["forward_extend"]]
        for site in MODELS:
            module = importlib.import_module(site.module)
            found += [vars(module)[site.unpack_function], vars(getattr(module, site.layer_class))["forward"]]
        return found

    before = raw()
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    sglang_gdn_zerocopy.activate()
    assert all(now is not then for now, then in zip(raw(), before, strict=True))
    assert sglang_gdn_zerocopy.deactivate() == ()
    assert all(now is then for now, then in zip(raw(), before, strict=True))


@pytest.mark.usefixtures("switched_on")
def test_a_model_wrapped_by_others_keeps_all_in_place(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    site = MODELS[0]
    module = importlib.import_module(site.module)
    ours = vars(module)[site.unpack_function]
    monkeypatch.setattr(module, site.unpack_function, lambda *args: ours(*args))
    covered = sglang_gdn_zerocopy.deactivate()
    assert [label for label in covered if site.unpack_function in label] != []
    # Switched off all the same: stock's three launches.
    assert Twin(harness, LAYER).launches == 3
    monkeypatch.undo()
    assert sglang_gdn_zerocopy.deactivate() == ()
