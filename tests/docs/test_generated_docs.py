"""Generated parts of docs/ and README.md are up to date, and links between the pages lead somewhere."""

import re

import pytest
from conftest import ROOT, bench

PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {path.name: path.read_text() for path in PAGES}
pytestmark = pytest.mark.quick


def test_every_generated_page_and_output_is_up_to_date() -> None:
    pages = bench("generate_docs").pages()
    stale = [path.name for path, text in pages.items() if path.read_text() != text]
    assert not stale, "python bench/generate_docs.py writes them"
    assert "flags.md" in {path.name for path in pages}


@pytest.mark.parametrize("name", TEXTS)
def test_a_link_to_another_page_names_a_page_and_a_heading_that_exist(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[name]):
        if target.startswith("https://"):
            continue
        page, _, anchor = target.partition("#")
        assert not page or (ROOT / "docs" / page).is_file(), target
        assert not anchor or anchor in anchors_of(TEXTS[page or name]), target


def test_the_navigation_of_the_site_has_every_page() -> None:
    listed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(TEXTS)


def test_no_file_points_at_a_page_that_is_not_there() -> None:
    folders = ("slm_toolkit", "bench", "recipes", "tests", "accel_configs", "ds_configs")
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.*")]:
        if path.suffix in (".py", ".sh", ".yaml", ".md"):
            named = re.findall(r"(?<![\w/])docs/(\w+\.md)(?! @)", path.read_text())  # @: of another project
            assert set(named) <= TEXTS.keys(), path


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as both GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
