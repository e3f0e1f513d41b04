"""One call of the backend's forward -> CallShape, or a Decision that says why the call is not ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from sglang_gdn_zerocopy.records import CallShape, Consumer, Decision, Protocol, Release, Route
from sglang_gdn_zerocopy.upstream.origin import is_stocks
from sglang_gdn_zerocopy.upstream.releases import (
    BACKEND_CLASS,
    CACHE_RESULTS,
    CACHE_STATE,
    CONV_ARGUMENTS,
    CONV_KEYWORDS,
    COPY_LIMIT,
    FLASHINFER_VERIFY_CLASS,
    FORWARD_ARGUMENTS,
    FORWARD_CONTEXT_MODULE,
    PATH,
    POOL_CURSORS,
    RECURRENCE_FIXED,
    RECURRENCE_INPUTS,
    RECURRENCE_RING,
    RECURRENCE_SNAPSHOTS,
    TRITON_VERIFY_CLASS,
)

# Of the conv's keyword arguments, its tensors.
_CONV_INDICES = ("conv_state_indices", "intermediate_conv_window", "intermediate_state_indices")
_RETRIEVE = tuple(name for name in sorted(CONV_KEYWORDS) if name.startswith("retrieve_"))
_CONV_KNOWN = CONV_KEYWORDS.union(CONV_ARGUMENTS)
_RECURRENCE_KNOWN = frozenset(
    {
        *RECURRENCE_INPUTS,
        *RECURRENCE_FIXED,
        *RECURRENCE_RING,
        *RECURRENCE_SNAPSHOTS,
        "cache_ring",
        "cache_steps",
    }
)
_RECURRENCE_FIXED = tuple(RECURRENCE_FIXED.items())
# Looked up once: in Python 3.11 an enum's member costs more than a global.
_FOLD_RING, _CIRCULAR_RING, _SNAPSHOTS = Protocol.FOLD_RING, Protocol.CIRCULAR_RING, Protocol.SNAPSHOTS
_TRITON = Consumer.TRITON
_LAYER, _BATCH, _PACKED = FORWARD_ARGUMENTS[:3]
_DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


def is_target_verify(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's mode flag says target verify. The flag decides, never the shape."""
    batch = args[1] if len(args) > 1 else kwargs["forward_batch"]
    return bool(batch.forward_mode.is_target_verify())


class ConvCall(NamedTuple):
    """What one call of stock's conv works on, see :func:`sglang_gdn_zerocopy.kernels.conv_update.conv_update`.

    ``x`` [N, D, T]: as stock passes it. ``rows`` [N * T, D]: the packed rows that it is a transposed view of.
    """

    x: torch.Tensor
    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool
    conv_state: torch.Tensor
    slots: torch.Tensor
    windows: torch.Tensor
    window_rows: torch.Tensor


def read_conv_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], packed: torch.Tensor | None = None) -> ConvCall:
    """The conv call of a target-verify chain from stock's arguments; ``rows`` is ``packed`` where ``x`` is its view.

    Raises ``ValueError`` for a call with other arguments, for a tree, and for anything that is not there.
    """
    if len(args) > len(CONV_ARGUMENTS) or not _CONV_KNOWN.issuperset(kwargs):
        strange = sorted(kwargs.keys() - _CONV_KNOWN)
        raise ValueError(f"stock's conv was called with {', '.join(strange) or 'more arguments'}")
    if len(args) == len(CONV_ARGUMENTS):
        known = kwargs
        x, conv_state, weight, bias, activation = args
    else:
        known = dict(zip(CONV_ARGUMENTS, args, strict=False)) | dict(kwargs)
        x, conv_state, weight, bias, activation = _given(known, CONV_ARGUMENTS)
    for name in _RETRIEVE:
        if known.get(name) is not None:
            raise ValueError("stock's conv was called for a draft tree")
    slots, windows, window_rows = _given(known, _CONV_INDICES)
    for tensor in (x, weight, conv_state, slots, windows, window_rows):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError("stock's conv was called without one of its tensors")
    if x.dim() != 3:
        raise ValueError("stock's conv was called without one of its tensors")
    rows = packed
    if rows is None or not _is_transposed_view(x, rows):
        rows = x.transpose(1, 2).view(-1, x.shape[1])
    return ConvCall(x, rows, weight, bias, _is_silu(activation), conv_state, slots, windows, window_rows)


