"""Every order of import, activate, activate, deactivate, deactivate ends in the state that its last step says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]

# Each order runs in a fork of a process that has torch and Triton but not the backend.
ORDERS = """
import importlib, itertools, os, pathlib, sys
from sglang_gdn_zerocopy.lab.loader import mount
mount(pathlib.Path(sys.argv[1]))
import torch, triton
from sglang_gdn_zerocopy import activate, deactivate, status
from sglang_gdn_zerocopy.upstream import patching

def run(order):
    module, on = None, False
    raw = copy = None
    for step in order:
        if step == "import":
            module = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
            first = vars(module.GDNAttnBackend)["forward_extend"]
            raw = first.__wrapped__ if hasattr(first, "__wrapped__") else first
            first = vars(module)["fused_qkv_split_gdn_prefill"]
            copy = first.__wrapped__ if hasattr(first, "__wrapped__") else first
        elif step == "activate":
            assert activate() is True
            on = True
        else:
            assert deactivate() == ()
            on = False
        if module is None:
            assert status()["state"] == ("waiting" if on else "off"), order
            continue
        now = vars(module.GDNAttnBackend)["forward_extend"]
        now_copy = vars(module)["fused_qkv_split_gdn_prefill"]
        if on:
            assert patching.is_patched(module.GDNAttnBackend, "forward_extend"), order
            # Exactly one layer of ours on each.
            assert now.__wrapped__ is raw and now_copy.__wrapped__ is copy, order
            assert status()["state"] == "installed", order
        else:
            assert now is raw and now_copy is copy, order
            assert status()["state"] == "off", order

orders = sorted(set(itertools.permutations(["import", "activate", "activate", "deactivate", "deactivate"])))
assert len(orders) == 30
for order in orders:
    pid = os.fork()
    if pid == 0:
        try:
            run(order)
        except BaseException as error:
            print(order, repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, order
print(len(orders))
"""

COVERED = """
import functools, importlib, pathlib, sys
from sglang_gdn_zerocopy.lab.loader import mount
mount(pathlib.Path(sys.argv[1]))
from sglang_gdn_zerocopy import activate, deactivate, status
activate()
module = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
backend = module.GDNAttnBackend
ours = backend.forward_extend

@functools.wraps(ours)
def theirs(*args, **kwargs):
    return ours(*args, **kwargs)

backend.forward_extend = theirs
assert status()["lost"] == [] and len(status()["covered"]) == 1
(covered,) = deactivate()
assert "GDNAttnBackend.forward_extend is now" in covered
assert vars(backend)["forward_extend"] is theirs
assert status()["state"] == "off"
# On again: the wrapper underneath is switched on again, not put on twice.
assert activate() and status()["state"] == "installed"
backend.forward_extend = lambda self, *args, **kwargs: None
assert status()["lost"] == ["GDNAttnBackend.forward_extend"]
"""

# Around the two below.
ACTIVE = """
import importlib, pathlib, sys, types
from sglang_gdn_zerocopy.lab.loader import mount
mount(pathlib.Path(sys.argv[1]))
from sglang_gdn_zerocopy import activate, status
from sglang_gdn_zerocopy.upstream import patching
from sglang_gdn_zerocopy.upstream.releases import BACKEND_MODULE, MODELS
activate()
"""
DECLINED = """
print([row for row in status()["counts"] if row["stage"] == "declined"])
"""

MODELS_FIRST = """
models = [(importlib.import_module(site.module), site) for site in MODELS]
assert BACKEND_MODULE not in sys.modules and status()["state"] == "waiting"
assert not any(patching.is_patched(model, site.unpack_function) for model, site in models)
importlib.import_module(BACKEND_MODULE)
assert all(patching.is_patched(model, site.unpack_function) for model, site in models)
"""

HALF_IMPORTED = """
for site in MODELS:
    # What a module is while its import runs, which may be what imports the backend.
    sys.modules[site.module] = types.ModuleType(site.module)
importlib.import_module(BACKEND_MODULE)
assert status()["state"] == "installed"
for site in MODELS:
    del sys.modules[site.module]
    model = importlib.import_module(site.module)
    assert patching.is_patched(model, site.unpack_function)
    assert patching.is_patched(getattr(model, site.layer_class), "forward")
"""


def test_every_order(python: Python, stock_tree: Callable[[str], Path]) -> None:
    done = python(ORDERS, str(stock_tree("0.5.17")), SGLANG_GDN_ZEROCOPY="1")
    assert done.stdout.strip() == "30"


def test_a_foreign_wrapper_over_ours(python: Python, stock_tree: Callable[[str], Path]) -> None:
    done = python(COVERED, str(stock_tree("0.5.17")), SGLANG_GDN_ZEROCOPY="1")
    assert done.stderr.count("switched off but left in place") == 1


@pytest.mark.parametrize("order", [MODELS_FIRST, HALF_IMPORTED], ids=["models first", "a model imports the backend"])
def test_a_model_before_the_backend(python: Python, stock_tree: Callable[[str], Path], order: str) -> None:
    done = python(ACTIVE + order + DECLINED, str(stock_tree("0.5.17")), SGLANG_GDN_ZEROCOPY="1")
    assert done.stdout.strip() == "[]"
