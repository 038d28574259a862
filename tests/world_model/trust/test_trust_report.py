"""trust.json, what it must show before RL starts, and the page about it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_toy import BlockWorldModel, episodes

from vla_rl.evaluation.statistics import Figure
from world_model.trust.config import DEFAULT_REQUIRE, MeasureConfig, TrustConfig
from world_model.trust.measure import Measured, measure
from world_model.trust.page import save_trust, write_page
from world_model.trust.report import PAGE_FILE, Provenance, TrustError, TrustReport, admit
from world_model.trust.types import PolicyOutcomes, TrustData


def requiring(require: dict[str, Any]) -> TrustConfig:
    return TrustConfig.model_validate({"require": require})


NOTHING = requiring(dict.fromkeys(DEFAULT_REQUIRE))


def report_of(**figures: Figure) -> TrustReport:
    return TrustReport(
        created="2026-01-01",
        provenance=Provenance(model_key="abc"),
        config=MeasureConfig(),
        frame_steps=8,
        figures=figures,
        not_measured={"skill": "no time"},
    )


def save(report: TrustReport, folder: Path) -> Path:
    report.save(folder / "trust.json")
    return folder / "trust.json"


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    report = report_of(pearson=Figure(value=0.5, n=3, of="policies"))
    path = save(report, tmp_path)
    assert json.loads(path.read_text())["figures"]["pearson"]["low"] is None, "JSON has no NaN"
    assert TrustReport.load(path).model_dump_json() == report.model_dump_json()


def test_a_missing_report_refuses(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match=r"trust report not found: .*world-model eval.*env\.trust\.ignore=true"):
        admit(TrustConfig(), tmp_path / "trust.json")
    admission = admit(TrustConfig(ignore=True), tmp_path / "trust.json")
    assert admission.ignored
    assert "trust report not found" in admission.problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 1, "figures": {', "not valid JSON, truncated"),
        ("[]", "schema_version is None, this version reads 1"),
        ('{"schema_version": 7}', "schema_version is 7, this version reads 1"),
        ('{"schema_version": 1, "created": "now"}', "no usable trust report: provenance"),
    ],
)
def test_an_unusable_report_refuses(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trust.json"
    path.write_text(text)
    with pytest.raises(TrustError, match=f"{message}.*world-model eval"):
        admit(TrustConfig(), path)


def test_a_report_about_other_weights_refuses(tmp_path: Path) -> None:
    path = save(report_of(), tmp_path)
    with pytest.raises(TrustError, match=r"another world model.*key abc, this one's is xyz"):
        admit(NOTHING, path, model_key="xyz")
    assert not admit(NOTHING, path, model_key="abc").ignored


def test_the_end_of_the_interval_counts() -> None:
    report = report_of(
        false_success=Figure(value=0.05, low=0.02, high=0.12, n=100, of="failed episodes"),
        informedness=Figure(value=0.2, low=0.09, high=0.3, n=100),
        pearson=Figure(value=0.95, low=0.6, high=0.99, n=6, of="policies"),
        trust_horizon=Figure(value=32, n=100),
    )
    verdicts = {v.figure: v for v in report.check(TrustConfig().require)}
    assert not verdicts["false_success"].passed
    assert not verdicts["false_success"].refuses, "warns"
    assert verdicts["false_success"].text.startswith(
        "False successes: 5.0 % [2.0, 12.0], n = 100 failed episodes; the interval's upper end must be at most 10 %"
    )
    assert verdicts["informedness"].refuses
    assert verdicts["pearson"].passed, "judged by its value"
    assert verdicts["trust_horizon"].passed, "has no interval"
    assert verdicts["skill"].text.startswith("Skill over copying: not measured (no time)")
    assert verdicts["skill"].refuses, "what was not measured is not reached"
    assert not verdicts["policy_gap"].passed
    assert not verdicts["policy_gap"].refuses, "warns"
    assert not verdicts["acting_gap"].passed
    assert not verdicts["acting_gap"].refuses, "refuses only what was measured"
    order = [v.refuses for v in report.check(TrustConfig().require)]
    assert order == sorted(order, reverse=True), "those that refuse come first"


def test_a_recipes_requirements_are_laid_over_the_defaults() -> None:
    require = requiring(
        {
            "false_success": {"above": 0.2},
            "skill": {"otherwise": "warn"},
            "pearson": None,
            "psnr": {"above": 20},
        }
    ).require
    assert (require["false_success"].above, require["false_success"].at_most) == (0.2, None)
    assert (require["skill"].above, require["skill"].otherwise) == (0, "warn")
    assert require["psnr"].otherwise == "refuse"
    assert set(require) == set(DEFAULT_REQUIRE) - {"pearson"} | {"psnr"}


@pytest.mark.parametrize(
    ("require", "message"),
    [
        ({"agrement": {"above": 0}}, "no trust figure is called 'agrement'. Did you mean 'agreement'"),
        ({"psnr": {}}, "either at_most or above"),
        ({"psnr": {"at_most": 1, "above": 0}}, "either at_most or above"),
        ({"psnr": {"above": 20, "otherwise": "shout"}}, "'refuse_if_measured' or 'warn'"),
    ],
)
def test_requirements_that_make_no_sense(require: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requiring(require)


@pytest.fixture(scope="module")
def measured() -> Measured:
    starts = [f"s{i}" for i in range(20)]
    outcomes = [np.arange(20) < k for k in (5, 15)]
    policies = [PolicyOutcomes(name, starts, o, o) for name, o in zip(("<b>ase", "final"), outcomes, strict=True)]
    config = MeasureConfig(inverse_updates=5)
    data = TrustData(episodes(24), styles={"dark": episodes(4, color=(90, 0, 0))}, policies=policies)
    return measure(BlockWorldModel(reach=4), data, config, Provenance(model="runs/block", model_key="abc"))


def test_the_page_says_it_all_and_fetches_nothing(measured: Measured, tmp_path: Path) -> None:
    report = save_trust(measured, tmp_path, control_hz=20, require=TrustConfig().require)
    assert TrustReport.load(tmp_path / "trust.json").model_dump_json() == report.model_dump_json()
    page = (tmp_path / PAGE_FILE).read_text()
    assert set(re.findall(r"(?<!xlink:)(?:src|href)=[\"']?(.{5})", page)) == {"data:"}
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert page.index("refuses to start") < page.index("What is required") < page.index("Imagined beside real")
    assert page.count("data:video/mp4") == len(report.clips) >= 2
    assert {(c.real, c.imagined) for c in report.clips} >= {(True, True), (False, True)}
    assert page.count('<svg class="figure"') == 8
    for text in (
        "False successes",
        "RL learns to exploit these",
        "dark",
        "LPIPS: no alexnet-owt-7be5be79.pth",
        "runs/block",
    ):
        assert text in page
    assert "&lt;b&gt;ase" in page, "names are escaped"


def test_the_headline_counts_what_is_required(measured: Measured, tmp_path: Path) -> None:
    report = measured.report.model_copy(update={"curves": {}, "calibrations": {}, "policies": ()})
    assert "RL in this world model may start." in write_page(report, tmp_path, NOTHING.require).read_text()
    one = requiring(dict.fromkeys(DEFAULT_REQUIRE) | {"psnr": {"above": 90}}).require
    assert "one figure does not reach" in write_page(report, tmp_path, one).read_text()


def test_clips_that_are_gone_are_left_out(measured: Measured, tmp_path: Path) -> None:
    bare = measured.report.model_copy(update={"curves": {}, "calibrations": {}, "policies": ()})
    report = save_trust(replace(measured, report=bare), tmp_path, control_hz=20, require={})
    (tmp_path / report.clips[0].file).unlink()
    assert write_page(report, tmp_path, {}).read_text().count("<video") == len(report.clips) - 1
