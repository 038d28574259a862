"""What X-VLA alone does: its published layout, its action layouts. The rest is in test_lerobot_flow.py."""

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from test_lerobot_flow import SPEC, make

from vla_rl.policies.fake_input import fake_env_spec, fake_observation
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.load import load_policy

IDENTITY = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY")


def test_an_x_vla_as_it_is_published_loads(tmp_path):
    """With the names of Florence-2's own code, which LeRobot renames."""
    policy = make("xvla")
    policy.save(tmp_path / "policy")
    file = tmp_path / "policy" / "model.safetensors"
    projection = "model.vlm.multi_modal_projector.image_projection.weight"
    published = {}
    for name, value in load_file(file).items():
        if name == projection:
            published["model.vlm.image_projection"] = value.T.contiguous()
        else:
            published[name.replace("model.vlm.language_model.", "model.vlm.language_model.model.")] = value
    save_file(published, file)
    obs = fake_observation(SPEC, 2)
    expected = policy.act(obs, temperature=0.0).actions
    np.testing.assert_array_equal(load_policy(tmp_path / "policy").act(obs, temperature=0.0).actions, expected)


def test_grippers_are_drawn_before_the_sigmoid():
    """X-VLA's layouts of two arms end in a sigmoid of the grippers; the likelihood is of what was denoised."""
    spec = fake_env_spec(action_dim=14, state_dim=14)
    policy = LeRobotConfig(
        type="xvla", preset="tiny", options={"action_mode": "joint", "normalization_mapping": IDENTITY}
    ).build(spec)
    obs = fake_observation(spec, 3)
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    assert ((chunk.actions[..., [6, 13]] > 0) & (chunk.actions[..., [6, 13]] < 1)).all()
    np.testing.assert_allclose(policy.evaluate(obs, chunk).log_prob.detach(), chunk.log_prob, atol=1e-5)
    loss, _ = policy.bc_loss(obs, chunk.actions)
    assert torch.isfinite(loss)
