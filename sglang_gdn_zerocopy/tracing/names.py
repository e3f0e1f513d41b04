"""Kernel names that fit a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_LONGEST = 60


def shorten(name: str) -> str:
    """``name`` without return type, namespaces, template arguments and parameters: "void a::b<int>(char*)" -> "b".

    Names that are no C++ signature stay as they are, apart from a cut at 60 characters.
    """
    if not name.endswith(")") or not (name.startswith("void ") or "::" in name):
        return _cut(name)
    signature = name.replace("(anonymous namespace)::", "")
    depth, before, kept = 0, "", ""
    for char in signature:
        # The parameter list ends the name.
        if char == "(" and depth == 0:
            break
        if char in "<(":
            depth += 1
        elif char in ">)" and before != "-":
            depth -= 1
        elif depth == 0:
            kept += char
        before = char
    words = kept.split()
    return _cut(words[-1].rsplit("::", 1)[-1] if words else name)


def shorten_all(names: Iterable[str]) -> dict[str, str]:
    """Full name -> short name, one to one: names that would look the same get " #1", " #2" in alphabetical order."""
    full = sorted(set(names))
    shared = Counter(map(shorten, full))
    seen: Counter[str] = Counter()
    result = {}
    for name in full:
        short = shorten(name)
        seen[short] += 1
        result[name] = f"{short} #{seen[short]}" if shared[short] > 1 else short
    return result


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 3] + "..."
