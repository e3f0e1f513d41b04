"""Off imports nothing; on reaches spawned and forked processes; nothing of ours makes SGLang's import fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]
HEAVY = ("torch", "triton", "wrapt", "pluggy", "sglang", "packaging")
BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"

LOADED = f"""
import json, sys
import sglang_gdn_zerocopy
sglang_gdn_zerocopy.activate()
status = sglang_gdn_zerocopy.status()
print(json.dumps([[name for name in {HEAVY!r} if name in sys.modules], status]))
"""


@pytest.mark.parametrize("value", [None, "0", "", "maybe"])
def test_off_or_unknown_loads_nothing(python: Python, value: str | None) -> None:
    environment = {} if value is None else {"SGLANG_GDN_ZEROCOPY": value}
    done = python(LOADED, **environment)
    loaded, status = json.loads(done.stdout)
    assert loaded == []
    assert status["state"] == "off"
    if value == "maybe":
        assert "SGLANG_GDN_ZEROCOPY='maybe' is not understood: use 1 or 0" in status["reason"]
        assert "declined" in done.stderr
    else:
        assert done.stderr == ""


def test_on_loads_only_wrapt(python: Python) -> None:
    loaded, status = json.loads(python(LOADED, SGLANG_GDN_ZEROCOPY="1").stdout)
    assert set(loaded) <= {"wrapt", "packaging"}
    assert status["state"] == "waiting"


def test_the_entry_point_is_activate() -> None:
    from importlib.metadata import entry_points

    (entry,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "gdn_zerocopy"]
    import sglang_gdn_zerocopy

    assert entry.load() is sglang_gdn_zerocopy.activate


def fake_sglang(folder: Path, backend: str, version: str = "0.5.99") -> Path:
    """A ``sglang`` of ``version`` whose backend module is the given source."""
    path = folder / (BACKEND.replace(".", "/") + ".py")
    path.parent.mkdir(parents=True)
    for parent in path.parents:
        if parent == folder:
            break
        (parent / "__init__.py").touch()
    path.write_text(backend)
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return folder


IMPORT = f"""
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
import sglang_gdn_zerocopy
sglang_gdn_zerocopy.activate()
module = importlib.import_module({BACKEND!r})
print(json.dumps(sglang_gdn_zerocopy.status()))
print(module.ANSWER)
"""


@pytest.mark.parametrize(
    ("backend", "version", "says"),
    [
        ("ANSWER = 42", "0.5.99", "SGLang 0.5.99 is not among the supported releases"),
        ("ANSWER = 42", "0.5.17", "is not the released one: GDNAttnBackend.forward_extend in"),
        ("ANSWER = 42\nclass GDNAttnBackend: ...", "not a version", "SGLang not a version is not among"),
    ],
)
def test_a_stale_or_foreign_sglang_starts_normally(
    python: Python, tmp_path: Path, backend: str, version: str, says: str
) -> None:
    done = python(IMPORT, str(fake_sglang(tmp_path / "site", backend, version)), SGLANG_GDN_ZEROCOPY="1")
    status, answer = done.stdout.splitlines()
    assert answer == "42"
    assert json.loads(status)["state"] == "declined"
    assert says in json.loads(status)["reason"]
    assert done.stderr.count("GDN zero-copy declined") == 1
    assert "Traceback" not in done.stderr


def test_a_declined_build_stays_declined_when_asked_again(python: Python, tmp_path: Path) -> None:
    code = IMPORT.replace("print(json.dumps(", "print(sglang_gdn_zerocopy.activate())\nprint(json.dumps(")
    done = python(code, str(fake_sglang(tmp_path / "site", "ANSWER = 42")), SGLANG_GDN_ZEROCOPY="1")
    switched_on, status, _ = done.stdout.splitlines()
    assert switched_on == "True"
    assert json.loads(status)["state"] == "declined"
    assert "SGLang 0.5.99 is not among" in json.loads(status)["reason"]
    assert done.stderr.count("GDN zero-copy declined") == 1


def test_a_declined_build_is_switched_off(python: Python, tmp_path: Path) -> None:
    code = IMPORT.replace("print(json.dumps(", "print(sglang_gdn_zerocopy.deactivate())\nprint(json.dumps(")
    done = python(code, str(fake_sglang(tmp_path / "site", "ANSWER = 42")), SGLANG_GDN_ZEROCOPY="1")
    covered, status, _ = done.stdout.splitlines()
    assert covered == "()"
    assert (json.loads(status)["state"], json.loads(status)["reason"]) == ("off", "deactivate() was called")


def test_an_override_without_the_names_that_we_need_is_still_declined(python: Python, tmp_path: Path) -> None:
    site = fake_sglang(tmp_path / "site", "ANSWER = 42\ndef is_cuda(): return True")
    done = python(IMPORT, str(site), SGLANG_GDN_ZEROCOPY="1", SGLANG_GDN_ZEROCOPY_UNVERIFIED="1")
    assert "has no GDNAttnBackend.forward_extend" in json.loads(done.stdout.splitlines()[0])["reason"]


def test_our_own_failure_does_not_fail_the_import(python: Python, tmp_path: Path) -> None:
    code = IMPORT.replace(
        "import sglang_gdn_zerocopy\n",
        "import sglang_gdn_zerocopy\n"
        "from sglang_gdn_zerocopy.upstream import probe\n"
        "def explode(*args): raise RuntimeError('probe exploded')\n"
        "probe.package_of = explode\n",
    )
    done = python(code, str(fake_sglang(tmp_path / "site", "ANSWER = 42")), SGLANG_GDN_ZEROCOPY="1")
    status, answer = done.stdout.splitlines()
    assert answer == "42"
    assert json.loads(status)["reason"] == "RuntimeError: probe exploded"
    assert "installing failed, stock takes over" in done.stderr


def test_a_missing_wrapt_is_one_clear_line(python: Python) -> None:
    code = "import sys\nsys.modules['wrapt'] = None\n" + LOADED
    done = python(code, SGLANG_GDN_ZEROCOPY="1")
    assert "activating failed, stock takes over: ModuleNotFoundError" in done.stderr
    assert json.loads(done.stdout)[1]["state"] == "off"


SPAWN = """
import json, multiprocessing, sys, pathlib

