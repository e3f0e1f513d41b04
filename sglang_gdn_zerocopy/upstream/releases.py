"""Data: the supported releases, what each does in target verify, and the bodies that the overlay relies on.

Why a patch exists, and when to drop it. The copy: up to 0.5.20 stock copies packed QKV into three tensors before every
GDN target verify although its Triton consumers read strides; from 0.5.21 upstream takes views itself. Drop it when
0.5.20 leaves the table. The conv and the unpack: every release runs them as two launches; drop them when upstream runs
one that is no slower.

A release enters the table when `check` has run all its cases. Its fingerprints come from
``python -m sglang_gdn_zerocopy.lab.fingerprints``.
"""

from __future__ import annotations

from sglang_gdn_zerocopy.records import ModelSite, Protocol, Release

BACKEND_MODULE = "sglang.srt.layers.attention.linear.gdn_backend"
BACKEND_CLASS = "GDNAttnBackend"
COPY_FUNCTION = "fused_qkv_split_gdn_prefill"
CONV_FUNCTION = "causal_conv1d_update"
# The names of stock's conv arguments, positional ones first; any other argument is unknown to us.
CONV_ARGUMENTS = ("x", "conv_state", "weight", "bias", "activation")
CONV_KEYWORDS = frozenset(
    {
        "conv_state_indices",
        "intermediate_conv_window",
        "intermediate_state_indices",
        "retrieve_next_token",
        "retrieve_next_sibling",
        "retrieve_parent_token",
    }
)
RECURRENCE_FUNCTION = "fused_sigmoid_gating_delta_rule_update"
# What stock passes to it in a target verify of a chain, and what the bundled kernel computes; all else is unknown.
RECURRENCE_FIXED = {
    "use_qk_l2norm_in_kernel": True,
    "softplus_beta": 1.0,
    "softplus_threshold": 20.0,
    "is_kda": False,
    "disable_state_update": True,
    "retrieve_parent_token": None,
}
RECURRENCE_RING = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
RECURRENCE_SNAPSHOTS = ("intermediate_states_buffer", "intermediate_state_indices")
RECURRENCE_INPUTS = (
    "q",
    "k",
    "v",
    "a",
    "b",
    "A_log",
    "dt_bias",
    "initial_state_source",
    "initial_state_indices",
    "cu_seqlens",
)
FORWARD_CONTEXT_MODULE = "sglang.srt.model_executor.forward_context"
# The way from a model's layer to the backend: module, class, functions.
PATH = (
    ("sglang.srt.layers.radix_linear_attention", "RadixLinearAttention", ("forward",)),
    (
        "sglang.srt.layers.attention.hybrid_linear_attn_backend",
        "HybridLinearAttnBackend",
        ("forward", "forward_extend"),
    ),
)
# Model modules whose layers unpack a projection, and how.
MODELS = (
    ModelSite("sglang.srt.models.qwen3_5", "Qwen3_5GatedDeltaNet", "fused_qkvzba_split_reshape_cat_contiguous", False),
    ModelSite("sglang.srt.models.qwen3_next", "Qwen3GatedDeltaNet", "fused_qkvzba_split_reshape_cat", True),
)
TRITON_VERIFY_CLASS = "TritonGDNKernel"
FLASHINFER_VERIFY_CLASS = "FlashInferGDNKernel"
COPY_LIMIT = "MAX_FUSED_QKV_SPLIT_DIM"
# Its value in every release, in elements of packed QKV.
STOCK_COPY_LIMIT = 8192

# The named arguments of the forward, in upstream's order, and what the hybrid backend passes beside them.
FORWARD_ARGUMENTS = ("layer", "forward_batch", "mixed_qkv", "a", "b")
_ALWAYS_PASSED = frozenset({"q", "k", "v", "save_kv_cache"})
_WITH_OUTPUT = _ALWAYS_PASSED | {"linear_attn_output"}

