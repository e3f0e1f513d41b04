"""Put wrappers on attributes of modules and classes, all or none, and take them off again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import wrapt

from sglang_gdn_zerocopy.upstream.origin import is_stocks

# wrapt keeps attributes of this prefix on the wrapper itself.
_MARKER = "_self_gdn_zerocopy"


@dataclass(frozen=True)
class Patch:
    """``wrapper(wrapped, instance, args, kwargs)`` around attribute ``name`` of ``owner`` (a module or a class)."""

    owner: Any
    name: str
    wrapper: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

    @property
    def label(self) -> str:
        """For messages: the owner's and the attribute's name."""
        return f"{self.owner.__name__}.{self.name}"


@dataclass(frozen=True)
class _Applied:
    patch: Patch
    raw: Any
    proxy: Any


class Applied:
    """Patches in force. :meth:`undo` puts the very same raw attributes back."""

    def __init__(self, entries: Sequence[_Applied]) -> None:
        self._entries = tuple(entries)

    def covered(self) -> tuple[str, ...]:
        """Labels of patches that others have wrapped or replaced since, each with what stands there now."""
        return tuple(
            f"{entry.patch.label} is now {_describe(vars(entry.patch.owner).get(entry.patch.name))}"
            for entry in self._entries
            if vars(entry.patch.owner).get(entry.patch.name) is not entry.proxy
        )

    def lost(self) -> tuple[str, ...]:
        """Labels of patches that no call reaches any more: replaced, not wrapped."""
        return tuple(
            entry.patch.label
            for entry in self._entries
            if entry.patch not in _markers(vars(entry.patch.owner).get(entry.patch.name))
        )

    def undo(self) -> tuple[str, ...]:
        """Put the raw attributes back, all or none.

        When someone covers a patch (see :meth:`covered`) nothing is touched, since what covers it would be lost
        or would keep calling our wrapper; the labels are returned and the caller switches the wrappers off.
        """
        covered = self.covered()
        if not covered:
            for entry in reversed(self._entries):
                setattr(entry.patch.owner, entry.patch.name, entry.raw)
        return covered


def _describe(value: Any) -> str:
    module = getattr(value, "__module__", None)
    return f"{module}.{getattr(value, '__qualname__', type(value).__name__)}"


def _markers(value: Any) -> list[Patch]:
    """Our patches in the chain of wrappers that starts with ``value``, outermost first.

    A wrapper fetched through the class is another object than the one that we put there, with the same marker.
    """
    found: list[Patch] = []
    for _ in range(100):
        # wrapt 1.x binds a method to a new wrapper that leads to the marked one as its parent.
        marker = getattr(value, _MARKER, None) or getattr(getattr(value, "_self_parent", None), _MARKER, None)
        if marker is not None:
            found.append(marker)
        value = getattr(value, "__wrapped__", None)
        if value is None:
            break
    return found


def is_patched(owner: Any, name: str) -> bool:
    """Whether a wrapper of ours is anywhere in the chain of ``owner``'s own attribute."""
    return bool(_markers(vars(owner).get(name)))


class Outermost:
    """Whether attribute ``name`` of ``owner`` is our wrapper around a function of ``package``, with no one else's code
    outside or inside it. Cheap to ask again: the answer is remembered for as long as the same object stands there."""

    def __init__(self, owner: Any, name: str, package: str) -> None:
        self._place = vars(owner)
        self._name = name
        self._package = package
        self._known: Any = None
        self._answer = False

    def __call__(self) -> bool:
        value = self._place.get(self._name)
        if value is not self._known:
            ours = type(value) is wrapt.FunctionWrapper and getattr(value, _MARKER, None) is not None
            self._answer = ours and is_stocks(value.__wrapped__, self._package)
            self._known = value
        return self._answer


def apply(patches: Sequence[Patch]) -> Applied:
    """Put all ``patches`` on, or none: when one fails the others are undone and its exception is raised.

    Each ``owner`` must hold the attribute itself (``vars(owner)``), not inherit it; else ``AttributeError``.
    """
    entries: list[_Applied] = []
    try:
        for patch in patches:
            if patch.name not in vars(patch.owner):
                raise AttributeError(f"{patch.label} does not exist")
            raw = vars(patch.owner)[patch.name]
            proxy = wrapt.FunctionWrapper(raw, patch.wrapper)
            setattr(proxy, _MARKER, patch)
            setattr(patch.owner, patch.name, proxy)
            entries.append(_Applied(patch, raw, proxy))
    except Exception:
        for entry in reversed(entries):
            setattr(entry.patch.owner, entry.patch.name, entry.raw)
        raise
    return Applied(entries)
