"""All checks of the project, in order, as the README and CI run them: ``python -m tests``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("pytest", "-n", str(os.cpu_count() or 1), "--dist", "loadgroup"),
)


def main() -> int:
    """Run every check, also after one has failed; 1 when any did."""
    failed = []
    for check in CHECKS:
        print(f"== {' '.join(check)}", flush=True)
        if subprocess.run([sys.executable, "-m", *check], cwd=ROOT, check=False).returncode:
            failed.append(check[0])
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