_SNAPSHOTS = (Protocol.SNAPSHOTS,)
_WITH_FOLD = (Protocol.SNAPSHOTS, Protocol.FOLD_RING)
_WITH_CIRCULAR = (Protocol.SNAPSHOTS, Protocol.CIRCULAR_RING)

# The first release whose recurrence multiplies by the reciprocal of the norm.
_RECIPROCAL_NORM_SINCE = "0.5.22"

# version: (stock copies, protocols of target verify, keyword arguments of the forward)
_BEHAVIOUR = {
    "0.5.13.post1": (True, _SNAPSHOTS, _ALWAYS_PASSED),
    "0.5.14": (True, _SNAPSHOTS, _ALWAYS_PASSED),
    "0.5.15.post1": (True, _SNAPSHOTS, _ALWAYS_PASSED),
    "0.5.16": (True, _WITH_CIRCULAR, _ALWAYS_PASSED),
    "0.5.17": (True, _WITH_FOLD, _ALWAYS_PASSED),
    "0.5.18": (True, _WITH_FOLD, _ALWAYS_PASSED),
    "0.5.19": (True, _WITH_FOLD, _WITH_OUTPUT),
    "0.5.20": (True, _WITH_CIRCULAR, _WITH_OUTPUT),
    "0.5.21": (False, _WITH_CIRCULAR, _WITH_OUTPUT),
    "0.5.22": (False, _WITH_CIRCULAR, _WITH_OUTPUT),
    "0.5.23": (False, _WITH_CIRCULAR, _WITH_OUTPUT),
}

# Published before their post releases, with the same bodies.
SAME_BODIES = {"0.5.13": "0.5.13.post1", "0.5.15": "0.5.15.post1"}

# Qualified name -> its bodies, oldest first: (first release, path inside the package, fingerprint).
_Bodies = dict[str, tuple[tuple[str, str, str], ...]]

