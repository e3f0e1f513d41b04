"""`doctor`: every stage with its reason, on a machine without a GPU and without SGLang's dependencies."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_gdn_zerocopy.__main__ import main
from sglang_gdn_zerocopy.cli import doctor
from sglang_gdn_zerocopy.cli.doctor import State
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.cli.model_config import read_model
from sglang_gdn_zerocopy.upstream.releases import BACKEND_MODULE

DENSE = {
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def config(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def qwen(folder: Path, k_heads: int, v_heads: int, **more: Any) -> Path:
    text = {**DENSE, "linear_num_key_heads": k_heads, "linear_num_value_heads": v_heads, **more}
    return config(folder, model_type="qwen3_5", text_config=text)


def findings(model: Path | None = None, tp: int = 1) -> dict[str, list[tuple[State, str]]]:
    found: dict[str, list[tuple[State, str]]] = {}
    for finding in doctor.examine(model, tp, in_process=False):
        found.setdefault(finding.stage, []).append((finding.state, finding.text))
    return found


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch, stock_tree: Callable[[str], Path]) -> Callable[[str], None]:
    """Put a stock release where an installed SGLang would be found."""

    def install(version: str) -> None:
        folder = stock_tree(version)
        package = folder / "sglang"
        monkeypatch.setattr(doctor, "_package", lambda: package)

    return install


def test_off_is_declined_with_the_remedy() -> None:
    ((state, text),) = findings()["switch"]
    assert state is State.DECLINED
    assert "SGLANG_GDN_ZEROCOPY is off; set it to 1" in text


def test_an_unknown_value_is_bad_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "perhaps")
    assert main(["doctor"]) == 2
    assert "SGLANG_GDN_ZEROCOPY='perhaps' is not understood: use 1 or 0" in capsys.readouterr().err


def test_no_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "no SGLang in" in printed
    assert "overlay: declined" in printed


@pytest.mark.parametrize(
    ("version", "kernels", "state", "says"),
    [
        ("0.5.17", "1", State.OK, "SGLang 0.5.17, stock"),
        ("0.5.17", "0", State.OK, "SGLang 0.5.17, stock"),
        ("0.5.23", "1", State.OK, "SGLang 0.5.23, stock"),
        ("0.5.23", "0", State.NOT_APPLICABLE, "built in: SGLang 0.5.23 reads packed QKV through views itself"),
    ],
)
def test_a_stock_release(
    stock: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    kernels: str,
    state: State,
    says: str,
) -> None:
    stock(version)
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_KERNELS", kernels)
    found = findings()
    assert found["release"][0][0] is state
    assert says in found["release"][0][1]
    expected = (State.OK, "bundled conv and recurrence, after a self-test at start")
    if kernels == "0":
        expected = (State.NOTE, "bundled kernels are off (SGLANG_GDN_ZEROCOPY_KERNELS=0)")
    assert found.get("kernels", [expected]) == [expected]
    assert not any(s is State.DECLINED for rows in found.values() for s, _ in rows)


def test_an_unknown_release_and_its_override(stock: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    stock("0.5.17")
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.5.17+cu130")
    assert findings()["release"][0][0] is State.DECLINED
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_UNVERIFIED", "1")
    assert findings()["release"][0][0] is State.NOTE


def test_without_a_gpu_there_is_nothing_to_do(
    stock: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock("0.5.17")
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    monkeypatch.setenv("PATH", "")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "nothing to do"
    assert {
        "stage": "gpu",
        "state": "not applicable",
        "text": "not applicable: nvidia-smi finds no GPU here",
    } in report["findings"]


def test_a_gpu_by_nvidia_smi_alone(
    stock: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.159.04'\n")
    tool.chmod(0o755)
    stock("0.5.17")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    assert main(["doctor", "--model", str(qwen(tmp_path / "m", 16, 32))]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA H200, 580.159.04" in printed
    assert "one launch up to packed QKV in each of 24 layers" in printed
    assert "overlay: active" in printed


@pytest.mark.parametrize(
    ("allowed", "state"),
    [("gdn_zerocopy", State.OK), ("other, gdn_zerocopy", State.OK), ("other", State.DECLINED)],
)
def test_the_plugin_allow_list(monkeypatch: pytest.MonkeyPatch, allowed: str, state: State) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    ((found, text),) = findings()["entry point"]
    assert found is state
    assert ("add gdn_zerocopy to it" in text) is (state is State.DECLINED)


def test_other_plugins_and_policies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.entry_points

    def entry_points(**selection: str) -> Any:
        group = selection.get("group", "")
        extra = metadata.EntryPoint("vendor", f"vendor_{group.rpartition('.')[2]}:load", group)
        return [*real(**selection), extra]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    found = findings()
    assert "plugin vendor (vendor_plugins:load) may hook" in found["other plugins"][0][1]
    assert "vendor (vendor_policies:load) takes part" in found["policies"][0][1]


def test_sitecustomize_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).resolve().parents[2] / "sitecustomize_example"
    monkeypatch.syspath_prepend(str(example))
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)
    assert findings()["sitecustomize"][0][0] is State.OK


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "tp", "width", "removed"),
    [
        (16, 32, 1, 8192, True),
        (16, 32, 2, 4096, True),
        (16, 48, 1, 10240, False),
        (16, 48, 2, 5120, True),
        (16, 64, 1, 12288, False),
    ],
)
def test_the_route_of_a_model(tmp_path: Path, k_heads: int, v_heads: int, tp: int, width: int, removed: bool) -> None:
    found = findings(qwen(tmp_path / "m", k_heads, v_heads), tp)
    assert f"24 GDN layers, {k_heads // tp} key and {v_heads // tp} value heads" in found["model"][0][1]
    assert f"qkv_dim {width} at TP {tp}" in found["model"][0][1]
    route = found["route"][0]
    if removed:
        assert route == (
            State.OK,
            "views on Triton target verify: 24 copies fewer a verify pass; upstream on FlashInfer",
        )
    else:
        assert route == (State.NOT_APPLICABLE, f"no copy to remove: qkv_dim {width} > 8192")


@pytest.mark.parametrize(
    ("version", "flashinfer"), [("0.5.14", "no, FlashInfer 0.6.12 bakes the strides"), ("0.5.17", "not compared here")]
)
def test_who_gets_strides_above_the_limit(
    stock: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, flashinfer: str
) -> None:
    stock(version)
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_KERNELS", "0")
    notes = [text for _, text in findings(qwen(tmp_path / "m", 16, 48))["route"][1:]]
    assert notes[0] == "stock hands strided views to Triton target verify: yes, the kernels take token strides"
    assert flashinfer in notes[1]
    assert any("CuTe DSL" in note for note in notes) is (version == "0.5.17")


def test_layer_types_are_counted(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    model = read_model(qwen(tmp_path / "m", 16, 32, layer_types=kinds), 1)
    assert model is not None
    assert model.layers == 2


def test_a_model_without_gdn_layers_has_nothing_to_do(tmp_path: Path) -> None:
    folder = config(tmp_path / "kimi", model_type="kimi_linear", linear_attn_config={"kda_layers": [1, 2]})
    ((state, text),) = findings(folder)["model"]
    assert state is State.NOT_APPLICABLE
    assert "no GDN layers" in text


@pytest.mark.parametrize(
    ("make", "tp", "says"),
    [
        (lambda folder: folder / "absent", 1, "cannot read"),
        (lambda folder: (folder / "config.json").write_text("{") and folder, 1, "is no JSON"),
        (lambda folder: config(folder, linear_num_key_heads=16), 1, "has no usable"),
        (lambda folder: qwen(folder, 16, 32), 3, "--tp 3 does not divide 16 key and 32 value heads"),
        (lambda folder: qwen(folder, 16, 32), 0, "--tp 0 does not divide"),
    ],
)
def test_an_unreadable_model_is_bad_input(tmp_path: Path, make: Any, tp: int, says: str) -> None:
    with pytest.raises(CommandError, match=says):
        read_model(make(tmp_path), tp)


def _fake_server_side(folder: Path, code: str) -> Path:
    """A ``sglang`` with a plugin loader, whose backend module runs ``code``."""
    from tests.test_activation import fake_sglang

    fake_sglang(folder, code)
    plugins = folder / "sglang" / "srt" / "plugins.py"
    plugins.write_text("def load_plugins():\n    import sglang_gdn_zerocopy\n    sglang_gdn_zerocopy.activate()\n")
    return folder


def test_in_process_reports_the_outcome_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = _fake_server_side(tmp_path / "site", "ANSWER = 1")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    rows = list(doctor._in_process())
    assert rows[0].state is State.DECLINED
    assert "declined: SGLang 0.5.99 is not among" in rows[0].text


def test_in_process_import_failure_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_fake_server_side(tmp_path / "site", "raise ImportError('no sgl_kernel')")))
    with pytest.raises(CommandError, match="cannot be imported here: ImportError: no sgl_kernel"):
        list(doctor._in_process())


def test_in_process_names_who_replaced_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stock_tree: Callable[[str], Path]
) -> None:
    """The stock backend, mounted, with a REPLACE and an AROUND hook put over ours."""
    loader = tmp_path / "sitecustomize.py"
    loader.write_text(
        "import pathlib, sys, types\n"
        "from sglang_gdn_zerocopy.lab.loader import mount\n"
        f"mount(pathlib.Path({str(stock_tree('0.5.17'))!r}))\n"
        "plugins = types.ModuleType('sglang.srt.plugins')\n"
        "def load_plugins():\n"
        "    import importlib, functools, sglang_gdn_zerocopy\n"
        "    sglang_gdn_zerocopy.activate()\n"
        f"    module = importlib.import_module({BACKEND_MODULE!r})\n"
        "    module.GDNAttnBackend.forward_extend = lambda self, *args, **kwargs: None\n"
        "    copy = module.fused_qkv_split_gdn_prefill\n"
        "    module.fused_qkv_split_gdn_prefill = functools.wraps(copy)(lambda *args: copy(*args))\n"
        "plugins.load_plugins = load_plugins\n"
        "sys.modules['sglang.srt.plugins'] = plugins\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    rows = list(doctor._in_process())
    assert rows[0].state is State.OK
    assert [row.state for row in rows if "no call reaches" in row.text] == [State.DECLINED]
    assert any("GDNAttnBackend.forward_extend is now sitecustomize.load_plugins" in row.text for row in rows)
    assert any(row.state is State.NOTE and "wrapped by another" in row.text for row in rows)
