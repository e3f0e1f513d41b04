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
from functools import partial
from types import ModuleType
from typing import Any

import torch

from sglang_gdn_zerocopy.bundled import Bundled, ConvTensors
from sglang_gdn_zerocopy.calls import LayerCall, Origin, Plan, PutOff, WaitingConv
from sglang_gdn_zerocopy.kernels.conv_update import Unpack
from sglang_gdn_zerocopy.kernels.packed_views import packed_views
from sglang_gdn_zerocopy.kernels.recurrent_verify import Config, Inputs, kept_as
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import Decision, ModelSite, Release, Route
from sglang_gdn_zerocopy.routing.manager import RouteManager
from sglang_gdn_zerocopy.self_test.conv import ConvShape, conv_shape
from sglang_gdn_zerocopy.shadow import Shadow, Touched
from sglang_gdn_zerocopy.upstream import adapter, origin, patching
from sglang_gdn_zerocopy.upstream.probe import FORWARD
from sglang_gdn_zerocopy.upstream.releases import (
    BACKEND_CLASS,
    CONV_FUNCTION,
    COPY_FUNCTION,
    RECURRENCE_FUNCTION,
    TRITON_VERIFY_CLASS,
)

# What is counted where conv and recurrence were one launch.
TOGETHER = ("recurrence", "bundled, with the conv in one launch")
# Routes on which the bundled conv runs.
_FUSED = (Route.FUSED_CONV, Route.BUNDLED)
# Looked up once: in Python 3.11 an enum's member costs more than a global.
_UPSTREAM, _BUNDLED = Route.UPSTREAM, Route.BUNDLED
_is_compiling = torch.compiler.is_compiling

