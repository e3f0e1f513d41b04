"""Zero-copy target verification of GDN models for stock SGLang releases.

    activation -> import_hook -> upstream/ (probe, patch, adapt) -> forward -> routing/ -> kernels/
        off          |             unknown release    |        route UPSTREAM |
        +------------+-------------------+------------+-----------------------+--> stock SGLang

Each stage is one module and hands the next a record; each may answer "not mine" with a sentence, and that ends in
upstream's own code running untouched. Importing this package loads none of torch, triton, wrapt, pluggy, sglang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_gdn_zerocopy.activation import activate, deactivate, status

if TYPE_CHECKING:
    from sglang_gdn_zerocopy.routing.hookspecs import hookimpl

__all__ = ["activate", "deactivate", "hookimpl", "status"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The marker for route policies needs pluggy, which must stay out of a process that has no use for it.
    if name == "hookimpl":
        from sglang_gdn_zerocopy.routing.hookspecs import hookimpl

        return hookimpl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
