"""Flow-SDE, Flow-Noise and the ODE on flows whose answer is known; paths and their likelihood."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from vla_rl.common.row_noise import RowGenerator
from vla_rl.config import ConfigError, validate
from vla_rl.policies.lerobot.flow_sampling import (
    denoise,
    gaussian_step,
    inject,
    log_density,
    normal,
    path_log_prob,
    plain_step,
    random_step,
)
from vla_rl.policies.lerobot.options import FlowSampling

MEAN, STD = 0.7, 0.4


def gaussian_flow(x, level):
    """The exact velocity of the flow between N(0, 1) at t = 1 and N(MEAN, STD^2) at t = 0: E[noise - data | x]."""
    t = level[:, None, None]
    variance = t**2 + (1 - t) ** 2 * STD**2
    surprise = (x - (1 - t) * MEAN) / variance
    return t * surprise - (MEAN + (1 - t) * STD**2 * surprise), None


def constant_flow(x, level):
    """A velocity and a noise that vary over the path, for likelihoods worked out by hand."""
    return torch.full_like(x, 0.5) * level[:, None, None], torch.full_like(x, 0.1)


def sample(velocity, noise, num_steps, sampling, temperature, generator=None, keeps_noise=False):
    injected = inject(noise, num_steps, sampling, temperature, generator)
    return denoise(velocity, noise, num_steps, sampling, injected, keeps_noise)


def draw(sampling, temperature=1.0, rows=40_000, num_steps=50, velocity=gaussian_flow, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((rows, 1, 1), generator=generator)
    with torch.no_grad():
        return sample(velocity, noise, num_steps, sampling, temperature, generator)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("noise_level", [0.2, 0.5, 1.0])
def test_the_marginal_of_flow_sde_is_the_odes(joint, noise_level):
    exact = FlowSampling(joint=joint, noise_level=noise_level, std_floor=0.0, log_prob_clamp=None)
    ode, sde = draw(exact, temperature=0.0).x.flatten(), draw(exact).x.flatten()
    for x in (ode, sde):
        assert float(x.mean()) == pytest.approx(MEAN, abs=0.015)
        assert float(x.std()) == pytest.approx(STD, rel=0.05)
    assert stats.kurtosis(sde.numpy()) == pytest.approx(0.0, abs=0.1)


def test_flow_sde_forgets_its_start_noise_and_the_ode_does_not():
    exact = FlowSampling(joint=True, noise_level=1.0, std_floor=0.0)
    start = torch.randn((40_000, 1, 1), generator=torch.Generator().manual_seed(0)).flatten()
    ode, sde = draw(exact, temperature=0.0).x.flatten(), draw(exact).x.flatten()
    assert np.corrcoef(start, ode)[0, 1] > 0.999
    assert np.corrcoef(start, sde)[0, 1] < 0.5


def test_a_wrong_drift_would_be_seen():
    """Noise without the drift that makes up for it, as in Flow-Noise, widens the marginal."""
    wide = FlowSampling(method="flow_noise", joint=True, std_floor=0.0)
    x = draw(wide, velocity=lambda x, t: (gaussian_flow(x, t)[0], torch.full_like(x, 0.1))).x
    assert float(x.std()) > 1.2 * STD


def test_temperature_goes_to_the_ode():
    exact = FlowSampling(joint=True, std_floor=0.0)
    ode, cold = draw(exact, temperature=0.0, rows=50), draw(exact, temperature=1e-4, rows=50)
    torch.testing.assert_close(cold.x, ode.x, atol=1e-3, rtol=0)


def test_the_ode_is_eulers():
    drawn = draw(FlowSampling(), temperature=0.0, rows=3, num_steps=4, velocity=constant_flow)
    start = torch.randn((3, 1, 1), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.x, start - 0.25 * 0.5 * (1 + 0.75 + 0.5 + 0.25))
    assert drawn.path is None and drawn.log_prob is None


def test_a_flow_sde_step_by_hand():
    """t = 0.5, t' = 0.25, a = 0.5: sigma = 0.5, x0 = 0.5, x1 = 1.5, weights 0.75 and 0.25 - 0.0625 = 0.1875."""
    x, speed = torch.full((1, 1, 1), 1.0), torch.full((1, 1, 1), 1.0)
    mean, std = gaussian_step(
        FlowSampling(noise_level=0.5, std_floor=0.0), x, speed, None, torch.tensor([0.5]), torch.tensor([0.25])
    )
    assert float(mean) == pytest.approx(0.75 * 0.5 + 0.1875 * 1.5)
    assert float(std) == pytest.approx(0.5 * math.sqrt(0.25))


def test_the_first_and_the_last_step_are_finite():
    for t, after in ((1.0, 0.9), (0.1, 0.0)):
        mean, std = gaussian_step(
            FlowSampling(std_floor=0.0), torch.ones(1, 1, 1), torch.ones(1, 1, 1), None, torch.tensor([t]),
            torch.tensor([after]),
        )  # fmt: skip
        assert torch.isfinite(mean).all() and 0 < float(std) < 1


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise"])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_stored_path_has_the_log_prob_it_was_drawn_with(method, joint, temperature):
    sampling = FlowSampling(method=method, joint=joint)
    drawn = draw(sampling, temperature, rows=64, num_steps=6, velocity=constant_flow)
    assert drawn.path is not None and drawn.log_prob is not None
    assert drawn.path.shape == (64, 7 if joint else 2, 1, 2)
    log_prob, entropy = path_log_prob(constant_flow, drawn.path, sampling, temperature)
    torch.testing.assert_close(log_prob, drawn.log_prob, atol=1e-5, rtol=0)
    assert entropy.shape == log_prob.shape
    levels = drawn.path[:, :, 0, -1]
    assert (levels[:, 1:] < levels[:, :-1]).all()
    if joint:
        torch.testing.assert_close(drawn.path[:, -1, :, :-1], drawn.x)
        assert (levels[:, 0] == 1).all() and (levels[:, -1] == 0).all()
    else:
        assert len(levels[:, 0].unique()) == 6, "each row draws its own step"


