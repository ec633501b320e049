"""Commands of the documents: fenced `console` blocks with `$ ` prompts.

`<!-- needs: WHAT -->` before a block says what it takes to run it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_BLOCK = re.compile(r"(?:^<!-- needs: (?P<needs>[a-z-]+) -->\n)?^```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. Its commands belong to one shell session, and so do those of one document."""

    document: Path
    line: int
    needs: str
    """What it takes beyond a development machine, for example `ascend`; empty for nothing."""
    commands: tuple[str, ...]


def blocks(document: Path) -> list[Block]:
    """Every console block of a document. Raises ValueError for a line that is neither a command nor goes on with one."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(document, text.count("\n", 0, match.start("body")) + 1, match["needs"] or "", _commands(document, match["body"]))
        for match in _BLOCK.finditer(text)
    ]


def _commands(document: Path, body: str) -> tuple[str, ...]:
    commands: list[str] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            commands.append(line[2:])
        elif commands and commands[-1].endswith("\\"):
            commands[-1] += f"\n{line}"
        else:
            raise ValueError(f"{document.name}: {line!r} is neither a command (`$ …`) nor goes on with one (`\\` at the end)")
    return tuple(commands)
