"""A function is stock's when its own code is of a file of stock's, and it wraps nothing."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import pytest
import wrapt

from sglang_gdn_zerocopy.upstream import origin

# The folder of this package of tests, in the part of stock's.
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def _function() -> None: ...


@wrapt.decorator
def _by_wrapt(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs)


@functools.wraps(os.path.join)
def _around_others() -> None: ...


def test_the_folder_of_a_package() -> None:
    assert origin.package_folder(sys.modules[__name__]) == HERE
    assert origin.package_folder(origin) == origin.__file__[: -len("upstream/origin.py")]


@pytest.mark.parametrize("place", [HERE, __file__])
def test_a_function_of_the_place_is_stocks(place: str) -> None:
    assert origin.is_stocks(_function, place)


@pytest.mark.parametrize("place", [HERE, __file__])
@pytest.mark.parametrize(
    "value",
    [_by_wrapt(_function), _around_others, functools.partial(_function), os.path.join, len, object(), None],
    ids=["wrapt", "functools.wraps", "partial", "another file", "builtin", "no function", "nothing"],
)
def test_what_else_stands_there_is_not(value: Any, place: str) -> None:
    assert not origin.is_stocks(value, place)


def test_a_file_is_narrower_than_its_folder() -> None:
    assert origin.is_stocks(origin.is_stocks, os.path.dirname(origin.__file__) + os.sep)
    assert not origin.is_stocks(origin.is_stocks, origin.__file__.replace("origin.py", "patching.py"))
