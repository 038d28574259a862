"""The objects part: a control step by hand, what is remembered, mirrors, what is never looked at, and learning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vla_rl.config import ConfigError, validate
from world_model.config import ObjectsConfig
from world_model.model.end_effector import last_error, path_loss, recur
from world_model.model.objects import NEVER, ObjectBatch, ObjectModel, mirrored, off_by
from world_model.types import Actions, Frames

TWO = ObjectsConfig.model_validate({"slots": [["block"], ["plate"]], "width": 32, "probe_width": 8})
LEARNED = TWO.model_copy(update={"end_effector": "learned"})
LATENT = (2, 4, 4)
TEXT = ["put the block on the plate"]


def make(config: ObjectsConfig = TWO, action_dim: int = 7) -> ObjectModel:
    torch.manual_seed(0)
    return ObjectModel(config, LATENT, num_views=1, state_dim=3, action_dim=action_dim).eval()


def first_frames(batch: int = 1) -> Frames:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, 1, 1, *LATENT, generator=generator)
    return Frames(latents, torch.zeros(batch, 1, 3))


def steps(*values: list[float], frame_steps: int = 4, executed: int | None = None) -> Actions:
    """One episode's actions, cut into frames; the first `executed` of them are."""
    count = len(values) if executed is None else executed
    flat = torch.tensor(values).unflatten(0, (-1, frame_steps))[None]
    return Actions(flat, (torch.arange(len(values)) < count).unflatten(0, (-1, frame_steps))[None])


MOVE = [1.0, 0.0, -1.0, 0.2, 0.0, 0.4, 1.0]  # 5 cm forward, 5 cm down, a turn, and the gripper closes.
REST = [0.0] * 7


def test_an_untrained_part_leaves_objects_where_they_are_and_sends_the_end_effector_where_actions_say() -> None:
    model = make()
    begun = model.begin(first_frames(), torch.tensor([[0.1, 0.2, 0.3]]), TEXT)
    after, poses, logits = model.roll(begun, steps(MOVE, REST, REST, MOVE))
    assert torch.equal(poses, begun.poses[:, None]) and logits.tolist() == [[0.0]]
    torch.testing.assert_close(after.position, torch.tensor([[0.2, 0.2, 0.2]]))
    torch.testing.assert_close(after.turn, torch.tensor([[0.4, 0.0, 0.8]]))
    assert after.gripper.tolist() == [[1.0]], "a command of 0 keeps the one before"


def test_a_control_step_by_hand() -> None:
    """The output's bias alone: slot 0 moves by 2 cm times (1, 0, -0.5, 0.5) in each step, and the logit is 3."""
    model = make()
    model.head[-1].bias.data[:4] = torch.tensor([1.0, 0.0, -0.5, 0.5])
    model.head[-1].bias.data[-1] = 3.0
    begun = model.begin(first_frames(), torch.zeros(1, 3), TEXT)
    _, poses, logits = model.roll(begun, steps(*[REST] * 4, *[REST] * 4, executed=6))
    moved = poses[0, :, 0] - begun.poses[0, 0]
    each = torch.tensor([0.02, 0.0, -0.01, 0.01])
    torch.testing.assert_close(moved, torch.stack([4 * each, 6 * each]), msg="two of the steps were not executed")
    assert torch.equal(poses[0, :, 1], begun.poses[0, 1].expand(2, 4)) and logits.tolist() == [[3.0, 3.0]]


def test_the_end_effector_stays_within_what_was_seen() -> None:
    model = make()
    model.learn_ranges(torch.rand(5, 2, 4), torch.tensor([[-0.1, -0.1, 0.02], [0.12, 0.1, 0.3]]))
    after, _, _ = model.roll(model.begin(first_frames(), torch.tensor([[0.1, 0.0, 0.05]]), TEXT), steps(*[MOVE] * 4))
    torch.testing.assert_close(after.position, torch.tensor([[0.12, 0.0, 0.02]]))


@pytest.mark.parametrize("config", [TWO, LEARNED], ids=["commanded", "learned"])
def test_a_frame_to_which_no_action_led_has_no_success_and_changes_nothing(config) -> None:
    model = trained_a_little(config)
    begun = model.begin(first_frames(), torch.zeros(1, 3), TEXT)
    whole = model.roll(begun, steps(*[MOVE] * 8, executed=4))
    assert whole[2][0, 1] == NEVER and torch.equal(whole[1][:, 0], whole[1][:, 1])
    short = model.roll(begun, steps(*[MOVE] * 4))
    assert all(torch.equal(t, short[0].tensors()[name]) for name, t in whole[0].tensors().items())


