"""Citations and links lead to what exists, README's map is the packages' own words, the tour's lines are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.cpu.test_imports import ROOT, SOURCES, tracked_files

TEXT = {".py", ".md", ".yaml", ".yml", ".toml"}
MOST_FILES = 12  # of a folder of source


def texts() -> dict[Path, str]:
    """Every text file that git tracks and that is still there."""
    files = [path for path in tracked_files() if path.suffix in TEXT and (ROOT / path).is_file()]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in files}


def documents_named(text: str) -> set[str]:
    """Markdown files that a text names, but for web addresses and placeholders."""
    return set(re.findall(r"(?<![\w./:-])((?:[\w.-]+/)*[\w.-]+\.md)\b", re.sub(r"https?://\S+", "", text)))


def sections_cited(text: str) -> set[tuple[str, str]]:
    """Pairs (document, section number) of citations such as `infer/draft/README.md, section 3`, links included."""
    return set(re.findall(r"((?:[\w-]+/)+README\.md)(?:\]\([^)\s]*\)|\))?,\s+(?:#\s*)?section\s+(\d+)", text))


def map_of_rooms() -> str:
    """The map in README: a line for each package, from the first sentence of its docstring."""
    packages = sorted(name for name, path in SOURCES.items() if path.name == "__init__.py")
    width = max(len(name) for name in packages) + 2
    lines = []
    for name in packages:
        said = ast.get_docstring(ast.parse(SOURCES[name].read_text(encoding="utf-8"))) or ""
        lines.append(f"{name.replace('.', '/') + '/':{width}} {' '.join(said.split())}")
    return "\n".join(lines)


def test_the_readers_of_citations_find_them() -> None:
    text = "see infer/draft/README.md, section 3, [train](../train/README.md), section 12; LOG.md, https://x.y/z.md"
    text += "; [data/README.md](../data/README.md), section 1"
    assert sections_cited(text) == {("infer/draft/README.md", "3"), ("train/README.md", "12"), ("data/README.md", "1")}
    assert documents_named("see infer/README.md and LOG.md, https://x.y/z.md") == {"infer/README.md", "LOG.md"}


def test_every_document_that_is_named_exists() -> None:
    names = {path.name for path in tracked_files()}
    for path, text in texts().items():
        if path.parts[0] == "tests":
            continue
        for name in documents_named(text):
            places = (ROOT / name, (ROOT / path).parent / name)
            found = any(place.is_file() for place in places) or ("/" not in name and name in names)
            assert found, f"{path} names {name}, which does not exist"


def test_every_section_that_is_cited_exists() -> None:
    for path, text in texts().items():
        if path == Path("tests/cpu/test_documents.py"):
            continue
        for document, number in sections_cited(text):
            file = ROOT / document
            assert file.is_file(), f"{path} cites {document}, which does not exist"
            headings = re.findall(r"^## (\d+)\. ", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert number in headings, f"{path} cites {document}, section {number}; it has {headings}"


@pytest.mark.parametrize("name", [str(path) for path in tracked_files() if path.suffix == ".md"])
def test_relative_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    for link in re.findall(r"\]\(([^)#\s]+)", file.read_text(encoding="utf-8") if file.is_file() else ""):
        if not link.startswith(("http:", "https:", "mailto:")):
            assert (file.parent / link).exists(), f"{name} links to {link}, which does not exist"


def test_readme_maps_the_packages_in_their_own_words() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = map_of_rooms()
    assert wanted in readme, f"README.md's map differs from the packages' docstrings; it should read:\n{wanted}"


def test_the_tour_in_contributing_points_at_what_it_names() -> None:
    """Each stop is written `path.py:LINE` (`name`): that line has to define or mention the name."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    stops = re.findall(r"`([\w/]+\.py):(\d+)` \(`([\w.]+)`\)", text)
    assert len(stops) >= 5, stops
    for path, line, name in stops:
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        word = re.compile(rf"\b{name.split('.')[-1]}\b")
        here = [number for number, text in enumerate(lines, start=1) if word.search(text)]
        assert int(line) in here, (
            f"CONTRIBUTING.md: {path}:{line} does not mention {name}; it stands in lines {here[:8]}"
        )


def test_no_folder_of_source_is_crowded() -> None:
    for folder in {path.parent for path in SOURCES.values()}:
        files = sorted(path.name for path in folder.glob("*.py"))
        assert len(files) <= MOST_FILES, (
            f"{folder.relative_to(ROOT)} holds {len(files)} files; give some of them a room: {files}"
        )