def seeded(by_row):
    if not by_row:
        return torch.Generator().manual_seed(7)
    generator = RowGenerator()
    generator.rows = [torch.Generator().manual_seed(i) for i in range(5)]
    return generator


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("joint", [True, False])
def test_numbers_that_are_drawn_beforehand_are_those_that_each_step_would_draw(joint, by_row):
    sampling, noise = FlowSampling(joint=joint), torch.randn((5, 2, 3), generator=torch.Generator().manual_seed(0))
    generator = seeded(by_row)
    steps, x = None if joint else random_step(4, 5, generator), noise
    for k in range(4):
        level, after = torch.full((5,), 1 - k / 4), torch.full((5,), 1 - (k + 1) / 4)
        speed, _ = constant_flow(x, level)
        mean, std = gaussian_step(sampling, x, speed, None, level, after, 0.7)
        drawn = mean + std * normal(x.shape, generator, x.device)
        noisy = torch.ones(5, dtype=torch.bool) if steps is None else steps == k
        x = torch.where(noisy[:, None, None], drawn, plain_step(x, speed, level, after))
    assert torch.equal(sample(constant_flow, noise, 4, sampling, 0.7, seeded(by_row)).x, x)


def test_the_log_prob_is_scipys():
    sampling = FlowSampling(method="flow_noise", joint=True, log_prob_clamp=None, std_floor=0.0)
    drawn = draw(sampling, rows=5, num_steps=3, velocity=constant_flow)
    assert drawn.path is not None and drawn.log_prob is not None
    points, levels = drawn.path[:, :, 0, 0].numpy(), drawn.path[:, :, 0, 1].numpy()
    expected = stats.norm.logpdf(points[:, 0])
    for k in range(3):
        mean = points[:, k] - (levels[:, k] - levels[:, k + 1]) * 0.5 * levels[:, k]
        expected += stats.norm.logpdf(points[:, k + 1], mean, 0.1)
    np.testing.assert_allclose(drawn.log_prob.flatten(), expected, rtol=1e-4)


def test_the_gradient_of_the_log_prob_raises_it_towards_what_was_drawn():
    """d log N / d mean = (x - mean) / std^2: the score that REINFORCE needs."""
    bias = torch.zeros(1, requires_grad=True)

    def velocity(x, level):
        return constant_flow(x, level)[0] + bias, torch.full_like(x, 0.1)

    sampling = FlowSampling(method="flow_noise", joint=False, log_prob_clamp=None)
    drawn = draw(sampling, rows=1, num_steps=4, velocity=constant_flow)
    assert drawn.path is not None
    log_prob, _ = path_log_prob(velocity, drawn.path, sampling, 1.0)
    log_prob.sum().backward()
    before, after = drawn.path[0, 0, 0], drawn.path[0, 1, 0]
    residual = after[0] - (before[0] - 0.25 * 0.5 * before[1])
    assert bias.grad is not None
    assert float(bias.grad) == pytest.approx(float(-0.25 * residual / 0.1**2), rel=1e-3)


def test_safeguards():
    floor = FlowSampling(std_floor=0.3)
    _, std = gaussian_step(floor, torch.ones(1, 1, 1), torch.ones(1, 1, 1), None, torch.tensor([0.1]), torch.zeros(1))
    assert float(std) == pytest.approx(0.3)
    far = log_density(torch.tensor(9.0), torch.tensor(0.0), torch.tensor(0.1), (-5.0, 2.0))
    near = log_density(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.01), (-5.0, 2.0))
    assert (float(far), float(near)) == (-5.0, 2.0)


def test_bad_options_are_named():
    with pytest.raises(ConfigError, match="noise_bounds"):
        validate(FlowSampling, {"noise_bounds": (0.2, 0.1)})
    with pytest.raises(ConfigError, match="log_prob_clamp"):
        validate(FlowSampling, {"log_prob_clamp": (2.0, -5.0)})


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise"])
@pytest.mark.parametrize("joint", [True, False])
def test_noise_that_is_kept_is_mixed_in_anew(method, joint):
    """X-VLA's sampler by hand, and the likelihood of paths whose every step knows the first noise."""

    def velocity(x, level):  # Of clean actions that depend on what is seen at this step alone.
        return (x - torch.tanh(x + 0.3)) / level[:, None, None], torch.full_like(x, 0.1)

    sampling = FlowSampling(method=method, joint=joint)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((5, 3, 2), generator=generator)
    clean = torch.zeros_like(noise)
    for t in (1.0, 0.75, 0.5, 0.25):
        clean = torch.tanh(noise * t + clean * (1 - t) + 0.3)
    plain = sample(velocity, noise, 4, sampling, 0.0, keeps_noise=True)
    torch.testing.assert_close(plain.x, clean)
    assert (plain.x - sample(velocity, noise, 4, sampling, 0.0).x).abs().max() > 0.01, "not the ODE's"
    drawn = sample(velocity, noise, 4, sampling, 1.2, generator, keeps_noise=True)
    assert drawn.path is not None and drawn.path.shape == (5, 5 if joint else 3, 3, 3)
    torch.testing.assert_close(drawn.path[:, 0, :, :-1], noise)
    log_prob, _ = path_log_prob(velocity, drawn.path, sampling, 1.2, keeps_noise=True)
    torch.testing.assert_close(log_prob, drawn.log_prob)
