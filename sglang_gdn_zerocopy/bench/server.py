"""The server under test: one that `ab` starts for a phase, or one that the user started."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_gdn_zerocopy.bench.client import healthy
from sglang_gdn_zerocopy.bench.errors import RunFailed
from sglang_gdn_zerocopy.bench.supervisor import Group, Supervisor, ending, tail
from sglang_gdn_zerocopy.ledger import parse_statement
from sglang_gdn_zerocopy.settings import SWITCH, child_environment

HOST = "127.0.0.1"
_POLL_S = 0.2


@dataclass(frozen=True)
class Server:
    """A server that answers on ``base_url``. ``group`` is None for the user's own, which is never stopped; ``log``
    may be None then too."""

    base_url: str
    log: Path | None
    group: Group | None

    def check(self, doing: str) -> None:
        """Raise ``RunFailed`` with the last lines of the log when the server has exited during ``doing``."""
        status = self.group.exit_status() if self.group is not None else None
        if status is not None and self.log is not None:
            raise RunFailed(
                f"the server ended with {ending(status)} during {doing}; last lines of {self.log}:\n{tail(self.log)}"
            )

    def statements(self) -> tuple[str, ...]:
        """The overlay's own lines in the log so far, each once, in order."""
        if self.log is None:
            return ()
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise RunFailed(f"the server's log cannot be read: {error}") from None
        said = (line[line.index("GDN zero-copy") :].strip() for line in lines if parse_statement(line))
        return tuple(dict.fromkeys(said))


def command(python: str, model: str, server_args: Sequence[str], port: int) -> list[str]:
    """The command line of a stock server. `ab`'s own values come last, where argparse lets them win."""
    place = ["--model-path", model, "--host", HOST, "--port", str(port)]
    return [python, "-m", "sglang.launch_server", *server_args, *place]


def start(
    supervisor: Supervisor, arguments: Sequence[str], arm: str, port: int, log: Path, startup_timeout_s: float
) -> Server:
    """Start a server with the overlay's switch set for ``arm`` and wait until it is healthy.

    Raises ``RunFailed`` as soon as the process exits, or after ``startup_timeout_s`` seconds; the supervisor ends
    what still runs then.
    """
    # The switch is set in both arms: the user's shell may have it on.
    env = child_environment(**{SWITCH.name: "1" if arm == "on" else "0", "PYTHONUNBUFFERED": "1"})
    group = supervisor.start(arguments, log, env)
    server = Server(f"http://{HOST}:{port}", log, group)
    wait_until_healthy(server, log, startup_timeout_s)
    return server


def wait_until_healthy(server: Server, log: Path, startup_timeout_s: float) -> None:
    """Wait for a server that writes ``log``; raises as :func:`start` does."""
    deadline = time.monotonic() + startup_timeout_s
    while True:
        server.check("its start")
        if healthy(server.base_url):
            server.check("its start")
            return
        if time.monotonic() > deadline:
            raise RunFailed(
                f"the server was not healthy after {startup_timeout_s:g} s (--startup-timeout); last lines of {log}:\n"
                f"{tail(log)}"
            )
        time.sleep(_POLL_S)
