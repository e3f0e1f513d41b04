"""Stage 4, the wrapper bodies. Upstream's forward stays the conductor.

The wrapped forward of the backend decides a call's route and runs upstream's own body. The module-level callables that
this body uses are wrapped once; each looks at the plan of the call that it runs in and, without one, does what it
always did. A model's unpack comes before the backend is asked, so it is put off, not skipped: it hands out the tensors
that the conv launch will fill, and whoever turns out not to be ours finds them filled by stock's unpack instead. In the
same way the conv of a small batch waits for the recurrence, and both become one launch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from sglang_gdn_zerocopy.kernels import conv_verify as together
from sglang_gdn_zerocopy.kernels.conv_update import Unpack, conv_update
from sglang_gdn_zerocopy.kernels.conv_verify import conv_verify
from sglang_gdn_zerocopy.kernels.packed_views import packed_views
from sglang_gdn_zerocopy.kernels.recurrent_verify import Config, Inputs, kept_as, recurrent_verify
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import CallShape, Decision, ModelSite, Protocol, Release, Route
from sglang_gdn_zerocopy.routing.manager import RouteManager
from sglang_gdn_zerocopy.self_test.conv import ConvShape, conv_difference, conv_shape
from sglang_gdn_zerocopy.self_test.memo import SelfTest
from sglang_gdn_zerocopy.self_test.one_launch import OneLaunchShape, one_launch_difference
from sglang_gdn_zerocopy.self_test.recurrence import recurrence_difference, recurrence_shape
from sglang_gdn_zerocopy.shadow import Shadow, Touched
from sglang_gdn_zerocopy.upstream import adapter, patching
from sglang_gdn_zerocopy.upstream.probe import FORWARD
from sglang_gdn_zerocopy.upstream.releases import (
    BACKEND_CLASS,
    CONV_FUNCTION,
    COPY_FUNCTION,
    RECURRENCE_FUNCTION,
    TRITON_VERIFY_CLASS,
)


class PutOff:
    """One projection whose unpack was put off. ``packed`` and the tensors of ``unpack`` are handed out unwritten."""

    def __init__(
        self, x: torch.Tensor, packed: torch.Tensor, unpack: Unpack, stock: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.x = x
        self.packed = packed
        self.unpack = unpack
        self.written = False
        # Stock's unpack and what it was called with.
        self.stock_function = stock
        self._args = args

    def write(self) -> None:
        """Fill the tensors that were handed out with the results of stock's unpack, unless that is done."""
        if not self.written:
            results = self.stock_function(*self._args)
            for mine, theirs in zip((self.packed, self.unpack.z, self.unpack.b, self.unpack.a), results, strict=True):
                mine.copy_(theirs)
            self.written = True

    def write_again(self) -> None:
        """Fill them with the results of stock's unpack, whoever filled them before."""
        self.written = False
        self.write()


@dataclass
class _LayerCall:
    """A model layer's forward that is running in a target verify."""

    layer: Any
    batch: Any
    put_off: PutOff | None = None


class _WaitingConv(NamedTuple):
    """A conv that its recurrence may take along. ``packed`` [rows, D] was handed out unwritten; ``now`` fills it."""

    call: adapter.ConvCall
    packed: torch.Tensor
    now: Callable[[], Any]


