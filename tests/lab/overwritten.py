"""What a release's own commit writes of the conv state, in a process of its own.

    python -m tests.lab.overwritten FOLDER VERSION

FOLDER holds the unpacked release. Prints one JSON line a commit: whether the live slots' conv state is the same when it
was NaN between verify and commit (``overwritten``), and whether every other slot is as before (``others_kept``).
"""

from __future__ import annotations

import json

import torch

from sglang_gdn_zerocopy.bits import same_bits
from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.commit import last_nodes
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.world import build_world
from tests.lab.scripts import mounted

# Both conv launches (16 and 32 bit), both layouts of the windows, a tree, rows without a slot or tokens, every ring.
NAMES = (
    "chain, ratio 2",
    "chain, fp32 activations",
    "chain, padded row with tokens",
    "tree, padded graph rows",
    "fold ring, padded graph rows",
    "circular ring, ratio 3, dense windows",
    "circular ring, a full ring",
)


def examine(harness: Harness, case: Case) -> None:
    """One verify of ``case``, then three commits of it, so that each request has all, one and a part accepted."""
    world = build_world(case, 7, "cpu", harness.low_parts)
    harness.verify(world)
    after_verify = {name: tensor.clone() for name, tensor in world.tensors.items()}
    conv_state = world.tensors["conv_state"]
    live = [slot for slot in case.slots[: case.live_requests] if slot >= 0]
    others = [slot for slot in range(case.pool_slots) if slot not in live]
    for turn in range(3):
        nodes = last_nodes(case, turn)
        results = []
        for poison in (False, True):
            for name, tensor in world.tensors.items():
                tensor.copy_(after_verify[name])
            if poison:
                conv_state[live] = torch.nan
            harness.commit(world, nodes)
            results.append(conv_state.clone())
        plain, poisoned = results
        line = {
            "case": case.name,
            "protocol": case.protocol.value,
            "nodes": nodes,
            "overwritten": same_bits(plain[live], poisoned[live]),
            "others_kept": all(same_bits(one[others], after_verify["conv_state"][others]) for one in results),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    harness, cases = mounted(NAMES)
    for case in cases:
        examine(harness, case)


if __name__ == "__main__":
    main()
