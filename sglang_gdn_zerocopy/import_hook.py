"""Stage 2: an upstream module imported -> probe -> patch. Catches everything: a failed hook would fail the import."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.records import ModelSite, ProbeReport, Verdict
from sglang_gdn_zerocopy.upstream import patching, probe
from sglang_gdn_zerocopy.upstream.releases import BACKEND_CLASS

if TYPE_CHECKING:
    from sglang_gdn_zerocopy.forward import Overlay

_QUIET = (Verdict.BUILT_IN, Verdict.NOT_APPLICABLE)


class Options(NamedTuple):
    """What the environment asks for."""

    allow_unverified: bool
    kernels: str
    self_test: bool
    shadow_every: int = 0
    status_folder: str = ""


@dataclass
class Installation:
    """What became of the imported backend module: ``overlay`` is None unless it was patched. ``applied`` holds what
    was put on it and on model modules since."""

    report: ProbeReport
    overlay: Overlay | None = None
    applied: list[patching.Applied] = field(default_factory=list)

    def covered(self) -> list[str]:
        """Labels of patches that others have wrapped or replaced since, each with what stands there now."""
        return [label for applied in self.applied for label in applied.covered()]

    def lost(self) -> list[str]:
        """Labels of patches that no call reaches any more."""
        return [label for applied in self.applied for label in applied.lost()]

    def undo(self) -> list[str]:
        """Put all raw attributes back, or none when others cover one; their labels are returned then."""
        covered = self.covered()
        if not covered:
            for applied in reversed(self.applied):
                applied.undo()
        return covered


def install(module: ModuleType, ledger: Ledger, options: Options) -> Installation:
    """Probe the backend ``module`` and patch it when the probe allows.

    Never raises; the outcome is said once in the log. Strict mode ends the process where this declines.
    """
    try:
        package = probe.package_of(module)
        version = probe.version_of(package)
        report = probe.examine_package(package, version, options.allow_unverified, options.kernels != "none")
        report = probe.examine_module(module, report)
        if not report.patchable or report.release is None:
            if report.verdict is Verdict.NOT_APPLICABLE or (report.verdict is Verdict.BUILT_IN and not report.differs):
                ledger.declined(report.reason, logging.INFO)
            else:
                ledger.refused(report.reason, level=logging.INFO if report.verdict in _QUIET else logging.WARNING)
            return Installation(report)
        if patching.is_patched(getattr(module, BACKEND_CLASS), probe.FORWARD):
            return Installation(report)
        # torch and pluggy come in here at the earliest: a declined import needs neither.
        from sglang_gdn_zerocopy.forward import Overlay

        overlay = Overlay(
            module,
            report.release,
            ledger,
            bundled_kernels=not report.kernels_off,
            bundled_recurrence=options.kernels == "all",
            self_test=options.self_test,
            shadow_every=options.shadow_every,
            shadow_folder=options.status_folder,
        )
        applied = patching.apply(overlay.patches())
        if report.verdict is Verdict.SUPPORTED and report.differs:
            # Views go on, except in strict mode.
            ledger.refused(report.kernels_off)
        kernels = report.kernels_off or "bundled kernels after their self-test"
        ledger.installed(f"{report.reason}; {kernels}; verify calls are decided one shape at a time")
        return Installation(report, overlay, [applied])
    except Exception as error:
        ledger.refused_by("installing", error)
        return Installation(ProbeReport(Verdict.DECLINED, f"{type(error).__name__}: {error}"))


def install_model(module: ModuleType, site: ModelSite, ledger: Ledger, installation: Installation) -> None:
    """Patch a model's module, so that its unpack can be put off. Never raises; without it stock unpacks."""
    overlay = installation.overlay
    if overlay is None or not overlay.bundled_kernels:
        return
    try:
        if not patching.is_patched(module, site.unpack_function):
            installation.applied.append(patching.apply(overlay.model_patches(module, site)))
    except Exception as error:
        ledger.refused_by(f"installing on {site.module}", error)
