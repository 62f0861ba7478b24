"""The site of the documents: it builds without a warning, and needs no network to be read."""

import os
import re
import subprocess
import sys

import pytest

import partopt
from tests.helpers import ROOT

pytestmark = pytest.mark.slow

pytest.importorskip("mkdocs", reason="the site is built by mkdocs")
LOADED = re.compile(r"""(?:src=|<link[^>]*href=|url\(|@import )["']?(https?:)?//[^"')>]*""")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_document_is_a_page(site):
    pages = {path.stem for path in site.glob("*.html")} - {"404", "index", "api", "changelog"}
    assert pages == {path.stem for path in (ROOT / "docs").glob("*.md")}


def test_the_api_has_every_public_name(site):
    text = (site / "api.html").read_text()
    missing = [
        name for name in partopt._PLACES if not re.search(rf'id="partopt[\w.]*\.{name}"', text)
    ]
    assert not missing


def test_nothing_is_loaded_from_a_network(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not LOADED.search(path.read_text()), path
