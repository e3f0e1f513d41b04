"""The wrapped forward of the real stock 0.5.17 backend, its kernels in the Triton interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglang_gdn_zerocopy
from sglang_gdn_zerocopy import forward
from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.comparison import compare
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.world import World, build_world
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.upstream.releases import RELEASES

CHAIN = Case("chain", num_v_heads=1, draft_tokens=2, slots=(1, 3))
FOLD = Case("fold", protocol=Protocol.FOLD_RING, ring_steps=4, num_v_heads=1, draft_tokens=2)


def world_of(case: Case, seed: int = 3) -> World:
    return build_world(case, seed, "cpu", low_parts=False)


def reasons() -> dict[str, int]:
    return {str(row["reason"]): row["count"] for row in sglang_gdn_zerocopy.status()["counts"]}


class Spy:
    """Keeps what a callable was called with and calls it."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.target(*args, **kwargs)


@pytest.mark.usefixtures("switched_on")
def test_the_kernel_gets_views_of_the_packed_tensor(harness: Harness) -> None:
    world = world_of(Case("chain", num_k_heads=2, num_v_heads=6, draft_tokens=2, slots=(1, 3)))
    backend = harness.backend(world)
    spy = Spy(backend.kernel_dispatcher.target_verify)
    backend.kernel_dispatcher.target_verify = spy
    before = harness.copies
    backend.forward_extend(world.layer, harness.forward_batch(world), world.mixed_qkv, world.a, world.b)
    assert harness.copies == before
    ((_, got),) = spy.calls
    storages = {got[name].untyped_storage().data_ptr() for name in "qkv"}
    assert len(storages) == 1
    assert [got[name].stride(1) for name in "qkv"] == [(2 * 2 + 6) * 128] * 3
    # The gates are the caller's own tensors, in the caller's order.
    assert got["a"] is world.a
    assert got["b"] is world.b
    assert sglang_gdn_zerocopy.status()["copies_avoided"] == 1


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("style", ["positional", "keywords", "through the class", "bound before", "mixed"])
def test_every_way_to_call(harness: Harness, style: str) -> None:
    world, twin = world_of(CHAIN), world_of(CHAIN)
    backend, batch = harness.backend(world), harness.forward_batch(world)
    five = (world.layer, batch, world.mixed_qkv, world.a, world.b)
    names = dict(zip(("layer", "forward_batch", "mixed_qkv", "a", "b"), five, strict=True))
    before = harness.copies
    if style == "positional":
        output = backend.forward_extend(*five)
    elif style == "keywords":
        output = backend.forward_extend(**names, save_kv_cache=True, q=None, k=None, v=None)
    elif style == "through the class":
        output = type(backend).forward_extend(backend, *five)
    elif style == "bound before":
        bound = backend.forward_extend
        output = bound(*five)
    else:
        output = backend.forward_extend(*five[:2], **{n: names[n] for n in ("mixed_qkv", "a", "b")})
    assert harness.copies == before
    sglang_gdn_zerocopy.deactivate()
    assert same_bits(output, harness.verify(twin))
    assert all(same_bits(world.tensors[name], twin.tensors[name]) for name in world.tensors)


def _extend_mode(batch: Any) -> None:
    batch.forward_mode = SimpleNamespace(is_target_verify=lambda: False)
    batch.extend_prefix_lens = torch.tensor([4, 4])
    batch.extend_seq_lens_cpu = [2, 2]


