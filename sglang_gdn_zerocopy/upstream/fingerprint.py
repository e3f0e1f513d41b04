"""A fingerprint of a definition that survives comments, formatting, docstrings and the Python version."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path

# Fields that say nothing about behaviour, or that some Python versions fill and others leave out.
_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind", "type_params", "type_ignores"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _canonical(node: object) -> Iterable[str]:
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name in _SKIPPED_FIELDS or value is None or value == []:
                continue
            if name == "body" and isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False):
                value = value[1:]
            yield f" {name}="
            yield from _canonical(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _canonical(item)
        yield "]"
    else:
        yield repr(node)


def fingerprint_definition(node: ast.AST) -> str:
    """16 hex digits of the definition's canonical form (SHA-256)."""
    return hashlib.sha256("".join(_canonical(node)).encode()).hexdigest()[:16]


def fingerprint_file(path: Path) -> dict[str, str]:
    """Qualified name -> fingerprint of every function and method of a source file, nested ones excluded.

    Raises ``OSError`` when the file cannot be read and ``SyntaxError`` when it cannot be parsed.
    """
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, _DEFINITIONS):
                    found[f"{node.name}.{member.name}"] = fingerprint_definition(member)
        elif isinstance(node, _DEFINITIONS):
            found[node.name] = fingerprint_definition(node)
    return found
