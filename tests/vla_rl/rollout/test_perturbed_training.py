"""RL on perturbed states: each group shares its perturbation, and the worst axis is drawn most (Group DRO)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from test_task_sampling import outcomes

from sim.tabletop import TabletopConfig
from vla_rl.common.distributed.launched import _episode, _outline
from vla_rl.config import ConfigError, validate
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.task_sampling import GroupDroSampler, SamplingConfig
from vla_rl.types import Episode, EpisodeSpec

AXES = {"axes": ["clean", "camera", "noise"], "levels": [1, 3]}


def config(**values: object) -> SamplingConfig:
    return validate(SamplingConfig, {"perturb": AXES, **values})


def played(task: str, perturbation: str, successes: int, failures: int) -> list[Episode]:
    return [replace(e, spec=replace(e.spec, perturbation=perturbation)) for e in outcomes(task, successes, failures)]


def test_every_axis_and_level_comes_equally_often_with_the_same_states() -> None:
    specs = config().build(["a", "b"], seed=3).draw(240)
    usual = SamplingConfig().build(["a", "b"], seed=3).draw(240)
    assert [replace(spec, perturbation=None) for spec in specs] == usual
    counts = Counter(spec.perturbation for spec in specs)
    assert set(counts) == {"clean", "camera-1", "camera-3", "noise-1", "noise-3"}
    assert counts["clean"] == counts["camera-1"] + counts["camera-3"] == 80
    assert min(counts.values()) > 25
    assert all(spec.perturbation is None for spec in usual)


def test_weights_follow_group_dro() -> None:
    """Worked by hand: exp(0.5 * loss), normalized; a cell not drawn keeps its last loss, at first 1."""
    sampler = config(kind="group_dro").build(["a"])
    assert isinstance(sampler, GroupDroSampler)
    np.testing.assert_allclose(sampler.probabilities, 1 / 3)
    sampler.update([*played("a", "clean", 4, 0), *played("a", "camera-3", 1, 3)])
    weights = np.exp([0.0, 0.5 * 0.75, 0.5])
    np.testing.assert_allclose(sampler.probabilities, 0.8 * weights / weights.sum() + 0.2 / 3)
    last = [*played("a", "noise-1", 1, 1), *played("a", "camera-1", 2, 2)]
    sampler.update(last)
    weights *= np.exp([0.0, 0.25, 0.25])
    np.testing.assert_allclose(sampler.probabilities, 0.8 * weights / weights.sum() + 0.2 / 3)
    metrics = sampler.metrics(last)
    assert metrics["train/success/noise"] == 0.5 and metrics["sampling/a/noise"] == sampler.probabilities[2]


def test_what_fails_is_drawn_most() -> None:
    sampler = config(kind="group_dro").build(["a", "b"], seed=1)
    for _ in range(8):
        sampler.update([*played("a", "camera-3", 0, 8), *(e for t in "ab" for e in played(t, "clean", 8, 0))])
    counts = Counter((s.task, (s.perturbation or "").partition("-")[0]) for s in sampler.draw(600))
    assert counts["a", "camera"] > 3 * counts["a", "clean"] > 0 and counts["b", "clean"] > 0


def test_tasks_alone_can_be_weighted() -> None:
    sampler = SamplingConfig(kind="group_dro").build(["a", "b"])
    sampler.update([*outcomes("a", 8, 0), *outcomes("b", 0, 8)])
    counts = Counter(spec.task for spec in sampler.draw(400))
    assert counts["b"] > counts["a"] > 0 and {spec.perturbation for spec in sampler.draw(4)} == {None}


@pytest.mark.parametrize("kind", ["uniform", "vade", "group_dro"])
def test_a_resumed_sampler_draws_what_it_would_have_drawn(kind: str) -> None:
    whole, first = (config(kind=kind).build(["a", "b"], seed=5) for _ in range(2))
    for sampler in (whole, first):
        sampler.draw(7)
        sampler.update(played("a", "camera-1", 1, 2))
    again = config(kind=kind).build(["a", "b"], seed=5)
    again.load_state(json.loads(json.dumps(first.state())))
    assert again.draw(20) == whole.draw(20)
    if kind == "group_dro":
        with pytest.raises(ValueError, match=r"the checkpoint has 6 weights, this run has 2.*sampling\.perturb"):
            SamplingConfig(kind="group_dro").build(["a", "b"]).load_state(first.state())


def test_the_episode_is_what_its_spec_says() -> None:
    """As env.perturb makes it, whatever the environment's section says; what is not named is as that says."""
    spec = EpisodeSpec("stack", "train", 4)
    plain, tinted = TabletopConfig().make(), TabletopConfig().perturbed("light", 3).make()
    clean, light = plain.reset(spec).images["agentview"], tinted.reset(spec).images["agentview"]
    np.testing.assert_array_equal(plain.reset(replace(spec, perturbation="light-3")).images["agentview"], light)
    np.testing.assert_array_equal(tinted.reset(replace(spec, perturbation="clean")).images["agentview"], clean)
    with pytest.raises(ConfigError, match=r"fog-1\.axis: got 'fog'"):
        plain.reset(replace(spec, perturbation="fog-1"))


def test_other_processes_learn_of_the_perturbation() -> None:
    [episode] = played("a", "camera-2", 1, 0)
    assert _episode(_outline(episode)).spec.perturbation == "camera-2"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ("sampling.perturb.axes=[camera,fog]",),
            r"axes: got 'fog'; tabletop has: camera.*, clean",
        ),
        (
            ("env={kind: 'sim.dummy:DummyConfig', num_envs: 8}", "sampling.perturb.axes=[camera]"),
            "axes: got 'camera'; sim.dummy:DummyConfig has: no perturbations",
        ),
        (("sampling.perturb.axes=[noise,noise]",), r"sampling\.perturb\.axes: .*each once"),
        (("sampling.perturb={axes: [noise], levels: [4]}",), r"sampling\.perturb\.levels"),
    ],
)
def test_what_cannot_be_perturbed_is_refused(values: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("tabletop_grpo", list(values))