_PLAN: ContextVar[Plan | None] = ContextVar("gdn_zerocopy_plan", default=None)
_LAYER_CALL: ContextVar[LayerCall | None] = ContextVar("gdn_zerocopy_layer_call", default=None)


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
        stock_conv = adapter.stock_conv_with(getattr(module, CONV_FUNCTION))
        self._bundled = Bundled(ledger, self_test, stock_conv, release.reciprocal_norm)
        self._path: adapter.StockPath | None = None
        self._backend_class = getattr(module, BACKEND_CLASS)
        self._package = origin.package_folder(module)
        self._nobody_else = (
            patching.Outermost(self._backend_class, FORWARD, self._package),
            patching.Outermost(module, CONV_FUNCTION, self._package),
        )
        # Whoever reads packed QKV behind the conv, by the names that stock's forward uses.
        places = self._recurrence_places() if bundled_kernels and bundled_recurrence else ()
        if places and release.copies:
            places += ((module, COPY_FUNCTION),)
        self._readers = [patching.Outermost(*place, self._package) for place in places]

    def kernels(self) -> list[dict[str, str]]:
        """The bundled kernels by shape: how each is compiled and what its self-test said."""
        return self._bundled.as_rows()

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
        home = sys.modules[getattr(holder, RECURRENCE_FUNCTION).__module__]
        # Its home is another module where others have put their own function into the kernel class's.
        owners = (holder, home) if hasattr(home, RECURRENCE_FUNCTION) else (holder,)
        return tuple((owner, RECURRENCE_FUNCTION) for owner in owners)

    def model_patches(self, module: ModuleType, site: ModelSite) -> list[patching.Patch]:
        """What to put on a model's module: its layer's forward and the unpack that this calls."""

        nobody_else = patching.Outermost(module, site.unpack_function, self._package)

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
        if _is_compiling():
            return wrapped(*args, **kwargs)
        call = _LAYER_CALL.get()
        put_off = call.put_off if call is not None else None
        # Another thread may have switched it off since this layer's unpack was put off.
        plan = self._plan(instance, args, kwargs, put_off) if self.live else None
        if put_off is not None and (plan is None or plan.put_off is not put_off):
            put_off.write()
        if plan is None:
            return wrapped(*args, **kwargs)
        if self._shadow is not None:
            return self._shadowed(self._shadow, plan, wrapped, instance, args, kwargs)
        return self._planned(plan, wrapped, args, kwargs)

    def _planned(self, plan: Plan, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        self, shadow: Shadow, plan: Plan, wrapped: Any, backend: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
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

        def stock() -> Any:
            if put_off is not None:
                put_off.write_again()
            return wrapped(*args, **kwargs)

        if not self.live:
            # An earlier call's comparison was read just now, and differed.
            return stock()
        if touched is None:
            return self._planned(plan, wrapped, args, kwargs)

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
    ) -> Plan | None:
        self._ledger.pulse()
        # Nothing has been written yet: whatever goes wrong here is counted and upstream takes the call.
        try:
            if not adapter.is_target_verify(args, kwargs):
                return None
            if put_off is not None and put_off.is_for(instance, args, kwargs) and self._adapt.knows(kwargs):
                # Decided a moment ago, and nobody but stock has had the call since.
                origin = put_off.origin
                self._ledger.decided(origin.shape.protocol, origin.decision)
                return Plan(origin.shape, origin.decision.route, put_off)
            shape = self._adapt(instance, args, kwargs)
            if isinstance(shape, Decision):
                self._ledger.decided(None, shape)
                return None
            decision = self.routes.decide(shape)
            self._ledger.decided(shape.protocol, decision)
            if decision.route is _UPSTREAM:
                return None
            mine = put_off is not None and adapter.packed_of(args, kwargs) is put_off.packed
            return Plan(shape, decision.route, put_off if mine and decision.route in _FUSED else None)
        except Exception as error:
            self._ledger.failed("forward", error)
            return None

    def _is_others(self, stage: str, wrapped: Any) -> bool:
        """Whether others were at a function of stock's before us: what they made of it is not ours to replace."""
        if origin.is_stocks(wrapped, self._package):
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
        put_off = plan.put_off
        try:
            if put_off is not None:
                read, packed = adapter.read_conv_call(args, kwargs, put_off.packed), put_off.packed
                x, unpack, stock_unpack = put_off.x, put_off.unpack, put_off.stock_function
            else:
                read = adapter.read_conv_call(args, kwargs)
                x, packed, unpack, stock_unpack = read.rows, self._empty_like(read.rows), None, None
            _, _, weight, bias, silu, conv_state, slots, windows, window_rows = read
            call = ConvTensors(
                x,
                plan.shape.draft_tokens,
                weight,
                bias,
                silu,
                conv_state,
                slots,
                windows,
                window_rows,
                unpack,
                stock_unpack,
            )
            output = read.x if read.rows is packed else self._as_conv_output(plan, packed)
            config = self._to_wait_for(plan, x.device)
            if config is not None:
                late = partial(self._conv_late, plan, call, packed, output, wrapped, args, kwargs)
                plan.waiting = WaitingConv(config, call, packed, late)
                return output
        except Exception as error:
            self._ledger.failed("conv", error)
            return self._stock_conv_of(plan, wrapped, args, kwargs)
        return self._conv(plan, call, packed, output, wrapped, args, kwargs)

    def _conv(
        self,
        plan: Plan,
        call: ConvTensors,
        packed: torch.Tensor,
        output: torch.Tensor,
        wrapped: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The bundled conv, which writes ``packed``, whose view ``output`` is stock's result; where it may not or
        cannot run, stock's and what that returns."""
        try:
            if self._bundled.conv(call, packed):
                if plan.put_off is not None:
                    plan.put_off.written = True
                self._ledger.count("conv", "fused with the unpack" if plan.put_off is not None else "fused")
                return output
        except Exception as error:
            self._ledger.failed("conv", error)
        return self._stock_conv_of(plan, wrapped, args, kwargs)

    def _conv_late(
        self,
        plan: Plan,
        call: ConvTensors,
        packed: torch.Tensor,
        handed_out: torch.Tensor,
        wrapped: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """As :meth:`_conv`, with the result in ``packed``, whose view ``handed_out`` is, whoever computes it."""
        output = self._conv(plan, call, packed, handed_out, wrapped, args, kwargs)
        if output.data_ptr() != handed_out.data_ptr() or output.stride() != handed_out.stride():
            handed_out.copy_(output)

    @staticmethod
    def _stock_conv_of(plan: Plan, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.put_off is not None:
            plan.put_off.write()
        return wrapped(*args, **kwargs)

    @staticmethod
    def _empty_like(rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)

    @staticmethod
    def _as_conv_output(plan: Plan, packed: torch.Tensor) -> torch.Tensor:
        """Packed rows as stock's conv returns them: [N, D, T]."""
        return packed.view(-1, plan.shape.draft_tokens, packed.shape[1]).transpose(1, 2)

    def _to_wait_for(self, plan: Plan, device: torch.device) -> Config | None:
        """The one launch that the conv may be left to: the faster choice, and nobody else will read packed QKV."""
        if not self._one_launch or plan.route is not _BUNDLED or not self._readers:
            return None
        config = self._bundled.one_launch(plan.shape, device)
        if config is None:
            return None
        for place in self._readers:
            if not place():
                return None
        return config

    def recurrence(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Upstream's recurrence; inside a call planned for it, the bundled one."""
        plan = _PLAN.get()
        if plan is None:
            return wrapped(*args, **kwargs)
        if plan.route is not _BUNDLED or self._is_others("recurrence", wrapped):
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
        self, plan: Plan, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        call = adapter.read_recurrence_call(args, kwargs)
        stock_call = partial(adapter.stock_recurrence_with, stock)
        return self._bundled.recurrence(plan.shape.draft_tokens, Inputs(*call.inputs), kept_as(call.kept), stock_call)

    def _launch_both(
        self,
        plan: Plan,
        waiting: WaitingConv,
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
        stock_call = partial(adapter.stock_recurrence_with, stock)
        output = self._bundled.together(waiting.config, call, inputs, kept, stock_call)
        if output is not None:
            plan.waiting = None
            plan.together = True
            if put_off is not None:
                put_off.written = True
        return output

    def layer_forward(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A model's GDN layer; in a target verify its unpack may be put off."""
        if not self.live or _is_compiling():
            return wrapped(*args, **kwargs)
        try:
            batch = adapter.batch_of(args, kwargs)
            call = LayerCall(adapter.layer_of(instance), batch) if adapter.is_target_verify(args, kwargs) else None
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
        if type(backend) is not self._backend_class or FORWARD in vars(backend):
            return False
        forward, conv = self._nobody_else
        return forward() and conv()

    def _put_off(
        self, call: LayerCall, stock: Callable[..., Any], args: tuple[Any, ...], interleaved: bool
    ) -> PutOff | None:
        x, ba, num_k_heads, num_v_heads, head_k_dim, head_v_dim = args
        layer, rows = call.layer, x.shape[0]
        qkv_dim = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
        backend = self._path.backend_of(layer) if self._path is not None else None
        if backend is None or not self._sees_it_first(backend):
            self._ledger.count("unpack", "left to stock: other code stands between the model and the backend")
            return None
        dtype = x.dtype
        shape = self._adapt.shape_of(backend, layer, call.batch, rows, qkv_dim, dtype)
        if isinstance(shape, Decision):
            return None
        decision = self.routes.decide(shape)
        if decision.route not in _FUSED or ba.dtype != dtype or x.dim() != 2:
            return None
        device, empty = x.device, torch.empty
        z = empty((rows, num_v_heads, head_v_dim), dtype=dtype, device=device)
        b = empty((rows, num_v_heads), dtype=dtype, device=device)
        a = empty((rows, num_v_heads), dtype=dtype, device=device)
        unpack = Unpack(ba, z, b, a, interleaved, num_k_heads, head_k_dim)

        def kernel() -> ConvShape:
            weight, bias, silu = adapter.conv_parameters(layer)
            conv_state, windows = adapter.conv_buffers(backend, layer)
            return conv_shape(
                shape.num_requests, shape.draft_tokens, x, weight, bias, silu, conv_state, windows, unpack
            )

        # The layer's parameters and buffers are those of its first call; the launch will look at them again.
        heads = (num_k_heads, num_v_heads, head_k_dim, head_v_dim, interleaved)
        key = (shape, heads, x.shape, x.stride(), dtype, device, ba.shape, ba.stride())
        if not self._bundled.may_unpack(key, kernel, stock):
            return None
        packed = empty((rows, qkv_dim), dtype=dtype, device=device)
        return PutOff(Origin(backend, layer, call.batch, shape, decision), x, packed, unpack, stock, args)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same elements of memory in the same order."""
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.numel() == other.numel()


def _reads_all_of(packed: torch.Tensor, inputs: Inputs) -> bool:
    """Whether q, k and v are the parts of ``packed`` [rows, D], in order, as views."""
    offset, rows = packed.data_ptr(), packed.shape[0]
    for part in inputs[:3]:
        if part.data_ptr() != offset or part.dtype != packed.dtype or part.shape[1] != rows:
            return False
        # A single row has no next one to be that far away.
        if rows > 1 and part.stride(1) != packed.stride(0):
            return False
        offset += part.shape[2] * part.shape[3] * part.element_size()
    return offset == packed.data_ptr() + packed.shape[1] * packed.element_size()
