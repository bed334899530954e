"""Build the site as `make docs` does, and check that it is whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markdown import Markdown
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#([^)\s]+))?\)")
"""Link to a file, with its anchor."""


GENERATED = ("reference/cli.md", "reference/http.md", "decisions/index.md")
"""Pages that `scripts/site_pages.py` makes."""


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(mkdocs, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {
        str(page.relative_to(tmp_path)): page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")
    }
    written = {
        str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in ROOT.glob("docs/**/*.md")
    }
    assert written | {"reference/cli.html", "reference/http.html", "decisions/index.html"} <= pages.keys()
    assert 'id="upriver.connect"' in pages["reference/api/finetune.html"]
    for name, page in pages.items():
        assert ":`" not in page, f"{name} shows a role of Sphinx"
        assert 'src="http' not in page, f"{name} loads what another host serves"
    for page_at_root in ROOT.glob("*.md"):  # outside the site, so that its build does not check them
        for target, anchor in LINK.findall(page_at_root.read_text(encoding="utf-8")):
            where = f"{page_at_root.name}: {target}#{anchor}"
            assert (ROOT / target).exists(), where
            if anchor:
                assert f'id="{anchor}"' in pages[target.removeprefix("docs/").replace(".md", ".html")], where


def test_links_lead_to_files_and_to_sections_that_are_there(tmp_path: Path) -> None:
    """Anchors of pages that follow from the code are left to the build."""
    (tmp_path / "docs").mkdir()
    config = site(tmp_path, nav=[])
    reader = Markdown(extensions=config["markdown_extensions"], extension_configs=config["mdx_configs"])
    docs = ROOT / "docs"
    anchors, gone = dict[Path, set[str]](), list[str]()
    pages = [*docs.rglob("*.md"), *ROOT.glob("*.md")]
    assert len(pages) > 30
    for page in pages:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            file = (page.parent / target).resolve()
            generated = file in [docs / each for each in GENERATED]
            if not generated and not file.exists():
                gone.append(f"{page.name}: {target}")
            elif anchor and file.suffix == ".md" and not generated and file.parent != docs / "reference/api":
                if file not in anchors:
                    shown = reader.reset().convert(file.read_text(encoding="utf-8"))
                    anchors[file] = set(re.findall(r'id="([^"]+)"', shown))
                if anchor not in anchors[file]:
                    gone.append(f"{page.name}: {target}#{anchor}")
    assert not gone
    assert anchors


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("[here](other.md#part)", True),
        ("[gone](missing.md)", False),
        ("[gone](other.md#missing)", False),
        ("[outside](../README.md)", False),
    ],
)
def test_a_broken_link_fails_the_build(text: str, allowed: bool, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{text}\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Part\n")
    config = site(tmp_path, nav=["index.md", "other.md"])
    if allowed:
        build(config)
    else:
        with pytest.raises(Abort):
            build(config)


def test_a_page_without_a_place_in_the_nav_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("index.md", "orphan.md"):
        (tmp_path / "docs" / name).write_text("# Page\n")
    with pytest.raises(Abort):
        build(site(tmp_path, nav=["index.md"]))


def site(folder: Path, nav: list[str]) -> Any:
    """Return the project's configuration for other pages."""
    places = {"docs_dir": str(folder / "docs"), "site_dir": str(folder / "site")}
    return load_config(
        str(ROOT / "mkdocs.yml"), **places, nav=nav, hooks=[], plugins=[], theme={"name": "mkdocs"}
    )
