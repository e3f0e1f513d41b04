"""Flags against the declarations of the eleven stock releases."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest

from sglang_gdn_zerocopy.bench import benchmark, target
from sglang_gdn_zerocopy.bench.flags import FIRST_RELEASE, RENAMES, translate
from sglang_gdn_zerocopy.bench.measurement import Shape
from sglang_gdn_zerocopy.bench.schedule import Gsm8k
from sglang_gdn_zerocopy.bench.target import probe
from sglang_gdn_zerocopy.cli.errors import CommandError
from sglang_gdn_zerocopy.upstream.releases import RELEASES
from tests.bench import standin_server

StockTree = Callable[[str], Path]


def server_parser(tree: Path) -> argparse.ArgumentParser:
    """A parser with every option that a stock release declares: ``add_argument`` calls and annotated fields."""
    folder = tree / "sglang" / "srt"
    files = [folder / "server_args.py", *sorted((folder / "arg_groups" / "fields").glob("*.py"))]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    groups: list[list[str]] = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            groups.append([str(word.value) for word in node.args if isinstance(word, ast.Constant)])
        elif isinstance(node, ast.ClassDef):
            groups += [names for field in node.body if (names := _field_options(field))]
    parser = argparse.ArgumentParser(conflict_handler="resolve", exit_on_error=False)
    for names in groups:
        if names and names[0].startswith("-"):
            parser.add_argument(*names, nargs="*")
    return parser


def _field_options(field: ast.stmt) -> list[str]:
    """The option names of one ``name: A[type, Arg(...)]`` field, none when it is kept off the command line."""
    if not isinstance(field, ast.AnnAssign) or not isinstance(field.annotation, ast.Subscript):
        return []
    if not isinstance(field.annotation.value, ast.Name) or field.annotation.value.id not in {"A", "Annotated"}:
        return []
    assert isinstance(field.target, ast.Name)
    assert isinstance(field.annotation.slice, ast.Tuple)
    names = ["--" + field.target.id.replace("_", "-")]
    calls = [part for part in field.annotation.slice.elts if isinstance(part, ast.Call)]
    for keyword in (word for call in calls if getattr(call.func, "id", "") == "Arg" for word in call.keywords):
        if keyword.arg == "cli_name":
            names[0] = ast.literal_eval(keyword.value)
        elif keyword.arg == "aliases":
            names += ast.literal_eval(keyword.value)
        elif keyword.arg == "no_cli":
            return []
    return names


def benchmark_parser(tree: Path) -> argparse.ArgumentParser:
    """The stock benchmark's own parser: its ``BenchArgs`` class, run from the release's file."""
    homes = ("benchmark/one_batch_server.py", "test/bench_one_batch_server_internal.py")
    file = next(path for path in (tree / "sglang" / home for home in homes) if path.is_file())
    module = ast.parse(file.read_text(encoding="utf-8"))
    (cls,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "BenchArgs")
    names: dict[str, Any] = {"dataclasses": dataclasses, "argparse": argparse, "Tuple": tuple, "__name__": __name__}
    names |= {"Optional": Optional, "List": list}
    exec(compile(ast.Module([cls], []), str(file), "exec"), names)
    parser = argparse.ArgumentParser(exit_on_error=False)
    names["BenchArgs"].add_cli_args(parser)
    # From ServerArgs, which declares the model.
    parser.add_argument("--model")
    return parser


def probe_tree(tree: Path, monkeypatch: pytest.MonkeyPatch) -> target.Target:
    monkeypatch.setenv("PYTHONPATH", str(tree))
    return probe(sys.executable)


@pytest.mark.parametrize("release", RELEASES)
def test_emitted_server_args_parse_in_every_release(release: str, stock_tree: StockTree) -> None:
    parser = server_parser(stock_tree(release))
    typed = ["--tp", "2", "--cuda-graph-max-bs", "64", "--cuda-graph-bs=8", "--mamba-scheduler-strategy", "x"]
    typed += ["--piecewise-cuda-graph-max-tokens", "128", "--piecewise-cuda-graph-tokens", "4"]
    translation = translate(typed, release)
    known, unknown = parser.parse_known_args([*translation.args, "--random-seed", "0"])
    assert unknown == []
    assert ["2"] in vars(known).values(), "--tp is a prefix of --tp-size, which argparse accepts"
    # Without the translation stock 0.5.20 and later refuse the same words.
    if release >= "0.5.20":
        with pytest.raises((argparse.ArgumentError, SystemExit)):
            parser.parse_args(typed)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("rename", RENAMES, ids=lambda rename: rename.old)
def test_both_names_become_the_name_that_the_release_declares(release: str, rename: Any, stock_tree: StockTree) -> None:
    declared = set(server_parser(stock_tree(release))._option_string_actions)
    has_either = bool({rename.old, rename.new} & declared)
    for typed in (rename.old, rename.new):
        if not has_either:
            with pytest.raises(CommandError, match=f"has no {typed}: it came with {rename.old_since}"):
                translate([typed], release)
            continue
        translation = translate([typed, "7"], release)
        assert translation.args[0] in declared
        assert translation.args[0] == (rename.new if rename.new in declared else rename.old)
        assert translation.args[1:] == ("7",)
        assert translation.notes == (
            (f"{typed} is called {translation.args[0]} in {release}",) * (typed != translation.args[0])
        )


@pytest.mark.parametrize("release", RELEASES)
def test_flags_without_an_older_name_are_refused_exactly_where_stock_lacks_them(
    release: str, stock_tree: StockTree
) -> None:
    declared = server_parser(stock_tree(release))._option_string_actions
    for flag in FIRST_RELEASE:
        if flag in declared:
            assert translate([flag, "triton"], release).args == (flag, "triton")
        else:
            with pytest.raises(CommandError, match=f"{release} has no {flag}"):
                translate([flag, "triton"], release)


def test_verify_backend_is_remarked_in_the_release_that_ignores_it() -> None:
    (note,) = translate(["--linear-attn-verify-backend=triton"], "0.5.17").notes
    assert "ignores it for GDN" in note
    assert translate(["--linear-attn-verify-backend=triton"], "0.5.18").notes == ()


def test_values_and_equals_signs_survive() -> None:
    args = ("--cuda-graph-max-bs=64", "--tp", "2", "--json", '{"a": "--cuda-graph-max-bs"}', "--x=--cuda-graph-bs")
    translated = translate(args, "0.5.20").args
    assert translated == ("--cuda-graph-max-bs-decode=64", *args[1:])


@pytest.mark.parametrize("word", ["--port", "--port=1", "--host", "--model", "--model-path=x"])
def test_what_ab_sets_itself_is_refused(word: str) -> None:
    with pytest.raises(CommandError, match=f"{word.split('=')[0]} is not a server argument here"):
        translate([word], "0.5.17")


@pytest.mark.parametrize("release", ["0.5.17rc1", "0.5.17.dev3+gabc", "0.5.17.post2"])
def test_builds_around_a_release_have_its_flags(release: str) -> None:
    assert translate(["--enable-gdn-replayssm-spec"], release).args == ("--enable-linear-replayssm-spec",)


def test_a_release_that_is_no_version_is_refused() -> None:
    with pytest.raises(CommandError, match="calls itself 'main'"):
        translate([], "main")


@pytest.mark.parametrize("release", RELEASES)
def test_probe_and_benchmark_command_of_every_release(
    release: str, stock_tree: StockTree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = stock_tree(release)
    found = probe_tree(tree, monkeypatch)
    assert found.release == release
    old = release.startswith("0.5.13")
    assert found.benchmark.module == ("sglang.bench_one_batch_server" if old else "sglang.benchmark.one_batch_server")
    options = benchmark.one_batch_options(Shape(256, 128, 8), "http://h:1", 7, tmp_path / "r.jsonl", "tok", runs=3)
    options += benchmark.profile_options(tmp_path, 3)
    assert benchmark.left_out(found.benchmark, options) == (("--local-tokenizer-path",) if old else ())
    words = benchmark.arguments(found.benchmark, options)
    assert words[:2] == ["-m", found.benchmark.module]
    args = benchmark_parser(tree).parse_args([*words[2:], "--model", "None"])
    assert (args.batch_size, args.input_len, args.output_len) == ([8, 8, 8], [256], [128])
    assert (args.base_url, args.seed, args.temperature) == ("http://h:1", 7, 0.0)
    assert (args.dataset_name, args.skip_warmup) == ("random-ids", True)
    assert (args.profile_activities, args.profile_steps) == (["CPU", "GPU"], 3)
    assert args.result_filename == str(tmp_path / "r.jsonl")
    assert found.gsm8k is not None
    settings = Gsm8k("0" * 64, 200, 5, 512, 64)
    gsm8k = benchmark.gsm8k_options(tmp_path, settings, "http://127.0.0.1:30000")
    assert benchmark.left_out(found.gsm8k, gsm8k) == ()
    place = benchmark.arguments(found.gsm8k, gsm8k)[-4:]
    assert place == ["--host", "127.0.0.1", "--port", "30000"]


def test_a_program_without_a_needed_flag_is_refused() -> None:
    tool = target.Tool("some.module", frozenset({"--base-url"}))
    with pytest.raises(CommandError, match=r"some\.module of this release has no --batch-size, --input-len"):
        benchmark.left_out(tool, benchmark.one_batch_options(Shape(1, 2, 3), "", 0, Path("x"), None))


def test_https_servers_reach_the_accuracy_program() -> None:
    settings = Gsm8k("", 1, 1, 1, 1)
    options = benchmark.gsm8k_options(Path("f"), settings, "https://box")
    assert options[-2:] == [("--host", ("https://box",), False), ("--port", ("443",), False)]


def test_probe_names_a_python_that_is_not_there() -> None:
    with pytest.raises(CommandError, match="--python '/no/such/python' cannot be run"):
        probe("/no/such/python")


def test_probe_names_a_python_without_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Isolated mode: whatever this environment holds is out of reach.
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    script.chmod(0o755)
    with pytest.raises(CommandError, match="has no SGLang: give the python of your server's environment"):
        probe(str(script))


def test_the_probe_imports_nothing_of_the_target(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    text = (Path(target.__file__).parent / "target_probe.py").read_text(encoding="utf-8")
    child = subprocess.run([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False)
    assert child.returncode == 0


@pytest.mark.parametrize(("text", "value"), [("4", 4.0), ("2.5", 2.5), ("-1", None), ("", None)])
def test_simulated_acceptance_is_recorded(text: str, value: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", text)
    tool = target.Tool("m", frozenset())
    found = target.Target("py", "0.5.17", "t", "t", "o", (), tool, None)
    assert found.environment(["--x"], 3).simulated_acceptance == value
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "four")
    with pytest.raises(CommandError, match="SGLANG_SIMULATE_ACC_LEN='four' is not a number"):
        found.environment([], 3)


BOX = tuple(
    target.Gpu(f"GPU-{letter}0", name, "580")
    for letter, name in zip("abcd", ("H200", "H200", "L4", "H200"), strict=True)
)


@pytest.mark.parametrize(
    ("visible", "args", "label"),
    [
        (None, (), "H200"),
        (None, ("--tp", "4"), "3 x H200, L4"),
        ("2", (), "L4"),
        ("3,2", ("--tp-size=2",), "H200, L4"),
        ("GPU-c", (), "L4"),
        ("GPU-", (), "none"),
        ("0,1", ("--tp", "2"), "2 x H200"),
        ("0,-1,1", ("--tp", "2"), "H200"),
        ("0,9,1", ("--tp", "2"), "H200"),
        ("", (), "none"),
        ("MIG-1", (), "a MIG slice"),
        ("1,2", ("--base-gpu-id", "1"), "L4"),
        (None, ("--tp", "2", "--dp", "2"), "3 x H200, L4"),
        (None, ("--tp", "2", "--dp", "2", "--enable-dp-attention"), "2 x H200"),
        (None, ("--tp", "4", "--nnodes", "2"), "2 x H200"),
    ],
)
def test_the_label_is_of_the_devices_that_the_server_takes(
    visible: str | None, args: tuple[str, ...], label: str
) -> None:
    assert target.gpu_label(target.used_gpus(target.visible_gpus(BOX, visible), args)) == label


def test_the_probe_lists_what_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU-a, NVIDIA H200, 580.1\\nGPU-b, NVIDIA L4, 580.1\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    standin_server.install(tmp_path / "tree", "0.5.17")
    found = probe_tree(tmp_path / "tree", monkeypatch)
    assert found.gpus == (target.Gpu("GPU-a", "NVIDIA H200", "580.1"), target.Gpu("GPU-b", "NVIDIA L4", "580.1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (found.environment([], 0).gpu, found.environment([], 0).driver) == ("NVIDIA L4", "580.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert found.environment([], 0).gpu == "NVIDIA H200"
    assert found.environment([], 0, external=True).gpu == "NVIDIA H200, NVIDIA L4"


@pytest.mark.parametrize("release", RELEASES)
def test_runs_of_one_process_come_in_order_and_draw_new_prompts(release: str, stock_tree: StockTree) -> None:
    """What lets `ab` make all runs of a shape in one process, and what keeps it from that with real acceptance."""
    homes = ("benchmark/one_batch_server.py", "test/bench_one_batch_server_internal.py")
    (file,) = (path for path in (stock_tree(release) / "sglang" / home for home in homes) if path.is_file())
    functions = {n.name: n for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}
    run = ast.unparse(functions["run_benchmark_internal"])
    order = "in itertools.product(bench_args.batch_size, bench_args.input_len, bench_args.output_len):"
    assert run.count(order) == 2, "once for the timed runs, once for the profiled ones"
    timed, _, _ = run.partition("if bench_args.profile:")
    assert timed.count("np.random.seed(bench_args.seed)") == 1
    one_case = ast.unparse(functions["run_one_case"])
    assert "random.seed(" not in one_case
    assert "result.dump_to_jsonl(result_filename)" in one_case
