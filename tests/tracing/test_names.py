from __future__ import annotations

import pytest

from sglang_gdn_zerocopy.tracing.names import shorten, shorten_all

CAST = "void at::native::elementwise_kernel<128, 4, at::native::f({lambda()#3}::operator()() const)::g>(int, char*)"


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("fused_qkv_split_gdn_prefill_kernel", "fused_qkv_split_gdn_prefill_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        (CAST, "elementwise_kernel"),
        ("void (anonymous namespace)::act<__nv_bfloat16, ((anonymous namespace)::K)0>(P<int>)", "act"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(cublasGemv<int>)", "kernel"),
        ("void arrow<decltype(a->b), 1>(int)", "arrow"),
        ("void plain(int)", "plain"),
        ("k" * 80, "k" * 57 + "..."),
    ],
)
def test_shorten(full: str, short: str) -> None:
    assert shorten(full) == short


def test_names_stay_apart() -> None:
    other = CAST.replace("128", "256")
    assert shorten_all([other, CAST, "x"]) == {
        CAST: "elementwise_kernel #1",
        other: "elementwise_kernel #2",
        "x": "x",
    }
