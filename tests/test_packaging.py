"""The wheel: only our files, installs beside SGLang without moving anything, works at its dependencies' floors."""

from __future__ import annotations

import hashlib
import json
import os
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


def build(folder: Path, changed: float | None = None, **environment: str) -> Path:
    """A wheel built in ``folder`` from a copy of the tree, so that no build folder is left in it.

    ``changed``: when all files of the copy were changed last.
    """
    source = folder / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".git", ".*", "build", "dist", "*.egg-info", "__pycache__")
    )
    for path in source.rglob("*"):
        if changed is not None:
            os.utime(path, (changed, changed))
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "dist"), str(source), **environment)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as anyone would build it."""
    return build(tmp_path_factory.mktemp("build"))


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


def test_two_builds_of_one_commit_are_one_file(tmp_path: Path) -> None:
    """Other folders and file times, the same bytes: SOURCE_DATE_EPOCH is all that a builder has to set."""
    digests = set()
    for name, changed in (("one", 1.6e9), ("two", 1.65e9)):
        (tmp_path / name).mkdir()
        built = build(tmp_path / name, changed, SOURCE_DATE_EPOCH="1700000000")
        digests.add(hashlib.sha256(built.read_bytes()).hexdigest())
    assert len(digests) == 1


OFFLINE = """
import os, pathlib, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        print("network:", event, arguments, file=sys.stderr)
        os._exit(3)
    if event == "subprocess.Popen" and "pip" in map(str, arguments[1]):
        print("pip:", arguments, file=sys.stderr)
        os._exit(3)

sys.addaudithook(watch)
if sys.argv[2] == "self-test of the watch":
    import socket
    socket.create_connection(("127.0.0.1", 9))
os.environ["TRITON_INTERPRET"] = "1"
import sglang_gdn_zerocopy
from sglang_gdn_zerocopy.lab.loader import mount
mount(pathlib.Path(sys.argv[1]))
sglang_gdn_zerocopy.activate()
from sglang_gdn_zerocopy.lab.cases import Case
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.world import build_world
case = Case("layer", model="qwen3_5", num_v_heads=1, draft_tokens=2, slots=(1,))
Harness().verify(build_world(case, 3, "cpu", low_parts=False))
assert sglang_gdn_zerocopy.status()["state"] == "installed"
from sglang_gdn_zerocopy.__main__ import main
main(["doctor"])
main(["doctor", "--live", sys.argv[3]])
"""


def test_nothing_but_check_goes_to_the_network(stock_tree: Callable[[str], Path], tmp_path: Path) -> None:
    """Import, activation, a verify call with self-tests, shadow and status file, `doctor` twice."""
    status = str(tmp_path / "status")
    environment = {"SGLANG_GDN_ZEROCOPY": "1", "SGLANG_GDN_ZEROCOPY_SHADOW": "1"}
    environment["SGLANG_GDN_ZEROCOPY_STATUS_DIR"] = status
    run(sys.executable, "-c", OFFLINE, str(stock_tree("0.5.17")), "", status, **environment)
    (written,) = Path(status).iterdir()
    assert written.name.startswith("gdn-zerocopy-")
    watched = subprocess.run([sys.executable, "-c", OFFLINE, "", "self-test of the watch"], check=False)
    assert watched.returncode == 3


def test_temporary_files_are_private() -> None:
    """Only tempfile's own makers, which take mode 0600 or 0700 and a name that cannot be guessed."""
    for path in (ROOT / "sglang_gdn_zerocopy").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        made = set(re.findall(r"tempfile\.(\w+)", text))
        assert made <= {"mkstemp", "mkdtemp", "TemporaryDirectory", "TemporaryFile"}, path
        assert '"/tmp' not in text, path
        assert "gettempdir" not in text, path


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_the_resolver_adds_only_ours_under_sglangs_pins(
    clean: Path, wheel: Path, stock_tree: Callable[[str], Path], tmp_path: Path, version: str
) -> None:
    """pip's own dry run, every pin of the release as a constraint: what it would install is ours and nothing else."""
    (metadata,) = stock_tree(version).glob("sglang-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    theirs = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    pins = [f"{r.name}{r.specifier}" for r in theirs if r.specifier and (r.marker is None or r.marker.evaluate())]
    assert len(pins) > 10
    constraints, report = tmp_path / "constraints.txt", tmp_path / "report.json"
    constraints.write_text("\n".join(pins), encoding="utf-8")
    command = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
    run(str(clean), "-m", "pip", *command, "--constraint", str(constraints), str(wheel))
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    names = {item["metadata"]["name"].lower().replace("_", "-") for item in found}
    assert names == {"sglang-gdn-zerocopy", *FLOORS}


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
