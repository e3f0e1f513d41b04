"""The README says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_gdn_zerocopy import __version__
from sglang_gdn_zerocopy.__main__ import COMMANDS
from sglang_gdn_zerocopy.settings import SETTINGS
from sglang_gdn_zerocopy.upstream.releases import RELEASES
from tests.readme import README, render

ROOT = Path(__file__).resolve().parents[1]
TEXT = README.read_text(encoding="utf-8")


def test_generated_parts_are_up_to_date() -> None:
    assert render(TEXT) == TEXT, "run: python -m tests.readme"
    assert all(version in TEXT for version in RELEASES)
    assert all(setting.name in TEXT for setting in SETTINGS)


def test_ci_runs_the_readmes_test_command() -> None:
    commands = re.findall(r"^    (python3 -m venv .*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    main_job, tests = commands
    assert main_job.endswith("sglang-gdn-zerocopy check")
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == tests


def test_every_command_is_described() -> None:
    for command in COMMANDS:
        assert f"`{command}`" in TEXT or f"sglang-gdn-zerocopy {command}" in TEXT, command


def test_one_version_everywhere() -> None:
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