def scheduler(folder, load_plugins, pipe):
    from sglang_gdn_zerocopy.lab.loader import mount
    import importlib, importlib.metadata
    mount(pathlib.Path(folder))
    if load_plugins:
        # What SGLang's loader does in each scheduler process.
        for entry in importlib.metadata.entry_points(group="sglang.srt.plugins"):
            if entry.name == "gdn_zerocopy":
                entry.load()()
    importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
    import sglang_gdn_zerocopy
    pipe.send(sglang_gdn_zerocopy.status())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = []
    for load_plugins in (True, False):
        ours, theirs = context.Pipe()
        child = context.Process(target=scheduler, args=(sys.argv[1], load_plugins, theirs))
        child.start()
        answers.append(ours.recv())
        child.join()
    print(json.dumps(answers))
"""


def test_a_spawned_scheduler_process(stock_tree: Callable[[str], Path], tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SPAWN)
    from sglang_gdn_zerocopy.settings import child_environment

    done = subprocess.run(
        [sys.executable, str(script), str(stock_tree("0.5.17"))],
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(SGLANG_GDN_ZEROCOPY="1"),
    )
    assert done.returncode == 0, done.stderr
    with_plugins, without = json.loads(done.stdout)
    assert with_plugins["state"] == "installed"
    assert with_plugins["release"] == "0.5.17"
    assert without["state"] == "off"


FORK = """
import os, pathlib, sys, importlib
from sglang_gdn_zerocopy.lab.loader import mount
mount(pathlib.Path(sys.argv[1]))
import sglang_gdn_zerocopy as overlay
overlay.activate()
module = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
raw = module.GDNAttnBackend.__dict__["forward_extend"].__wrapped__
assert overlay.status()["counts"] != []
pid = os.fork()
if pid == 0:
    try:
        assert overlay.status()["counts"] == []
        overlay.activate()
        proxy = module.GDNAttnBackend.__dict__["forward_extend"]
        assert proxy.__wrapped__ is raw
        overlay.deactivate()
        assert module.GDNAttnBackend.__dict__["forward_extend"] is raw
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)
_, code = os.waitpid(pid, 0)
assert code == 0
assert module.GDNAttnBackend.__dict__["forward_extend"] is not raw
"""


def test_a_forked_child_counts_from_zero_and_patches_once(python: Python, stock_tree: Callable[[str], Path]) -> None:
    python(FORK, str(stock_tree("0.5.17")), SGLANG_GDN_ZEROCOPY="1")
