"""The generated parts of the README: ``python -m tests.readme`` writes them, a test compares them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sglang_gdn_zerocopy.records import Protocol
from sglang_gdn_zerocopy.settings import SETTINGS
from sglang_gdn_zerocopy.upstream.releases import RELEASES, SAME_BODIES

README = Path(__file__).resolve().parents[1] / "README.md"


def releases_table() -> str:
    """The supported releases with their protocols and what the overlay does there."""
    also = {post: base for base, post in SAME_BODIES.items()}
    rows = ["| SGLang | target verify | overlay |", "| --- | --- | --- |"]
    for version, release in RELEASES.items():
        name = f"{version} (and {also[version]}, same code)" if version in also else version
        protocols = ", ".join(protocol.value for protocol in release.protocols)
        effect = "bundled conv and recurrence"
        effect += "; circular ring: bundled conv" if Protocol.CIRCULAR_RING in release.protocols else ""
        effect += "; trees: views instead of the copy" if release.copies else "; trees: upstream, which has no copy"
        rows.append(f"| {name} | {protocols} | {effect} |")
    return "\n".join(rows)


def settings_table() -> str:
    """The environment variables."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    rows += [f"| `{s.name}` | {f'`{s.default}`' if s.default else 'empty'} | {s.help} |" for s in SETTINGS]
    return "\n".join(rows)


def render(text: str) -> str:
    """``text`` with every generated part as it should be."""
    for name, content in {"releases": releases_table(), "settings": settings_table()}.items():
        pattern = rf"(<!-- {name}: generated -->.*?<!-- end -->)"
        before, _, after = re.split(pattern, text, maxsplit=1, flags=re.DOTALL)
        text = f"{before}<!-- {name}: generated -->\n{content}\n<!-- end -->{after}"
    return text


if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
