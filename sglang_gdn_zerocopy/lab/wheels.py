"""Stock SGLang wheels: fetched with pip, unpacked once, kept in a cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

# Any of a release's wheels has the same Python sources; this one exists for every release.
_TAGS = ("--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_34_x86_64")
_MANIFEST = "wheel.json"


class LabError(Exception):
    """A wheel cannot be had or a worker broke. The text names the value and the remedy."""


@dataclass(frozen=True)
class StockTree:
    """A release's Python sources. ``folder`` holds ``sglang`` and its dist-info; ``sha256`` is the wheel's."""

    version: str
    folder: Path
    wheel: str
    sha256: str


def default_cache() -> Path:
    """The user's cache folder for wheels."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("sglang-gdn-zerocopy"))


def fetch(version: str, cache: Path) -> StockTree:
    """The release's sources from ``cache``, fetched over pip when they are not there yet.

    Writes ``cache/sglang-<version>`` in one step, so that an interrupted fetch leaves nothing behind there.
    Raises :class:`LabError` when pip finds no such wheel or the cache cannot be written.
    """
    folder = cache / f"sglang-{version}"
    if not (folder / _MANIFEST).is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
                unpacked = _unpack(_download(version, Path(scratch)), Path(scratch) / "tree")
                _put(unpacked, folder)
        except OSError as error:
            raise LabError(f"cannot keep the wheel of sglang {version} in {cache}: {error}; use --cache DIR") from None
    manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    return StockTree(version, folder, manifest["wheel"], manifest["sha256"])


def _put(unpacked: Path, folder: Path) -> None:
    """Move ``unpacked`` to ``folder``, unless another process has put a complete one there meanwhile."""
    if not (folder / _MANIFEST).is_file():
        shutil.rmtree(folder, ignore_errors=True)
    try:
        os.replace(unpacked, folder)
    except OSError:
        if not (folder / _MANIFEST).is_file():
            raise


def _download(version: str, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", *_TAGS, "--dest", str(target), f"sglang=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        last = lines[-1] if lines else "it printed nothing"
        raise LabError(f"pip cannot fetch the wheel of sglang {version}: {last}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> Path:
    """Python sources and metadata only: nothing compiled, no data."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or ".dist-info/" in name:
                archive.extract(name, target)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (target / _MANIFEST).write_text(json.dumps({"wheel": wheel.name, "sha256": digest}), encoding="utf-8")
    return target
