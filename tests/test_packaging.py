"""The wheel: only our files, installs beside SGLang without moving anything, works at its dependencies' floors."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sglang_gdn_zerocopy.settings import child_environment
from sglang_gdn_zerocopy.upstream.releases import RELEASES

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
# Ours, in full: the lowest versions that we promise to work with.
FLOORS = {"wrapt": "1.14.0", "pluggy": "1.3.0", "packaging": "22.0"}


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=child_environment(**environment), timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, so that no build folder is left in it."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".git", ".*", "build", "dist", "*.egg-info", "__pycache__")
    )
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "dist"), str(source))
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The Python of a clean environment that holds the wheel and its dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(str(python), "-m", "pip", "install", "--quiet", str(wheel))
    return python


def test_the_wheel_holds_only_our_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    ours = [name for name in names if ".dist-info/" not in name]
    assert all(name.startswith("sglang_gdn_zerocopy/") for name in ours)
    assert {"sglang_gdn_zerocopy/py.typed", "sglang_gdn_zerocopy/__init__.py"} <= set(ours)
    source = {p.relative_to(ROOT).as_posix() for p in (ROOT / "sglang_gdn_zerocopy").rglob("*.py")}
    assert source == {name for name in ours if name.endswith(".py")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_clean_install_works_and_brings_three_packages(clean: Path) -> None:
    listed = run(str(clean), "-m", "pip", "list", "--format=freeze")
    names = {line.partition("==")[0].lower().replace("_", "-") for line in listed.splitlines()}
    assert names - {"pip", "setuptools"} == {"sglang-gdn-zerocopy", "wrapt", "pluggy", "packaging"}
    script = clean.parent / "sglang-gdn-zerocopy"
    assert "check" in run(str(script), "--help")
    done = subprocess.run([str(script), "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'sglang-gdn-zerocopy[lab]'" in done.stderr
    assert subprocess.run([str(script), "doctor"], capture_output=True, check=False).returncode == 1


def test_the_entry_point_of_the_installed_wheel(clean: Path) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "(entry,) = entry_points(group='sglang.srt.plugins')\n"
        "print(entry.name, entry.load()())"
    )
    assert run(str(clean), "-c", code).strip() == "gdn_zerocopy False"


def test_no_dependency_of_ours_moves_a_pin_of_sglangs(stock_tree: Callable[[str], Path]) -> None:
    """Ours are unpinned and not SGLang's, but for packaging, which no release pins."""
    ours = re.search(r"^dependencies = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    assert ours is not None
    names = {Requirement(text).name for text in re.findall(r'"([^"]+)"', ours[1])}
    assert names == set(FLOORS)
    for version in RELEASES:
        (metadata,) = stock_tree(version).glob("sglang-*.dist-info/METADATA")
        theirs = [
            Requirement(line.partition(": ")[2])
            for line in metadata.read_text(encoding="utf-8").splitlines()
            if line.startswith("Requires-Dist: ")
        ]
        clashing = {r.name for r in theirs if r.name in names and str(r.specifier)}
        assert clashing == set(), f"SGLang {version} pins {clashing}"


def test_floors_are_the_declared_ones() -> None:
    for name, floor in FLOORS.items():
        assert re.search(rf'"{name}>={floor.removesuffix(".0").removesuffix(".0")}', PYPROJECT), name


def test_the_floors_work(tmp_path: Path) -> None:
    """The foundation's tests once more with the lowest wrapt, pluggy and packaging in front."""
    floors = [f"{name}=={version}" for name, version in FLOORS.items()]
    target = tmp_path / "floors"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *floors)
    code = "import wrapt, pluggy; print(wrapt.__version__, pluggy.__version__)"
    assert run(sys.executable, "-c", code, PYTHONPATH=str(target)).split() == ["1.14.0", "1.3.0"]
    # pytest needs a newer pluggy itself, so the tests of that floor run as a script would use it.
    tests = ["tests/upstream/test_patching.py", "tests/test_lifecycle.py"]
    only_wrapt = tmp_path / "wrapt"
    only_wrapt.mkdir()
    shutil.move(target / "wrapt", only_wrapt / "wrapt")
    run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)),
        *(str(ROOT / test) for test in tests),
        PYTHONPATH=str(only_wrapt),
    )
    policies = (
        "from sglang_gdn_zerocopy.routing.manager import RouteManager\n"
        "from sglang_gdn_zerocopy.ledger import Ledger\n"
        "from tests.routing.test_builtin import SHAPE\n"
        "from tests.routing.test_manager import FirstLayersUpstream, Raises, UnknownArgument, VETO\n"
        "import pluggy\n"
        "assert pluggy.__version__ == '1.3.0'\n"
        "routes = RouteManager(Ledger(), [])\n"
        "routes.register(FirstLayersUpstream(), 'veto')\n"
        "routes.register(Raises(), 'raises')\n"
        "try:\n"
        "    routes.register(UnknownArgument(), 'unknown')\n"
        "except pluggy.PluginValidationError:\n"
        "    pass\n"
        "assert routes.decide(SHAPE) == VETO, routes.decide(SHAPE)\n"
        "assert routes.policies == ('veto', 'builtin'), routes.policies\n"
    )
    # A stand-in for pytest's import in the test modules, which cannot run with that pluggy.
    stub = "import sys; from unittest.mock import MagicMock; sys.modules['pytest'] = MagicMock()\n"
    run(sys.executable, "-c", stub + policies, PYTHONPATH=f"{target}:{ROOT}")
