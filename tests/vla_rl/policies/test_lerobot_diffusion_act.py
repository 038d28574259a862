"""Diffusion Policy and ACT behind our policy: LeRobot's actions and losses, likelihoods by hand, saved for LeRobot."""

import json
import math

import numpy as np
import pytest
import torch

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.config import ConfigError, validate
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig, describe
from vla_rl.policies.load import load_policy

SPEC = fake_env_spec()
DIFFUSION = {
    "ddim": {},
    "ddpm": {"options": {"noise_scheduler_type": "DDPM"}},
    "sample, history": {"options": {"prediction_type": "sample", "n_obs_steps": 2, "n_action_steps": 6}},
}


def make(policy_type, **options):
    config = validate(LeRobotConfig, {"type": policy_type, "preset": "tiny", **options}, prefix="policy")
    policy = config.build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy


@pytest.fixture(scope="module", params=DIFFUSION)
def diffusion(request):
    return make("diffusion", value_head=True, **DIFFUSION[request.param])


@pytest.fixture(scope="module", params=["diffusion", "act", "act, learned"])
def policy(request):
    learned = {"sampling": {"method": "flow_noise"}} if request.param == "act, learned" else {}
    return make(request.param.split(",")[0], value_head=True, **learned)


def theirs(core, batch, seed):
    """All actions that LeRobot's `select_action` gives from an empty history, with the noise of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        core.reset()
        return torch.stack([core.select_action(dict(batch)) for _ in range(core.config.n_action_steps)], 1)


def test_temperature_0_is_lerobots_sampler(diffusion):
    obs = fake_observation(SPEC, 3)
    ours = diffusion.act(obs, torch.Generator().manual_seed(3), 0.0).actions
    expected = diffusion.postprocessor(theirs(diffusion.core, diffusion._batch(obs), 3))
    np.testing.assert_allclose(ours, expected.numpy(), atol=1e-5)
    assert np.abs(ours - diffusion.act(obs, torch.Generator().manual_seed(4), 0.0).actions).max() > 1e-2


def test_act_at_temperature_0_is_lerobots():
    policy = make("act")
    obs = fake_observation(SPEC, 3)
    expected = policy.postprocessor(theirs(policy.core, policy._batch(obs), 0))
    np.testing.assert_allclose(policy.act(obs, temperature=0.0).actions, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("kind", DIFFUSION)
def test_a_denoising_path_has_the_likelihood_it_was_drawn_with(kind, joint):
    policy = make("diffusion", sampling={"joint": joint}, value_head=True, **DIFFUSION[kind])
    obs = fake_observation(SPEC, 4)
    for temperature in (0.8, 1.0):
        chunk = policy.act(obs, torch.Generator().manual_seed(0), temperature)
        assert chunk.path.shape == (4, 6 if joint else 2, 8, 8)
        together = policy.evaluate(obs, chunk, temperature)
        np.testing.assert_allclose(together.log_prob.detach(), chunk.log_prob, atol=1e-4)
        alone = policy.evaluate(obs.select([2]), chunk.select([2]), temperature)
        np.testing.assert_allclose(alone.log_prob.detach()[0], together.log_prob.detach()[2], atol=1e-3)
    executed = chunk.path[:, -1, policy.history - 1 :, :-1][:, : policy.chunk_size]
    if joint:
        np.testing.assert_allclose(policy._to_environment(torch.from_numpy(executed)), chunk.actions, atol=1e-6)


def test_the_steps_are_the_schedulers(diffusion):
    """Mean and deviation of one step against diffusers' own, DDIM's with eta = 1, drawn many times."""
    scheduler, obs = diffusion.core.diffusion.noise_scheduler, fake_observation(SPEC, 1)
    seen = diffusion._seen(diffusion._batch(obs))
    x = torch.randn((1, 8, 7), generator=torch.Generator().manual_seed(1))
    step, after = diffusion.steps[2:3], diffusion.steps[3:4]
    diffusion.config.__dict__["sampling"] = diffusion.config.sampling.model_copy(update={"std_floor": 0.0})
    with torch.no_grad():
        mean, std = diffusion._step(seen, x, step, after, 1.0)
        output = diffusion.core.diffusion.unet(x, step, global_cond=seen)
    more = {} if "DDPM" in type(scheduler).__name__ else {"eta": 1.0}
    generator = torch.Generator().manual_seed(2)
    drawn = torch.cat(
        [scheduler.step(output, int(step), x, generator=generator, **more).prev_sample for _ in range(999)]
    )
    np.testing.assert_allclose(drawn.mean(0), mean[0], atol=5 * float(std.max()) / 999**0.5)
    np.testing.assert_allclose(drawn.std(0), std[0], rtol=0.15)


def test_the_diffusion_loss_is_lerobots(monkeypatch):
    policy = make("diffusion")
    obs = fake_observation(SPEC, 3)
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 8, 7)).astype(np.float32)
    noise, steps = torch.randn((3, 8, 7), generator=torch.Generator().manual_seed(0)), torch.tensor([3, 50, 99])
    monkeypatch.setattr(torch, "randn", lambda *size, **options: noise)
    monkeypatch.setattr(torch, "randint", lambda *size, **options: steps)
    ours, _ = policy.bc_loss(obs, actions)
    batch = policy._batch(obs, actions) | {"action_is_pad": torch.zeros((3, 8), dtype=torch.bool)}
    batch["observation.state"] = batch["observation.state"][:, None]
    loss, _ = policy.core.forward(batch)
    assert float(ours.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    valid = np.ones((3, 8), bool)
    valid[:, 5:] = False
    masked, _ = policy.bc_loss(obs, actions, valid)
    policy.core.config.do_mask_loss_for_padding = True
    padded = torch.from_numpy(~valid)
    loss, _ = policy.core.forward(batch | {"action_is_pad": padded})
    assert float(masked.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)


def test_the_act_loss_is_lerobots():
    policy = make("act")
    obs = fake_observation(SPEC, 3)
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 6, 7)).astype(np.float32)
    loss, _ = policy.bc_loss(obs, actions)
    mean = policy.core.model(
        {**policy._batch(obs), "observation.images": [policy._batch(obs)["observation.images.agentview"]]}
    )[0]
    wanted = policy._batch(obs, actions)["action"]
    assert float(loss.detach()) == pytest.approx(float((mean[:, :6] - wanted).abs().mean().detach()), rel=1e-5)
    policy.train()
    assert "kld_loss" in policy.bc_loss(obs, actions)[1], "in training its latent counts"
    with pytest.raises(ValueError, match="at once"):
        policy.bc_loss(obs, np.zeros((3, 9, 7), np.float32))


def test_acts_likelihood_by_hand():
    obs = fake_observation(SPEC, 2)
    policy = make("act", sampling={"std_floor": 0.2, "log_prob_clamp": None}, num_actions=5)
    greedy, chunk = policy.act(obs, temperature=0.0), policy.act(obs, torch.Generator().manual_seed(0), 1.5)
    z = (chunk.actions - greedy.actions) / 0.3
    assert chunk.path.shape == (2, 5, 7) and 0.5 < z.std() < 1.5
    by_hand = -0.5 * z**2 - math.log(0.3) - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(chunk.log_prob, by_hand, atol=1e-3)
    learned = make("act", sampling={"method": "flow_noise", "noise_bounds": [0.1, 0.4]})
    output = learned.evaluate(obs, learned.act(obs, torch.Generator().manual_seed(0)))
    np.testing.assert_allclose(output.entropy.detach(), math.log(0.2) + 0.5 * math.log(2 * math.pi * math.e), atol=1e-5)


def test_lerobot_loads_what_we_save(policy, tmp_path):
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    policy.save(tmp_path / "policy")
    kind = policy.core.config.type
    core = get_policy_class(kind).from_pretrained(tmp_path / "policy")
    before, after = make_pre_post_processors(core.config, pretrained_path=str(tmp_path / "policy"))
    obs = fake_observation(SPEC, 2)
    batch = {"task": obs.instruction, "observation.state": torch.from_numpy(obs.state)}
    batch["observation.images.agentview"] = torch.from_numpy(obs.images["agentview"]).permute(0, 3, 1, 2) / 255
    expected = policy.act(obs, torch.Generator().manual_seed(3), 0.0).actions
    np.testing.assert_allclose(expected, after(theirs(core, before(batch), 3)).numpy(), atol=1e-5)
    for name in ("vla_rl.json", "vla_rl.safetensors"):
        (tmp_path / "policy" / name).unlink()
    again = load_policy(tmp_path / "policy")
    np.testing.assert_array_equal(again.act(obs, torch.Generator().manual_seed(3), 0.0).actions, expected)


def test_rl_takes_them_and_inspect_says_how(policy, tmp_path):
    GRPOConfig(ratio_level="action").build(policy)
    policy.save(tmp_path / "policy")
    info = describe(tmp_path / "policy")
    assert info is not None and "GRPO" in info.rl
    assert ("DPPO" if policy.core.config.type == "diffusion" else "Gaussian") in info.rl_reason


def test_fewer_actions_than_are_planned_and_images_of_another_size():
    for kind in ("act", "diffusion"):
        policy = make(kind, num_actions=3)
        larger = fake_observation(fake_env_spec(image_size=96), 2)
        assert policy.act(larger, torch.Generator().manual_seed(0)).log_prob.shape == (2, 3, 7)
        with pytest.raises(ConfigError, match="at most 8"):
            make(kind, num_actions=9)


def test_what_they_do_not_do_is_said():
    with pytest.raises(ConfigError, match=r"policy\.sampling\.method"):
        make("diffusion", sampling={"method": "flow_noise"})
    with pytest.raises(ConfigError, match=r"policy\.lora: not for 'act'"):
        make("act", lora={"rank": 2}, trainable="lora")
    with pytest.raises(ConfigError, match=r"policy\.camera_map: agentview: null"):
        make("act", camera_map={"agentview": None})
    policy = make("diffusion")
    obs = fake_observation(SPEC, 2)
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"chunk\.path has shape"):
        make("diffusion", sampling={"joint": True}).evaluate(obs, chunk)


def test_what_a_checkpoints_processors_name_is_not_run(tmp_path):
    """LeRobot imports and calls whatever class a step names."""
    policy, ran = make("act"), tmp_path / "ran"
    policy.save(tmp_path / "policy")
    files = [tmp_path / "policy" / f"policy_{name}.json" for name in ("preprocessor", "postprocessor")]
    given = [file.read_text() for file in files]

    def with_step(number: int, **step) -> None:
        for file, text in zip(files, given, strict=True):
            values = json.loads(text)
            values["steps"] += [step] if file == files[number] else []
            file.write_text(json.dumps(values))

    steps = (
        {"class": "subprocess.Popen", "config": {"args": ["touch", str(ran)]}},
        {"class": "lerobot.utils.utils.say", "config": {"text": "hello"}},
        {"class": "lerobot.processor.nothing.Step"},
        {"class": "Step"},
        {"registry_name": "action_tokenizer_processor", "config": {"action_tokenizer_name": "someone/with-code"}},
        {"registry_name": "reward_classifier_processor", "config": {"pretrained_path": "someone/with-code"}},
    )
    for number, step in enumerate(steps):
        with_step(number % 2, **step)
        with pytest.raises(ValueError, match=rf"{files[number % 2].name}: the step '{next(iter(step.values()))}'"):
            load_policy(tmp_path / "policy")
    assert not ran.exists()
    with_step(1, **{"class": "lerobot.processor.device_processor.DeviceProcessorStep", "config": {"device": "cpu"}})
    obs = fake_observation(SPEC, 2)
    again = load_policy(tmp_path / "policy")
    np.testing.assert_array_equal(again.act(obs, None, 0.0).actions, policy.act(obs, None, 0.0).actions)
