"""Stage 2: backend module imported -> probe -> patch. Catches everything: a failed hook would fail the import."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import ProbeReport, Verdict
from sglang_gdn_zerocopy.upstream import patching, probe
from sglang_gdn_zerocopy.upstream.releases import BACKEND_CLASS

if TYPE_CHECKING:
    from sglang_gdn_zerocopy.forward import Overlay

_QUIET = (Verdict.BUILT_IN, Verdict.NOT_APPLICABLE)


@dataclass(frozen=True)
class Installation:
    """What became of one imported backend module; ``overlay`` and ``applied`` are None unless it was patched."""

    report: ProbeReport
    overlay: Overlay | None = None
    applied: patching.Applied | None = None


def install(module: ModuleType, ledger: Ledger, allow_unverified: bool) -> Installation:
    """Probe ``module`` and patch it when the probe allows. Never raises; the outcome is said once in the log."""
    try:
        package = probe.package_of(module)
        report = probe.examine_package(package, probe.version_of(package), allow_unverified)
        report = probe.examine_module(module, report)
        if not report.patchable or report.release is None:
            ledger.declined(report.reason, logging.INFO if report.verdict in _QUIET else logging.WARNING)
            return Installation(report)
        if patching.is_patched(getattr(module, BACKEND_CLASS), probe.FORWARD):
            return Installation(report)
        # torch and pluggy come in here at the earliest: a declined import needs neither.
        from sglang_gdn_zerocopy.forward import Overlay

        overlay = Overlay(module, report.release, ledger)
        applied = patching.apply(overlay.patches())
        ledger.installed(f"{report.reason}; verify calls are decided one shape at a time")
        return Installation(report, overlay, applied)
    except Exception as error:
        ledger.failed("installing", error)
        return Installation(ProbeReport(Verdict.DECLINED, f"{type(error).__name__}: {error}"))
