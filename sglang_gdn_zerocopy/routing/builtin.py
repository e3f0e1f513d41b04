"""The built-in policy: an ordinary plugin, asked last."""

from __future__ import annotations

from sglang_gdn_zerocopy.records import CallShape, Consumer, Decision, Protocol, Route
from sglang_gdn_zerocopy.routing.hookspecs import hookimpl

_NEEDS_ITS_OWN_LAYOUT = {
    Consumer.FLASHINFER: "FlashInfer bakes in the strides of its first call",
    Consumer.CUTEDSL: "stock hands the CuTe DSL ring kernel contiguous tensors in every release",
    Consumer.UNKNOWN: "nobody has tested it with views",
}


@hookimpl(trylast=True)
def gdn_zerocopy_route(shape: CallShape) -> Decision:
    """The bundled kernels for chains, views for what they do not take, upstream where there is nothing to remove.

    The circular ring's verify is no recurrence: behind the fused conv stock's own kernel reads views.
    """
    if shape.consumer is not Consumer.TRITON:
        why = _NEEDS_ITS_OWN_LAYOUT[shape.consumer]
        return Decision(Route.UPSTREAM, f"overlay inactive: verify={shape.consumer_name}; {why}")
    if shape.tree and shape.protocol is not Protocol.SNAPSHOTS:
        return Decision(Route.UPSTREAM, f"a draft tree with a {shape.protocol.value}; stock serves chains only")
    bundled = shape.bundled_kernels and not shape.tree
    if bundled and shape.bundled_recurrence and shape.protocol is not Protocol.CIRCULAR_RING:
        text = "one launch up to packed QKV and one for the recurrence, which reads it in place; small batches in one"
        return Decision(Route.BUNDLED, text)
    if bundled:
        text = f"one launch up to packed QKV, which {shape.consumer_name} reads through views"
        return Decision(Route.FUSED_CONV, text)
    if shape.copy_limit == 0:
        return Decision(Route.UPSTREAM, "no copy to remove: this release reads packed QKV through views itself")
    if shape.qkv_dim > shape.copy_limit:
        return Decision(Route.UPSTREAM, f"no copy to remove: qkv_dim {shape.qkv_dim} > {shape.copy_limit}")
    return Decision(Route.VIEWS, f"{shape.consumer_name} reads packed QKV through views, no copy")
