"""Stock releases are recognised, everything else is declined with its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_gdn_zerocopy.lab.fingerprints import KERNELS_RELY_ON, VIEWS_RELY_ON, relied_on
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.records import ProbeReport, Verdict
from sglang_gdn_zerocopy.upstream import probe
from sglang_gdn_zerocopy.upstream.releases import RELEASES, SAME_BODIES

BACKEND = "srt/layers/attention/linear/gdn_backend.py"
Stock = Callable[[str], Path]


@pytest.fixture
def edited(stock_tree: Stock, tmp_path: Path) -> Callable[[str, str, str], Path]:
    """A copy of the relied-on files of 0.5.20 with one text replaced in one of them."""

    def make(path: str, old: str, new: str) -> Path:
        source = stock_tree("0.5.20") / "sglang"
        package = tmp_path / "sglang"
        for name in {**RELEASES["0.5.20"].fingerprints, **RELEASES["0.5.20"].kernel_fingerprints}:
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, package / name)
        text = (package / path).read_text()
        assert old in text
        (package / path).write_text(text.replace(old, new))
        return package

    return make


@pytest.mark.parametrize("version", [*RELEASES, *SAME_BODIES])
def test_every_stock_release_is_recognised(stock_tree: Stock, version: str) -> None:
    folder = stock_tree(version)
    release = RELEASES[SAME_BODIES.get(version, version)]
    for wanted, table in (
        (VIEWS_RELY_ON, release.fingerprints),
        (KERNELS_RELY_ON, release.kernel_fingerprints),
    ):
        recorded = {name: (path, body) for path, bodies in table.items() for name, body in bodies.items()}
        assert relied_on(folder, wanted) == recorded
    assert probe.version_of(folder / "sglang") == version
    report = probe.examine_package(folder / "sglang", version)
    assert report.release is release
    assert report.verdict is Verdict.SUPPORTED
    assert report.kernels_off == ""
    views_only = probe.examine_package(folder / "sglang", version, want_kernels=False)
    assert views_only.verdict is (Verdict.SUPPORTED if release.copies else Verdict.BUILT_IN)
    assert "SGLANG_GDN_ZEROCOPY_KERNELS=0" in views_only.kernels_off


def test_another_conv_keeps_the_views(edited: Callable[[str, str, str], Path]) -> None:
    path = next(name for name in RELEASES["0.5.20"].kernel_fingerprints if "conv1d" in name)
    package = edited(path, "acc += matrix_x * matrix_w", "acc += matrix_w * matrix_x")
    report = probe.examine_package(package, "0.5.20")
    assert report.verdict is Verdict.SUPPORTED
    assert f"_causal_conv1d_update_kernel in {path} differs" in report.kernels_off


def test_one_changed_line_is_an_unknown_build(edited: Callable[[str, str, str], Path]) -> None:
    package = edited(BACKEND, "actual_seq_len = mixed_qkv.shape[0]", "actual_seq_len = mixed_qkv.shape[0] + 0")
    report = probe.examine_package(package, "0.5.20")
    assert report.verdict is Verdict.DECLINED
    assert report.differs == (f"GDNAttnBackend.forward_extend in {BACKEND}",)
    assert "GDNAttnBackend.forward_extend" in report.reason
    assert "SGLANG_GDN_ZEROCOPY_UNVERIFIED=1" in report.reason


def test_comments_do_not_make_a_build_unknown(edited: Callable[[str, str, str], Path]) -> None:
    package = edited(BACKEND, "actual_seq_len = mixed", "# a comment\n        actual_seq_len = mixed")
    assert probe.examine_package(package, "0.5.20").verdict is Verdict.SUPPORTED


def test_a_changed_kernel_is_an_unknown_build(edited: Callable[[str, str, str], Path]) -> None:
    path = next(name for name in RELEASES["0.5.20"].fingerprints if "recurrent" in name)
    package = edited(path, "stride_q = q.stride()[1]", "stride_q = H * K")
    report = probe.examine_package(package, "0.5.20")
    assert report.differs == (f"fused_sigmoid_gating_delta_rule_update in {path}",)


def test_a_missing_file_names_what_it_held(edited: Callable[[str, str, str], Path]) -> None:
    package = edited(BACKEND, "class GDNAttnBackend", "class GDNAttnBackend")
    path = next(name for name in RELEASES["0.5.20"].fingerprints if "fused_proj" in name)
    (package / path).unlink()
    assert all(path in name for name in probe.examine_package(package, "0.5.20").differs)


@pytest.mark.parametrize(
    "version",
    [
        "0.5.12",
        "0.5.24",
        "0.5.99",
        "0.5.20.post1",
        "0.5.21rc0",
        "0.0.0.dev0",
        "0.5.20.dev3+g1",
        "0.5.17+cu130",
        "unknown",
    ],
)
def test_unknown_versions_are_declined_and_overridable(stock_tree: Stock, version: str) -> None:
    package = stock_tree("0.5.20") / "sglang"
    report = probe.examine_package(package, version)
    assert report.verdict is Verdict.DECLINED
    assert f"SGLang {version} is not among" in report.reason
    allowed = probe.examine_package(package, version, allow_unverified=True)
    assert allowed.verdict is Verdict.UNVERIFIED
    assert allowed.release is probe.nearest_release(version)
    assert allowed.patchable


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.5.12", "0.5.13.post1"),
        ("0.5.17+cu130", "0.5.17"),
        ("0.5.21rc0", "0.5.20"),
        ("0.5.99", "0.5.23"),
        ("x", "0.5.23"),
    ],
)
def test_nearest_release(version: str, nearest: str) -> None:
    assert probe.nearest_release(version).version == nearest


def _supported() -> ProbeReport:
    return ProbeReport(Verdict.SUPPORTED, "stock", "0.5.17", RELEASES["0.5.17"])


def _module(harness: Harness, **changes: Any) -> ModuleType:
    """The real backend module under another roof, with names changed; None takes a name away."""
    module = ModuleType(harness.module.__name__)
    vars(module).update(vars(harness.module))
    for name, value in changes.items():
        if value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    return module


def test_the_real_module_passes(harness: Harness) -> None:
    assert probe.examine_module(harness.module, _supported()) == _supported()


@pytest.mark.parametrize(
    ("changes", "verdict", "says"),
    [
        ({"GDNAttnBackend": None}, Verdict.DECLINED, "has no GDNAttnBackend.forward_extend"),
        ({"GDNAttnBackend": type("GDNAttnBackend", (), {})}, Verdict.DECLINED, "no GDNAttnBackend.forward_extend"),
        ({"fused_qkv_split_gdn_prefill": None}, Verdict.DECLINED, "has no fused_qkv_split_gdn_prefill"),
        ({"MAX_FUSED_QKV_SPLIT_DIM": None}, Verdict.DECLINED, "has no MAX_FUSED_QKV_SPLIT_DIM"),
        ({"TritonGDNKernel": None}, Verdict.DECLINED, "has no TritonGDNKernel"),
        ({"is_cuda": bool, "is_cpu": lambda: True}, Verdict.NOT_APPLICABLE, "not applicable on CPU"),
        ({"is_cuda": bool, "is_npu": lambda: True}, Verdict.NOT_APPLICABLE, "not applicable on NPU"),
        ({"is_cuda": bool, "is_xpu": lambda: True}, Verdict.NOT_APPLICABLE, "not applicable on XPU"),
        ({"is_cuda": bool}, Verdict.NOT_APPLICABLE, "SGLang sees no GPU here"),
        (
            {"is_cuda": bool, "is_hip": lambda: True, "fused_qkv_split_gdn_prefill": None},
            Verdict.NOT_APPLICABLE,
            "has no copy on HIP",
        ),
        ({"is_cuda": bool, "is_hip": lambda: True}, Verdict.SUPPORTED, "untested on HIP"),
    ],
)
def test_a_module_that_is_not_as_expected(
    harness: Harness, changes: dict[str, Any], verdict: Verdict, says: str
) -> None:
    report = probe.examine_module(_module(harness, **changes), _supported())
    assert report.verdict is verdict
    assert says in report.reason


def test_a_replaced_forward_is_named(harness: Harness) -> None:
    def forward_extend(self: Any, *args: Any, **kwargs: Any) -> None: ...

    other = type("GDNAttnBackend", (), {"forward_extend": forward_extend})
    report = probe.examine_module(_module(harness, GDNAttnBackend=other), _supported())
    assert report.verdict is Verdict.DECLINED
    assert __file__ in report.reason


def test_a_release_that_is_not_patchable_is_not_looked_into() -> None:
    report = ProbeReport(Verdict.BUILT_IN, "built in", "0.5.23", RELEASES["0.5.23"])
    assert probe.examine_module(ModuleType("empty"), report) is report


def test_a_module_without_a_file_has_no_package() -> None:
    module: Any = SimpleNamespace(__name__="sglang.x", __file__=None)
    with pytest.raises(ValueError, match="from no file"):
        probe.package_of(module)