# What the views rely on.
_VIEWS_BODIES: _Bodies = {
    "GDNAttnBackend.forward_extend": (
        ("0.5.13.post1", "srt/layers/attention/linear/gdn_backend.py", "a79033d950811e63"),
        ("0.5.14", "srt/layers/attention/linear/gdn_backend.py", "1d9cf87715be26c9"),
        ("0.5.15.post1", "srt/layers/attention/linear/gdn_backend.py", "92f8cdc1f94f9bce"),
        ("0.5.16", "srt/layers/attention/linear/gdn_backend.py", "c962e1fe929c0f34"),
        ("0.5.17", "srt/layers/attention/linear/gdn_backend.py", "ca96ce284cf6b233"),
        ("0.5.18", "srt/layers/attention/linear/gdn_backend.py", "14bedcf787dbf71d"),
        ("0.5.19", "srt/layers/attention/linear/gdn_backend.py", "41e8cc45e85edf83"),
        ("0.5.20", "srt/layers/attention/linear/gdn_backend.py", "64c5450198a56ae2"),
        ("0.5.21", "srt/layers/attention/linear/gdn_backend.py", "55b50a5a1990eec8"),
        ("0.5.22", "srt/layers/attention/linear/gdn_backend.py", "98258faa4bdd32eb"),
    ),
    "GDNAttnBackend._init_target_verify_qkv_routing": (
        ("0.5.21", "srt/layers/attention/linear/gdn_backend.py", "945dc44eba8fdccc"),
    ),
    "GDNAttnBackend._replayssm_fold_uses_cutedsl": (
        ("0.5.21", "srt/layers/attention/linear/gdn_backend.py", "aab018a720043d92"),
    ),
    "GDNAttnBackend._target_verify_supports_strided_qkv": (
        ("0.5.21", "srt/layers/attention/linear/gdn_backend.py", "3238f6d8ac56430a"),
    ),
    "GDNAttnBackend._replayssm_fold_target_verify": (
        ("0.5.17", "srt/layers/attention/linear/gdn_backend.py", "199519461ac016e3"),
        ("0.5.21", "srt/layers/attention/linear/gdn_backend.py", "d18f96cf9a1389fd"),
        ("0.5.23", "srt/layers/attention/linear/gdn_backend.py", "bae33515d3caa913"),
    ),
    "GDNAttnBackend._replayssm_target_verify": (
        ("0.5.16", "srt/layers/attention/linear/gdn_backend.py", "54a8b3c0419e61c3"),
        ("0.5.20", "srt/layers/attention/linear/gdn_backend.py", "41014b9a672cc1ad"),
        ("0.5.23", "srt/layers/attention/linear/gdn_backend.py", "0d253afbfdceabd9"),
    ),
    "GDNKernelDispatcher.target_verify": (
        ("0.5.13.post1", "srt/layers/attention/linear/gdn_backend.py", "dd426fb50e93c047"),
        ("0.5.16", "srt/layers/attention/linear/gdn_backend.py", "d828caa010102d89"),
        ("0.5.21", "srt/layers/attention/linear/gdn_backend.py", "4e3e2c954bdf025f"),
    ),
    "GDNKernelDispatcher._get_target_verify_kernel": (
        ("0.5.21", "srt/layers/attention/linear/gdn_backend.py", "730c1fc12b399e4f"),
    ),
    "TritonGDNKernel.target_verify": (
        ("0.5.13.post1", "srt/layers/attention/linear/kernels/gdn_triton.py", "33205b45e693df81"),
    ),
    "_select_recurrent_launch_config": (
        ("0.5.21", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "645725b8b546bfa6"),
        ("0.5.22", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "0a05d4717c9240a2"),
        ("0.5.23", "kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py", "9f455e14943e4406"),
    ),
    "fused_sigmoid_gating_delta_rule_update_kernel": (
        ("0.5.13.post1", "srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py", "4cf27a178b5aa78a"),
        ("0.5.16", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "4cf27a178b5aa78a"),
        ("0.5.17", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "5fcd54f9b13a7882"),
        ("0.5.19", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "064b6d4103cf26f4"),
        ("0.5.22", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "0f035d41f6898726"),
        ("0.5.23", "kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py", "0f035d41f6898726"),
    ),
    "fused_sigmoid_gating_delta_rule_update": (
        ("0.5.13.post1", "srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py", "e23fb7a064ae1b0d"),
        ("0.5.16", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "67780f1a5d755e7b"),
        ("0.5.17", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "f94d5dc61b542cc6"),
        ("0.5.19", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "26b97c81b7db0521"),
        ("0.5.21", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "0b94687e4795c042"),
        ("0.5.22", "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py", "6d0771541f556bad"),
        ("0.5.23", "kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py", "71ca5e17fd7c88b2"),
    ),
    "gdn_replayssm_spec_circular_kernel": (
        ("0.5.16", "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py", "4fd75445b303e212"),
        ("0.5.20", "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py", "0ce6c1adb3024510"),
        ("0.5.23", "kernels/ops/attention/linear/gdn_replayssm_spec_decode.py", "0ce6c1adb3024510"),
    ),
    "_launch_gdn_spec": (
        ("0.5.16", "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py", "c4e72a469525ddcf"),
        ("0.5.20", "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py", "065d73bd5f3836e2"),
        ("0.5.23", "kernels/ops/attention/linear/gdn_replayssm_spec_decode.py", "065d73bd5f3836e2"),
    ),
    "gdn_replayssm_spec_decode": (
        ("0.5.16", "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py", "04445a78044df3ab"),
        ("0.5.20", "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py", "f0491d0e2b90012b"),
        ("0.5.21", "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py", "b584228295280292"),
        ("0.5.23", "kernels/ops/attention/linear/gdn_replayssm_spec_decode.py", "b584228295280292"),
    ),
    "fused_qkv_split_gdn_prefill_kernel": (
        ("0.5.13.post1", "jit_kernel/triton/gdn_fused_proj.py", "452cafceccada80b"),
        ("0.5.17", "kernels/ops/attention/triton_gdn_fused_proj.py", "452cafceccada80b"),
    ),
    "fused_qkv_split_gdn_prefill": (
        ("0.5.13.post1", "jit_kernel/triton/gdn_fused_proj.py", "95f4604fbc33dcaf"),
        ("0.5.17", "kernels/ops/attention/triton_gdn_fused_proj.py", "95f4604fbc33dcaf"),
        ("0.5.18", "kernels/ops/attention/triton_gdn_fused_proj.py", "b7a15efeaafdc385"),
    ),
}

