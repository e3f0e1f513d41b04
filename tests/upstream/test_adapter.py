"""One call -> CallShape, or the sentence why it is not ours. Every guard clause has its case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.world import World, build_world
from sglang_gdn_zerocopy.records import CallShape, Consumer, Decision, Protocol
from sglang_gdn_zerocopy.upstream.adapter import Adapter
from sglang_gdn_zerocopy.upstream.releases import RELEASES

FOLD = Case("fold", protocol=Protocol.FOLD_RING, ring_steps=4)
CIRCULAR = Case("circular", protocol=Protocol.CIRCULAR_RING)
SNAPSHOTS = Case("snapshots")


class FlashInferGDNKernel:
    """Named as upstream's; the adapter goes by the object's class."""


class CuteDSLGDNKernel:
    """Another verify kernel."""


class Call:
    """One call on the real backend class, to be changed before it is adapted."""

    def __init__(self, harness: Harness, case: Case, release: str = "0.5.17") -> None:
        self.harness = harness
        self.world: World = build_world(case, 7, "cpu", low_parts=False)
        self.backend: Any = harness.backend(self.world)
        self.batch: Any = harness.forward_batch(self.world)
        self.release = RELEASES[release]
        self.kwargs: dict[str, Any] = {
            "q": None,
            "k": None,
            "v": None,
            "save_kv_cache": True,
            "layer": self.world.layer,
            "forward_batch": self.batch,
            "mixed_qkv": self.world.mixed_qkv,
            "a": self.world.a,
            "b": self.world.b,
        }

    @property
    def dispatcher(self) -> Any:
        return self.backend.kernel_dispatcher

    @property
    def pool(self) -> Any:
        return self.backend.req_to_token_pool.mamba_pool

    def adapt(self) -> CallShape | Decision:
        return Adapter(self.harness.module, self.release, True, True)(self.backend, (), self.kwargs)

    def shape(self) -> CallShape:
        adapted = self.adapt()
        assert isinstance(adapted, CallShape), adapted
        return adapted


def test_the_shape_of_a_chain(harness: Harness) -> None:
    assert Call(harness, Case("x", num_k_heads=2, num_v_heads=6, draft_tokens=3, slots=(1, 2, 3))).shape() == CallShape(
        layer_id=0,
        protocol=Protocol.SNAPSHOTS,
        consumer=Consumer.TRITON,
        consumer_name="TritonGDNKernel",
        tree=False,
        num_requests=3,
        draft_tokens=3,
        num_k_heads=2,
        num_v_heads=6,
        head_k_dim=128,
        head_v_dim=128,
        qkv_dim=1280,
        copy_limit=8192,
        activation_dtype="float16",
        state_dtype="float32",
        bundled_kernels=True,
        bundled_recurrence=True,
    )


def test_positional_and_keyword_calls_are_the_same(harness: Harness) -> None:
    call = Call(harness, SNAPSHOTS)
    by_name = call.shape()
    args = (call.world.layer, call.batch, call.world.mixed_qkv, call.world.a, call.world.b)
    adapter = Adapter(harness.module, call.release, True, True)
    assert adapter(call.backend, args, {}) == by_name
    assert adapter(call.backend, args[:1], {k: v for k, v in call.kwargs.items() if k != "layer"}) == by_name


def test_the_limit_is_read_at_the_call(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(harness, SNAPSHOTS)
    monkeypatch.setattr(harness.module, "MAX_FUSED_QKV_SPLIT_DIM", 4096)
    assert call.shape().copy_limit == 4096


def _set(path: str, value: Any) -> Any:
    def change(call: Call) -> None:
        target: Any = call
        *parents, name = path.split(".")
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return change


def _subclass(call: Call) -> None:
    call.backend.__class__ = type("XpuGDNAttnBackend", (type(call.backend),), {})


def _without(buffer: str) -> Any:
    def change(call: Call) -> None:
        vars(call.backend.req_to_token_pool.mamba2_layer_cache(0))[buffer] = None

    return change


def _argument(name: str, value: Any) -> Any:
    def change(call: Call) -> None:
        call.kwargs[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_subclass, "XpuGDNAttnBackend is not GDNAttnBackend itself"),
        (_argument("foo", 1), "unknown argument foo"),
        (_argument("linear_attn_output", None), "unknown argument linear_attn_output"),
        (_set("backend.mis_metadata", object()), "multi-item scoring"),
        (_set("batch.spec_info", None), "draft_token_num None"),
        (_set("batch.spec_info", SimpleNamespace()), "draft_token_num None"),
        (_set("batch.spec_info.draft_token_num", 0), "draft_token_num 0"),
        (_set("batch.spec_info.draft_token_num", "4"), "draft_token_num '4'"),
        (_set("batch.spec_info.ragged_verify_layout", object()), "ragged verify layout"),
        (_set("batch.spec_info.draft_token_num", 3), "8 rows are no whole number of requests of 3"),
        (_argument("mixed_qkv", torch.zeros(0, 512)), "0 rows"),
        (_argument("mixed_qkv", (torch.zeros(8, 512), None)), "not one tensor"),
        (_argument("mixed_qkv", torch.zeros(2, 4, 512)), "not one tensor"),
        (_argument("mixed_qkv", torch.zeros(8, 640)), "640 wide"),
        (_set("world.layer.num_q_heads", 2), "512 wide"),
    ],
)
def test_not_ours(harness: Harness, change: Any, says: str) -> None:
    call = Call(harness, SNAPSHOTS)
    change(call)
    adapted = call.adapt()
    assert isinstance(adapted, Decision)
    assert says in adapted.reason


def test_the_output_argument_is_known_from_0_5_19(harness: Harness) -> None:
    call = Call(harness, SNAPSHOTS, release="0.5.19")
    call.kwargs["linear_attn_output"] = None
    assert call.shape().protocol is Protocol.SNAPSHOTS


@pytest.mark.parametrize(("case", "release"), [(CIRCULAR, "0.5.17"), (FOLD, "0.5.20"), (FOLD, "0.5.15.post1")])
def test_a_protocol_that_the_release_was_not_tested_with(harness: Harness, case: Case, release: str) -> None:
    adapted = Call(harness, case, release).adapt()
    assert isinstance(adapted, Decision)
    assert adapted.reason == f"{case.protocol.value} target verify is untested on SGLang {release}"


@pytest.mark.parametrize(
    ("case", "change", "protocol"),
    [
        (FOLD, [], Protocol.FOLD_RING),
        (FOLD, [_set("pool.replayssm_is_kda", True)], Protocol.SNAPSHOTS),
        (FOLD, [_set("pool.replayssm_spec_fold", False)], Protocol.SNAPSHOTS),
        (FOLD, [_without("replayssm_rawv")], Protocol.SNAPSHOTS),
        (CIRCULAR, [], Protocol.CIRCULAR_RING),
        (CIRCULAR, [_set("pool.replayssm_is_kda", True)], Protocol.SNAPSHOTS),
        (CIRCULAR, [_set("pool.replayssm_cache_base", None)], Protocol.SNAPSHOTS),
        (CIRCULAR, [_without("replayssm_d")], Protocol.SNAPSHOTS),
    ],
)
def test_the_protocol_is_that_of_the_live_pool(
    harness: Harness, case: Case, change: list[Any], protocol: Protocol
) -> None:
    call = Call(harness, case, "0.5.17" if case is FOLD else "0.5.20")
    for apply in change:
        apply(call)
    assert call.shape().protocol is protocol


@pytest.mark.parametrize(
    ("kernel", "tree", "consumer"),
    [
        (None, False, Consumer.TRITON),
        (None, True, Consumer.TRITON),
        (FlashInferGDNKernel(), False, Consumer.FLASHINFER),
        # A tree goes to the tree kernel, which is Triton's.
        (FlashInferGDNKernel(), True, Consumer.TRITON),
        (CuteDSLGDNKernel(), False, Consumer.UNKNOWN),
    ],
)
def test_the_consumer_of_snapshots_is_the_dispatchers_object(
    harness: Harness, kernel: Any, tree: bool, consumer: Consumer
) -> None:
    call = Call(harness, Case("tree", tree=True, windows="dense") if tree else SNAPSHOTS)
    if kernel is not None:
        call.dispatcher.verify_kernel = kernel
    assert (call.shape().consumer, call.shape().tree) == (consumer, tree)


def test_before_0_5_16_the_verify_kernel_takes_trees_too(harness: Harness) -> None:
    call = Call(harness, Case("tree", tree=True, windows="dense"))
    del call.dispatcher.tree_verify_kernel
    call.dispatcher.verify_kernel = FlashInferGDNKernel()
    assert call.shape().consumer is Consumer.FLASHINFER


def test_a_subclass_of_the_triton_kernel_is_another_kernel(harness: Harness) -> None:
    call = Call(harness, SNAPSHOTS)
    call.dispatcher.verify_kernel.__class__ = type("Mine", (type(call.dispatcher.verify_kernel),), {})
    assert (call.shape().consumer, call.shape().consumer_name) == (Consumer.UNKNOWN, "Mine")


@pytest.mark.parametrize(
    ("flashinfer", "state", "draft_tokens", "consumer"),
    [
        (True, torch.bfloat16, 2, Consumer.TRITON),
        (True, torch.bfloat16, 3, Consumer.CUTEDSL),
        (True, torch.float32, 3, Consumer.TRITON),
        (False, torch.bfloat16, 3, Consumer.TRITON),
    ],
)
def test_the_consumer_of_the_fold_ring(
    harness: Harness, flashinfer: bool, state: torch.dtype, draft_tokens: int, consumer: Consumer
) -> None:
    call = Call(harness, Case("fold", protocol=Protocol.FOLD_RING, ring_steps=4, draft_tokens=draft_tokens))
    call.dispatcher.verify_kernel_is_flashinfer = flashinfer
    object.__setattr__(call.pool.mamba_cache, "temporal", call.world.cache["temporal"].to(state))
    assert call.shape().consumer is consumer


def test_a_pool_without_rings_at_all_keeps_snapshots(harness: Harness) -> None:
    call = Call(harness, SNAPSHOTS, "0.5.13.post1")
    call.backend.req_to_token_pool.mamba_pool = SimpleNamespace(
        mamba_cache=SimpleNamespace(temporal=call.world.cache["temporal"])
    )
    assert call.shape().protocol is Protocol.SNAPSHOTS
