"""Activates the overlay in interpreters that load no SGLang plugins: Ray actors, embedders.

Put this file's folder on PYTHONPATH. Python runs ``sitecustomize`` at every start, children included, so this must be
cheap, silent and unable to fail: the package loads no torch and no SGLang, and does nothing at all unless
SGLANG_GDN_ZEROCOPY is on. A ``sitecustomize`` of your own that this one hides is run first.
"""

from __future__ import annotations

import contextlib


def _run_the_hidden_one() -> None:
    import importlib.machinery
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        import importlib.util

        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _activate() -> None:
    from sglang_gdn_zerocopy import activate

    activate()


# An interpreter's start must not fail because of this example.
for _step in (_run_the_hidden_one, _activate):
    with contextlib.suppress(Exception):
        _step()
