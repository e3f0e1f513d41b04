"""The environment variables: one parser, clear errors."""

from __future__ import annotations

import pytest

from sglang_gdn_zerocopy import settings


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_switch_on(text: str) -> None:
    assert settings.SWITCH.read({"SGLANG_GDN_ZEROCOPY": text}) is True


@pytest.mark.parametrize("environ", [{}, {"SGLANG_GDN_ZEROCOPY": "0"}, {"SGLANG_GDN_ZEROCOPY": ""}])
def test_switch_off(environ: dict[str, str]) -> None:
    assert settings.SWITCH.read(environ) is False


@pytest.mark.parametrize("text", ["2", "maybe", "enabled", "-1"])
def test_unknown_value_names_variable_value_and_remedy(text: str) -> None:
    with pytest.raises(settings.SettingError, match=f"SGLANG_GDN_ZEROCOPY='{text}'.*use 1 or 0"):
        settings.SWITCH.read({"SGLANG_GDN_ZEROCOPY": text})


def test_child_environment_leaves_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_TEST", "before")
    child = settings.child_environment(GDN_TEST="after", GDN_NEW="1")
    assert (child["GDN_TEST"], child["GDN_NEW"]) == ("after", "1")
    assert settings.child_environment()["GDN_TEST"] == "before"


@pytest.mark.parametrize(
    ("text", "value"), [("1", "all"), ("yes", "all"), (" Conv ", "conv"), ("0", "none"), ("off", "none")]
)
def test_the_bundled_kernels_in_three_steps(text: str, value: str) -> None:
    assert settings.KERNELS.read({settings.KERNELS.name: text}) == value


def test_an_unknown_choice_of_kernels_names_the_remedy() -> None:
    with pytest.raises(
        settings.SettingError, match="SGLANG_GDN_ZEROCOPY_KERNELS='most' is not understood: use 1, conv or 0"
    ):
        settings.KERNELS.read({settings.KERNELS.name: "most"})


@pytest.mark.parametrize(("text", "value"), [("0", 0), (" 8 ", 8), ("1000", 1000)])
def test_a_count(text: str, value: int) -> None:
    assert settings.SHADOW.read({settings.SHADOW.name: text}) == value


@pytest.mark.parametrize("text", ["-1", "1_000", "2.5", "often"])
def test_no_count_names_the_remedy(text: str) -> None:
    with pytest.raises(
        settings.SettingError,
        match=f"SGLANG_GDN_ZEROCOPY_SHADOW='{text}' is not understood: use a whole number, 0 for never",
    ):
        settings.SHADOW.read({settings.SHADOW.name: text})


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("setting", [*settings.SETTINGS, settings.RANK], ids=lambda setting: setting.name)
def test_an_empty_variable_is_as_good_as_none(setting: settings.Setting, text: str) -> None:
    assert setting.read({setting.name: text}) == setting.read({})