def _given(known: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple([known.get(name) for name in names])


def _is_transposed_view(x: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether ``x`` [N, D, T] is all of the dense ``packed`` [N * T, D]."""
    requests, dim, tokens = x.shape
    return (
        x.data_ptr() == packed.data_ptr()
        and x.stride() == (tokens * dim, 1, dim)
        and packed.shape == (requests * tokens, dim)
        and x.dtype == packed.dtype
    )


def stock_conv_with(conv: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Stock's conv as a function of (rows [N * T, D], T, weight, bias, silu, conv state, slots, windows, window rows)
    that returns packed QKV [N * T, D]."""

    def call(rows: torch.Tensor, draft_tokens: int, *tensors: Any) -> torch.Tensor:
        weight, bias, silu, conv_state, slots, windows, window_rows = tensors
        x = rows.view(-1, draft_tokens, rows.shape[1]).transpose(1, 2)
        indices = dict(zip(_CONV_INDICES, (slots, windows, window_rows), strict=True))
        output: torch.Tensor = conv(x, conv_state, weight, bias, "silu" if silu else None, **indices)
        return output.transpose(1, 2).view(rows.shape[0], -1)

    return call


class RecurrenceCall(NamedTuple):
    """What one call of stock's recurrence works on, see ``kernels.recurrent_verify``.

    ``inputs``: its first ten arguments, in order. ``kept``: the snapshots' two tensors or the ring's four.
    """

    inputs: tuple[torch.Tensor, ...]
    kept: tuple[torch.Tensor, ...]


def read_recurrence_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecurrenceCall:
    """The recurrence of a target-verify chain from stock's arguments.

    Raises ``ValueError`` for a call with other arguments or other values of those that stock keeps fixed.
    """
    if args or not _RECURRENCE_KNOWN.issuperset(kwargs):
        strange = sorted(kwargs.keys() - _RECURRENCE_KNOWN)
        raise ValueError(f"stock's recurrence was called with {', '.join(strange) or 'positional arguments'}")
    for name, value in _RECURRENCE_FIXED:
        given = kwargs.get(name)
        if given is not value and given != value:
            raise ValueError(f"stock's recurrence was called with {name}={given!r}")
    names = RECURRENCE_RING if kwargs.get("cache_ring") else RECURRENCE_SNAPSHOTS
    inputs, kept = _given(kwargs, RECURRENCE_INPUTS), _given(kwargs, names)
    for tensor in (*inputs, *kept):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError("stock's recurrence was called without one of its tensors")
    return RecurrenceCall(inputs, kept)


def stock_recurrence_with(recurrence: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Stock's recurrence as a function of (inputs, kept), see :class:`RecurrenceCall`, that returns the output."""

    def call(inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> torch.Tensor:
        named: dict[str, Any] = dict(zip(RECURRENCE_INPUTS, inputs, strict=True)) | RECURRENCE_FIXED
        if len(kept) == len(RECURRENCE_SNAPSHOTS):
            named |= dict(zip(RECURRENCE_SNAPSHOTS, kept, strict=True)) | {"cache_steps": kept[0].shape[1]}
        else:
            named |= dict(zip(RECURRENCE_RING, kept, strict=True)) | {"cache_ring": True}
        output: torch.Tensor = recurrence(**named)
        return output

    return call


def _is_silu(activation: Any) -> bool:
    return activation in ("silu", "swish") or activation is True


def conv_buffers(backend: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The conv state and the intermediate conv windows of ``layer`` in ``backend``'s pool."""
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    return cache.conv[0], cache.intermediate_conv_window[0]


def conv_parameters(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Weight [D, W], bias [D] or None, and whether SiLU follows, of ``layer``'s conv."""
    return layer.conv_weights, layer.bias, _is_silu(layer.activation)


def packed_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The packed QKV in the arguments of the backend's forward."""
    return args[2] if len(args) > 2 else kwargs[FORWARD_ARGUMENTS[2]]


CONV_STATES = frozenset({"conv[0]"})
"""The conv state among the names of :class:`VerifyBuffers`."""


class VerifyBuffers(NamedTuple):
    """The tensors behind one target-verify call of a layer, see :class:`sglang_gdn_zerocopy.shadow.Touched`."""

    state: torch.Tensor
    kept: dict[str, torch.Tensor]
    results: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    slots: torch.Tensor
    starts: torch.Tensor


def verify_buffers(backend: Any, layer: Any, num_requests: int) -> VerifyBuffers:
    """All that a target verify of ``layer`` may write, and what it reads beside the rows that come in."""
    pool = backend.req_to_token_pool.mamba_pool
    cache = vars(backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id))
    kept: dict[str, torch.Tensor] = {}
    results: dict[str, torch.Tensor] = {}
    for name, value in cache.items():
        several = isinstance(value, (list, tuple))
        for index, tensor in enumerate(value if several else (value,)):
            if isinstance(tensor, torch.Tensor) and name != CACHE_STATE:
                into = results if name in CACHE_RESULTS else kept
                into[f"{name}[{index}]" if several else name] = tensor
    for name in POOL_CURSORS:
        # Two names may stand for one tensor.
        cursor = getattr(pool, name, None)
        if isinstance(cursor, torch.Tensor) and all(cursor is not known for known in kept.values()):
            kept[name] = cursor
    named = {"weight": layer.conv_weights, "bias": layer.bias, "A_log": layer.A_log, "dt_bias": layer.dt_bias}
    metadata = backend.forward_metadata
    return VerifyBuffers(
        state=cache[CACHE_STATE],
        kept=kept,
        results=results,
        parameters={name: tensor.detach() for name, tensor in named.items() if tensor is not None},
        slots=metadata.mamba_cache_indices[:num_requests],
        starts=metadata.query_start_loc,
    )


def rows_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Packed QKV and the gates in the arguments of the backend's forward."""
    known = dict(zip(FORWARD_ARGUMENTS, args, strict=False)) | dict(kwargs)
    return {name: known[name] for name in FORWARD_ARGUMENTS[2:]}


def layer_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The attention layer in the arguments of the backend's forward."""
    return args[0] if args else kwargs[FORWARD_ARGUMENTS[0]]


class StockPath:
    """The way from a model's layer to the backend, as stock has it: no other code may see packed QKV on it."""

    def __init__(self) -> None:
        # A class, its members as they are at any time, and those functions of it that are stock's own.
        places = [_own_functions(*place) for place in PATH]
        self._own = [(kind, vars(kind), tuple(functions.items())) for kind, functions in places]

    def backend_of(self, layer: Any) -> Any:
        """The GDN backend that ``layer``'s call will reach, None when someone else's code may stand in between."""
        hybrid = sys.modules[FORWARD_CONTEXT_MODULE].get_attn_backend()
        for thing, (kind, members, functions) in zip((layer, hybrid), self._own, strict=True):
            if type(thing) is not kind or not functions:
                return None
            own = vars(thing)
            for name, function in functions:
                if members.get(name) is not function or name in own:
                    return None
        return hybrid.linear_attn_backend


def _own_functions(module_name: str, class_name: str, names: tuple[str, ...]) -> tuple[type, dict[str, Any]]:
    """A class and those functions of it, none when one of them is not of the module's own file."""
    module = sys.modules[module_name]
    kind = getattr(module, class_name)
    functions = {name: vars(kind).get(name) for name in names}
    file = module.__file__
    if file is None or not all(is_stocks(function, file) for function in functions.values()):
        return kind, {}
    return kind, functions


def layer_of(model_layer: Any) -> Any:
    """The attention layer that a model's GDN layer calls with its packed QKV."""
    return model_layer.attn


def batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The batch in the arguments of a model layer's forward."""
    return args[1] if len(args) > 1 else kwargs["forward_batch"]


def _not_ours(reason: str) -> Decision:
    return Decision(Route.UPSTREAM, reason)


class Adapter:
    """Reads the live objects of one imported backend module. Keeps no state between calls."""

    def __init__(self, module: ModuleType, release: Release, bundled_kernels: bool, bundled_recurrence: bool) -> None:
        self._module = module
        self._bundled_kernels = bundled_kernels
        self._bundled_recurrence = bundled_kernels and bundled_recurrence
        self._backend_class = getattr(module, BACKEND_CLASS)
        self._triton_class = getattr(module, TRITON_VERIFY_CLASS)
        self._release = release
        self._protocols = release.protocols
        self._copies = release.copies
        self._known_kwargs = release.call_kwargs | set(FORWARD_ARGUMENTS)

    def knows(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether all keyword arguments of a call of the backend's forward are known."""
        return self._known_kwargs.issuperset(kwargs)

    def __call__(self, backend: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallShape | Decision:
        """The shape of a target-verify call on ``backend`` (the bound instance), or why it is not ours.

        ``args`` and ``kwargs`` are what the caller passed; nothing in them is written.
        """
        if not self.knows(kwargs):
            return _not_ours(f"unknown argument {', '.join(sorted(kwargs.keys() - self._known_kwargs))}")
        if args:
            layer, batch, mixed_qkv = layer_in(args, kwargs), batch_of(args, kwargs), packed_of(args, kwargs)
        else:
            layer, batch, mixed_qkv = kwargs[_LAYER], kwargs[_BATCH], kwargs[_PACKED]
        size = mixed_qkv.shape if isinstance(mixed_qkv, torch.Tensor) else ()
        if len(size) != 2:
            return _not_ours("mixed_qkv is not one tensor of shape [rows, qkv_dim]")
        return self.shape_of(backend, layer, batch, size[0], size[1], mixed_qkv.dtype)

    def shape_of(
        self, backend: Any, layer: Any, batch: Any, rows: int, qkv_dim: int, dtype: torch.dtype
    ) -> CallShape | Decision:
        """The same from the sizes of packed QKV ``[rows, qkv_dim]``, which need not exist yet."""
        if type(backend) is not self._backend_class:
            return _not_ours(f"{type(backend).__name__} is not {BACKEND_CLASS} itself")
        if getattr(backend, "mis_metadata", None) is not None:
            return _not_ours("multi-item scoring is active")
        spec_info = batch.spec_info
        draft_tokens = getattr(spec_info, "draft_token_num", None)
        if not isinstance(draft_tokens, int) or draft_tokens < 1:
            return _not_ours(f"spec_info has draft_token_num {draft_tokens!r}")
        if getattr(spec_info, "ragged_verify_layout", None) is not None:
            return _not_ours("a ragged verify layout is set")
        if rows == 0 or rows % draft_tokens:
            return _not_ours(f"{rows} rows are no whole number of requests of {draft_tokens} draft tokens")
        if qkv_dim != layer.q_dim + layer.k_dim + layer.v_dim or layer.num_q_heads != layer.num_k_heads:
            return _not_ours(f"mixed_qkv is {qkv_dim} wide, which is not the layer's packed QKV")
        pool = backend.req_to_token_pool.mamba_pool
        cache = pool.mamba_cache
        protocol = _protocol(pool, cache)
        if protocol not in self._protocols:
            return _not_ours(f"{protocol.value} target verify is untested on SGLang {self._release.version}")
        tree = backend.forward_metadata.retrieve_parent_token is not None
        state_dtype = cache.temporal.dtype
        consumer, name = self._consumer(backend.kernel_dispatcher, protocol, tree, state_dtype, draft_tokens)
        # As the tuple that it is: by name it would take three times as long, and this runs once a layer and step.
        return tuple.__new__(
            CallShape,
            (
                layer.layer_id,
                protocol,
                consumer,
                name,
                tree,
                rows // draft_tokens,
                draft_tokens,
                layer.num_k_heads,
                layer.num_v_heads,
                layer.head_k_dim,
                layer.head_v_dim,
                qkv_dim,
                getattr(self._module, COPY_LIMIT) if self._copies else 0,
                _DTYPE_NAMES.get(dtype, "other"),
                _DTYPE_NAMES.get(state_dtype, "other"),
                self._bundled_kernels,
                self._bundled_recurrence,
            ),
        )

    def _consumer(
        self, dispatcher: Any, protocol: Protocol, tree: bool, state_dtype: torch.dtype, draft_tokens: int
    ) -> tuple[Consumer, str]:
        if protocol is _FOLD_RING:
            # Stock's own test for the CuTe DSL ring kernel.
            if dispatcher.verify_kernel_is_flashinfer and state_dtype is torch.bfloat16 and draft_tokens >= 3:
                return Consumer.CUTEDSL, "gated_delta_rule_mtp"
            return _TRITON, "fused_sigmoid_gating_delta_rule_update"
        if protocol is _CIRCULAR_RING:
            return _TRITON, "gdn_replayssm_spec_decode"
        kernel = dispatcher.verify_kernel
        if tree:
            # Releases before 0.5.16 have no kernel of their own for trees.
            kernel = getattr(dispatcher, "tree_verify_kernel", kernel)
        if type(kernel) is self._triton_class:
            return _TRITON, TRITON_VERIFY_CLASS
        name = type(kernel).__name__
        return (Consumer.FLASHINFER if name == FLASHINFER_VERIFY_CLASS else Consumer.UNKNOWN), name


def _protocol(pool: Any, cache: Any) -> Protocol:
    """Stock's order of tests: fold ring, circular ring, else snapshots."""
    if not getattr(pool, "replayssm_is_kda", False):
        if getattr(cache, "replayssm_rawv", None) is not None and getattr(pool, "replayssm_spec_fold", False):
            return _FOLD_RING
        if getattr(cache, "replayssm_d", None) is not None and getattr(pool, "replayssm_cache_base", None) is not None:
            return _CIRCULAR_RING
    return _SNAPSHOTS
