"""The named target-verify cases that `check` and the tests run, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_gdn_zerocopy.records import Protocol

# The draft tree of tree cases by parent index of each draft token; -1 is the root.
TREE_PARENTS = (-1, 0, 0, 1)
# Requests of a case with a large batch on the CPU.
MANY = 9
# What stands for it on a GPU: requests, draft tokens, key heads, value heads. Qwen3.5-4B has 16 and 32.
MANY_ON_GPU = (
    (8, 8, 16, 32),
    (17, 3, 8, 24),
    (32, 5, 4, 16),
    (64, 4, 16, 32),
    (64, 6, 8, 8),
    (128, 1, 16, 32),
    (128, 2, 16, 32),
    (128, 7, 2, 4),
)


@dataclass(frozen=True)
class Case:
    """One target-verify call on random data.

    ``slots`` holds one state slot a request, -1 for a padded graph row; ``live`` of them are requests with tokens,
    the rest has a zero-length segment. ``buffer_steps`` is the draft dimension that the buffers were allocated
    with (default: ``draft_tokens``). ``windows`` is "dense" or "overlapping". dtypes are torch's names; on a GPU
    the activations are bfloat16 (see :func:`on_gpu`), since the Triton interpreter computes bfloat16 wrongly.
    ``layers`` calls are made one after the other, each with buffers of its own. ``model`` names the model whose GDN
    layer is run from its projection on ("qwen3_5" or "qwen3_next"); empty, the backend is called with packed QKV.
    ``strided_unpack``: the case needs a release whose unpack takes row strides. ``one_launch``: conv and recurrence in
    one launch also where the table of choices would not say so, which is without a GPU.
    """

    name: str
    protocol: Protocol = Protocol.SNAPSHOTS
    num_k_heads: int = 1
    num_v_heads: int = 2
    draft_tokens: int = 4
    slots: tuple[int, ...] = (3, 1)
    live: int | None = None
    tree: bool = False
    buffer_steps: int | None = None
    windows: str = "overlapping"
    activation_dtype: str = "float16"
    state_dtype: str = "float32"
    bias: bool = False
    row_padding: int = 0
    layers: int = 1
    ring_steps: int = 16
    model: str = ""
    strided_unpack: bool = False
    one_launch: bool = False

    @property
    def num_requests(self) -> int:
        """Rows of the batch in requests, padding included."""
        return len(self.slots)

    @property
    def pool_slots(self) -> int:
        """Slots of the state pool: more than the case uses."""
        return max(*self.slots, 3) + 2

    @property
    def pool_requests(self) -> int:
        """Rows of the buffers that hold one a request: more than the case uses."""
        return max(self.num_requests, 4) + 1

    @property
    def live_requests(self) -> int:
        """Requests that have tokens."""
        return self.num_requests if self.live is None else self.live


def _scattered(requests: int) -> tuple[int, ...]:
    """A slot for each of so many requests, no two neighbours in order."""
    return tuple((5 * request + 3) % requests for request in range(requests))


_FOLD = Protocol.FOLD_RING
_CIRCULAR = Protocol.CIRCULAR_RING

CASES = (
    Case("chain, ratio 2"),
    Case("chain, ratio 1", num_v_heads=1, windows="dense", bias=True),
    Case("chain, ratio 3", num_v_heads=3, draft_tokens=3),
    Case("chain, ratio 4, two key heads", num_k_heads=2, num_v_heads=8, draft_tokens=2, slots=(2,)),
    Case("chain, fp32 activations", activation_dtype="float32", draft_tokens=2),
    Case("chain, 16-bit state", state_dtype="float16"),
    Case("chain, one token, one request", draft_tokens=1, slots=(0,), num_v_heads=1),
    Case("chain, 5 draft tokens", draft_tokens=5, slots=(1,)),
    Case("chain, 6 draft tokens", draft_tokens=6, slots=(4,), num_v_heads=1),
    Case("chain, 7 draft tokens", draft_tokens=7, slots=(0,), num_v_heads=1),
    Case("chain, 8 draft tokens", draft_tokens=8, slots=(2,), num_v_heads=1),
    Case("chain, T below the allocated steps", draft_tokens=2, buffer_steps=4, windows="dense"),
    Case("chain, padded graph rows", slots=(2, 3, -1, -1), live=2),
    Case("chain, padded row with tokens", slots=(2, -1), draft_tokens=3),
    Case("chain, rows inside a wider buffer", row_padding=7, draft_tokens=3),
    Case("chain, many requests", draft_tokens=2, slots=_scattered(MANY)),
    Case("chain, three layers", layers=3, draft_tokens=2, slots=(1,), num_v_heads=1),
    Case("tree, dense windows", tree=True, windows="dense"),
    Case("tree, padded graph rows", tree=True, windows="dense", slots=(1, 2, -1), live=2),
    Case("fold ring", protocol=_FOLD, ring_steps=4),
    Case("fold ring, padded graph rows", protocol=_FOLD, ring_steps=4, slots=(3, -1), live=1),
    Case("fold ring, T beyond the ring", protocol=_FOLD, ring_steps=4, draft_tokens=6, slots=(1,)),
    Case("fold ring, many requests", protocol=_FOLD, ring_steps=2, draft_tokens=2, slots=_scattered(MANY)),
    Case("fold ring, ratio 3", protocol=_FOLD, ring_steps=3, draft_tokens=3, num_v_heads=3, slots=(0,)),
    Case("circular ring", protocol=_CIRCULAR, draft_tokens=4),
    Case("circular ring, padded graph rows", protocol=_CIRCULAR, slots=(1, -1), live=1, draft_tokens=3),
    Case("circular ring, ratio 3, dense windows", protocol=_CIRCULAR, num_v_heads=3, draft_tokens=2, windows="dense"),
    Case("circular ring, a full ring", protocol=_CIRCULAR, num_v_heads=1, draft_tokens=2, slots=(0, 1, 2)),
    Case("Qwen3.5 layer", model="qwen3_5", num_k_heads=2, num_v_heads=4, draft_tokens=2),
    Case("Qwen3.5 layer, dense windows, ratio 1", model="qwen3_5", num_v_heads=1, windows="dense", draft_tokens=3),
    Case("Qwen3.5 layer, ratio 3", model="qwen3_5", num_v_heads=3, draft_tokens=2),
    Case("Qwen3.5 layer, padded graph rows", model="qwen3_5", slots=(2, 3, -1), live=2, draft_tokens=2),
    Case("Qwen3.5 layer, one GEMM output", model="qwen3_5", row_padding=12, draft_tokens=2, strided_unpack=True),
    Case("Qwen3.5 layer, tree", model="qwen3_5", tree=True, windows="dense"),
    Case("Qwen3.5 layer, fold ring", model="qwen3_5", protocol=_FOLD, ring_steps=4),
    Case("Qwen3.5 layer, circular ring", model="qwen3_5", protocol=_CIRCULAR),
    Case("Qwen3.5 layer, one launch", model="qwen3_5", draft_tokens=2, one_launch=True),
    Case(
        "chain, one launch, padded row", slots=(2, -1), num_v_heads=1, draft_tokens=3, windows="dense", one_launch=True
    ),
    Case("fold ring, one launch", protocol=_FOLD, ring_steps=2, draft_tokens=2, slots=(1,), bias=True, one_launch=True),
    Case("Qwen3-Next layer, one launch", model="qwen3_next", draft_tokens=2, slots=(2,), one_launch=True),
    Case("Qwen3-Next layer", model="qwen3_next", num_k_heads=2, num_v_heads=4, draft_tokens=2),
    Case("Qwen3-Next layer, ratio 4", model="qwen3_next", num_v_heads=4, draft_tokens=2, slots=(1,)),
    Case("Qwen3-Next layer, fold ring", model="qwen3_next", protocol=_FOLD, ring_steps=4, draft_tokens=3),
    Case("Qwen3-Next layer, circular ring", model="qwen3_next", protocol=_CIRCULAR, draft_tokens=3),
)


def cases_for(
    protocols: tuple[Protocol, ...], strided_unpack: bool, overlapping_windows: bool = True
) -> tuple[Case, ...]:
    """The cases that a release can run: with these protocols, and an unpack that takes row strides or does not.

    All of them have dense windows when the release has no ``overlapping_windows``.
    """
    cases = [case for case in CASES if case.protocol in protocols and (strided_unpack or not case.strided_unpack)]
    return tuple(case if overlapping_windows else replace(case, windows="dense") for case in cases)


def on_gpu(case: Case) -> tuple[Case, ...]:
    """The same case with bfloat16 activations, four times as many heads and both state dtypes of production.

    For a case with many requests there are several, see ``MANY_ON_GPU``, with a ring as long as the draft.
    """
    if case.num_requests == MANY:
        variants = [
            replace(
                case,
                name=f"{case.name}: {requests} of {draft_tokens} tokens, {key_heads} and {value_heads} heads",
                slots=_scattered(requests),
                draft_tokens=draft_tokens,
                ring_steps=draft_tokens,
                num_k_heads=key_heads,
                num_v_heads=value_heads,
            )
            for requests, draft_tokens, key_heads, value_heads in MANY_ON_GPU
        ]
    else:
        variants = [replace(case, num_k_heads=case.num_k_heads * 4, num_v_heads=case.num_v_heads * 4)]
    activations = "bfloat16" if case.activation_dtype == "float16" else case.activation_dtype
    states = ("float32", "bfloat16") if case.state_dtype == "float32" else ("bfloat16",)
    return tuple(
        replace(variant, name=f"{variant.name} [state {state}]", activation_dtype=activations, state_dtype=state)
        for variant in variants
        for state in states
    )
