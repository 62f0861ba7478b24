"""Pages of the site that are made of other files: the README, the changelog, the API."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import partopt
from partopt.documents.kinds import DOCUMENTS

ROOT = Path(__file__).parents[2]
LINK = re.compile(
    r"\[(?P<text>[^\]]*)\]\((?:\.\./)?(?:docs/)?(?P<target>[\w./-]+)(?P<anchor>#[\w-]+)?\)"
)
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "api.md", content=_api()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links lead to pages of the site; what is none of them is named alone."""
    return LINK.sub(_link, markdown)


def _link(found: re.Match[str]) -> str:
    page = PAGES.get(found["target"], found["target"])
    if page in PAGES.values() or (ROOT / "docs" / page).is_file():
        return f"[{found['text']}]({page}{found['anchor'] or ''})"
    return found["text"] if (ROOT / page).exists() else found[0]


def _api() -> str:
    """The docstring of every public name, and of the documents that are no public name."""
    names = sorted(partopt._PLACES, key=str.lower)
    parts = [f"::: {partopt._PLACES[name]}.{name}" for name in names]
    modules = {document.__module__ for document in DOCUMENTS.values()}
    modules -= {partopt._PLACES[name] for name in names}
    parts += [f"::: {module}" for module in sorted(modules)]
    return "# API\n\n`import partopt as po` has these names.\n\n" + "\n\n".join(parts) + "\n"
