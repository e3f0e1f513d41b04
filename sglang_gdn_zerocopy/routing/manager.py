"""Policies of all plugins, asked once per shape; a broken one is isolated and named."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

import pluggy

from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import CallShape, Decision, Route
from sglang_gdn_zerocopy.routing import builtin, hookspecs

# Distinct shapes of one process; beyond it the oldest decisions are asked again.
_MEMO_LIMIT = 65536
# From what leaves most to stock to what leaves least.
_REACH = (Route.UPSTREAM, Route.VIEWS, Route.FUSED_CONV, Route.BUNDLED)


class RouteManager:
    """Holds the policies and remembers their decisions by shape."""

    def __init__(self, ledger: Ledger, entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        self._ledger = ledger
        self._memo: dict[CallShape, Decision] = {}
        self._plugins = pluggy.PluginManager(hookspecs.PROJECT)
        self._plugins.add_hookspecs(hookspecs.RoutePolicy)
        self._plugins.register(builtin, "builtin")
        if entry_points is None:
            entry_points = metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
        for entry_point in entry_points:
            self._load(entry_point)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the registered policies, first asked first."""
        impls = reversed(self._plugins.hook.gdn_zerocopy_route.get_hookimpls())
        return tuple(impl.plugin_name for impl in impls)

    def _load(self, entry_point: metadata.EntryPoint) -> None:
        try:
            self.register(entry_point.load(), entry_point.name)
        except Exception as error:
            self._ledger.declined(f"policy {entry_point.name} ({entry_point.value}) was left out: {_text(error)}")

    def register(self, policy: Any, name: str) -> None:
        """Add a policy (an object or module with a hookimpl) and forget remembered decisions.

        Raises pluggy's ``PluginValidationError`` when its hook does not fit, ``ValueError`` on a taken name or
        a policy that implements no hook; nothing is registered then.
        """
        self._plugins.register(policy, name)
        try:
            self._plugins.check_pending()
            if not self._plugins.get_hookcallers(policy):
                raise ValueError("it implements no hook of ours")
        except Exception:
            self._plugins.unregister(name=name)
            raise
        self._memo.clear()

    def decide(self, shape: CallShape) -> Decision:
        """The route of ``shape``. A policy may leave more to stock than the built-in one does, never less."""
        decision = self._memo.get(shape)
        if decision is None:
            allowed = builtin.gdn_zerocopy_route(shape)
            decision = self._ask(shape)
            if _REACH.index(decision.route) > _REACH.index(allowed.route):
                decision = allowed
            if len(self._memo) >= _MEMO_LIMIT:
                self._memo.clear()
            self._memo[shape] = decision
        return decision

    def _ask(self, shape: CallShape) -> Decision:
        """Ask policy after policy, so that one that raises is known by name and taken out."""
        for name in self.policies:
            others = [plugin for plugin in self._plugins.get_plugins() if plugin is not self._plugins.get_plugin(name)]
            ask_one = self._plugins.subset_hook_caller("gdn_zerocopy_route", others)
            try:
                decision = ask_one(shape=shape)
                if decision is not None and not isinstance(decision, Decision):
                    raise TypeError(f"it answered {decision!r}, not a Decision or None")
            except Exception as error:
                self._plugins.unregister(name=name)
                self._ledger.declined(f"policy {name} was taken out: {_text(error)}")
                continue
            if decision is not None:
                return decision
        raise AssertionError("the built-in policy always answers")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
