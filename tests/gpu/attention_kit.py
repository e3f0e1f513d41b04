"""The installed release's own GDN target-verify cases (chain, tree, CUDA graph) with the overlay on.

    python -m tests.gpu.attention_kit

They compare with a PyTorch reference that ships in the wheel. The release's plugin loader switches the overlay on; the
variable must be set. Prints one line a case, then the counts as JSON.
"""

from __future__ import annotations

import json
import sys
import unittest
from typing import Any

KIT = "sglang.test.kits.attention_unittest"


def main() -> int:
    """Run the cases; a failing one raises."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from importlib import import_module

    gdn = import_module(f"{KIT}.attention_methods.gdn_attention")
    verify = import_module(f"{KIT}.runner_modes.speculative_target_verify_runner")
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    import sglang_gdn_zerocopy

    test = unittest.TestCase()

    def case(name: str, k_heads: int, v_heads: int, draft_tokens: int, requests: int) -> Any:
        return gdn.GDNAttentionCase(
            name=name,
            backend="triton",
            forward_mode=ForwardMode.TARGET_VERIFY,
            num_k_heads=k_heads,
            num_v_heads=v_heads,
            page_size=1,
            prefix_lens=tuple(range(2, 2 + requests)),
            extend_lens=(draft_tokens,) * requests,
        )

    def avoided() -> int:
        return int(sglang_gdn_zerocopy.status()["copies_avoided"])

    chains = [case(f"chain_{k}_{v}_{t}_{n}", k, v, t, n) for k, v in ((2, 2), (2, 4)) for t in (1, 4) for n in (1, 3)]
    trees = [case(f"tree_{k}_{v}", k, v, 3, 2) for k, v in ((2, 2), (2, 4))]
    for run in (verify.run_gdn_eagle_verify_case, verify.run_gdn_eagle_verify_cuda_graph_case):
        for topk, cases in ((1, chains), (2, trees)):
            for one in cases:
                before = avoided()
                run(test, one, topk=topk)
                removed = avoided() - before
                print(f"{run.__name__} {one.name} topk={topk}: passed, {removed} copies avoided", flush=True)
                assert removed > 0, "the overlay was not live"
    print(json.dumps(sglang_gdn_zerocopy.status()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
