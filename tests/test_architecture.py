"""The import table: which part of the package may import which, held as data."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "sglang_gdn_zerocopy"
OURS = "sglang_gdn_zerocopy"

# Part -> what of ours it may import (prefixes), and which libraries beside the standard library.
EVIDENCE = {"records", "ledger", "settings", "upstream.releases", "upstream.probe", "cli.errors"}
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "__init__": ({"activation", "routing.hookspecs"}, set()),
    "__main__": ({"cli"}, set()),
    "settings": (set(), set()),
    "records": (set(), set()),
    "ledger": ({"records"}, set()),
    "activation": (
        {"settings", "ledger", "import_hook", "status_file", "upstream.releases", "__version__"},
        {"wrapt"},
    ),
    "status_file": ({"settings"}, set()),
    "import_hook": ({"records", "ledger", "upstream", "forward"}, set()),
    "upstream.fingerprint": (set(), set()),
    "upstream.releases": ({"records"}, set()),
    "upstream.probe": ({"records", "upstream.fingerprint", "upstream.releases"}, {"packaging"}),
    "upstream.origin": (set(), set()),
    "upstream.patching": ({"upstream.origin"}, {"wrapt"}),
    "upstream.adapter": ({"records", "upstream.origin", "upstream.releases"}, {"torch"}),
    "bits": (set(), {"torch"}),
    "forward": (
        {"records", "ledger", "upstream", "routing", "kernels", "self_test.conv", "bundled", "calls", "shadow"},
        {"torch"},
    ),
    "bundled": ({"records", "ledger", "kernels", "self_test"}, {"torch"}),
    "calls": ({"records", "kernels", "bundled", "upstream.adapter"}, {"torch"}),
    "shadow": ({"bits", "ledger"}, {"torch"}),
    "self_test": ({"bits", "ledger", "kernels", "self_test"}, {"torch"}),
    "routing": ({"records", "ledger", "routing"}, {"pluggy"}),
    "kernels": ({"kernels.dependent_launch", "kernels.launch"}, {"torch", "triton"}),
    "kernels.conv_verify": (
        {"kernels.dependent_launch", "kernels.launch", "kernels.conv_update", "kernels.recurrent_verify"},
        {"torch", "triton"},
    ),
    "lab": (
        EVIDENCE | {"bits", "lab", "upstream.fingerprint", "kernels", "forward", "bundled", ""},
        {"torch", "triton", "platformdirs"},
    ),
    "cli": (EVIDENCE | {"cli", "lab", "bench", "tracing", "status_file"}, {"rich"}),
    "bench": (EVIDENCE | {"bench", "tracing"}, {"rich", "scipy", "numpy", "matplotlib", "packaging"}),
    "tracing": (EVIDENCE | {"tracing"}, {"rich"}),
}
# What must never be imported by us at module level: SGLang comes to us, we do not go to it.
FORBIDDEN_EVERYWHERE = {"sglang", "sgl_kernel"}


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def _imports(path: Path) -> set[str]:
    """Absolute names that a module imports anywhere in it, type-checking blocks excepted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            is_package = (PACKAGE.parent / module.replace(".", "/")).is_dir()
            found |= {f"{module}.{alias.name}" if is_package else module for alias in node.names}
    return found


def _rule(name: str) -> tuple[set[str], set[str]]:
    for part in (name, name.partition(".")[0]):
        if part in ALLOWED:
            return ALLOWED[part]
    if name.endswith("__init__"):
        return set(), set()
    raise AssertionError(f"{name} is in no row of the import table")


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_imports_follow_the_table(path: Path) -> None:
    ours, libraries = _rule(_name(path))
    for imported in _imports(path):
        top, _, rest = imported.partition(".")
        assert top not in FORBIDDEN_EVERYWHERE, f"{path} imports {imported}"
        if top == OURS:
            fits = any(rest == a or (a and rest.startswith(f"{a}.")) for a in ours)
            assert fits, f"{_name(path)} may not import {imported}"
        elif top not in _standard_library():
            assert top in libraries, f"{_name(path)} may not import {imported}"


def _standard_library() -> frozenset[str]:
    import sys

    return frozenset(sys.stdlib_module_names)


@pytest.mark.parametrize("path", [p for p in _modules() if p.name != "settings.py"], ids=_name)
def test_only_settings_reads_the_environment(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in ("environ", "getenv", "environb"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").glob("*.py")), ids=_name)
def test_kernels_make_nothing_contiguous(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("tl", "gl")):
            assert node.attr not in ("contiguous", "clone", "reshape"), f"{path}:{node.lineno} hides a copy"


def test_only_upstream_spells_sglang_names() -> None:
    """The backend's and the copy's names stand in one place, so that an upgrade is an edit of one table."""
    for path in _modules():
        name = _name(path)
        if name.startswith(("upstream.", "lab.", "bench.", "tracing.", "cli.")):
            continue
        text = path.read_text(encoding="utf-8")
        for word in ("GDNAttnBackend", "fused_qkv_split", "replayssm_", "verify_kernel_is_flashinfer"):
            assert word not in text, f"{path} spells {word}"
