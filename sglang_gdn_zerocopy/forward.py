"""Stage 4, the wrapper bodies. Upstream's forward stays the conductor.

The wrapped forward decides a call's route and runs upstream's own body. The module-level callables that this body
uses are wrapped once; each looks at the plan of the call that it runs in and, without one, does what it always did.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from sglang_gdn_zerocopy.kernels.packed_views import packed_views
from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import CallShape, Decision, Release, Route
from sglang_gdn_zerocopy.routing.manager import RouteManager
from sglang_gdn_zerocopy.upstream import patching
from sglang_gdn_zerocopy.upstream.adapter import Adapter, is_target_verify
from sglang_gdn_zerocopy.upstream.probe import FORWARD
from sglang_gdn_zerocopy.upstream.releases import BACKEND_CLASS, COPY_FUNCTION

_PLAN: ContextVar[CallShape | None] = ContextVar("gdn_zerocopy_plan", default=None)


class Overlay:
    """The wrappers of one imported backend module. ``live`` off makes them pass everything through."""

    def __init__(self, module: ModuleType, release: Release, ledger: Ledger) -> None:
        self.live = True
        self.routes = RouteManager(ledger)
        self._adapt = Adapter(module, release)
        self._ledger = ledger
        self._module = module

    def patches(self) -> list[patching.Patch]:
        """What to put on the module: the forward and the copy that it calls."""
        return [
            patching.Patch(getattr(self._module, BACKEND_CLASS), FORWARD, self.forward_extend),
            patching.Patch(self._module, COPY_FUNCTION, self.copy),
        ]

    def forward_extend(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide, then run upstream's body with or without a plan, on identical objects."""
        # Under torch.compile's tracer nothing of ours may run: no lookups, no counting, no logging.
        if not self.live or torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        shape = self._shape_for_views(instance, args, kwargs)
        if shape is None:
            return wrapped(*args, **kwargs)
        token = _PLAN.set(shape)
        try:
            return wrapped(*args, **kwargs)
        finally:
            _PLAN.reset(token)

    def _shape_for_views(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallShape | None:
        # Nothing has been written yet: whatever goes wrong here is counted and upstream takes the call.
        try:
            if not is_target_verify(args, kwargs):
                return None
            shape = self._adapt(instance, args, kwargs)
            if isinstance(shape, Decision):
                self._ledger.decided(None, shape)
                return None
            decision = self.routes.decide(shape)
            self._ledger.decided(shape.protocol, decision)
            return shape if decision.route is Route.VIEWS else None
        except Exception as error:
            self._ledger.failed("forward", error)
            return None

    def copy(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Upstream's copy of packed QKV; inside a planned call, views of it."""
        shape = _PLAN.get()
        if shape is None:
            return wrapped(*args, **kwargs)
        try:
            views = packed_views(*args, **kwargs)
        except Exception as error:
            self._ledger.failed("copy", error)
            return wrapped(*args, **kwargs)
        self._ledger.count("copy", "avoided")
        return views
