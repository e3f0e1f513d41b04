"""Fixtures: stock releases as unpacked wheels, and one of them mounted in this process.

The kernels of a mounted release run in the Triton interpreter, so that the real ones are tested without a GPU. With
GDN_ZEROCOPY_TEST_DEVICE=cuda those of the drills, of shadow mode and of the fused route run on the device instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Triton reads it when it is imported, so it must be set before any test imports torch or triton.
os.environ["TRITON_INTERPRET"] = "1" if os.environ.get("GDN_ZEROCOPY_TEST_DEVICE", "cpu") == "cpu" else "0"
os.environ.pop("SGLANG_GDN_ZEROCOPY", None)

from sglang_gdn_zerocopy.kernels import conv_verify
from sglang_gdn_zerocopy.lab import wheels
from sglang_gdn_zerocopy.lab.harness import Harness
from sglang_gdn_zerocopy.lab.loader import mount
from sglang_gdn_zerocopy.settings import CACHE

ROOT = Path(__file__).resolve().parents[1]
DEVICE = os.environ.get("GDN_ZEROCOPY_TEST_DEVICE", "cpu")
# What a script starts in its background ignores Ctrl-C, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Has all that a release with a copy can have, and is what the H200 figures are about.
MOUNTED = "0.5.17"


@pytest.fixture(scope="session")
def stock_tree() -> Callable[[str], Path]:
    """The folder of a stock release's Python sources, fetched over pip once and kept in the cache."""

    def folder(release: str) -> Path:
        cache = Path(CACHE.read()) if CACHE.read() else wheels.default_cache()
        return wheels.fetch(release, cache).folder

    return folder


@pytest.fixture(scope="session")
def harness(stock_tree: Callable[[str], Path]) -> Harness:
    """The stock 0.5.17 backend, mounted in this process."""
    mount(stock_tree(MOUNTED))
    return Harness()


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The overlay activated for one test, with an empty ledger."""
    import sglang_gdn_zerocopy
    from sglang_gdn_zerocopy import activation

    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    activation._PROCESS.ledger.reset()
    sglang_gdn_zerocopy.activate()
    yield
    sglang_gdn_zerocopy.deactivate()


@pytest.fixture
def two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conv and recurrence one after the other, also on a device where one launch would be the choice."""
    monkeypatch.setattr(conv_verify, "choose", lambda *args: None)


@pytest.fixture
def views_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The overlay activated for one test without its bundled kernels, with an empty ledger."""
    import sglang_gdn_zerocopy
    from sglang_gdn_zerocopy import activation

    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY", "1")
    monkeypatch.setenv("SGLANG_GDN_ZEROCOPY_KERNELS", "0")
    activation._PROCESS.ledger.reset()
    sglang_gdn_zerocopy.activate()
    yield
    sglang_gdn_zerocopy.deactivate()


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python code in a child process with the given environment changes; must exit 0."""

    def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **environment},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run