class _Plan:
    """What was decided for the backend's forward that is running."""

    __slots__ = ("put_off", "route", "shape", "together", "waiting")

    def __init__(self, shape: CallShape, route: Route, put_off: PutOff | None) -> None:
        self.shape = shape
        self.route = route
        self.put_off = put_off
        self.waiting: _WaitingConv | None = None
        # Whether conv and recurrence were one launch, which leaves the conv state to the commit.
        self.together = False

    def conv_now(self) -> None:
        """Run the conv that waits, if one does: somebody is about to read packed QKV."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.now()


# What is counted where conv and recurrence were one launch.
TOGETHER = ("recurrence", "bundled, with the conv in one launch")
# Routes on which the bundled conv runs.
_FUSED = (Route.FUSED_CONV, Route.BUNDLED)

_STATE_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}

_PLAN: ContextVar[_Plan | None] = ContextVar("gdn_zerocopy_plan", default=None)
_LAYER_CALL: ContextVar[_LayerCall | None] = ContextVar("gdn_zerocopy_layer_call", default=None)


class Overlay:
    """The wrappers of one imported backend module. ``live`` off makes them pass everything through."""

    def __init__(
        self,
        module: ModuleType,
        release: Release,
        ledger: Ledger,
        bundled_kernels: bool,
        bundled_recurrence: bool,
        self_test: bool,
        shadow_every: int = 0,
        shadow_folder: str = "",
    ) -> None:
        self.live = True
        # Why this process stays with stock; empty while it does not.
        self.gave_up = ""
        self._one_launch = True
        self._shadow = Shadow(shadow_every, shadow_folder, ledger, self._give_up) if shadow_every else None
        self.bundled_kernels = bundled_kernels
        self.routes = RouteManager(ledger)
        self._adapt = adapter.Adapter(module, release, bundled_kernels, bundled_recurrence)
        self._ledger = ledger
        self._module = module
        self._release = release
        self._self_test = SelfTest(ledger, self_test)
        self._stock_conv = adapter.stock_conv_with(getattr(module, CONV_FUNCTION))
        self._path: adapter.StockPath | None = None
        self._backend_class = getattr(module, BACKEND_CLASS)
        self._nobody_else = (
            patching.Outermost(self._backend_class, FORWARD),
            patching.Outermost(module, CONV_FUNCTION),
        )
        # Whoever reads packed QKV behind the conv, by the names that stock's forward uses.
        places = (*self._recurrence_places(), (module, COPY_FUNCTION)) if bundled_recurrence else ()
        self._readers = [patching.Outermost(*place) for place in places[: None if release.copies else -1]]

    def kernels(self) -> list[dict[str, str]]:
        """The bundled kernels by shape: how each is compiled and what its self-test said."""
        return self._self_test.as_rows()

    def patches(self) -> list[patching.Patch]:
        """What to put on the backend's module: the forward, and what it calls that a route replaces."""
        patches = [patching.Patch(self._backend_class, FORWARD, self.forward_extend)]
        if self._release.copies:
            patches.append(patching.Patch(self._module, COPY_FUNCTION, self.copy))
        if self.bundled_kernels:
            patches.append(patching.Patch(self._module, CONV_FUNCTION, self.conv))
            patches += [patching.Patch(*place, self.recurrence) for place in self._recurrence_places()]
        return patches

    def _recurrence_places(self) -> tuple[tuple[ModuleType, str], ...]:
        # The snapshots' kernel class holds the recurrence by name; the fold ring imports it at every call.
        holder = sys.modules[getattr(self._module, TRITON_VERIFY_CLASS).__module__]
        recurrence = getattr(holder, RECURRENCE_FUNCTION)
        return tuple((owner, RECURRENCE_FUNCTION) for owner in (holder, sys.modules[recurrence.__module__]))

    def model_patches(self, module: ModuleType, site: ModelSite) -> list[patching.Patch]:
        """What to put on a model's module: its layer's forward and the unpack that this calls."""

        nobody_else = patching.Outermost(module, site.unpack_function)

        def unpack(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not nobody_else():
                return wrapped(*args, **kwargs)
            return self.unpack(wrapped, args, kwargs, site.interleaved)

        self._path = self._path or adapter.StockPath()
        return [
            patching.Patch(getattr(module, site.layer_class), "forward", self.layer_forward),
            patching.Patch(module, site.unpack_function, unpack),
        ]

    def forward_extend(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide, then run upstream's body with or without a plan, on identical objects."""
        # Under torch.compile's tracer nothing of ours may run: no lookups, no counting, no logging.
        if not self.live or torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        self._ledger.pulse()
        call = _LAYER_CALL.get()
        put_off = call.put_off if call is not None else None
        plan = self._plan(instance, args, kwargs, put_off)
        if put_off is not None and (plan is None or plan.put_off is not put_off):
            put_off.write()
        if plan is None:
            return wrapped(*args, **kwargs)
        if self._shadow is not None:
            return self._shadowed(self._shadow, plan, wrapped, instance, args, kwargs)
        return self._planned(plan, wrapped, args, kwargs)

    def _planned(self, plan: _Plan, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = _PLAN.set(plan)
        try:
            output = wrapped(*args, **kwargs)
        finally:
            _PLAN.reset(token)
        if plan.waiting is not None:
            self._one_launch = False
            plan.conv_now()
            self._ledger.declined(
                "a conv waited for a recurrence that did not come: some other code took its place; no one launch"
            )
        return output

    def _shadowed(
        self, shadow: Shadow, plan: _Plan, wrapped: Any, backend: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        put_off = plan.put_off
        touched = None
        try:
            rows = adapter.rows_of(args, kwargs)
            handed_out = {}
            if put_off is not None:
                rows = {"projection": put_off.x, "gates": put_off.unpack.ba}
                handed_out = {"z": put_off.unpack.z, "b": put_off.unpack.b, "a": put_off.unpack.a}
            if shadow.due(plan.shape.layer_id, next(iter(rows.values())).device):
                buffers = adapter.verify_buffers(backend, adapter.layer_in(args, kwargs), plan.shape.num_requests)
                touched = Touched(rows, *buffers)
        except Exception as error:
            self._ledger.failed("shadow", error)
        if touched is None:
            return self._planned(plan, wrapped, args, kwargs)

        def stock() -> Any:
            if put_off is not None:
                put_off.write_again()
            return wrapped(*args, **kwargs)

        facts = {name: str(getattr(value, "value", value)) for name, value in plan.shape._asdict().items()}
        facts |= {"release": self._release.version, "route": plan.route.value}
        ours = partial(self._planned, plan, wrapped, args, kwargs)

        def left_alone() -> frozenset[str]:
            return adapter.CONV_STATES if plan.together else frozenset()

        return shadow.run(plan.shape.layer_id, facts, touched, handed_out, ours, stock, left_alone)

    def _give_up(self, reason: str) -> None:
        """Stock from the next call on, for the rest of this process."""
        self.live = False
        self.gave_up = reason
        self._ledger.declined(f"{reason}; stock from here on, but for graphs captured before", logging.ERROR)

    def _plan(
        self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], put_off: PutOff | None
    ) -> _Plan | None:
        # Nothing has been written yet: whatever goes wrong here is counted and upstream takes the call.
        try:
            if not adapter.is_target_verify(args, kwargs):
                return None
            shape = self._adapt(instance, args, kwargs)
            if isinstance(shape, Decision):
                self._ledger.decided(None, shape)
                return None
            decision = self.routes.decide(shape)
            self._ledger.decided(shape.protocol, decision)
            if decision.route is Route.UPSTREAM:
                return None
            mine = put_off is not None and adapter.packed_of(args, kwargs) is put_off.packed
            return _Plan(shape, decision.route, put_off if mine and decision.route in _FUSED else None)
        except Exception as error:
            self._ledger.failed("forward", error)
            return None

    def _is_others(self, stage: str, wrapped: Any) -> bool:
        """Whether others were at a function of stock's before us: what they made of it is not ours to replace."""
        if patching.is_bare(wrapped):
            return False
        code = getattr(wrapped, "__code__", None)
        place = code.co_filename if code is not None else type(wrapped).__name__
        self._ledger.declined(f"the {stage} was hooked by code of {place} before us; left to it")
        return True

    def copy(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Upstream's copy of packed QKV; inside a planned call, views of it."""
        plan = _PLAN.get()
        if plan is None:
            return wrapped(*args, **kwargs)
        if self._is_others("copy", wrapped):
            plan.conv_now()
            return wrapped(*args, **kwargs)
        try:
            views = packed_views(*args, **kwargs)
        except Exception as error:
            self._ledger.failed("copy", error)
            plan.conv_now()
            return wrapped(*args, **kwargs)
        self._ledger.count("copy", "avoided")
        return views

    def conv(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Upstream's conv; inside a call planned for it, the bundled one, with the unpack that was put off."""
        plan = _PLAN.get()
        if plan is None or plan.route not in _FUSED or self._is_others("conv", wrapped):
            return wrapped(*args, **kwargs)
        # A launch raises before it is queued (a check, the compiler, the launcher), so nothing has been written.
        try:
            call = adapter.read_conv_call(args, kwargs)
            packed = plan.put_off.packed if plan.put_off is not None else self._empty_like(call.rows)
            if self._may_wait(plan, call):
                plan.waiting = _WaitingConv(
                    call, packed, partial(self._conv_late, plan, call, packed, wrapped, args, kwargs)
                )
                return self._as_conv_output(plan, packed)
        except Exception as error:
            self._ledger.failed("conv", error)
            return self._stock_conv_of(plan, wrapped, args, kwargs)
        return self._conv(plan, call, packed, wrapped, args, kwargs)

    def _conv(
        self,
        plan: _Plan,
        call: adapter.ConvCall,
        packed: torch.Tensor,
        wrapped: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The bundled conv, which writes ``packed``; where it may not or cannot run, stock's and what that returns."""
        try:
            if self._launch_conv(plan, call, packed):
                self._ledger.count("conv", "fused with the unpack" if plan.put_off is not None else "fused")
                return self._as_conv_output(plan, packed)
        except Exception as error:
            self._ledger.failed("conv", error)
        return self._stock_conv_of(plan, wrapped, args, kwargs)

    def _conv_late(
        self,
        plan: _Plan,
        call: adapter.ConvCall,
        packed: torch.Tensor,
        wrapped: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """As :meth:`_conv`, with the result in ``packed`` whoever computes it."""
        output = self._conv(plan, call, packed, wrapped, args, kwargs)
        handed_out = self._as_conv_output(plan, packed)
        if output.data_ptr() != handed_out.data_ptr() or output.stride() != handed_out.stride():
            handed_out.copy_(output)

    @staticmethod
    def _stock_conv_of(plan: _Plan, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.put_off is not None:
            plan.put_off.write()
        return wrapped(*args, **kwargs)

    @staticmethod
    def _empty_like(rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)

    @staticmethod
    def _as_conv_output(plan: _Plan, packed: torch.Tensor) -> torch.Tensor:
        """Packed rows as stock's conv returns them: [N, D, T]."""
        return packed.view(-1, plan.shape.draft_tokens, packed.shape[1]).transpose(1, 2)

    def _may_wait(self, plan: _Plan, call: adapter.ConvCall) -> bool:
        """Whether the conv may be left to the recurrence: one launch is the faster choice, and nobody else will read
        packed QKV."""
        shape = plan.shape
        if not self._one_launch or plan.route is not Route.BUNDLED or not self._readers:
            return False
        if self._choose_one_launch(shape, call.rows.device) is None:
            return False
        return all(place() for place in self._readers)

    def _launch_conv(self, plan: _Plan, call: adapter.ConvCall, packed: torch.Tensor) -> bool:
        put_off, draft_tokens = plan.put_off, plan.shape.draft_tokens
        x, unpack = (put_off.x, put_off.unpack) if put_off is not None else (call.rows, None)
        if put_off is None:
            shape = self._conv_shape_of(plan, call)
            if not self._self_test.passed(shape, lambda: conv_difference(shape, self._stock_conv)):
                return False
        conv_update(
            x,
            draft_tokens,
            call.weight,
            call.bias,
            call.silu,
            call.conv_state,
            call.slots,
            call.windows,
            call.window_rows,
            packed,
            unpack,
        )
        if put_off is not None:
            put_off.written = True
        return True

    @staticmethod
    def _conv_shape_of(plan: _Plan, call: adapter.ConvCall) -> ConvShape:
        put_off = plan.put_off
        x, unpack = (put_off.x, put_off.unpack) if put_off is not None else (call.rows, None)
        return conv_shape(
            plan.shape.num_requests,
            plan.shape.draft_tokens,
            x,
            call.weight,
            call.bias,
            call.silu,
            call.conv_state,
            call.windows,
            unpack,
        )

    def recurrence(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Upstream's recurrence; inside a call planned for it, the bundled one."""
        plan = _PLAN.get()
        if plan is None:
            return wrapped(*args, **kwargs)
        if plan.route is not Route.BUNDLED or self._is_others("recurrence", wrapped):
            plan.conv_now()
            return wrapped(*args, **kwargs)
        # As with the conv: an exception comes before the launch.
        output = None
        if plan.waiting is not None:
            try:
                output = self._launch_both(plan, plan.waiting, wrapped, args, kwargs)
            except Exception as error:
                self._ledger.failed("one launch", error)
            if output is not None:
                self._ledger.count(*TOGETHER)
                return output
            plan.conv_now()
        try:
            output = self._launch_recurrence(plan, wrapped, args, kwargs)
        except Exception as error:
            self._ledger.failed("recurrence", error)
        if output is None:
            return wrapped(*args, **kwargs)
        self._ledger.count("recurrence", "bundled")
        return output

    def _launch_recurrence(
        self, plan: _Plan, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        call = adapter.read_recurrence_call(args, kwargs)
        inputs, kept = Inputs(*call.inputs), kept_as(call.kept)
        reciprocal = self._release.reciprocal_norm
        shape = recurrence_shape(plan.shape.draft_tokens, inputs, kept, reciprocal)
        stock_call = adapter.stock_recurrence_with(stock)
        if not self._self_test.passed(shape, lambda: recurrence_difference(shape, stock_call)):
            return None
        return recurrent_verify(*inputs, kept, reciprocal_norm=reciprocal, overlap=shape.overlap)

    def _choose_one_launch(self, shape: CallShape, device: torch.device) -> Config | None:
        protocol = "ring" if shape.protocol is Protocol.FOLD_RING else "snapshots"
        heads = shape.num_requests * shape.num_v_heads
        state_dtype = _STATE_DTYPES.get(shape.state_dtype)
        return together.choose(protocol, state_dtype, heads, shape.draft_tokens, device) if state_dtype else None

    def _launch_both(
        self,
        plan: _Plan,
        waiting: _WaitingConv,
        stock: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """Conv and recurrence in one launch, or None where that may not be."""
        call, put_off = waiting.call, plan.put_off
        read = adapter.read_recurrence_call(args, kwargs)
        inputs, kept = Inputs(*read.inputs), kept_as(read.kept)
        if not _reads_all_of(waiting.packed, inputs) or not _same(inputs.slots, call.slots):
            return None
        if put_off is not None and not (_same(inputs.a, put_off.unpack.a) and _same(inputs.b, put_off.unpack.b)):
            return None
        config = self._choose_one_launch(plan.shape, inputs.state.device)
        if config is None:
            return None
        reciprocal = self._release.reciprocal_norm
        x, unpack, unpack_stock = call.rows, None, None
        if put_off is not None:
            x, unpack, unpack_stock = put_off.x, put_off.unpack, put_off.stock_function
        shape = OneLaunchShape(
            config,
            self._conv_shape_of(plan, call),
            recurrence_shape(plan.shape.draft_tokens, inputs, kept, reciprocal),
        )
        stock_call = adapter.stock_recurrence_with(stock)
        if not self._self_test.passed(
            shape, lambda: one_launch_difference(shape, self._stock_conv, unpack_stock, stock_call)
        ):
            return None
        output = conv_verify(
            x,
            plan.shape.draft_tokens,
            call.weight,
            call.bias,
            call.silu,
            call.conv_state,
            call.slots,
            call.windows,
            call.window_rows,
            unpack,
            None if unpack is not None else inputs.a,
            None if unpack is not None else inputs.b,
            inputs.a_log,
            inputs.dt_bias,
            inputs.state,
            inputs.starts,
            kept,
            reciprocal_norm=reciprocal,
            overlap=shape.recurrence.overlap,
            config=config,
        )
        plan.waiting = None
        plan.together = True
        if put_off is not None:
            put_off.written = True
        return output

    def layer_forward(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A model's GDN layer; in a target verify its unpack may be put off."""
        if not self.live or torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        try:
            batch = adapter.batch_of(args, kwargs)
            call = _LayerCall(adapter.layer_of(instance), batch) if adapter.is_target_verify(args, kwargs) else None
        except Exception as error:
            self._ledger.failed("layer", error)
            call = None
        token = _LAYER_CALL.set(call)
        try:
            output = wrapped(*args, **kwargs)
        finally:
            _LAYER_CALL.reset(token)
        if call is not None and call.put_off is not None and not call.put_off.written:
            self._path = None
            self._ledger.declined(
                "a projection was never unpacked: the backend's forward was not reached; unpack left to stock"
            )
        return output

    def unpack(self, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any], interleaved: bool) -> Any:
        """Upstream's unpack of a projection; put off when the conv launch will do it."""
        call = _LAYER_CALL.get()
        if call is None or call.put_off is not None or kwargs:
            return wrapped(*args, **kwargs)
        try:
            call.put_off = self._put_off(call, wrapped, args, interleaved)
        except Exception as error:
            self._ledger.failed("unpack", error)
        if call.put_off is None:
            return wrapped(*args, **kwargs)
        unpack = call.put_off.unpack
        return call.put_off.packed, unpack.z, unpack.b, unpack.a

    def _sees_it_first(self, backend: Any) -> bool:
        """Whether no code of others can look at packed QKV before our conv has written it."""
        own = type(backend) is self._backend_class and FORWARD not in vars(backend)
        return own and all(place() for place in self._nobody_else)

    def _put_off(
        self, call: _LayerCall, stock: Callable[..., Any], args: tuple[Any, ...], interleaved: bool
    ) -> PutOff | None:
        x, ba, num_k_heads, num_v_heads, head_k_dim, head_v_dim = args
        layer, rows = call.layer, x.shape[0]
        qkv_dim = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
        backend = self._path.backend_of(layer) if self._path is not None else None
        if backend is None or not self._sees_it_first(backend):
            self._ledger.count("unpack", "left to stock: other code stands between the model and the backend")
            return None
        shape = self._adapt.shape_of(backend, layer, call.batch, rows, qkv_dim, x.dtype)
        if isinstance(shape, Decision) or self.routes.decide(shape).route not in _FUSED:
            return None
        if ba.dtype != x.dtype or x.dim() != 2:
            return None

        def empty(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=x.dtype, device=x.device)

        unpack = Unpack(
            ba=ba,
            z=empty(rows, num_v_heads, head_v_dim),
            b=empty(rows, num_v_heads),
            a=empty(rows, num_v_heads),
            interleaved=interleaved,
            num_k_heads=num_k_heads,
            head_k_dim=head_k_dim,
        )
        weight, bias, silu = adapter.conv_parameters(layer)
        conv_state, windows = adapter.conv_buffers(backend, layer)
        kernel = conv_shape(shape.num_requests, shape.draft_tokens, x, weight, bias, silu, conv_state, windows, unpack)
        if not self._self_test.passed(kernel, lambda: conv_difference(kernel, self._stock_conv, stock)):
            return None
        return PutOff(x, empty(rows, qkv_dim), unpack, stock, args)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same elements of memory in the same order."""
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.numel() == other.numel()


def _reads_all_of(packed: torch.Tensor, inputs: Inputs) -> bool:
    """Whether q, k and v are the parts of ``packed`` [rows, D], in order, as views."""
    offset = packed.data_ptr()
    for part in inputs[:3]:
        if part.data_ptr() != offset or part.dtype != packed.dtype or part.stride(1) != packed.stride(0):
            return False
        offset += part.shape[2] * part.shape[3] * part.element_size()
    return (
        inputs.q.shape[1] == packed.shape[0] and offset == packed.data_ptr() + packed.shape[1] * packed.element_size()
    )
