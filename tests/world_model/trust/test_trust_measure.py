"""Measuring trust in a toy world: a right world model is admitted, planted faults are not, and a figure says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_toy import BLUE, BlockWorldModel, episodes

from world_model.trust.config import MeasureConfig, TrustConfig
from world_model.trust.measure import Measured, measure
from world_model.trust.report import TrustError, TrustReport, admit
from world_model.trust.types import PolicyOutcomes, Scores, TrustData
from world_model.types import Actions, Frames, LoggedEpisode

QUICK = MeasureConfig(inverse_updates=0)
HELD_OUT = episodes(80)


def judge(world_model: BlockWorldModel, held_out: list[LoggedEpisode], folder: Path) -> tuple[TrustReport, set[str]]:
    """The report, and the figures for which RL refuses; the exception and the verdicts must name the same."""
    report = measure(world_model, TrustData(held_out=held_out), QUICK).report
    report.save(folder / "trust.json")
    refusing = {v.figure for v in report.check(TrustConfig().require) if v.refuses}
    if not refusing:
        assert not admit(TrustConfig(), folder / "trust.json").ignored
        return report, refusing
    with pytest.raises(TrustError) as refusal:
        admit(TrustConfig(), folder / "trust.json")
    for verdict in report.check(TrustConfig().require):
        assert (verdict.text in str(refusal.value)) == verdict.refuses
    ignored = admit(TrustConfig(ignore=True), folder / "trust.json")
    assert ignored.ignored
    assert ignored.problem == str(refusal.value)
    return report, refusing


@pytest.fixture(scope="module")
def good() -> Measured:
    starts = [f"s{i}" for i in range(50)]
    outcomes = [np.arange(50) < k for k in (10, 20, 40)]
    policies = [PolicyOutcomes(f"policy {i}", starts, o, o) for i, o in enumerate(outcomes)]
    twice, paid = [f"s{i % 25}" for i in range(50)], outcomes[1].astype(float)
    acting = PolicyOutcomes("policy", twice, outcomes[1], outcomes[1], paid, outcomes[1])
    data = TrustData(HELD_OUT, episodes(60, seed=9), {"blue block": episodes(30, color=BLUE)}, policies, acting)
    return measure(BlockWorldModel(), data, MeasureConfig(inverse_updates=150))


def test_a_right_world_model_is_admitted(good: Measured, tmp_path: Path) -> None:
    good.report.save(tmp_path / "trust.json")
    admission = admit(TrustConfig(), tmp_path / "trust.json")
    assert (admission.problem, admission.ignored, admission.warnings) == ("", False, ())
    assert all(v.passed for v in admission.verdicts)


def test_its_figures(good: Measured) -> None:
    figures = {name: figure.value for name, figure in good.report.figures.items()}
    real = np.mean([e.succeeded for e in HELD_OUT])
    assert figures["agreement"] == 1
    assert figures["informedness"] == 1
    assert figures["agreement_over_majority"] == pytest.approx(min(real, 1 - real))
    # Latents are pixels / 127.5 - 1 with noise of deviation .02; copying errs where the block was or is.
    assert figures["latent_error"] == pytest.approx(0.02**2, rel=0.02)
    assert figures["skill"] == pytest.approx(1 - 0.02**2 / 0.058, abs=0.003)
    assert figures["state_error"] == 0
    assert figures["psnr_reconstruction"] == 50
    assert figures["psnr_copy"] < 20
    assert 35 < figures["psnr"] < 50
    assert figures["trust_horizon"] == good.report.trust_horizon == 12
    assert figures["action_gain"] > 50
    assert figures["action_gain"] - figures["action_response"] == pytest.approx(1, abs=0.1)
    assert figures["inverse_error_real"] < 0.4
    assert figures["inverse_error_ratio"] == pytest.approx(1, abs=0.1)
    assert figures["outcome_flips"] == 0
    assert figures["calibration_error"] == pytest.approx(0.03, abs=1e-6)
    assert [figures[name] for name in ("auc", "head_auc", "auc_after_1", "auc_after_3")] == [1, 1, 1, 1]
    assert (figures["pearson"], figures["mmrv"]) == (pytest.approx(1), 0)
    assert good.report.curves["real_success"].mean[-1] == pytest.approx(real)
    assert good.report.curves["latent_error"].n == (80,) * 6


def test_what_was_not_measured_says_why(good: Measured) -> None:
    alone = {"group_correlation", "group_correlation_verdict"}
    assert set(good.report.not_measured) == {"lpips", "fvd"} | alone
    assert all("no two held-out episodes share an initial state" in good.report.not_measured[name] for name in alone)
    bare = measure(BlockWorldModel(), TrustData(HELD_OUT[:6]), QUICK).report
    assert "it needs 20" in bare.not_measured["trust_horizon"]
    assert "got 0" in bare.not_measured["pearson"]
    assert "no held-out episodes of the recipe's own policy" in bare.not_measured["acting_gap"]
    assert "inverse_updates is 0" in bare.not_measured["inverse_error_ratio"]
    text = next(v.text for v in bare.check(TrustConfig().require) if v.figure == "trust_horizon")
    assert text.startswith("Trust horizon: not measured (6 held-out episodes, it needs 20")
    assert text.endswith("RL refuses.")


@pytest.mark.parametrize(("imagined", "refused"), [(28, True), (22, False), (5, False)])
def test_a_world_model_that_flatters_the_policy_is_refused(imagined: int, refused: bool) -> None:
    starts = [f"s{i}" for i in range(40)]
    acting = PolicyOutcomes("policy", starts, np.arange(40) < 16, np.arange(40) < imagined)
    report = measure(BlockWorldModel(), TrustData(HELD_OUT, acting=acting), QUICK).report
    gap = report.figures["acting_gap"]
    assert gap.value == pytest.approx((imagined - 16) / 40) and gap.low < gap.value < gap.high
    (verdict,) = (v for v in report.check(TrustConfig().require) if v.figure == "acting_gap")
    assert verdict.refuses is refused and ("the policy acting" in verdict.text)


def test_the_order_of_what_a_policy_does_in_imagination_is_that_of_what_it_leads_to() -> None:
    """Two states of four episodes: within the first payment follows the truth, within the second half of it does."""
    starts, caused = ["a"] * 4 + ["b"] * 4, np.array([1, 1, 0, 0, 1, 1, 0, 0], bool)
    worth = np.array([0.9, 0.9, 0.1, 0.1, 0.9, 0.1, 0.9, 0.1])
    acting = PolicyOutcomes("policy", starts, caused, worth > 0.5, worth, caused)
    report = measure(BlockWorldModel(), TrustData(HELD_OUT[:6], acting=acting), QUICK).report
    assert report.figures["acting_order"].value == pytest.approx(0.5)
    assert report.figures["acting_auc"].value == pytest.approx(0.75)
    apart = replace(acting, starts=list("abcdefgh"), caused=None)
    report = measure(BlockWorldModel(), TrustData(HELD_OUT[:6], acting=apart), QUICK).report
    assert "measures it where env.first_frames is a simulator" in report.not_measured["acting_order"]
    report = measure(BlockWorldModel(), TrustData(HELD_OUT[:6], acting=replace(apart, caused=caused)), QUICK).report
    assert "share an initial state" in report.not_measured["acting_order"] and "acting_auc" in report.figures


def test_another_style_is_told_apart(good: Measured) -> None:
    seen = good.report.styles["blue block"]
    assert seen["skill"].value < 0
    require = TrustConfig.model_validate({"require": {"styles/blue block/skill": {"above": 0}}}).require
    assert [v.figure for v in good.report.check(require) if v.refuses] == ["styles/blue block/skill"]


def test_clips_of_each_kind_that_there_is(good: Measured) -> None:
    assert [clip.kind for clip in good.clips] == ["success"] * 3 + ["failure"] * 3
    clip = good.clips[0]
    assert clip.real.shape == clip.imagined.shape == (7, 1, 16, 16, 3)
    assert np.abs(clip.real.astype(int) - clip.imagined).mean() < 5, "it shows the same episode"


def test_an_optimistic_success_head_is_warned_of_and_refused_where_a_recipe_asks(tmp_path: Path) -> None:
    report, refusing = judge(BlockWorldModel(reach=4), HELD_OUT, tmp_path)
    assert not refusing
    assert "false_success" in {v.figure for v in report.check(TrustConfig().require) if not v.passed}
    strict = TrustConfig.model_validate({"require": {"false_success": {"otherwise": "refuse"}}})
    with pytest.raises(TrustError, match="False successes"):
        admit(strict, tmp_path / "trust.json")
    assert report.figures["false_success"].low > 0.3
    assert report.figures["head_false_success"].low > 0.3, "the head is at fault, not the dynamics"
    assert refusing.isdisjoint({"skill", "action_gain"}), "the dynamics is right"


def test_a_pessimistic_success_head_is_refused(tmp_path: Path) -> None:
    report, refusing = judge(BlockWorldModel(reach=-1), HELD_OUT, tmp_path)
    assert "informedness" in refusing
    assert "false_success" not in refusing
    assert report.figures["agreement"].value == report.figures["majority"].value


def test_success_networks_that_guess_are_refused_by_their_order(tmp_path: Path) -> None:
    report, refusing = judge(Guessing(), HELD_OUT, tmp_path)
    assert {"auc", "informedness"} <= refusing
    assert report.figures["auc"].low < 0.5 < report.figures["auc"].high
    assert refusing.isdisjoint({"skill", "action_gain"}), "the dynamics is right"
    unasked = TrustConfig.model_validate({"require": {"informedness": None}})
    assert "auc" in {v.figure for v in report.check(unasked.require) if v.refuses}, "also where no verdict is asked for"


def test_a_probability_that_is_too_sure_is_warned_of(tmp_path: Path) -> None:
    """It orders the episodes as before, and no threshold knows of it."""
    report, refusing = judge(BlockWorldModel(slip=0.15, sure=0.999), HELD_OUT, tmp_path)
    assert not refusing
    assert "calibration_error" in {v.figure for v in report.check(TrustConfig().require) if not v.passed}
    assert report.figures["calibration_error"].low > 0.05
    assert report.figures["head_calibration_error"].value < 0.01, "on real frames it is as good as it says"


def test_first_frames_which_the_success_networks_never_learned_are_not_asked_about() -> None:
    class SureAtFirst(BlockWorldModel):
        """It takes every first frame for a success."""

        def score(self, frames: Frames, instruction: Sequence[str]) -> Scores:
            found = super().score(frames, instruction)
            found.probability[:, 0] = 1.0
            return found

    names = ("head_auc", "head_calibration_error", "head_agreement")
    plain, sure = (measure(w, TrustData(HELD_OUT), QUICK).report for w in (BlockWorldModel(), SureAtFirst()))
    assert [sure.figures[name] for name in names] == [plain.figures[name] for name in names]


def test_auc_falls_with_the_frames_since_a_real_one() -> None:
    report = measure(BlockWorldModel(slip=0.35), TrustData(HELD_OUT), QUICK).report
    assert "auc_after_4" not in report.figures
    depths = [report.figures[name].value for name in ("head_auc", "auc_after_1", "auc_after_2", "auc_after_3")]
    assert depths[0] == 1
    assert sorted(depths, reverse=True) == depths and depths[1] > depths[3]
    none = measure(BlockWorldModel(), TrustData(HELD_OUT[:6]), QUICK.model_copy(update={"auc_frames": 0})).report
    assert "head_auc" in none.figures and "auc_after_1" not in none.figures


def test_order_within_initial_states_where_several_episodes_share_one() -> None:
    grouped = [replace(e, start=f"s{i // 4}") for i, e in enumerate(HELD_OUT)]
    right, wrong = (measure(w, TrustData(grouped), QUICK).report.figures for w in (BlockWorldModel(), Guessing()))
    for name in ("group_correlation", "group_correlation_verdict"):
        assert right[name].value == pytest.approx(1) and right[name].n == 20
        assert wrong[name].low < 0 < wrong[name].high


def test_dynamics_that_ignores_actions_is_refused(tmp_path: Path) -> None:
    report, refusing = judge(BlockWorldModel(follows=False), HELD_OUT, tmp_path)
    assert "action_gain" in refusing
    assert report.figures["action_gain"].value == pytest.approx(1)
    assert report.figures["action_response"].value == 0
    assert "skill" not in refusing, "it looks right on average"
    assert report.figures["head_agreement"].value == 1, "the head is right"


def test_a_world_model_fitted_on_another_style_is_refused(tmp_path: Path) -> None:
    report, refusing = judge(BlockWorldModel(), episodes(80, color=BLUE), tmp_path)
    assert {"skill", "trust_horizon", "action_gain", "informedness"} <= refusing
    assert report.figures["skill"].high < 0
    assert report.figures["image_horizon"].value == 0


def test_outcomes_that_depend_on_the_noise_show_as_flips() -> None:
    report = measure(BlockWorldModel(slip=0.4), TrustData(HELD_OUT), QUICK).report
    assert report.figures["outcome_flips"].low > 0
    assert report.figures["agreement"].value < 1


@pytest.mark.parametrize(("slip", "expected"), [(0.4, 1.0), (0.05, 0.6), (0.0, 0.0)])
def test_futures_that_scatter_less_than_they_err_show_in_their_spread(slip: float, expected: float) -> None:
    """Really four control steps in ten slip; a world model in which as many do draws what could have happened."""
    data = TrustData(episodes(300, slip=0.4))
    report = measure(BlockWorldModel(slip=slip, wobble=0), data, QUICK).report
    figure = report.figures["spread"]
    assert figure.value == pytest.approx(expected, abs=0.07) and figure.low <= figure.value <= figure.high
    apart, off = (np.array(report.curves[name].mean) for name in ("latent_spread", "latent_error"))
    assert np.sqrt(apart / off) == pytest.approx(expected, abs=0.2) and len(apart) > 4, "frame by frame too"
    if slip == 0.4:
        assert figure.low < 1 < figure.high


def test_the_figures_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TrustData(episodes(10, past_success=False), episodes(10, seed=3))
    assert len({e.num_frames for e in data.held_out}) > 2, "episodes of several lengths"
    reports = []
    for size in (3, 10, 3):
        monkeypatch.setattr("world_model.trust.measure.BATCH_SIZE", size)
        reports.append(measure(BlockWorldModel(slip=0.3), data, QUICK).report)
    dumped = [r.model_dump_json(exclude={"created", "config"}) for r in reports]
    assert dumped[0] == dumped[1] == dumped[2]
    monkeypatch.setattr("world_model.trust.measure.SEED", 1)
    other = measure(BlockWorldModel(slip=0.3), data, QUICK).report
    assert other.figures["latent_error"] != reports[0].figures["latent_error"]


def test_bad_episodes_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="held-out episodes: no episode"):
        measure(BlockWorldModel(), TrustData([]), QUICK)
    with pytest.raises(ValueError, match=r"2 actions per frame.*frame_steps = 4"):
        measure(BlockWorldModel(frame_steps=4), TrustData(HELD_OUT), QUICK)
    broken = replace(HELD_OUT[0], states=HELD_OUT[0].states[:-1])
    with pytest.raises(ValueError, match="episode 0 needs at least 2 frames, as many in each array"):
        measure(BlockWorldModel(), TrustData([broken]), QUICK)


class Guessing(BlockWorldModel):
    """Its success networks answer at random."""

    def _probability(self, track: np.ndarray) -> np.ndarray:
        noise = np.abs(np.sin(1e3 * (1 + np.arange(track.size)).reshape((*track.shape[:-1], 2))[..., 0]))
        return noise * 0.1

    def _scores(self, track: np.ndarray) -> Scores:
        probability = self._probability(track)
        return Scores(probability.astype(np.float32), np.maximum.accumulate(probability > 0.099, axis=1))


class Broken(BlockWorldModel):
    """Imagines NaN in one pixel of the third frame."""

    def imagine(self, context: tuple[np.ndarray, list], actions: Actions) -> tuple[Frames, Scores]:
        frames, scores = super().imagine(context, actions)
        frames.latents[0, 2, 0, 0, 0, 0] = torch.nan
        return frames, scores


def test_nan_is_not_averaged_away() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        measure(Broken(), TrustData(HELD_OUT[:4]), QUICK)


@pytest.mark.slow
def test_lpips_and_video_distance_where_their_weights_are_given(tmp_path: Path) -> None:
    from torchvision.models import alexnet
    from torchvision.models.video import r3d_18

    torch.manual_seed(0)
    torch.save(alexnet(weights=None).state_dict(), tmp_path / "alexnet-owt-7be5be79.pth")
    torch.save(r3d_18(weights=None).state_dict(), tmp_path / "r3d_18-b3b3357e.pth")
    channels = (64, 192, 384, 256, 256)
    torch.save(
        {f"lin{i}.model.1.weight": torch.ones(1, c, 1, 1) for i, c in enumerate(channels)}, tmp_path / "alex.pth"
    )
    config = QUICK.model_copy(update={"perceptual_weights": tmp_path})
    data = TrustData([replace(e, images=e.images.repeat(4, 2).repeat(4, 3)) for e in HELD_OUT[:4]])
    exact, off = (measure(BlockWorldModel(wobble=w, enlarge=4), data, config).report.figures for w in (0.0, 0.3))
    assert (exact["lpips"].value, exact["fvd"].value) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6))
    assert min(off["lpips"].value, off["fvd"].value) > 1e-4
    (tmp_path / "r3d_18-b3b3357e.pth").rename(tmp_path / "alex.pth")
    with pytest.raises(ValueError, match=r"needs lin0\.model\.1\.weight with 64 numbers"):
        measure(BlockWorldModel(enlarge=4), data, config)
