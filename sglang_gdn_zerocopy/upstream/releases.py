"""Data: the supported releases, what each does in target verify, and the bodies that the overlay relies on.

Why a patch exists, and when to drop it: up to 0.5.20 stock copies packed QKV into three tensors before every
GDN target verify although its Triton consumers read strides; from 0.5.21 upstream takes views itself, so there
is nothing to patch. Drop the copy patch when 0.5.20 leaves the table.

A release enters the table when `check` has run all its cases. Its fingerprints come from
``python -m sglang_gdn_zerocopy.lab.fingerprints``.
"""

from __future__ import annotations

from sglang_gdn_zerocopy.records import Protocol, Release

BACKEND_MODULE = "sglang.srt.layers.attention.linear.gdn_backend"
BACKEND_CLASS = "GDNAttnBackend"
COPY_FUNCTION = "fused_qkv_split_gdn_prefill"
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

_FINGERPRINTS = {
    "0.5.13.post1": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "a79033d950811e63",
            "GDNKernelDispatcher.target_verify": "dd426fb50e93c047",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "fused_sigmoid_gating_delta_rule_update_kernel": "4cf27a178b5aa78a",
            "fused_sigmoid_gating_delta_rule_update": "e23fb7a064ae1b0d",
        },
        "jit_kernel/triton/gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "95f4604fbc33dcaf",
        },
    },
    "0.5.14": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "1d9cf87715be26c9",
            "GDNKernelDispatcher.target_verify": "dd426fb50e93c047",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "fused_sigmoid_gating_delta_rule_update_kernel": "4cf27a178b5aa78a",
            "fused_sigmoid_gating_delta_rule_update": "e23fb7a064ae1b0d",
        },
        "jit_kernel/triton/gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "95f4604fbc33dcaf",
        },
    },
    "0.5.15.post1": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "92f8cdc1f94f9bce",
            "GDNKernelDispatcher.target_verify": "dd426fb50e93c047",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "srt/layers/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "fused_sigmoid_gating_delta_rule_update_kernel": "4cf27a178b5aa78a",
            "fused_sigmoid_gating_delta_rule_update": "e23fb7a064ae1b0d",
        },
        "jit_kernel/triton/gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "95f4604fbc33dcaf",
        },
    },
    "0.5.16": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "c962e1fe929c0f34",
            "GDNAttnBackend._replayssm_target_verify": "54a8b3c0419e61c3",
            "GDNKernelDispatcher.target_verify": "d828caa010102d89",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "fused_sigmoid_gating_delta_rule_update_kernel": "4cf27a178b5aa78a",
            "fused_sigmoid_gating_delta_rule_update": "67780f1a5d755e7b",
        },
        "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py": {
            "gdn_replayssm_spec_circular_kernel": "4fd75445b303e212",
            "_launch_gdn_spec": "c4e72a469525ddcf",
            "gdn_replayssm_spec_decode": "04445a78044df3ab",
        },
        "jit_kernel/triton/gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "95f4604fbc33dcaf",
        },
    },
    "0.5.17": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "ca96ce284cf6b233",
            "GDNAttnBackend._replayssm_fold_target_verify": "199519461ac016e3",
            "GDNAttnBackend._replayssm_target_verify": "54a8b3c0419e61c3",
            "GDNKernelDispatcher.target_verify": "d828caa010102d89",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "fused_sigmoid_gating_delta_rule_update_kernel": "5fcd54f9b13a7882",
            "fused_sigmoid_gating_delta_rule_update": "f94d5dc61b542cc6",
        },
        "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py": {
            "gdn_replayssm_spec_circular_kernel": "4fd75445b303e212",
            "_launch_gdn_spec": "c4e72a469525ddcf",
            "gdn_replayssm_spec_decode": "04445a78044df3ab",
        },
        "kernels/ops/attention/triton_gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "95f4604fbc33dcaf",
        },
    },
    "0.5.18": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "14bedcf787dbf71d",
            "GDNAttnBackend._replayssm_fold_target_verify": "199519461ac016e3",
            "GDNAttnBackend._replayssm_target_verify": "54a8b3c0419e61c3",
            "GDNKernelDispatcher.target_verify": "d828caa010102d89",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "fused_sigmoid_gating_delta_rule_update_kernel": "5fcd54f9b13a7882",
            "fused_sigmoid_gating_delta_rule_update": "f94d5dc61b542cc6",
        },
        "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py": {
            "gdn_replayssm_spec_circular_kernel": "4fd75445b303e212",
            "_launch_gdn_spec": "c4e72a469525ddcf",
            "gdn_replayssm_spec_decode": "04445a78044df3ab",
        },
        "kernels/ops/attention/triton_gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "b7a15efeaafdc385",
        },
    },
    "0.5.19": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "41e8cc45e85edf83",
            "GDNAttnBackend._replayssm_fold_target_verify": "199519461ac016e3",
            "GDNAttnBackend._replayssm_target_verify": "54a8b3c0419e61c3",
            "GDNKernelDispatcher.target_verify": "d828caa010102d89",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "fused_sigmoid_gating_delta_rule_update_kernel": "064b6d4103cf26f4",
            "fused_sigmoid_gating_delta_rule_update": "26b97c81b7db0521",
        },
        "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py": {
            "gdn_replayssm_spec_circular_kernel": "4fd75445b303e212",
            "_launch_gdn_spec": "c4e72a469525ddcf",
            "gdn_replayssm_spec_decode": "04445a78044df3ab",
        },
        "kernels/ops/attention/triton_gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "b7a15efeaafdc385",
        },
    },
    "0.5.20": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "64c5450198a56ae2",
            "GDNAttnBackend._replayssm_fold_target_verify": "199519461ac016e3",
            "GDNAttnBackend._replayssm_target_verify": "41014b9a672cc1ad",
            "GDNKernelDispatcher.target_verify": "d828caa010102d89",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "fused_sigmoid_gating_delta_rule_update_kernel": "064b6d4103cf26f4",
            "fused_sigmoid_gating_delta_rule_update": "26b97c81b7db0521",
        },
        "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py": {
            "gdn_replayssm_spec_circular_kernel": "0ce6c1adb3024510",
            "_launch_gdn_spec": "065d73bd5f3836e2",
            "gdn_replayssm_spec_decode": "f0491d0e2b90012b",
        },
        "kernels/ops/attention/triton_gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "b7a15efeaafdc385",
        },
    },
    "0.5.21": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "55b50a5a1990eec8",
            "GDNAttnBackend._init_target_verify_qkv_routing": "945dc44eba8fdccc",
            "GDNAttnBackend._replayssm_fold_uses_cutedsl": "aab018a720043d92",
            "GDNAttnBackend._target_verify_supports_strided_qkv": "3238f6d8ac56430a",
            "GDNAttnBackend._replayssm_fold_target_verify": "d18f96cf9a1389fd",
            "GDNAttnBackend._replayssm_target_verify": "41014b9a672cc1ad",
            "GDNKernelDispatcher.target_verify": "4e3e2c954bdf025f",
            "GDNKernelDispatcher._get_target_verify_kernel": "730c1fc12b399e4f",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "_select_recurrent_launch_config": "645725b8b546bfa6",
            "fused_sigmoid_gating_delta_rule_update_kernel": "064b6d4103cf26f4",
            "fused_sigmoid_gating_delta_rule_update": "0b94687e4795c042",
        },
        "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py": {
            "gdn_replayssm_spec_circular_kernel": "0ce6c1adb3024510",
            "_launch_gdn_spec": "065d73bd5f3836e2",
            "gdn_replayssm_spec_decode": "b584228295280292",
        },
        "kernels/ops/attention/triton_gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "b7a15efeaafdc385",
        },
    },
    "0.5.22": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "98258faa4bdd32eb",
            "GDNAttnBackend._init_target_verify_qkv_routing": "945dc44eba8fdccc",
            "GDNAttnBackend._replayssm_fold_uses_cutedsl": "aab018a720043d92",
            "GDNAttnBackend._target_verify_supports_strided_qkv": "3238f6d8ac56430a",
            "GDNAttnBackend._replayssm_fold_target_verify": "d18f96cf9a1389fd",
            "GDNAttnBackend._replayssm_target_verify": "41014b9a672cc1ad",
            "GDNKernelDispatcher.target_verify": "4e3e2c954bdf025f",
            "GDNKernelDispatcher._get_target_verify_kernel": "730c1fc12b399e4f",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py": {
            "_select_recurrent_launch_config": "0a05d4717c9240a2",
            "fused_sigmoid_gating_delta_rule_update_kernel": "0f035d41f6898726",
            "fused_sigmoid_gating_delta_rule_update": "6d0771541f556bad",
        },
        "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py": {
            "gdn_replayssm_spec_circular_kernel": "0ce6c1adb3024510",
            "_launch_gdn_spec": "065d73bd5f3836e2",
            "gdn_replayssm_spec_decode": "b584228295280292",
        },
        "kernels/ops/attention/triton_gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "b7a15efeaafdc385",
        },
    },
    "0.5.23": {
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNAttnBackend.forward_extend": "98258faa4bdd32eb",
            "GDNAttnBackend._init_target_verify_qkv_routing": "945dc44eba8fdccc",
            "GDNAttnBackend._replayssm_fold_uses_cutedsl": "aab018a720043d92",
            "GDNAttnBackend._target_verify_supports_strided_qkv": "3238f6d8ac56430a",
            "GDNAttnBackend._replayssm_fold_target_verify": "bae33515d3caa913",
            "GDNAttnBackend._replayssm_target_verify": "0d253afbfdceabd9",
            "GDNKernelDispatcher.target_verify": "4e3e2c954bdf025f",
            "GDNKernelDispatcher._get_target_verify_kernel": "730c1fc12b399e4f",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel.target_verify": "33205b45e693df81"},
        "kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py": {
            "_select_recurrent_launch_config": "9f455e14943e4406",
            "fused_sigmoid_gating_delta_rule_update_kernel": "0f035d41f6898726",
            "fused_sigmoid_gating_delta_rule_update": "71ca5e17fd7c88b2",
        },
        "kernels/ops/attention/linear/gdn_replayssm_spec_decode.py": {
            "gdn_replayssm_spec_circular_kernel": "0ce6c1adb3024510",
            "_launch_gdn_spec": "065d73bd5f3836e2",
            "gdn_replayssm_spec_decode": "b584228295280292",
        },
        "kernels/ops/attention/triton_gdn_fused_proj.py": {
            "fused_qkv_split_gdn_prefill_kernel": "452cafceccada80b",
            "fused_qkv_split_gdn_prefill": "b7a15efeaafdc385",
        },
    },
}

RELEASES = {
    version: Release(version, copies, protocols, call_kwargs, _FINGERPRINTS[version])
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
