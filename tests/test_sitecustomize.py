"""The sitecustomize example: cheap, silent, exception-proof, inert when off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "sitecustomize_example"
STATE = "import json, sys, sglang_gdn_zerocopy as o; print(json.dumps([o.status()['state'], sorted(sys.modules)]))"


def run(code: str, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As ``env -i`` does it: no variable but the ones named."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": path, **environment},
    )


def test_on_waits_for_the_backend_and_loads_nothing_heavy() -> None:
    done = run(STATE, str(EXAMPLE), SGLANG_GDN_ZEROCOPY="1")
    state, modules = json.loads(done.stdout)
    assert state == "waiting"
    assert not {"torch", "triton", "pluggy", "sglang"} & set(modules)
    assert done.stderr == ""


def test_off_is_inert_and_silent() -> None:
    done = run("import json, sys; print(json.dumps(sorted(sys.modules)))", str(EXAMPLE))
    assert not {"torch", "wrapt", "pluggy", "sglang"} & set(json.loads(done.stdout))
    assert done.stderr == ""


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.gdn_other_ran = True\n")
    path = os.pathsep.join([str(EXAMPLE), str(tmp_path)])
    done = run("import sys; print(sys.gdn_other_ran)", path, SGLANG_GDN_ZEROCOPY="1")
    assert done.stdout.strip() == "True"


def test_a_broken_one_and_a_missing_package_do_not_stop_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    (tmp_path / "sglang_gdn_zerocopy.py").write_text("raise RuntimeError('ours')\n")
    path = os.pathsep.join([str(EXAMPLE), str(tmp_path)])
    done = run("print('started')", path, SGLANG_GDN_ZEROCOPY="1")
    assert (done.stdout.strip(), done.stderr) == ("started", "")
