"""Strict mode: what is declined ends the process; what has nothing to do, and what is off, does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_gdn_zerocopy.ledger import Ledger
from sglang_gdn_zerocopy.self_test import conv as conv_test
from sglang_gdn_zerocopy.self_test.memo import SelfTest
from sglang_gdn_zerocopy.settings import child_environment
from tests.test_activation import fake_sglang

BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
STRICT = {"SGLANG_GDN_ZEROCOPY": "1", "SGLANG_GDN_ZEROCOPY_STRICT": "1"}

# As SGLang loads plugins and models: whatever is an Exception is logged and swallowed.
SWALLOW = f"""
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
import sglang_gdn_zerocopy
BREAK = None
try:
    sglang_gdn_zerocopy.activate()
except Exception as error:
    print("swallowed", error)
try:
    importlib.import_module({BACKEND!r})
except Exception as error:
    print("swallowed", error)
print("serving", json.dumps(sglang_gdn_zerocopy.status()))
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(**environment),
        timeout=300,
    )


def assert_stopped(done: subprocess.CompletedProcess[str], reason: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "serving" not in done.stdout
    assert "swallowed" not in done.stdout
    assert done.stderr.count("GDN zero-copy stopped (pid ") == 1
    assert f"SGLANG_GDN_ZEROCOPY_STRICT=1 and {reason}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_build_stops_the_start(tmp_path: Path) -> None:
    site = str(fake_sglang(tmp_path / "site", "ANSWER = 42"))
    assert_stopped(run(SWALLOW, site, **STRICT), "SGLang 0.5.99 is not among the supported releases")
    # Without it the server starts, with stock's code.
    done = run(SWALLOW, site, **STRICT | {"SGLANG_GDN_ZEROCOPY_STRICT": "0"})
    assert done.returncode == 0
    assert "serving" in done.stdout


def test_an_edited_build_stops_the_start(tmp_path: Path) -> None:
    site = fake_sglang(tmp_path / "site", "ANSWER = 42", "0.5.17")
    assert_stopped(run(SWALLOW, str(site), **STRICT), "this SGLang 0.5.17 is not the released one")


@pytest.mark.parametrize("name", ["SGLANG_GDN_ZEROCOPY", "SGLANG_GDN_ZEROCOPY_KERNELS", "SGLANG_GDN_ZEROCOPY_STRICT"])
def test_a_setting_that_is_not_understood_stops_the_start(tmp_path: Path, name: str) -> None:
    site = str(fake_sglang(tmp_path / "site", "ANSWER = 42"))
    assert_stopped(run(SWALLOW, site, **STRICT | {name: "maybe"}), f"{name}='maybe' is not understood: use 1")


def test_a_failed_activation_stops_the_start(tmp_path: Path) -> None:
    site = str(fake_sglang(tmp_path / "site", "ANSWER = 42"))
    code = SWALLOW.replace("BREAK = None", "sys.modules['wrapt'] = None")
    assert_stopped(run(code, site, **STRICT), "activating failed: ModuleNotFoundError")


def test_our_own_failure_at_the_import_stops_the_start(tmp_path: Path) -> None:
    site = str(fake_sglang(tmp_path / "site", "ANSWER = 42"))
    code = SWALLOW.replace("BREAK = None", "from sglang_gdn_zerocopy.upstream import probe\nprobe.package_of = None")
    assert_stopped(run(code, site, **STRICT), "installing failed: TypeError")


def test_off_is_no_refusal(tmp_path: Path) -> None:
    """`ab` sets the switch to 0 in one arm of the same environment."""
    site = str(fake_sglang(tmp_path / "site", "ANSWER = 42"))
    done = run(SWALLOW, site, **STRICT | {"SGLANG_GDN_ZEROCOPY": "0"})
    assert done.returncode == 0
    assert done.stderr == ""


MOUNTED = f"""
import importlib, json, pathlib, sys
from sglang_gdn_zerocopy.lab import loader
known = loader._known_stand_ins
loader._known_stand_ins = lambda: {{**known(), **CHANGES}}
loader.mount(pathlib.Path(sys.argv[1]))
import sglang_gdn_zerocopy
sglang_gdn_zerocopy.activate()
importlib.import_module({BACKEND!r})
print(json.dumps(sglang_gdn_zerocopy.status()))
"""


@pytest.mark.parametrize(
    ("release", "changes", "kernels", "state"),
    [
        # A supported build before its first verify call: a prefill worker stays like this for ever.
        ("0.5.17", "{}", "1", "installed"),
        ("0.5.17", "{'is_cuda': lambda: False}", "1", "not applicable"),
        ("0.5.21", "{}", "0", "built in"),
    ],
)
def test_nothing_to_do_is_no_refusal(
    stock_tree: Callable[[str], Path], release: str, changes: str, kernels: str, state: str
) -> None:
    code = MOUNTED.replace("CHANGES", changes)
    done = run(code, str(stock_tree(release)), **STRICT, SGLANG_GDN_ZEROCOPY_KERNELS=kernels)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["state"], status["counts"][0]["count"]) == (state, 1)


