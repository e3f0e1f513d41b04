"""A SGLang package, and the backend module imported from it, against the table. Imports nothing of SGLang."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

from sglang_gdn_zerocopy.records import ProbeReport, Release, Verdict
from sglang_gdn_zerocopy.upstream.fingerprint import fingerprint_file
from sglang_gdn_zerocopy.upstream.releases import (
    BACKEND_CLASS,
    CONV_FUNCTION,
    COPY_FUNCTION,
    COPY_LIMIT,
    RELEASES,
    SAME_BODIES,
    TRITON_VERIFY_CLASS,
)

FORWARD = "forward_extend"
REMEDY = "SGLANG_GDN_ZEROCOPY_UNVERIFIED=1 uses views all the same"


def package_of(module: ModuleType) -> Path:
    """The folder of the ``sglang`` package that ``module`` (``sglang.a.b...``) was loaded from.

    Raises ``ValueError`` when the module has no file.
    """
    if not module.__file__:
        raise ValueError(f"{module.__name__} was loaded from no file")
    return Path(module.__file__).resolve().parents[module.__name__.count(".") - 1]


def version_of(package: Path) -> str:
    """The version of the distribution that owns the ``sglang`` package folder; "unknown" when there is none."""
    for distribution in metadata.distributions(name="sglang", path=[str(package.parent)]):
        return distribution.version
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"


def differing_bodies(package: Path, fingerprints: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """The definitions below ``package`` whose body is not the one in ``fingerprints``, as "name in path"."""
    differs = []
    for path, bodies in fingerprints.items():
        try:
            found = fingerprint_file(package / path)
        except (OSError, SyntaxError, UnicodeDecodeError):
            found = {}
        differs += [f"{name} in {path}" for name, value in bodies.items() if found.get(name) != value]
    return tuple(differs)


def nearest_release(version: str) -> Release:
    """The newest supported release that is not newer than ``version``; the oldest one when there is none."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        wanted = max(map(Version, RELEASES))
    older = [v for v in RELEASES if Version(v) <= wanted]
    return RELEASES[max(older or [min(RELEASES, key=Version)], key=Version)]


def examine_package(
    package: Path, version: str, allow_unverified: bool = False, want_kernels: bool = True
) -> ProbeReport:
    """Version and bodies of a ``sglang`` package folder against the table. Reads source files only.

    ``allow_unverified`` turns a build that is unknown or was edited into ``Verdict.UNVERIFIED``; such a build gets
    views only. ``want_kernels``: the bundled kernels are asked for.
    """
    release = RELEASES.get(SAME_BODIES.get(version, version))
    if release is None:
        reason = f"SGLang {version} is not among the supported releases ({', '.join(RELEASES)}); {REMEDY}"
        differs: tuple[str, ...] = ()
    else:
        differs = differing_bodies(package, release.fingerprints)
        reason = f"this SGLang {version} is not the released one: {'; '.join(differs)} differs; {REMEDY}"
    if release is not None and not differs:
        kernels_off = _kernels_off(package, release, want_kernels)
        if release.copies or not kernels_off:
            return ProbeReport(Verdict.SUPPORTED, f"SGLang {version}, stock", version, release, kernels_off=kernels_off)
        reason = f"built in: SGLang {version} reads packed QKV through views itself; {kernels_off}"
        return ProbeReport(Verdict.BUILT_IN, reason, version, release, kernels_off=kernels_off)
    if not allow_unverified:
        return ProbeReport(Verdict.DECLINED, reason, version, None, differs)
    release = release or nearest_release(version)
    reason = f"SGLang {version} is unverified and was allowed by SGLANG_GDN_ZEROCOPY_UNVERIFIED=1"
    return ProbeReport(
        Verdict.UNVERIFIED, reason, version, release, differs, "no bundled kernel on an unverified build"
    )


def _kernels_off(package: Path, release: Release, wanted: bool) -> str:
    """Why the bundled kernels may not be used; empty when they may."""
    if not wanted:
        return "bundled kernels are off (SGLANG_GDN_ZEROCOPY_KERNELS=0)"
    differs = differing_bodies(package, release.kernel_fingerprints)
    return f"no bundled kernel: {'; '.join(differs)} differs from the released one" if differs else ""


def _origin(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return str(Path(code.co_filename).resolve()) if code is not None else type(function).__name__


def _says(module: ModuleType, question: str) -> bool:
    """The answer of one of SGLang's platform questions; a release that does not ask it says no."""
    return bool(getattr(module, question, bool)())


def examine_module(module: ModuleType, report: ProbeReport) -> ProbeReport:
    """The imported backend module itself: the names that we need, the platform, other patchers.

    ``report`` is the package's; it is returned when nothing speaks against patching ``module``.
    """

    def stop(verdict: Verdict, reason: str) -> ProbeReport:
        return replace(report, verdict=verdict, reason=reason)

    if not report.patchable:
        return report
    on_hip = _says(module, "is_hip")
    for platform in ("cpu", "npu", "xpu"):
        if _says(module, f"is_{platform}"):
            return stop(Verdict.NOT_APPLICABLE, f"not applicable on {platform.upper()}: stock's path there is another")
    if not on_hip and not _says(module, "is_cuda"):
        return stop(Verdict.NOT_APPLICABLE, "not applicable: SGLang sees no GPU here")
    if on_hip and not hasattr(module, COPY_FUNCTION):
        return stop(Verdict.NOT_APPLICABLE, f"not applicable: SGLang {report.version} has no copy on HIP")
    backend = getattr(module, BACKEND_CLASS, None)
    forward = vars(backend).get(FORWARD) if isinstance(backend, type) else None
    if forward is None:
        return stop(Verdict.DECLINED, f"{module.__name__} has no {BACKEND_CLASS}.{FORWARD}")
    for name in (COPY_FUNCTION, CONV_FUNCTION, COPY_LIMIT, TRITON_VERIFY_CLASS):
        if not hasattr(module, name):
            return stop(Verdict.DECLINED, f"{module.__name__} has no {name}")
    if _origin(forward) != str(Path(module.__file__ or "").resolve()):
        reason = f"{BACKEND_CLASS}.{FORWARD} was replaced by code of {_origin(forward)}"
        return stop(Verdict.DECLINED, reason)
    if on_hip:
        report = replace(report, kernels_off="no bundled kernel on HIP")
        if report.release is not None and not report.release.copies:
            return stop(Verdict.BUILT_IN, f"built in: SGLang {report.version} reads packed QKV through views itself")
        return stop(report.verdict, f"{report.reason}; untested on HIP")
    return report