# What the bundled kernels rely on beside it: stock's unpack and conv, and the way from a model to the backend.
_KERNEL_BODIES: _Bodies = {
    "_causal_conv1d_update_kernel": (
        ("0.5.13.post1", "srt/layers/attention/mamba/causal_conv1d_triton.py", "289c8130bc2d2e12"),
        ("0.5.16", "kernels/ops/mamba/causal_conv1d_triton.py", "289c8130bc2d2e12"),
        ("0.5.19", "kernels/ops/mamba/causal_conv1d_triton.py", "fd8945a65eb2b782"),
    ),
    "causal_conv1d_update": (
        ("0.5.13.post1", "srt/layers/attention/mamba/causal_conv1d_triton.py", "432565943f4a0af9"),
        ("0.5.16", "kernels/ops/mamba/causal_conv1d_triton.py", "432565943f4a0af9"),
    ),
    "fused_qkvzba_split_reshape_cat_kernel": (
        ("0.5.13.post1", "jit_kernel/triton/gdn_fused_proj.py", "c423b83fd120b955"),
        ("0.5.17", "kernels/ops/attention/triton_gdn_fused_proj.py", "c423b83fd120b955"),
    ),
    "fused_qkvzba_split_reshape_cat": (
        ("0.5.13.post1", "jit_kernel/triton/gdn_fused_proj.py", "e92c0316eb8d85ca"),
        ("0.5.17", "kernels/ops/attention/triton_gdn_fused_proj.py", "e92c0316eb8d85ca"),
        ("0.5.18", "kernels/ops/attention/triton_gdn_fused_proj.py", "a494482cd730b35d"),
    ),
    "fused_qkvzba_split_reshape_cat_contiguous_kernel": (
        ("0.5.13.post1", "jit_kernel/triton/gdn_fused_proj.py", "b073c7862e515912"),
        ("0.5.17", "kernels/ops/attention/triton_gdn_fused_proj.py", "b073c7862e515912"),
        ("0.5.19", "kernels/ops/attention/triton_gdn_fused_proj.py", "d5230fc7b8c65f75"),
        ("0.5.20", "kernels/ops/attention/triton_gdn_fused_proj.py", "dafb7218913eeb36"),
    ),
    "fused_qkvzba_split_reshape_cat_contiguous": (
        ("0.5.13.post1", "jit_kernel/triton/gdn_fused_proj.py", "414f96815037fc5a"),
        ("0.5.17", "kernels/ops/attention/triton_gdn_fused_proj.py", "414f96815037fc5a"),
        ("0.5.18", "kernels/ops/attention/triton_gdn_fused_proj.py", "018322604d599c41"),
        ("0.5.19", "kernels/ops/attention/triton_gdn_fused_proj.py", "56255f618531cdd0"),
        ("0.5.20", "kernels/ops/attention/triton_gdn_fused_proj.py", "0e4317ddd38e14a9"),
    ),
    "Qwen3_5GatedDeltaNet.forward": (
        ("0.5.13.post1", "srt/models/qwen3_5.py", "e62f04e8c96f2621"),
        ("0.5.16", "srt/models/qwen3_5.py", "de7e9f9273b43530"),
        ("0.5.18", "srt/models/qwen3_5.py", "c18e3d0e7a38b883"),
        ("0.5.19", "srt/models/qwen3_5.py", "54fe376311666fc3"),
        ("0.5.20", "srt/models/qwen3_5.py", "63c5b3393eb2351c"),
        ("0.5.21", "srt/models/qwen3_5.py", "8e51ea7f66372bfa"),
        ("0.5.22", "srt/models/qwen3_5.py", "06a4bef658906aac"),
        ("0.5.23", "srt/models/qwen3_5.py", "36dfe28d8e80242e"),
    ),
    "Qwen3GatedDeltaNet.forward": (("0.5.13.post1", "srt/models/qwen3_next.py", "3ffe973d0f4b0ac1"),),
    "RadixLinearAttention.forward": (
        ("0.5.13.post1", "srt/layers/radix_linear_attention.py", "db05da2a38bfca00"),
        ("0.5.14", "srt/layers/radix_linear_attention.py", "c76d3193f1ca5a61"),
        ("0.5.19", "srt/layers/radix_linear_attention.py", "39de60396f29647d"),
        ("0.5.20", "srt/layers/radix_linear_attention.py", "4086da87ffc65992"),
        ("0.5.22", "srt/layers/radix_linear_attention.py", "bbb3f481056d9bae"),
        ("0.5.23", "srt/layers/radix_linear_attention.py", "985feae356553649"),
    ),
    "HybridLinearAttnBackend.forward": (
        ("0.5.13.post1", "srt/layers/attention/hybrid_linear_attn_backend.py", "409f87b39ae54ad5"),
        ("0.5.23", "srt/layers/attention/hybrid_linear_attn_backend.py", "93c8e70128879d56"),
    ),
    "HybridLinearAttnBackend.forward_extend": (
        ("0.5.13.post1", "srt/layers/attention/hybrid_linear_attn_backend.py", "d25f8cb90cfe6e8a"),
    ),
    "get_attn_backend": (("0.5.13.post1", "srt/model_executor/forward_context.py", "010c540443142d0b"),),
}