def trained_a_little(config: ObjectsConfig = TWO) -> ObjectModel:
    model = make(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.mark.parametrize("config", [TWO, LEARNED], ids=["commanded", "learned"])
def test_frames_one_by_one_are_frames_together_and_no_noise_is_drawn(config) -> None:
    model, actions = trained_a_little(config), steps(*[MOVE, REST] * 4)
    begun = model.begin(first_frames(), torch.zeros(1, 3), TEXT)
    together = model.roll(begun, actions)
    state = torch.random.get_rng_state()
    half, _, one = model.roll(begun, actions.at(slice(0, 1)))
    end, _, two = model.roll(half, actions.at(slice(1, 2)))
    assert torch.equal(torch.cat([one, two], 1), together[2]) and torch.equal(end.hidden, together[0].hidden)
    assert torch.equal(end.position, together[0].position)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("config", [TWO, LEARNED], ids=["commanded", "learned"])
def test_memory_is_selected_put_and_kept_by_row_with_its_instruction(config) -> None:
    model = trained_a_little(config)
    three = model.begin(first_frames(3), torch.arange(9.0).view(3, 3), ["a", "b", "c"])
    picked = three.select(torch.tensor([2, 0]))
    assert torch.equal(picked.poses, three.poses[[2, 0]]) and torch.equal(picked.words, three.words[[2, 0]])
    put = three.put(torch.tensor([1]), picked.select(torch.tensor([0])))
    assert torch.equal(put.words, three.words[[0, 2, 2]]) and torch.equal(put.position, three.position[[0, 2, 2]])
    assert "words" not in three.tensors() and ("arm" in three.tensors()) == (config is LEARNED)
    told = picked.with_tensors(three.select(torch.tensor([1, 1])).tensors())
    assert torch.equal(told.words, picked.words) and torch.equal(told.poses, three.poses[[1, 1]])


def test_a_mirror_turns_y_yaw_and_two_of_the_rotations() -> None:
    batch = make_batch(2, 3)
    seen = mirrored(batch, torch.tensor([True, False]))
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert torch.equal(seen.poses[0], batch.poses[0] * sign) and torch.equal(seen.start[0], batch.start[0] * sign)
    assert torch.equal(seen.position[0], batch.position[0] * sign[:3])
    flipped = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    assert torch.equal(seen.actions.values[0], batch.actions.values[0] * flipped)
    assert batch.path is not None and seen.path is not None
    assert torch.equal(seen.path[0], batch.path[0] * sign[:3])
    for name in ("poses", "start", "position", "success", "path"):
        assert torch.equal(getattr(seen, name)[1], getattr(batch, name)[1])
    assert torch.equal(mirrored(seen, torch.tensor([True, False])).poses, batch.poses)
    turned = replace(batch, actions=Actions(batch.actions.values[..., :5], batch.actions.executed))
    with pytest.raises(ValueError, match=r"objects\.mirror: got true with actions of 5 numbers"):
        mirrored(turned, torch.tensor([True, False]))


def make_batch(size: int, length: int, seed: int = 0) -> ObjectBatch:
    """A world whose block follows the end effector in x, and which succeeds where it is above x = 0.1.

    The single frames show the block's x as brightness.
    """
    torch.manual_seed(seed)
    start = torch.zeros(size, 2, 4)
    start[:, 0, 0] = 0.2 * torch.rand(size) - 0.1
    values = torch.zeros(size, 1, length, 7)
    values[..., 0] = 2 * torch.rand(size, 1, length) - 1
    values[..., 1] = 2 * torch.rand(size, 1, length) - 1
    poses = start[:, None].repeat(1, length + 1, 1, 1)
    poses[:, 1:, 0, 0] += 0.02 * values[:, 0, :, 0].cumsum(1)
    latents = (start[:, 0, 0] * 10)[:, None, None, None, None].expand(-1, 1, *LATENT).clone()
    return ObjectBatch(
        poses=poses,
        start=start,
        position=torch.zeros(size, 3),
        actions=Actions(values, torch.ones(size, 1, length, dtype=torch.bool)),
        success=poses[:, 1:, 0, 0] > 0.1,
        instruction=TEXT * size,
        latents=latents,
        seen=start,
        is_first=torch.ones(size, dtype=torch.bool),
        said=TEXT * size,
        path=lagging(values[:, 0]),
    )


def lagging(values: torch.Tensor) -> torch.Tensor:
    """Where an arm is that begins at 0, goes a fifth of the way that actions (B, L, A) ask, and keeps 40 % of speed."""
    moved, path = torch.zeros(len(values), 3), [torch.zeros(len(values), 3)]
    for action in values.unbind(1):
        moved = 0.2 * 0.05 * action[:, :3] + 0.4 * moved
        path.append(path[-1] + moved)
    return torch.stack(path[1:], 1)


def test_it_learns_to_read_to_roll_and_to_tell_success() -> None:
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(120):
        loss, _ = model.loss(make_batch(16, 6, seed=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    test = make_batch(64, 6, seed=10_000)
    _, metrics = model.eval().loss(test)
    assert metrics["pose_error"] < 0.006, "objects move by some 2 cm a step"
    assert metrics["read_error"] < 0.015, "they lie within 20 cm"
    begun = model.begin(Frames(test.latents[:, None], torch.zeros(64, 1, 3)), test.position, test.instruction)
    _, _, logits = model.roll(begun, test.actions)
    assert ((logits[:, 0] > 0) == test.success.any(1)).float().mean() > 0.85


@pytest.mark.parametrize("config", [TWO, LEARNED], ids=["commanded", "learned"])
def test_padding_teaches_nothing(config) -> None:
    model, batch = trained_a_little(config), make_batch(4, 5)
    assert batch.path is not None
    short = replace(
        batch,
        poses=batch.poses[:, :4],
        actions=Actions(batch.actions.values[:, :, :3], batch.actions.executed[:, :, :3]),
        success=batch.success[:, :3],
        path=batch.path[:, :3],
    )
    executed = batch.actions.executed.clone()
    executed[:, :, 3:] = False
    path = torch.where(executed[:, 0, :, None], batch.path, torch.nan)
    padded = replace(batch, actions=Actions(batch.actions.values, executed), path=path)
    torch.testing.assert_close(model.loss(padded)[0], model.loss(short)[0])


def test_a_commanded_end_effector_is_what_it_was_before_there_were_others() -> None:
    """Numbers of the version before `end_effector`; its weights load, and its keyframes."""
    model = trained_a_little()
    assert not any(name.startswith("arm") for name in model.state_dict())
    begun = model.begin(first_frames(), torch.tensor([[0.1, 0.2, 0.3]]), TEXT)
    assert sorted(begun.tensors()) == ["gripper", "hidden", "poses", "position", "turn"]
    after, poses, logits = model.roll(begun, steps(*[MOVE, REST] * 4, executed=6))
    expected = [0.01244931761, 0.03300536051, 0.0329081975, -0.0923665166]
    torch.testing.assert_close(poses[0, -1, 0], torch.tensor(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits[0], torch.tensor([0.1464778781, 0.1552741528]), rtol=0, atol=1e-5)
    torch.testing.assert_close(after.position, torch.tensor([[0.25, 0.2, 0.15]]))
    whole, metrics = make().loss(make_batch(8, 6))
    without, _ = make().loss(replace(make_batch(8, 6), path=None))
    assert torch.equal(whole, without) and metrics["hand_error"] > 0.01


def test_the_end_effector_of_an_arm_that_lags_is_learned_and_objects_do_not_pull_at_it() -> None:
    torch.manual_seed(0)
    model, test = make(LEARNED).train(), make_batch(32, 8, seed=10_000)
    assert model.arm is not None
    commanded = make().loss(test)[1]["hand_error"]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(40):
        batch = make_batch(16, 8, seed=step)
        assert batch.path is not None
        batch.path[:, torch.arange(8) % 4 != 3] = torch.nan  # As recordings with a state every 4 control steps.
        loss, _ = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.loss(test)[1]["hand_error"] < 0.004 and commanded > 0.05
    optimizer.zero_grad()
    _, poses, logits, _ = model._control_steps(model._started(test.start, test.position, TEXT * 32), test.actions)
    (poses.sum() + logits.sum()).backward()
    assert all(parameter.grad is None for parameter in model.arm.parameters())
    with pytest.raises(ValueError, match="end_effector=learned needs the path"):
        model.loss(replace(test, path=None))


def test_the_error_of_a_path_is_taken_at_each_episodes_last_recorded_state() -> None:
    true = torch.full((3, 4, 3), torch.nan)
    true[0, 3], true[0, 1], true[1, 2] = torch.tensor([0.0, 0.3, 0.4]), 9.0, torch.tensor([0.1, 0.0, 0.0])
    assert last_error(torch.zeros(3, 4, 3), true).item() == pytest.approx(0.3), "(0.5 + 0.1) / 2; nothing of the third"
    assert last_error(torch.zeros(1, 4, 3), true[2:]) == 0 == path_loss(torch.zeros(1, 4, 3), true[2:])


def test_the_recurrence_is_torchs_gru() -> None:
    model, (seen, hidden) = make(), torch.randn(2, 5, TWO.width)
    torch.testing.assert_close(recur(model.memory, seen, hidden), model.memory(seen, hidden))


def test_poses_are_off_as_a_probe_errs() -> None:
    torch.manual_seed(0)
    off = off_by(torch.zeros(4000, 1, 4), meters=0.002, radians=0.06).std(0)[0]
    torch.testing.assert_close(off, torch.tensor([0.002, 0.002, 0.002, 0.06]), rtol=0.05, atol=0)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"states that begin with a position.*got 2 and 7 numbers"):
        ObjectModel(TWO, LATENT, num_views=1, state_dim=2, action_dim=7)
    with pytest.raises(ValueError, match="got 8 and 3 numbers"):
        ObjectModel(TWO, LATENT, num_views=1, state_dim=8, action_dim=3)
    with pytest.raises(ConfigError, match="slots"):
        validate(ObjectsConfig, {"slots": []})
