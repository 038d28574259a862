"""The report: right numbers, nothing fetched from outside, and a word about each thing that is missing."""

import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from vla_rl.evaluation.compare import compare, format_p
from vla_rl.evaluation.report.charts import Bar, Line, bar_chart, line_chart, nice_ticks, stacked_bar
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import EpisodeRecord, Evaluation, EvaluationError, EvaluationMeta
from vla_rl.evaluation.robustness import Robustness
from vla_rl.evaluation.statistics import SEEDS_ALIKE, Interval
from vla_rl.evaluation.suites import SuiteResults
from vla_rl.evaluation.video import write_mp4
from vla_rl.interfaces import Admission
from vla_rl.training.metrics import LogConfig, MetricLogger

TASKS = ("push_to_zone", "stack")


def evaluation(name: str, rate: float, seed: int, split="eval", samples: int = 1) -> Evaluation:
    rng = np.random.default_rng(seed)
    episodes = tuple(
        EpisodeRecord(mode=mode, task=task, split=split, index=i // samples, sample=i % samples,
                      success=bool(rng.random() < rate), steps=30)
        for mode in ("greedy", "sampled")
        for task in TASKS
        for i in range(60)
    )  # fmt: skip
    meta = EvaluationMeta(
        name=name,
        env="tabletop",
        split=split,
        seed=0,
        temperatures={"greedy": 0.0, "sampled": 1.0},
        horizon=dict.fromkeys(TASKS, 120),
        cameras=("agentview",),
        image_size=(64, 64),
        num_envs=8,
        protocol="tabletop, eval split, initial states 0 to 59 of each task.",
        config={},
        created="2026-01-02T03:04:05+00:00",
        wall_seconds=10.0,
    )
    return Evaluation(meta=meta, episodes=episodes)


@pytest.fixture(scope="session")
def video(tmp_path_factory) -> bytes:
    frames = np.zeros((3, 64, 64, 3), np.uint8)
    return write_mp4(tmp_path_factory.mktemp("video") / "black.mp4", frames, 10).read_bytes()


@pytest.fixture
def run(tmp_path, video):
    folder = tmp_path / "tabletop_grpo"
    evaluation("base", 0.3, 0).save(folder / "evaluations/base.json")
    evaluation("final", 0.6, 1).save(folder / "evaluations/final.json")
    with MetricLogger(folder, LogConfig(tensorboard=False, console=False)) as logger:
        for step in range(1, 6):
            logger.log(step, {"train/success": 0.1 * step, "loss/policy": -0.01 * step, "update/approx_kl": 0.01,
                              "update/clip_fraction": float("nan") if step == 3 else 0.1, "time/simulation": 6.0,
                              "time/update": 3.0, "time/other": 1.0, "time/total": 10.0})  # fmt: skip
        logger.log(5, {"validation/sampled": 0.5, "validation/greedy": 0.6})
    (folder / "config.yaml").write_text("name: tabletop_grpo\ndescription: a <b>bold</b> recipe\n")
    (folder / "command.txt").write_text("vla-rl train tabletop_grpo\n")
    (folder / "versions.json").write_text(json.dumps({"torch": "2.11.0", "git_commit": "abc123def456"}))
    (folder / "videos").mkdir()
    for name in ("base", "final"):
        for outcome in ("success", "failure"):
            (folder / f"videos/{name}__stack__sampled__eval-0007__{outcome}.mp4").write_bytes(video)
    return folder


