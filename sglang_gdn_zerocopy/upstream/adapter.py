"""One call of the backend's forward -> CallShape, or a Decision that says why the call is not ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from sglang_gdn_zerocopy.records import CallShape, Consumer, Decision, Protocol, Release, Route
from sglang_gdn_zerocopy.upstream.releases import (
    BACKEND_CLASS,
    COPY_LIMIT,
    FLASHINFER_VERIFY_CLASS,
    FORWARD_ARGUMENTS,
    TRITON_VERIFY_CLASS,
)

_DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


def is_target_verify(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's mode flag says target verify. The flag decides, never the shape."""
    forward_batch = args[1] if len(args) > 1 else kwargs["forward_batch"]
    return bool(forward_batch.forward_mode.is_target_verify())


def _not_ours(reason: str) -> Decision:
    return Decision(Route.UPSTREAM, reason)


class Adapter:
    """Reads the live objects of one imported backend module. Keeps no state between calls."""

    def __init__(self, module: ModuleType, release: Release) -> None:
        self._module = module
        self._backend_class = getattr(module, BACKEND_CLASS)
        self._triton_class = getattr(module, TRITON_VERIFY_CLASS)
        self._release = release
        self._known_kwargs = release.call_kwargs | set(FORWARD_ARGUMENTS)

    def __call__(self, backend: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallShape | Decision:
        """The shape of a target-verify call on ``backend`` (the bound instance), or why it is not ours.

        ``args`` and ``kwargs`` are what the caller passed; nothing in them is written.
        """
        if type(backend) is not self._backend_class:
            return _not_ours(f"{type(backend).__name__} is not {BACKEND_CLASS} itself")
        unknown = kwargs.keys() - self._known_kwargs
        if unknown:
            return _not_ours(f"unknown argument {', '.join(sorted(unknown))}")
        layer, batch, mixed_qkv = (args[i] if len(args) > i else kwargs[FORWARD_ARGUMENTS[i]] for i in range(3))
        if getattr(backend, "mis_metadata", None) is not None:
            return _not_ours("multi-item scoring is active")
        draft_tokens = getattr(batch.spec_info, "draft_token_num", None)
        if not isinstance(draft_tokens, int) or draft_tokens < 1:
            return _not_ours(f"spec_info has draft_token_num {draft_tokens!r}")
        if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
            return _not_ours("a ragged verify layout is set")
        if not isinstance(mixed_qkv, torch.Tensor) or mixed_qkv.dim() != 2:
            return _not_ours("mixed_qkv is not one tensor of shape [rows, qkv_dim]")
        rows, qkv_dim = mixed_qkv.shape
        if rows == 0 or rows % draft_tokens:
            return _not_ours(f"{rows} rows are no whole number of requests of {draft_tokens} draft tokens")
        if qkv_dim != layer.q_dim + layer.k_dim + layer.v_dim or layer.num_q_heads != layer.num_k_heads:
            return _not_ours(f"mixed_qkv is {qkv_dim} wide, which is not the layer's packed QKV")
        pool = backend.req_to_token_pool.mamba_pool
        cache = pool.mamba_cache
        protocol = _protocol(pool, cache)
        if protocol not in self._release.protocols:
            return _not_ours(f"{protocol.value} target verify is untested on SGLang {self._release.version}")
        tree = backend.forward_metadata.retrieve_parent_token is not None
        consumer, name = self._consumer(backend.kernel_dispatcher, protocol, tree, cache.temporal.dtype, draft_tokens)
        return CallShape(
            layer_id=layer.layer_id,
            protocol=protocol,
            consumer=consumer,
            consumer_name=name,
            tree=tree,
            num_requests=rows // draft_tokens,
            draft_tokens=draft_tokens,
            num_k_heads=layer.num_k_heads,
            num_v_heads=layer.num_v_heads,
            head_k_dim=layer.head_k_dim,
            head_v_dim=layer.head_v_dim,
            qkv_dim=qkv_dim,
            copy_limit=getattr(self._module, COPY_LIMIT),
            activation_dtype=_DTYPE_NAMES.get(mixed_qkv.dtype, "other"),
            state_dtype=_DTYPE_NAMES.get(cache.temporal.dtype, "other"),
        )

    def _consumer(
        self, dispatcher: Any, protocol: Protocol, tree: bool, state_dtype: torch.dtype, draft_tokens: int
    ) -> tuple[Consumer, str]:
        if protocol is Protocol.FOLD_RING:
            # Stock's own test for the CuTe DSL ring kernel.
            if dispatcher.verify_kernel_is_flashinfer and state_dtype is torch.bfloat16 and draft_tokens >= 3:
                return Consumer.CUTEDSL, "gated_delta_rule_mtp"
            return Consumer.TRITON, "fused_sigmoid_gating_delta_rule_update"
        if protocol is Protocol.CIRCULAR_RING:
            return Consumer.TRITON, "gdn_replayssm_spec_decode"
        kernel = dispatcher.verify_kernel
        if tree:
            # Releases before 0.5.16 have no kernel of their own for trees.
            kernel = getattr(dispatcher, "tree_verify_kernel", kernel)
        if type(kernel) is self._triton_class:
            return Consumer.TRITON, TRITON_VERIFY_CLASS
        name = type(kernel).__name__
        return (Consumer.FLASHINFER if name == FLASHINFER_VERIFY_CLASS else Consumer.UNKNOWN), name


def _protocol(pool: Any, cache: Any) -> Protocol:
    """Stock's order of tests: fold ring, circular ring, else snapshots."""
    if not getattr(pool, "replayssm_is_kda", False):
        if getattr(cache, "replayssm_rawv", None) is not None and getattr(pool, "replayssm_spec_fold", False):
            return Protocol.FOLD_RING
        if getattr(cache, "replayssm_d", None) is not None and getattr(pool, "replayssm_cache_base", None) is not None:
            return Protocol.CIRCULAR_RING
    return Protocol.SNAPSHOTS
