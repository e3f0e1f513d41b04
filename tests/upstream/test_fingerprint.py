"""The fingerprint sees behaviour and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sglang_gdn_zerocopy.upstream.fingerprint import fingerprint_definition, fingerprint_file

BODY = '''
def f(x: int, y=2):
    """Says what it does."""
    z = x + y  # adds
    return f"{z!r:>{y}} {x=}"
'''


def _of(source: str) -> str:
    return fingerprint_definition(ast.parse(source).body[0])


@pytest.mark.parametrize(
    "same",
    [
        BODY.replace("Says what it does.", "Other words."),
        BODY.replace('    """Says what it does."""\n', ""),
        BODY.replace("  # adds", ""),
        BODY.replace("x + y", "(x\n         + y)"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(same: str) -> None:
    assert _of(same) == _of(BODY)


@pytest.mark.parametrize(
    "other",
    [
        BODY.replace("x + y", "x - y"),
        BODY.replace("y=2", "y=3"),
        BODY.replace("y=2", "*, y=2"),
        BODY.replace("!r", "!s"),
        BODY.replace("def f", "@cached\ndef f"),
        BODY.replace("    z = x", "    x += 1\n    z = x"),
    ],
)
def test_behaviour_counts(other: str) -> None:
    assert _of(other) != _of(BODY)


def test_a_string_expression_that_is_no_docstring_counts() -> None:
    assert _of("def f():\n    g()\n    'text'\n") != _of("def f():\n    g()\n")


def test_names_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("class A:\n    x = 1\n    def m(self): ...\ndef f():\n    def inner(): ...\n")
    assert set(fingerprint_file(path)) == {"A.m", "f"}