def _bodies_of(version: str, table: _Bodies) -> dict[str, dict[str, str]]:
    """Path -> qualified name -> fingerprint of ``table``'s definitions in one release."""
    order = list(_BEHAVIOUR)
    found: dict[str, dict[str, str]] = {}
    for name, bodies in table.items():
        known = [body for body in bodies if order.index(body[0]) <= order.index(version)]
        if known:
            _, path, fingerprint = known[-1]
            found.setdefault(path, {})[name] = fingerprint
    return found


RELEASES = {
    version: Release(
        version=version,
        copies=copies,
        protocols=protocols,
        call_kwargs=call_kwargs,
        fingerprints=_bodies_of(version, _VIEWS_BODIES),
        kernel_fingerprints=_bodies_of(version, _KERNEL_BODIES),
        reciprocal_norm=list(_BEHAVIOUR).index(version) >= list(_BEHAVIOUR).index(_RECIPROCAL_NORM_SINCE),
    )
    for version, (copies, protocols, call_kwargs) in _BEHAVIOUR.items()
}


def wide_qkv_consumers(version: str) -> tuple[tuple[str, str], ...]:
    """Who gets strided Q, K and V from stock above its copy limit, and whether it honours the strides there.

    ``version`` is a key of :data:`RELEASES`.
    """
    untested = "not compared here"
    baked_in = "no, FlashInfer 0.6.12 bakes the strides of its first call into the compiled kernel"
    behaviour = RELEASES[version]
    old = version in ("0.5.13.post1", "0.5.14", "0.5.15.post1")
    consumers = [("Triton target verify", "yes, the kernels take token strides")]
    consumers.append(("FlashInfer target verify", baked_in if old else untested))
    if Protocol.FOLD_RING in behaviour.protocols:
        consumers.append(("the CuTe DSL ring (FlashInfer verify, bfloat16 state, 3 draft tokens up)", untested))
    return tuple(consumers)
