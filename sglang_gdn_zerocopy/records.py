"""The nouns that the stages hand to each other. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class _Word(str, Enum):
    # Hashed once a layer and step: as the string that it is, not by Enum's Python.
    __hash__ = str.__hash__


class Route(_Word):
    """What happens to one call of the backend's forward."""

    UPSTREAM = "upstream"
    VIEWS = "views"
    FUSED_CONV = "fused conv"
    BUNDLED = "bundled conv and recurrence"


class Consumer(_Word):
    """The kernel family that will read Q, K and V in this call."""

    TRITON = "triton"
    FLASHINFER = "flashinfer"
    CUTEDSL = "cutedsl"
    UNKNOWN = "unknown"


class Protocol(_Word):
    """How target verify keeps what a later commit needs."""

    SNAPSHOTS = "snapshots"
    FOLD_RING = "fold ring"
    CIRCULAR_RING = "circular ring"


class CallShape(NamedTuple):
    """What a route policy sees of one target-verify call: sizes and names, no tensors.

    ``num_requests`` x ``draft_tokens`` rows enter the layer. Head counts are per rank. ``state_dtype`` and
    ``activation_dtype`` are torch's names without the prefix ("bfloat16"). ``copy_limit`` is the widest packed
    QKV (in elements) that stock copies; wider rows already reach the consumer as views, and 0 says that the release
    copies none. ``bundled_kernels``: the bundled kernels may be used in this process; ``bundled_recurrence``: the
    recurrence too.
    """

    layer_id: int
    protocol: Protocol
    consumer: Consumer
    consumer_name: str
    tree: bool
    num_requests: int
    draft_tokens: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    qkv_dim: int
    copy_limit: int
    activation_dtype: str
    state_dtype: str
    bundled_kernels: bool
    bundled_recurrence: bool


class ModelSite(NamedTuple):
    """Where a model's GDN layer unpacks its projection: module, layer class, unpack function of that module, and
    whether the projection interleaves q, k, v and z by key head."""

    module: str
    layer_class: str
    unpack_function: str
    interleaved: bool


class Decision(NamedTuple):
    """A route and the sentence that explains it."""

    route: Route
    reason: str


@dataclass(frozen=True)
class Release:
    """One supported release, as data.

    ``copies``: stock's target verify copies packed QKV into three tensors. ``protocols``: what its target verify
    can run. ``call_kwargs``: keyword arguments that SGLang passes beside the five named ones. ``fingerprints``:
    path inside the sglang package -> qualified name -> fingerprint of that definition; ``kernel_fingerprints``: the
    same for what only the bundled kernels rely on. ``reciprocal_norm``: its recurrence normalises q and k as
    x * (1 / norm), not x / norm.
    """

    version: str
    copies: bool
    protocols: tuple[Protocol, ...]
    call_kwargs: frozenset[str]
    fingerprints: Mapping[str, Mapping[str, str]]
    kernel_fingerprints: Mapping[str, Mapping[str, str]]
    reciprocal_norm: bool


class Verdict(str, Enum):
    """The outcome of looking at an imported SGLang."""

    SUPPORTED = "supported"
    UNVERIFIED = "unverified"
    BUILT_IN = "built in"
    NOT_APPLICABLE = "not applicable"
    DECLINED = "declined"


@dataclass(frozen=True)
class ProbeReport:
    """What the probe found. ``reason`` is a sentence that names the offending value; ``differs`` the definitions
    whose body is not the release's own; ``kernels_off`` says why the bundled kernels may not be used, empty when they
    may."""

    verdict: Verdict
    reason: str
    version: str = ""
    release: Release | None = None
    differs: tuple[str, ...] = field(default=())
    kernels_off: str = ""

    @property
    def patchable(self) -> bool:
        """Whether the overlay may patch this build."""
        return self.verdict in (Verdict.SUPPORTED, Verdict.UNVERIFIED)
