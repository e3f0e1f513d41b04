"""Runs inside the target python, as ``python -c <this text>``: prints one JSON line about what is installed there.

Imports nothing but the standard library and starts neither SGLang nor torch: flags are read from the source files.
"""

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
from pathlib import Path

# Newest home first; the files that declare the flags, relative to the sglang package.
BENCHMARKS = (
    ("sglang.benchmark.one_batch_server", ("benchmark/one_batch_server.py",)),
    (
        "sglang.bench_one_batch_server",
        ("bench_one_batch_server.py", "test/bench_one_batch_server_internal.py"),
    ),
)
GSM8K = ("sglang.test.few_shot_gsm8k", ("test/few_shot_gsm8k.py",))


def version(name: str) -> str:
    """The installed version of a distribution, "none" when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def package_folder() -> "Path | None":
    """The folder of the installed sglang package, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def declared_flags(files: "list[Path]") -> "list[str]":
    """All option names in literal ``add_argument`` calls."""
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    declarations = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    words = [word.value for call in declarations for word in call.args if isinstance(word, ast.Constant)]
    return sorted({word for word in words if isinstance(word, str) and word.startswith("--")})


def tool(folder: Path, name: str, files: "tuple[str, ...]") -> "dict[str, object] | None":
    """Module name and flags, or None when the first file is missing."""
    paths = [folder / file for file in files]
    if not paths[0].is_file():
        return None
    return {"module": name, "flags": declared_flags([path for path in paths if path.is_file()])}


def gpus() -> "list[list[str]]":
    """UUID, name and driver version of every GPU in the order of its index; none without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=uuid,name,driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == 3]


def main() -> None:
    """Print the JSON line."""
    folder = package_folder()
    answer: dict[str, object] = {
        "release": version("sglang"),
        "torch": version("torch"),
        "triton": version("triton"),
        "overlay": version("sglang-gdn-zerocopy"),
        "package": str(folder) if folder else None,
        "benchmark": None,
        "gsm8k": None,
        "gpus": gpus(),
    }
    if folder:
        answer["benchmark"] = next((found for entry in BENCHMARKS if (found := tool(folder, *entry))), None)
        answer["gsm8k"] = tool(folder, *GSM8K)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
