"""Stage 1: switched on? Register the import hook. Idempotent; never raises into SGLang."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sglang_gdn_zerocopy import settings
from sglang_gdn_zerocopy.ledger import Ledger

if TYPE_CHECKING:
    from sglang_gdn_zerocopy.import_hook import Installation, Options


class _Process:
    """The overlay's state in this process."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.wanted = False
        # Modules whose import is awaited.
        self.awaited: set[str] = set()
        self.fork_guarded = False
        self.reason = "activate() was not called"
        self.installation: Installation | None = None


_PROCESS = _Process()


def activate() -> bool:
    """Switch the overlay on when the environment says so; SGLang's plugin loader calls this in every process.

    With ``SGLANG_GDN_ZEROCOPY`` off or unset nothing is imported and nothing is patched. Otherwise the GDN backend
    is patched once it is imported, at once if it already is. Returns whether the overlay is switched on; why it is
    not, or what became of it, is in :func:`status` and in the log. Never raises, but in strict mode it ends the
    process where it would be declined.
    """
    try:
        if not settings.SWITCH.read():
            _PROCESS.reason = f"{settings.SWITCH.name} is off"
            return False
        _PROCESS.ledger.strict = settings.STRICT.read()
        folder = settings.STATUS_DIR.read()
        wishes = settings.UNVERIFIED.read(), settings.KERNELS.read(), settings.SELFTEST.read(), settings.SHADOW.read()
    except settings.SettingError as error:
        _PROCESS.reason = str(error)
        _PROCESS.ledger.strict = _strict()
        _PROCESS.ledger.refused(str(error))
        return False
    try:
        if folder:
            _report_to(folder)
        _switch_on(*wishes, folder)
    except Exception as error:
        _PROCESS.wanted = False
        _PROCESS.reason = f"{type(error).__name__}: {error}"
        _PROCESS.ledger.refused_by("activating", error)
    _tell()
    return _PROCESS.wanted


def _report_to(folder: str) -> None:
    from sglang_gdn_zerocopy.status_file import StatusFile

    if _PROCESS.ledger.reporter is None:
        _PROCESS.ledger.reporter = StatusFile(folder, status)


def _tell() -> None:
    if _PROCESS.ledger.reporter is not None:
        _PROCESS.ledger.reporter.changed()


def _strict() -> bool:
    """Whether strict mode is on, also when it is not the setting that was misspelt; misspelt itself it is on."""
    try:
        return bool(settings.STRICT.read())
    except settings.SettingError:
        return True


def _switch_on(allow_unverified: bool, kernels: str, self_test: bool, shadow_every: int, status_folder: str) -> None:
    import wrapt

    from sglang_gdn_zerocopy import import_hook
    from sglang_gdn_zerocopy.upstream.releases import BACKEND_MODULE, MODELS

    options = import_hook.Options(allow_unverified, kernels, self_test, shadow_every, status_folder)

    def on_import(module: ModuleType) -> None:
        _PROCESS.awaited.discard(module.__name__)
        if _PROCESS.wanted:
            _install(module, options)
            _tell()

    if not _PROCESS.fork_guarded:
        os.register_at_fork(after_in_child=_PROCESS.ledger.reset)
        _PROCESS.fork_guarded = True
    _PROCESS.wanted = True
    _PROCESS.reason = "waiting for the GDN backend to be imported"
    if _PROCESS.installation is not None and _PROCESS.installation.overlay is not None:
        # What shadow mode found outlives a second call of this function.
        _PROCESS.installation.overlay.live = not _PROCESS.installation.overlay.gave_up
        return
    names = [name for name in (BACKEND_MODULE, *(site.module for site in MODELS)) if name not in _PROCESS.awaited]
    # All are awaited before the first hook is registered, which runs at once for a module that is there.
    _PROCESS.awaited.update(names)
    for name in names:
        wrapt.register_post_import_hook(on_import, name)


def _install(module: ModuleType, options: Options) -> None:
    """Patch the backend when ``module`` is it, and the models that are there; a model waits for the backend."""
    from sglang_gdn_zerocopy import import_hook
    from sglang_gdn_zerocopy.upstream.releases import BACKEND_MODULE, MODELS

    if module.__name__ == BACKEND_MODULE:
        _PROCESS.installation = import_hook.install(module, _PROCESS.ledger, options)
    if _PROCESS.installation is None:
        return
    for site in MODELS:
        if site.module not in _PROCESS.awaited and site.module in sys.modules:
            import_hook.install_model(sys.modules[site.module], site, _PROCESS.ledger, _PROCESS.installation)


def deactivate() -> tuple[str, ...]:
    """Switch the overlay off between two calls and put upstream's very own functions back.

    Where others have wrapped over our wrappers these stay in place, switched off, and are returned by name.
    """
    _PROCESS.wanted = False
    _PROCESS.reason = "deactivate() was called"
    try:
        return _switch_off()
    finally:
        _tell()


def _switch_off() -> tuple[str, ...]:
    installation = _PROCESS.installation
    if installation is None or installation.overlay is None:
        _PROCESS.installation = None
        return ()
    installation.overlay.live = False
    covered = installation.undo()
    if not covered:
        _PROCESS.installation = None
    for label in covered:
        _PROCESS.ledger.declined(f"switched off but left in place: {label}")
    return tuple(covered)


def status() -> dict[str, Any]:
    """This process's overlay as plain data.

    ``state``: "off", "waiting" (the backend is not imported yet), "installed", "built in", "not applicable" or
    "declined", or "fell back" after shadow mode found a difference; with its ``reason``. ``version``: the overlay's.
    ``release``: the SGLang version seen.
    ``bundled_kernels``: they may be used here.
    ``kernels``: per shape how a bundled kernel is compiled and what its self-test said.
    ``policies``: route policies, first asked first. ``covered``: patches that others wrapped or replaced since;
    ``lost``: those no call reaches any more. ``copies_avoided`` and ``counts``: what happened so far.
    """
    from sglang_gdn_zerocopy import __version__

    installation = _PROCESS.installation
    report = installation.report if installation else None
    overlay = installation.overlay if installation else None
    if not _PROCESS.wanted:
        state, reason = "off", _PROCESS.reason
    elif report is None:
        state, reason = "waiting", _PROCESS.reason
    else:
        state, reason = ("installed" if overlay else report.verdict.value), report.reason
        if overlay and overlay.gave_up:
            state, reason = "fell back", overlay.gave_up
    return {
        "pid": os.getpid(),
        "state": state,
        "reason": reason,
        "version": __version__,
        "release": report.version if report else "",
        "bundled_kernels": bool(overlay and overlay.bundled_kernels),
        "kernels": overlay.kernels() if overlay else [],
        "policies": list(overlay.routes.policies) if overlay else [],
        "covered": installation.covered() if installation else [],
        "lost": installation.lost() if installation else [],
        "copies_avoided": _PROCESS.ledger.counts["copy", "avoided"],
        "counts": _PROCESS.ledger.as_rows(),
    }
