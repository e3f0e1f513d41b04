"""Whose code a function is, told by the file that its code names."""

from __future__ import annotations

import os
from types import FunctionType, ModuleType
from typing import Any


def package_folder(module: ModuleType) -> str:
    """Where ``module``'s top-level package was loaded from, as the code of its functions names it, with a separator
    behind it."""
    folder = module.__file__ or ""
    for _ in range(module.__name__.count(".")):
        folder = os.path.dirname(folder)
    return folder + os.sep


def is_stocks(value: Any, place: str) -> bool:
    """Whether ``value`` is a function that wraps no other, of the file ``place`` or of one in the folder ``place``
    (with a separator behind it), as SGLang's own are."""
    # A wrapper by wrapt says that it is a function, with the code of what it wraps.
    if type(value) is not FunctionType or hasattr(value, "__wrapped__"):
        return False
    return value.__code__.co_filename.startswith(place)
