"""``python -m sglang_gdn_zerocopy`` and the console script: one subcommand per module of ``cli``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from sglang_gdn_zerocopy.cli.errors import CommandError

COMMANDS = ("check", "doctor", "ab", "report", "traces")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="sglang-gdn-zerocopy",
        description="Zero-copy target verification of GDN models for stock SGLang releases.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"sglang_gdn_zerocopy.cli.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns its exit code; 2 for bad input, with one line on standard error."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except CommandError as error:
        print(f"sglang-gdn-zerocopy {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"sglang-gdn-zerocopy {args.command}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
