"""The documents: links lead somewhere, commands can be read by a shell, and what they name exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from docs.commands import DOCUMENTS, ROOT, blocks

COMMANDS = [(block.document.name, command) for document in DOCUMENTS for block in blocks(document) for command in block.commands]


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{document.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(linked), f"{document.name} links to {target}, which has no such heading"


def test_the_readme_opens_with_what_it_is_and_the_commands() -> None:
    commands = [command for block in blocks(ROOT / "README.md") for command in block.commands]
    assert commands[0] == "make demo"
    assert any(command.startswith("kubectl apply -f examples/") for command in commands)
    assert any(command.startswith("helm install ") for command in commands)


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=lambda value: str(value).splitlines()[0][:60])
def test_a_shell_can_read_the_command(document: str, command: str) -> None:
    result = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{document}: {result.stderr}"


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=lambda value: str(value).splitlines()[0][:60])
def test_what_a_command_names_exists(document: str, command: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", command):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document}: there is no `make {target}`"
    for path in re.findall(r"\b(?:examples|charts|docs|tools|tests|crds|requirements)/[\w./-]+", command):
        assert (ROOT / path).exists(), f"{document}: there is no {path}"
    for path in re.findall(r"-f (Dockerfile\.\w+)", command):
        assert (ROOT / path).exists(), f"{document}: there is no {path}"


def test_every_make_target_explains_itself() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)$", makefile, re.MULTILINE))
    explained = set(re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE))
    assert phony == explained


def test_every_record_is_listed() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")
    records = sorted(path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert records
    assert [name for name in records if f"({name})" not in index] == []
    numbers = [int(name[:4]) for name in records]
    assert numbers == list(range(1, len(records) + 1))


def test_the_changelog_knows_the_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    (chart,) = re.findall(r"^appVersion: (.+)$", (ROOT / "charts/npufleet/Chart.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    assert chart == version
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
