"""Patches go on all or none, and come off as the very same objects."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from types import ModuleType
from typing import Any

import pytest
import wrapt

from sglang_gdn_zerocopy.upstream import patching

# The folder of this package of tests, in the part of stock's.
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def _target() -> tuple[Any, ModuleType]:
    class Backend:
        def forward(self, x: int, *, y: int = 0) -> tuple[int, int]:
            """Doc."""
            return x, y

    module = ModuleType("module")
    vars(module)["helper"] = lambda x: x
    return Backend, module


def _plus_one(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (*wrapped(*args, **kwargs), "seen") if instance is not None else wrapped(*args, **kwargs) + 1


def test_apply_and_undo_restore_the_raw_entries() -> None:
    backend, module = _target()
    raw = vars(backend)["forward"], vars(module)["helper"]
    applied = patching.apply(
        [patching.Patch(backend, "forward", _plus_one), patching.Patch(module, "helper", _plus_one)]
    )
    assert backend().forward(1, y=2) == (1, 2, "seen")
    assert backend.forward(backend(), 1) == (1, 0, "seen")
    assert vars(module)["helper"](1) == 2
    assert patching.is_patched(backend, "forward")
    assert applied.undo() == ()
    assert vars(backend)["forward"] is raw[0]
    assert vars(module)["helper"] is raw[1]
    assert not patching.is_patched(backend, "forward")


def test_the_wrapper_looks_like_the_function() -> None:
    backend, _ = _target()
    signature, raw = inspect.signature(backend.forward), vars(backend)["forward"]
    patching.apply([patching.Patch(backend, "forward", _plus_one)])
    assert inspect.signature(backend.forward) == signature
    assert (backend.forward.__name__, backend.forward.__doc__) == ("forward", "Doc.")
    assert inspect.unwrap(vars(backend)["forward"]) is raw


@pytest.mark.parametrize("broken", ["absent", "inherited"])
def test_a_patch_that_fails_undoes_the_others(broken: str) -> None:
    backend, module = _target()
    child = type("Child", (backend,), {})
    raw = vars(module)["helper"]
    name, owner = ("missing", backend) if broken == "absent" else ("forward", child)
    with pytest.raises(AttributeError, match=name):
        patching.apply([patching.Patch(module, "helper", _plus_one), patching.Patch(owner, name, _plus_one)])
    assert vars(module)["helper"] is raw
    assert "forward" not in vars(child)


def test_instances_made_before_and_pickled_after_work() -> None:
    backend, _ = _target()
    earlier = backend()
    bound_earlier = earlier.forward
    patching.apply([patching.Patch(backend, "forward", _plus_one)])
    assert earlier.forward(1) == (1, 0, "seen")
    # A method bound before the patch stays upstream's.
    assert bound_earlier(1) == (1, 0)
    assert copy.copy(earlier).forward(1) == (1, 0, "seen")


def _by_functools(function: Any) -> Any:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return (*function(*args, **kwargs), "around")

    return around


def _by_wrapt(function: Any) -> Any:
    def around(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (*wrapped(*args, **kwargs), "around")

    return wrapt.FunctionWrapper(function, around)


@pytest.mark.parametrize("wrap", [_by_functools, _by_wrapt])
def test_a_foreign_wrapper_over_ours_is_reported_and_left_alone(wrap: Any) -> None:
    backend, module = _target()
    helper = vars(module)["helper"]
    applied = patching.apply(
        [patching.Patch(module, "helper", _plus_one), patching.Patch(backend, "forward", _plus_one)]
    )
    ours = vars(module)["helper"]
    # As SGLang's hook registry does it: fetched through the class, wrapped, put back.
    backend.forward = wrap(backend.forward if wrap is _by_functools else vars(backend)["forward"])
    assert backend().forward(1) == (1, 0, "seen", "around")
    assert patching.is_patched(backend, "forward")
    assert applied.lost() == ()
    covered = applied.undo()
    assert [label.split(" is now ")[0] for label in covered] == ["Backend.forward"]
    assert backend().forward(1) == (1, 0, "seen", "around")
    assert vars(module)["helper"] is ours is not helper


def test_a_replacement_is_reported_as_lost() -> None:
    backend, _ = _target()
    applied = patching.apply([patching.Patch(backend, "forward", _plus_one)])

    def replacement(self: Any, x: int) -> str:
        return "replaced"

    backend.forward = replacement
    assert applied.lost() == ("Backend.forward",)
    assert f"{__name__}.test_a_replacement" in applied.covered()[0]
    assert not patching.is_patched(backend, "forward")
    assert applied.undo() != ()
    assert backend().forward(1) == "replaced"


def test_outermost_is_ours_around_a_function_of_the_package_and_nothing_else() -> None:
    backend, _ = _target()
    raw, outermost = vars(backend)["forward"], patching.Outermost(backend, "forward", HERE)
    assert not outermost()
    patching.apply([patching.Patch(backend, "forward", _plus_one)])
    ours = vars(backend)["forward"]
    assert outermost()
    for foreign in (_by_functools(ours), _by_wrapt(ours), _by_wrapt(raw), raw, _plus_one):
        backend.forward = foreign
        assert not outermost()
        backend.forward = ours
        assert outermost()
    del backend.forward
    assert not outermost()


@pytest.mark.parametrize("wrap", [_by_functools, _by_wrapt, functools.partial])
def test_outermost_looks_at_what_we_wrapped(wrap: Any) -> None:
    backend, _ = _target()
    backend.forward = wrap(vars(backend)["forward"])
    patching.apply([patching.Patch(backend, "forward", _plus_one)])
    assert not patching.Outermost(backend, "forward", HERE)()


def test_a_function_of_another_package_is_not_stocks() -> None:
    backend, _ = _target()
    patching.apply([patching.Patch(backend, "forward", _plus_one)])
    assert patching.Outermost(backend, "forward", HERE)()
    assert not patching.Outermost(backend, "forward", os.path.join(HERE, "elsewhere") + os.sep)()
