"""The record of one compared case, free of torch: the worker makes it, the matrix reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CaseResult:
    """One case on one release. ``launches``: of unpack, conv and copy, in all layers. ``equal``: result -> whether its
    bits are the same in both runs."""

    case: str
    protocol: str
    route: str
    layers: int
    copies_before: int
    copies_after: int
    launches_before: int
    launches_after: int
    equal: dict[str, bool]

    @property
    def bits_equal(self) -> bool:
        """Whether every result is the same in both runs."""
        return all(self.equal.values())