class Links(HTMLParser):
    """Everything a browser would fetch, and the tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for key, value in attrs if key in ("src", "href", "srcset", "poster", "data")]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found += [value for key, value in attrs if key in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(path) -> str:
    return path.read_text()


def test_it_opens_with_the_result_and_its_intervals(run):
    page = read(write_report(run))
    result = compare(evaluation("base", 0.3, 0), evaluation("final", 0.6, 1)).result("sampled")
    headline = page[page.index('class="headline"') : page.index('class="cards"')]
    assert f"Sampled success rose from {100 * result.rate_a:.1f} % to {100 * result.rate_b:.1f} %." in headline
    assert f"difference +{100 * result.difference:.1f} points" in headline
    assert f"[{100 * result.interval_a.low:.1f}, {100 * result.interval_a.high:.1f}]" in headline
    assert f"exact McNemar p = {format_p(result.p_value_by_state)}" in headline
    assert f"{result.gained} gained, {result.lost} lost" in headline and "Greedy success" in headline
    assert headline.index("Sampled success") < headline.index("Greedy success")


def test_with_samples_of_a_state_p_is_by_state(run):
    before, after = evaluation("base", 0.3, 0, samples=4), evaluation("final", 0.6, 1, samples=4)
    before.save(run / "evaluations/base.json")
    after.save(run / "evaluations/final.json")
    page = read(write_report(run))
    result = compare(before, after).result("sampled")
    assert f"exact p by state = {format_p(result.p_value_by_state)}" in page
    assert "McNemar" not in page
    assert "4 samples of each: a claim about these states" in page


def test_nothing_is_fetched_and_the_markup_closes(run):
    page = read(write_report(run))
    links = Links()
    links.feed(page)
    assert not links.open
    assert len(links.found) == 4 and all(link.startswith("data:video/mp4;base64,") for link in links.found)
    assert not re.search(r"https?://|url\(|@import|<script", page)


def test_it_holds_every_part(run):
    page = read(write_report(run, title="My run"))
    assert "<title>My run</title>" in page and "abc123def456" in page
    for part in ("Success by task", "Learning curves", "Where the time went", "Episodes", "Repeat it"):
        assert part in page
    for chart in ("Success by iteration", "Loss: policy by iteration", "KL divergence", "Clipped fraction"):
        assert f'aria-label="{chart}' in page
    assert "simulation and rendering 60 %" in page and "update 30 %" in page and "50 s in 5 iterations" in page
    assert "vla-rl train tabletop_grpo" in page and "vla-rl compare" in page
    assert "sampled, eval state 7" in page
    assert "a &lt;b&gt;bold&lt;/b&gt; recipe" in page, "the recipe is text, not markup"
    assert "without its controls" in page and "Not in this report" not in page


def test_a_change_that_may_be_chance_is_called_so(run):
    evaluation("final", 0.3, 2).save(run / "evaluations/final.json")
    assert "which can be chance." in read(write_report(run))
    evaluation("final", 0.05, 2).save(run / "evaluations/final.json")
    assert "Sampled success fell from" in read(write_report(run))


def test_controls(run):
    gain = {"of": "RL", "over": "shuffled rewards", "mode": "sampled", "mean": 0.123, "per_seed": [0.1, 0.146],
            "interval": [None, None], "p_values": [1e-7, 0.02]}  # fmt: skip
    ablation = {"recipe": "x", "seeds": [0, 1], "num_episodes": 120, "rates": {}, "gains": [gain]}
    (run / "ablation.json").write_text(json.dumps(ablation))
    page = read(write_report(run))
    assert "RL − shuffled rewards" in page and "+12.3" in page and "+10.0, +14.6" in page and "1e-07, 0.02" in page
    assert SEEDS_ALIKE in html.unescape(page), "beside the table"
    assert "needs three seeds" in page and "without its controls" not in page
    assert "RL's sampled success, in points: +12.3 over shuffled rewards" in html.unescape(page)
    (run / "ablation.json").write_text(json.dumps(ablation | {"gains": [gain | {"mode": "greedy"}]}))
    page = html.unescape(read(write_report(run)))
    assert "RL's greedy success, in points: +12.3 over shuffled rewards" in page, "where nothing was sampled"


def test_one_evaluation_is_shown_alone(run):
    (run / "evaluations/base.json").unlink()
    (run / "evaluations/final.json").unlink()
    shown = evaluation("openvla", 0.5, 3, split="validation")
    shown.save(run / "evaluations/openvla.json")
    page = read(write_report(run))
    assert f"Sampled success of openvla is {shown.rate('sampled').text()}." in page
    assert "on the validation split, not on eval" in page and "McNemar" not in page


def test_of_several_evaluations_with_other_names_the_newest_is_shown(run, video):
    for name in ("base", "final"):
        (run / f"evaluations/{name}.json").unlink()
    for name, created in (("a__b", "2026-01-03T00:00:00+00:00"), ("c", "2026-01-02T00:00:00+00:00")):
        shown = evaluation(name, 0.5, 3)
        meta = shown.meta.model_copy(update={"created": created})
        shown.model_copy(update={"meta": meta}).save(run / f"evaluations/{name}.json")
    (run / "videos/a__b__stack__sampled__eval-0007__success.mp4").write_bytes(video)
    page = read(write_report(run))
    assert "Sampled success of a__b is" in page and "no evaluation yet" not in page
    assert "the page shows the newest, a__b; also in the folder: c" in page
    assert page.count("<video") == 1, "by the evaluation's whole name"


def test_suites_are_shown_side_by_side(tmp_path):
    rates = {"one": 0.2, "two": 0.6}
    made = {suite: evaluation(f"policy-{suite}", rate, 3) for suite, rate in rates.items()}
    for suite, one in made.items():
        one.save(tmp_path / f"evaluations/policy-{suite}.json")
    results = SuiteResults.of("policy", made, {"one": "Spatial", "two": "Goal"}, [["one", "two"]])
    results.save(tmp_path / "suites.json")
    page = read(write_report(tmp_path))
    average = 100 * next(rate.rate for rate in results.rates if rate.is_average and rate.mode == "sampled")
    assert f"Sampled success of policy averages {average:.1f} % over 2 suites." in page
    assert "The tasks of Spatial" in page and "The tasks of Goal" in page and "Success by suite" in page
    assert "also in the folder" not in page and "Success by task" not in page
    (tmp_path / "evaluations/policy-one.json").unlink()
    page = read(write_report(tmp_path))
    assert "The tasks of Spatial" not in page and "policy-one.json" in page and "averages" in page
    later = evaluation("policy", 0.5, 4)  # Another one, made afterwards, is no suite's.
    later.model_copy(update={"meta": later.meta.model_copy(update={"created": "2027-01-01T00:00:00+00:00"})}).save(
        tmp_path / "evaluations/policy.json"
    )
    page = read(write_report(tmp_path))
    assert "Success by suite" not in page and "Success by task" in page


def test_an_evaluation_whose_episodes_were_all_lost_says_so(run):
    (run / "evaluations/base.json").unlink()
    lost = evaluation("final", 0.5, 3)
    episodes = tuple(e.model_copy(update={"lost": True}) for e in lost.episodes)
    lost.model_copy(update={"episodes": episodes}).save(run / "evaluations/final.json")
    page = read(write_report(run))
    assert "Sampled success of final is not known: all episodes were lost." in page


@pytest.mark.parametrize("where", ["train", "imagined"])
def test_a_lone_success_curve_says_of_what_it_is(run, where):
    (run / "metrics.jsonl").write_text('{"step": 1, "train/success": 0.25}\n{"step": 2, "train/success": 0.5}\n')
    if where == "imagined":
        admission = Admission(report="trust.json")
        (run / "admission.json").write_text(admission.model_dump_json())
    assert f'aria-label="Success: {where}, sampled by iteration"' in read(write_report(run))


def test_imagined_success_is_of_episodes_from_initial_states(run):
    """From keyframes it is not to be compared with the real success beside it."""
    plain = [{"step": step, "train/success": 0.5, "gate/real": 0.25} for step in (1, 2)]
    mixed = {"train/success": 0.9, "train/success_from_keyframes": 1.0, "train/success_from_start": 0.5}
    charts = []
    for rows in (plain, [row | mixed for row in plain]):
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        page = read(write_report(run))
        charts.append(
            page[page.index('aria-label="Success by iteration"') : page.index("</svg>", page.index("imagined, s"))]
        )
    assert charts[0] == charts[1]


def test_a_negative_control_says_that_it_is_one(run):
    (run / "config.yaml").write_text("name: tabletop_grpo\ntrain: {control: shuffled_rewards}\n")
    page = read(write_report(run))
    assert "This run is a negative control (train.control=shuffled_rewards)" in page
    assert "without its controls" not in page


def test_its_commands_can_be_pasted(run):
    spaced = run.rename(run.parent / "my run")
    page = html.unescape(read(write_report(spaced)))
    assert f"vla-rl compare '{spaced}/evaluations/base.json' '{spaced}/evaluations/final.json'" in page


def test_missing_and_broken_parts_are_named(tmp_path, run):
    empty = tmp_path / "empty"
    empty.mkdir()
    page = read(write_report(empty))
    assert "has no evaluation yet" in page
    for name in ("evaluations/base.json", "metrics.jsonl", "config.yaml", "versions.json", "videos"):
        assert name in page
    (run / "evaluations/base.json").write_text("{")
    (run / "versions.json").write_text("{")
    (run / "config.yaml").write_text("a: [")
    page = read(write_report(run))
    assert "base.json: not valid JSON" in page and "versions.json: not valid JSON" in page
    assert "config.yaml: not valid YAML" in page and "Sampled success of final is" in page
    with pytest.raises(EvaluationError, match="run folder not found"):
        write_report(tmp_path / "nowhere")


def test_charts_draw_what_they_are_given():
    svg = line_chart("KL", [Line("a", [(0, 0.0), (1, float("nan")), (2, 1.0), (3, 0.5)], "#000")])
    assert svg.count("<polyline") == 2, "a NaN leaves a gap"
    assert line_chart("KL", [Line("a", [(0, float("nan"))], "#000")]) == ""
    svg = bar_chart("Success", [("push & pull", [Bar(0.5, Interval(0.25, 0.75), "n = 8", "#123456")])])
    width = (400 - 12 - 92) * 0.5
    assert f'width="{width:.1f}"' in svg and "push &amp; pull" in svg and "50 %  n = 8" in svg
    svg = stacked_bar("Time", {"a": 3.0, "b": 1.0})
    assert "width: 75.0%" in svg and "a 75 %" in svg and "b 25 %" in svg


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.5, 1.0]), (-0.013, 0.021, [-0.02, -0.01, 0, 0.01, 0.02, 0.03]), (3, 3, [1, 2, 3, 4, 5])],
)
def test_ticks_are_round_and_enclose(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def with_outcomes(run, name: str, outcomes: dict[str, list[int]]) -> None:
    """Write an evaluation with the given greedy outcomes."""
    episodes = tuple(
        EpisodeRecord(mode="greedy", task=task, split="eval", index=i, sample=0, success=bool(ok), steps=9)
        for task, row in outcomes.items()
        for i, ok in enumerate(row)
    )
    (run / f"evaluations/{name}.json").unlink()
    evaluation(name, 0.5, 0).model_copy(update={"episodes": episodes}).save(run / f"evaluations/{name}.json")


@pytest.mark.parametrize(("fell", "place"), [(20, "headline"), (4, "warning")])
def test_a_task_that_fell_in_a_run_that_rose_is_named(run, fell, place):
    with_outcomes(run, "base", {"push_to_zone": [1] * 50, "stack": [0] * 50})
    with_outcomes(run, "final", {"push_to_zone": [0] * fell + [1] * (50 - fell), "stack": [1] * 45 + [0] * 5})
    page = read(write_report(run))
    headline, rest = page[page.index('class="headline"') :].split('class="cards"')
    if place == "headline":
        assert headline.index("push_to_zone fell from 100.0 to 60.0 % (greedy, p ") < headline.index("success rose")
        assert "which can be chance" not in rest
    else:
        assert (
            "push_to_zone" not in headline and "push_to_zone fell from 100.0 to 92.0 % (greedy), which can be" in rest
        )


def test_a_protocol_that_is_not_the_official_one_is_not_comparable(run):
    assert "<h2>Protocol</h2>" not in read(write_report(run))
    for name in ("base", "final"):
        file = run / f"evaluations/{name}.json"
        values = json.loads(file.read_text())
        values["meta"]["official"] = {"control steps": ["160", "280"], "tasks": ["10", "10"]}
        file.write_text(json.dumps(values))
    page = read(write_report(run))
    box = page[page.index("<h2>Protocol</h2>") : page.index("<h2>Success by task")]
    assert "Not comparable with published numbers:</span> other than the official protocol in control steps." in box
    assert '<td>control steps</td><td class="bad">160</td><td>280</td>' in box and "<td>tasks</td><td>10</td>" in box
    values["meta"]["official"] = {"tasks": ["10", "10"]}
    file.write_text(json.dumps(values))
    assert "Not comparable" not in read(write_report(run))


def test_an_evaluation_lacks_no_learning_curves(run):
    (run / "metrics.jsonl").unlink()
    assert "no metrics.jsonl" in read(write_report(run))
    (run / "command.txt").write_text("vla-rl eval tabletop_grpo")
    assert "no metrics.jsonl" not in read(write_report(run))


def test_perturbed_rows_are_on_the_page(run):
    assert "<h2>Perturbed</h2>" not in read(write_report(run))
    clean, dark = evaluation("policy", 0.9, 0), evaluation("light-3", 0.2, 1)
    found = Robustness.of(clean, {("light", 3): dark})
    found.save(run / "robustness.json")
    page = read(write_report(run))
    box = page[page.index("<h2>Perturbed</h2>") : page.index("<h2>Learning curves")]
    lost = next(rate for rate in found.rates if rate.level and rate.mode == "sampled")
    assert f'<td>light, level 3</td><td class="num">{100 * lost.rate:.1f} %</td>' in box
    assert f"{100 * lost.difference:+.1f} [" in box and box.count("<td>clean</td>") == 2
