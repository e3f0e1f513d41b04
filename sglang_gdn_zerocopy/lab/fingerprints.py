"""For maintainers: print the rows of ``upstream/releases.py`` for unpacked releases.

    python -m sglang_gdn_zerocopy.lab.fingerprints VERSION=FOLDER...

FOLDER holds a release's ``sglang`` package. The rows say what the overlay relies on in that release.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_gdn_zerocopy.upstream.fingerprint import fingerprint_file

# Definitions whose body the overlay relies on; a release holds those of them that exist there.
_RELIED_ON = {
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


def relied_on(folder: Path) -> dict[str, dict[str, str]]:
    """What the overlay relies on in the ``sglang`` package below ``folder``: path -> qualified name -> fingerprint."""
    package = folder / "sglang"
    found: dict[str, dict[str, str]] = {}
    for pattern, names in _RELIED_ON.items():
        for path in sorted(package.rglob(pattern)):
            if "hardware_backend" not in path.parts:
                bodies = fingerprint_file(path)
                relative = path.relative_to(package).as_posix()
                found[relative] = {name: bodies[name] for name in names if name in bodies}
    return found


def main(arguments: Sequence[str]) -> int:
    """Print one dictionary literal a release."""
    for argument in arguments:
        version, _, folder = argument.partition("=")
        print(f'"{version}": {relied_on(Path(folder))!r},')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
