"""Every guard clause of the built-in policy has its case."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_gdn_zerocopy.records import CallShape, Consumer, Protocol, Route
from sglang_gdn_zerocopy.routing.builtin import gdn_zerocopy_route

SHAPE = CallShape(
    layer_id=0,
    protocol=Protocol.SNAPSHOTS,
    consumer=Consumer.TRITON,
    consumer_name="TritonGDNKernel",
    tree=False,
    num_requests=8,
    draft_tokens=4,
    num_k_heads=16,
    num_v_heads=32,
    head_k_dim=128,
    head_v_dim=128,
    qkv_dim=8192,
    copy_limit=8192,
    activation_dtype="bfloat16",
    state_dtype="float32",
    bundled_kernels=False,
    bundled_recurrence=True,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tree": True},
        {"protocol": Protocol.FOLD_RING},
        {"protocol": Protocol.CIRCULAR_RING},
        {"draft_tokens": 1},
        {"num_v_heads": 48, "num_k_heads": 16, "qkv_dim": 5120},
    ],
)
def test_views(change: dict[str, Any]) -> None:
    assert gdn_zerocopy_route(SHAPE._replace(**change)).route is Route.VIEWS


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"protocol": Protocol.FOLD_RING},
        {"copy_limit": 0},
        {"qkv_dim": 10240},
    ],
)
def test_the_bundled_kernels_for_chains(change: dict[str, Any]) -> None:
    assert gdn_zerocopy_route(SHAPE._replace(bundled_kernels=True, **change)).route is Route.BUNDLED


@pytest.mark.parametrize("copy_limit", [8192, 0])
def test_the_circular_ring_keeps_its_own_verify(copy_limit: int) -> None:
    shape = SHAPE._replace(bundled_kernels=True, protocol=Protocol.CIRCULAR_RING, copy_limit=copy_limit)
    assert gdn_zerocopy_route(shape).route is Route.FUSED_CONV


def test_the_conv_alone() -> None:
    shape = SHAPE._replace(bundled_kernels=True, bundled_recurrence=False)
    assert gdn_zerocopy_route(shape).route is Route.FUSED_CONV


def test_a_tree_keeps_the_stock_conv() -> None:
    assert gdn_zerocopy_route(SHAPE._replace(bundled_kernels=True, tree=True)).route is Route.VIEWS


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"consumer": Consumer.FLASHINFER, "consumer_name": "FlashInferGDNKernel"}, "verify=FlashInferGDNKernel"),
        ({"consumer": Consumer.CUTEDSL, "consumer_name": "gated_delta_rule_mtp"}, "CuTe DSL"),
        ({"consumer": Consumer.UNKNOWN, "consumer_name": "Mine"}, "verify=Mine; nobody has tested it"),
        ({"qkv_dim": 10240}, "no copy to remove: qkv_dim 10240 > 8192"),
        ({"qkv_dim": 8193}, "8193 > 8192"),
        ({"copy_limit": 0}, "reads packed QKV through views itself"),
        ({"copy_limit": 0, "tree": True, "bundled_kernels": True}, "reads packed QKV through views itself"),
        ({"tree": True, "protocol": Protocol.FOLD_RING}, "tree with a fold ring"),
        ({"tree": True, "protocol": Protocol.CIRCULAR_RING}, "tree with a circular ring"),
    ],
)
def test_upstream_with_the_offending_value(change: dict[str, Any], says: str) -> None:
    decision = gdn_zerocopy_route(SHAPE._replace(**change))
    assert decision.route is Route.UPSTREAM
    assert says in decision.reason
