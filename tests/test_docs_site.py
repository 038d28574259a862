"""The documentation site builds without a warning: every page is in its menu, every link and anchor leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from browser import browser, missing_browser

from vla_rl.algorithms.offpolicy.config import OnlineConfig
from vla_rl.config import KINDS, RUNS

pytest.importorskip("material", reason="needs the extra docs: pip install '.[docs]'")

ROOT = Path(__file__).resolve().parent.parent


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(root / "mkdocs.yml"), "-d", str(site)]
    quietly = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=quietly)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_site_builds_and_documents_the_api(site: Path) -> None:
    pages = {page.relative_to(site).with_suffix(".md") for page in site.rglob("*.html")}
    sources = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    assert sources <= pages
    api = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in ("load_recipe", "make_env", "load_policy", "train", "evaluate"):
        assert f'id="vla_rl.training.api.{name}"' in api
    assert not re.search(r'(?:src|href)="(?:https?:)?//(?!github\.com|squidfunk)', api), "a page needs another server"


@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "there is a browser")
def test_search_works_from_the_built_folder_without_a_server(site: Path) -> None:
    with browser() as chromium:
        page = chromium.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "reference" / "contracts.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("conformal bands", delay=20)
        page.click("a.md-search-result__link[href*='failure_detection.html']")
        page.wait_for_url("**/failure_detection.html*")
        assert page.title().startswith("Notice failures") and all(url.startswith("file:") for url in asked)


def test_the_docs_stay_short_and_the_pictures_small() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")}
    assert sum(words.values()) <= 60_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
    assert sum(file.stat().st_size for file in (ROOT / "docs" / "pictures").iterdir()) <= 1_500_000


def test_link_to_nowhere_fails(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Home\n\n[lost](nowhere.md)\n", encoding="utf-8")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    head, nav = config.split("\nnav:\n")
    assert "quickstart.md" in nav
    (tmp_path / "mkdocs.yml").write_text(head + "\nnav:\n  - index.md\n", encoding="utf-8")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert "nowhere.md" in built.stderr


def test_the_table_of_what_was_run_is_up_to_date_and_its_evidence_is_there() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "support_table.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_missing_evidence_is_named() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from support_table import problems
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    row = {"name": "a", "option": "b", "level": "gain"}
    rows = [{**row, "evidence": evidence} for evidence in ("tests/none.py", "results.md#nothing", "results.md")]
    assert problems({"methods": [*rows, {**row, "evidence": "results.md", "level": "great"}, row]}) == [
        "methods 1: no file tests/none.py",
        "methods 2: results.md has no heading #nothing",
        "methods 4: level 'great', weights None",
        "methods 5: has or lacks ['evidence']; fields are ['evidence', 'level', 'name', 'note', 'option']",
    ]


def test_every_method_transport_and_workflow_has_a_row() -> None:
    tables = yaml.safe_load((ROOT / "docs" / "support.yaml").read_text(encoding="utf-8"))
    told = {table: {row["option"] for row in rows} for table, rows in tables.items() if table != "combinations"}
    methods = {f"{section}.kind={kind}" for section in ("algo", "offline") for kind in KINDS[section]}
    methods |= {f"online.method={name}" for name in get_args(OnlineConfig.model_fields["method"].annotation)}
    assert methods <= told["methods"]
    assert {f"kind: {kind}" for kind in KINDS["transport"]} <= told["transports"]
    rows = {*told["workflows"], *told["methods"]}
    assert [run for run in RUNS if run not in ("eval", "fit") and not {f"vla-rl {run}", f"run: {run}"} & rows] == []