def _record_extend(backend: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Prefill is not under test: its conv and chunk kernels are stand-ins; the copy between them is the real one."""
    monkeypatch.setattr(module, "causal_conv1d_fn", lambda x, *args, **kwargs: x.clone())
    monkeypatch.setattr(module, "fused_gdn_gating", lambda *args: (None, None))
    spy = Spy(lambda **kwargs: (kwargs["v"].clone(), None, None))
    backend.kernel_dispatcher.extend = spy
    backend.forward_metadata.__dict__.update(
        state_checkpoint_cu_starts=None, num_state_checkpoints=0, state_checkpoint_every_n_tokens=0
    )
    return spy


@pytest.mark.usefixtures("switched_on")
def test_an_extend_that_looks_like_a_verify_keeps_its_copy(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(CHAIN)
    backend, batch = harness.backend(world), harness.forward_batch(world)
    # Same rows per request as draft tokens, and a stale spec_info: the mode flag decides.
    _extend_mode(batch)
    spy = _record_extend(backend, harness.module, monkeypatch)
    before = harness.copies
    backend.forward_extend(world.layer, batch, world.mixed_qkv, world.a, world.b)
    assert harness.copies == before + 1
    ((_, got),) = spy.calls
    assert got["q"].is_contiguous()
    assert reasons() == {reason: 1 for reason in reasons() if "stock" in reason}


@pytest.mark.usefixtures("switched_on")
def test_verify_and_extend_interleaved_on_two_backends(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, extend = world_of(CHAIN), world_of(CHAIN, seed=4)
    first, second = harness.backend(verify), harness.backend(extend)
    verify_batch, extend_batch = harness.forward_batch(verify), harness.forward_batch(extend)
    _extend_mode(extend_batch)
    _record_extend(second, harness.module, monkeypatch)
    for _ in range(2):
        before = harness.copies
        first.forward_extend(verify.layer, verify_batch, verify.mixed_qkv, verify.a, verify.b)
        assert harness.copies == before
        second.forward_extend(extend.layer, extend_batch, extend.mixed_qkv, extend.a, extend.b)
        assert harness.copies == before + 1


@pytest.mark.usefixtures("switched_on")
def test_draft_length_changes_from_call_to_call(harness: Harness) -> None:
    """N-gram drafting and adaptive lengths: nothing of one call stays for the next."""
    for draft_tokens in (4, 1, 2, 4):
        case = Case("ngram", num_v_heads=1, slots=(2,), draft_tokens=draft_tokens, buffer_steps=4, windows="dense")
        assert compare(harness, case, 5, "cpu").bits_equal


@pytest.mark.usefixtures("switched_on")
def test_another_consumer_gets_the_copy(harness: Harness) -> None:
    class FlashInferGDNKernel:
        target_verify = Spy(lambda **kwargs: kwargs["v"].clone())

    world = world_of(CHAIN)
    backend = harness.backend(world)
    backend.kernel_dispatcher.verify_kernel = FlashInferGDNKernel()
    before = harness.copies
    backend.forward_extend(world.layer, harness.forward_batch(world), world.mixed_qkv, world.a, world.b)
    assert harness.copies == before + 1
    ((_, got),) = FlashInferGDNKernel.target_verify.calls
    assert all(got[name].is_contiguous() for name in "qkv")
    assert any("overlay inactive: verify=FlashInferGDNKernel" in reason for reason in reasons())


@pytest.mark.usefixtures("views_only")
def test_wide_qkv_stays_upstreams(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.module, "MAX_FUSED_QKV_SPLIT_DIM", 256)
    harness.verify(world_of(CHAIN))
    assert reasons()["no copy to remove: qkv_dim 384 > 256"] == 1
    assert sglang_gdn_zerocopy.status()["copies_avoided"] == 0


@pytest.mark.usefixtures("switched_on")
def test_an_unknown_argument_goes_through_untouched(harness: Harness) -> None:
    world = world_of(CHAIN)
    before = harness.copies
    harness.backend(world).forward_extend(
        world.layer, harness.forward_batch(world), world.mixed_qkv, world.a, world.b, foo=1
    )
    assert harness.copies == before + 1
    assert reasons()["unknown argument foo"] == 1


@pytest.mark.usefixtures("switched_on")
def test_our_own_failure_before_the_launch_leaves_the_call_to_stock(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_gdn_zerocopy.upstream.adapter import Adapter

    def explode(*args: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(Adapter, "__call__", explode)
    world, twin = world_of(CHAIN), world_of(CHAIN)
    before = harness.copies
    outputs = [harness.verify(world) for _ in range(2)]
    assert harness.copies == before + 2
    assert [r.message for r in caplog.records if "forward failed, stock takes over: KeyError" in r.message] != []
    assert len([r for r in caplog.records if "forward failed" in r.message]) == 1
    sglang_gdn_zerocopy.deactivate()
    assert same_bits(outputs[0], harness.verify(twin))


@pytest.mark.usefixtures("switched_on")
def test_packed_rows_that_cannot_be_viewed_are_copied(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_gdn_zerocopy import forward

    def refuse(*args: Any) -> None:
        raise ValueError("stride 2 inside a row")

    monkeypatch.setattr(forward, "packed_views", refuse)
    before = harness.copies
    harness.verify(world_of(CHAIN))
    assert harness.copies == before + 1
    assert any("stride 2 inside a row" in reason for reason in reasons())


@pytest.mark.usefixtures("switched_on")
def test_an_error_of_stock_is_stocks_and_leaves_no_plan_behind(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(CHAIN)
    backend, batch = harness.backend(world), harness.forward_batch(world)

    class StockError(Exception):
        pass

    calls = []

    def fail(**kwargs: Any) -> None:
        calls.append(kwargs)
        raise StockError

    backend.kernel_dispatcher.target_verify = fail
    with pytest.raises(StockError):
        backend.forward_extend(world.layer, batch, world.mixed_qkv, world.a, world.b)
    # State may have been written: stock was not run again, and the next plain copy is a copy.
    assert len(calls) == 1
    before = harness.copies
    harness.module.fused_qkv_split_gdn_prefill(world.mixed_qkv.contiguous(), 1, 1, 1, 128, 128, 128)
    assert harness.copies == before + 1


@pytest.mark.usefixtures("switched_on")
def test_a_tree_on_a_fold_ring_fails_as_stock_does(harness: Harness) -> None:
    world = world_of(FOLD)
    backend = harness.backend(world)
    for name in ("retrieve_parent_token", "retrieve_next_token", "retrieve_next_sibling"):
        setattr(backend.forward_metadata, name, torch.full((2, 2), -1, dtype=torch.int32))
    with pytest.raises(AssertionError, match="linear draft chain"):
        backend.forward_extend(world.layer, harness.forward_batch(world), world.mixed_qkv, world.a, world.b)
    assert any("a draft tree with a fold ring" in reason for reason in reasons())


def test_no_tracer_sees_us(harness: Harness, switched_on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.compile the wrapped method is upstream's alone: no graph break, no counting."""
    backend_class = harness.module.GDNAttnBackend

    def stub(self: Any, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return mixed_qkv + 1

    from sglang_gdn_zerocopy.upstream import patching

    overlay = sglang_gdn_zerocopy.activation._PROCESS.installation.overlay  # type: ignore[union-attr]  # switched on
    assert overlay is not None
    stub_class = type("GDNAttnBackend", (), {"forward_extend": stub})
    assert backend_class is not stub_class
    patching.apply([patching.Patch(stub_class, "forward_extend", overlay.forward_extend)])
    instance = stub_class()
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: True))

    def call(x: torch.Tensor) -> Any:
        return instance.forward_extend(None, batch, x, None, None)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    counts = reasons()
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))
    assert reasons() == counts


def test_wrong_views_are_found(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself can fail: swapped query and key give other bits, in the output at least."""
    from sglang_gdn_zerocopy import forward
    from sglang_gdn_zerocopy.kernels.packed_views import packed_views as real

    def swapped(*args: Any) -> Any:
        query, key, value = real(*args)
        return key, query, value

    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    monkeypatch.setattr(forward, "packed_views", swapped)
    result = compare(harness, CHAIN, 11, "cpu")
    assert not result.equal["output"]
    assert result.equal["windows"]
    assert result.equal["conv state"]
    assert not result.bits_equal


@pytest.mark.parametrize("kernels", [True, False])
def test_a_build_without_stocks_recurrence_needs_no_place_for_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """Views on an unverified build ask for nothing that only the bundled kernels replace."""

    def missing(self: forward.Overlay) -> Any:
        raise AttributeError("no such function")

    monkeypatch.setattr(forward.Overlay, "_recurrence_places", missing)
    arguments = (harness.module, RELEASES["0.5.17"], Ledger(), kernels, True, True)
    if kernels:
        with pytest.raises(AttributeError, match="no such function"):
            forward.Overlay(*arguments)
    else:
        assert forward.Overlay(*arguments).patches()
