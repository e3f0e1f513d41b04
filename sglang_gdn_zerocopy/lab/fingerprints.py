"""For maintainers: print the body tables of ``upstream/releases.py`` for unpacked releases.

    python -m sglang_gdn_zerocopy.lab.fingerprints VERSION=FOLDER...

FOLDER holds a release's ``sglang`` package; versions come oldest first. The tables say what the overlay relies on, and
from which release on it has which body.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_gdn_zerocopy.upstream.fingerprint import fingerprint_file

# File name -> definitions whose body the views rely on; a release holds those of them that exist there.
VIEWS_RELY_ON = {
    "gdn_backend.py": (
        "GDNAttnBackend.forward_extend",
        "GDNAttnBackend._init_target_verify_qkv_routing",
        "GDNAttnBackend._replayssm_fold_uses_cutedsl",
        "GDNAttnBackend._target_verify_supports_strided_qkv",
        "GDNAttnBackend._replayssm_fold_target_verify",
        "GDNAttnBackend._replayssm_target_verify",
        "GDNKernelDispatcher.target_verify",
        "GDNKernelDispatcher._get_target_verify_kernel",
    ),
    "gdn_triton.py": ("TritonGDNKernel.target_verify",),
    "fused_sigmoid_gating_recurrent.py": (
        "_select_recurrent_launch_config",
        "fused_sigmoid_gating_delta_rule_update_kernel",
        "fused_sigmoid_gating_delta_rule_update",
    ),
    "gdn_replayssm_spec_decode.py": (
        "gdn_replayssm_spec_circular_kernel",
        "_launch_gdn_spec",
        "gdn_replayssm_spec_decode",
    ),
    "*gdn_fused_proj.py": ("fused_qkv_split_gdn_prefill_kernel", "fused_qkv_split_gdn_prefill"),
}
# The same for the bundled kernels: what they stand in for, and the way from a model's projection to the backend.
KERNELS_RELY_ON = {
    "causal_conv1d_triton.py": ("_causal_conv1d_update_kernel", "causal_conv1d_update"),
    "*gdn_fused_proj.py": (
        "fused_qkvzba_split_reshape_cat_kernel",
        "fused_qkvzba_split_reshape_cat",
        "fused_qkvzba_split_reshape_cat_contiguous_kernel",
        "fused_qkvzba_split_reshape_cat_contiguous",
    ),
    "qwen3_5.py": ("Qwen3_5GatedDeltaNet.forward",),
    "qwen3_next.py": ("Qwen3GatedDeltaNet.forward",),
    "radix_linear_attention.py": ("RadixLinearAttention.forward",),
    "hybrid_linear_attn_backend.py": ("HybridLinearAttnBackend.forward", "HybridLinearAttnBackend.forward_extend"),
    "forward_context.py": ("get_attn_backend",),
}
_ELSEWHERE = ("hardware_backend", "test", "configs", "multimodal_gen")


def relied_on(folder: Path, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, str]]:
    """Qualified name -> (path inside the package, fingerprint) of ``wanted`` in the ``sglang`` below ``folder``."""
    package = folder / "sglang"
    found: dict[str, tuple[str, str]] = {}
    for pattern, names in wanted.items():
        for path in sorted(package.rglob(pattern)):
            relative = path.relative_to(package)
            if not set(_ELSEWHERE) & set(relative.parts):
                bodies = fingerprint_file(path)
                found |= {name: (relative.as_posix(), bodies[name]) for name in names if name in bodies}
    return found


def history(releases: Mapping[str, Path], wanted: Mapping[str, tuple[str, ...]]) -> dict[str, list[tuple[str, ...]]]:
    """Qualified name -> (first release, path, fingerprint) of each of its bodies, oldest first; no path: gone."""
    table: dict[str, list[tuple[str, ...]]] = {name: [] for names in wanted.values() for name in names}
    for version, folder in releases.items():
        found = relied_on(folder, wanted)
        for name, bodies in table.items():
            body = found.get(name, ("", ""))
            if body != (bodies[-1][1:] if bodies else ("", "")):
                bodies.append((version, *body))
    return table


def main(arguments: Sequence[str]) -> int:
    """Print both tables as dictionary literals."""
    releases = {version: Path(folder) for version, _, folder in (a.partition("=") for a in arguments)}
    for title, wanted in {"_VIEWS_BODIES": VIEWS_RELY_ON, "_KERNEL_BODIES": KERNELS_RELY_ON}.items():
        print(f"{title} = {history(releases, wanted)!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
