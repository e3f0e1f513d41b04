"""The way from a model's layer to the backend: one piece of someone else's code on it, and there is no backend."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wrapt

from sglang_gdn_zerocopy.upstream import adapter

# Stand-ins for stock's two classes and for what hands out the backend.
LAYERS = """
class Layer:
    def forward(self):
        pass
"""
BACKENDS = """
class Hybrid:
    def forward(self):
        pass

    def forward_extend(self):
        pass
"""
CONTEXT = """
backend = None

def get_attn_backend():
    return backend
"""


class Stock:
    """A layer, and a hybrid backend around ``gdn``, as stock makes them."""

    def __init__(self, layers: Any, backends: Any, context: Any) -> None:
        self.layer_class, self.hybrid_class = layers.Layer, backends.Hybrid
        self.context = context
        self.layer = self.layer_class()
        self.gdn = SimpleNamespace()
        self.use(self.hybrid_class())

    def use(self, hybrid: Any) -> None:
        """``hybrid`` is the server's attention backend."""
        hybrid.linear_attn_backend = self.gdn
        self.hybrid = self.context.backend = hybrid

    def backend(self, path: adapter.StockPath) -> Any:
        """What the layer's call reaches."""
        return path.backend_of(self.layer)


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stock:
    names = {"stand_in_layers": LAYERS, "stand_in_backends": BACKENDS, "stand_in_context": CONTEXT}
    for name, text in names.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    layers, backends, context = (importlib.import_module(name) for name in names)
    for module in (layers, backends, context):
        # Taken out again after the test, so that the next one has classes of its own.
        del sys.modules[module.__name__]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    path = (("stand_in_layers", "Layer", ("forward",)), ("stand_in_backends", "Hybrid", ("forward", "forward_extend")))
    monkeypatch.setattr(adapter, "PATH", path)
    monkeypatch.setattr(adapter, "FORWARD_CONTEXT_MODULE", "stand_in_context")
    return Stock(layers, backends, context)


def other(self: Any) -> None:
    """Of another file than stock's."""


def passed_on(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs)


def test_stocks_own_way(stock: Stock) -> None:
    path = adapter.StockPath()
    assert stock.backend(path) is stock.gdn
    # Another backend of the same kind is asked for at the call, and attributes that are not on the way do not matter.
    stock.use(stock.hybrid_class())
    stock.layer.name = "layer"
    assert stock.backend(path) is stock.gdn


def _subclass_of_the_layer(stock: Stock) -> None:
    stock.layer = type("Mine", (stock.layer_class,), {})()


def _subclass_of_the_backend(stock: Stock) -> None:
    stock.use(type("Mine", (stock.hybrid_class,), {})())


def _on_the_layer(stock: Stock) -> None:
    stock.layer.forward = lambda: None


def _on_the_backend(stock: Stock) -> None:
    stock.hybrid.forward_extend = lambda: None


def _replaced(stock: Stock) -> None:
    stock.hybrid_class.forward_extend = other


def _wrapped(stock: Stock) -> None:
    stock.layer_class.forward = wrapt.FunctionWrapper(vars(stock.layer_class)["forward"], passed_on)


def _deleted(stock: Stock) -> None:
    del stock.hybrid_class.forward


@pytest.mark.parametrize(
    "change",
    [_subclass_of_the_layer, _subclass_of_the_backend, _on_the_layer, _on_the_backend, _replaced, _wrapped, _deleted],
)
def test_someone_elses_code_after_us(stock: Stock, change: Callable[[Stock], None]) -> None:
    path = adapter.StockPath()
    assert stock.backend(path) is stock.gdn
    change(stock)
    assert stock.backend(path) is None


@pytest.mark.parametrize("change", [_replaced, _wrapped, _deleted])
def test_someone_elses_code_before_us(stock: Stock, change: Callable[[Stock], None]) -> None:
    """What stands there when we come is not taken for stock's."""
    change(stock)
    assert stock.backend(adapter.StockPath()) is None