def edited(holds: str) -> str:
    """A stock build of whose fingerprints those in the table that has the file ``holds`` show a change."""
    return MOUNTED.replace("CHANGES", "{}").replace(
        "import sglang_gdn_zerocopy\n",
        "import sglang_gdn_zerocopy\n"
        "from sglang_gdn_zerocopy.upstream import probe\n"
        "real = probe.differing_bodies\n"
        "edited = lambda package, table: real(package, table) or "
        f"(('body in a.py',) if {holds!r} in table else ())\n"
        "probe.differing_bodies = edited\n",
    )


@pytest.mark.parametrize(("release", "otherwise"), [("0.5.17", "installed"), ("0.5.22", "built in")])
def test_edited_kernels_stop_the_start_that_would_go_on_without_them(
    stock_tree: Callable[[str], Path], release: str, otherwise: str
) -> None:
    code, tree = edited("srt/models/qwen3_5.py"), str(stock_tree(release))
    done = run(code, tree, **STRICT)
    assert done.returncode == 1
    assert "no bundled kernel: body in a.py differs from the released one" in done.stderr.splitlines()[-1]
    done = run(code, tree, SGLANG_GDN_ZEROCOPY="1")
    status = json.loads(done.stdout)
    assert status["state"] == otherwise
    said = " ".join(row["reason"] for row in status["counts"])
    assert "no bundled kernel: body in a.py differs from the released one" in said
    assert "after their self-test" not in said


def test_a_build_that_the_user_allows_is_no_refusal(stock_tree: Callable[[str], Path]) -> None:
    code = edited("srt/layers/attention/linear/gdn_backend.py")
    done = run(code, str(stock_tree("0.5.17")), **STRICT, SGLANG_GDN_ZEROCOPY_UNVERIFIED="1")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["state"], status["bundled_kernels"]) == ("installed", False)


SPAWN = f"""
import importlib, multiprocessing, sys, threading

def scheduler(folder, pipe):
    # Half-started ranks hold threads and process groups that a normal exit would wait for.
    threading.Thread(target=threading.Event().wait).start()
    sys.path.insert(0, folder)
    import sglang_gdn_zerocopy
    sglang_gdn_zerocopy.activate()
    try:
        importlib.import_module({BACKEND!r})
    except Exception:
        pass
    pipe.send("ready")

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=scheduler, args=(sys.argv[1], theirs))
    child.start()
    theirs.close()
    # What SGLang's engine does: a scheduler that dies before it is ready ends the start.
    try:
        print(ours.recv())
    except EOFError:
        child.join(30)
        print("scheduler died during initialization", child.exitcode)
"""


def test_a_scheduler_process_ends_at_once_and_its_parent_sees_it(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SPAWN)
    site = fake_sglang(tmp_path / "site", "ANSWER = 42")
    done = subprocess.run(
        [sys.executable, str(script), str(site)],
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(**STRICT),
        timeout=120,
    )
    assert done.stdout == "scheduler died during initialization 1\n", done.stderr
    assert done.stderr.count("GDN zero-copy stopped (pid ") == 1


@pytest.mark.parametrize("raises", [False, True])
def test_a_failed_self_test_stops(raises: bool) -> None:
    import torch

    def difference() -> str:
        if raises:
            raise RuntimeError("no kernel image")
        return "conv windows"

    x = torch.empty(4, 512)
    shape = conv_test.conv_shape(2, 2, x, torch.empty(512, 4), None, True, x, x, None)
    ledger = Ledger()
    ledger.strict = True
    says = "RuntimeError: no kernel image" if raises else "conv windows is not stock's"
    with pytest.raises(SystemExit, match=f"{says}$"):
        SelfTest(ledger, enabled=True).passed(shape, difference)
