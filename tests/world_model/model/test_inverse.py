"""The inverse dynamics on latents whose only motion is the action: what it reads, what it ignores, what is an error."""

from __future__ import annotations

import numpy as np
import torch

from world_model.model.inverse import InverseDynamics, mean_actions
from world_model.types import Actions

SIDE, STEPS = 8, 2


def moving(size: int, seed: int) -> tuple[torch.Tensor, Actions]:
    """A bright row, moved by the mean of dimension 0; dimension 1 moves nothing, and 2 never varies."""
    rng = np.random.default_rng(seed)
    values = np.zeros((size, 1, STEPS, 3), np.float32)
    values[..., :2] = rng.uniform(-2, 2, (size, 1, STEPS, 2))
    start = rng.uniform(2, 5, size)
    where = np.stack([start, start + values[:, 0, :, 0].mean(1)], 1)
    rows = np.exp(-((np.arange(SIDE) - where[..., None]) ** 2)).astype(np.float32)
    latents = np.broadcast_to(rows[:, :, None, None, :, None], (size, 2, 1, 1, SIDE, SIDE))
    return torch.from_numpy(latents.copy()), Actions(torch.from_numpy(values), torch.ones(size, 1, STEPS).bool())


def fitted() -> InverseDynamics:
    torch.manual_seed(0)
    network = InverseDynamics((1, SIDE, SIDE), 1, 3)
    network.learn_scale(mean_actions(moving(1000, 0)[1])[:, 0])
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for step in range(150):
        latents, actions = moving(64, step + 1)
        optimizer.zero_grad()
        network.loss(latents[:, 0], latents[:, 1], mean_actions(actions)[:, 0]).backward()
        optimizer.step()
    return network


def test_it_reads_what_moves_and_guesses_what_does_not() -> None:
    network = fitted()
    assert network.varies.tolist() == [True, True, False]
    latents, actions = moving(400, 999)
    network.varies[1] = False
    followed = float(network.errors(latents, actions).mean())
    others = float(network.errors(latents, actions.select(torch.randperm(400))).mean())
    assert followed < 0.1 and 1 < others < 4, "another's action is two variances away"
    network.varies[:2] = torch.tensor([False, True])
    assert 0.7 < float(network.errors(latents, actions).mean()) < 1.4, "the mean is the best guess"


def test_what_did_not_vary_where_the_scale_was_taken_is_not_learned() -> None:
    """The scale is of some clips: an action that is rare may be in none of them."""
    torch.manual_seed(0)
    network, (latents, actions) = InverseDynamics((1, SIDE, SIDE), 1, 3), moving(8, 5)
    network.learn_scale(mean_actions(moving(1000, 0)[1])[:, 0])
    wanted = mean_actions(actions)[:, 0]
    usual = network.loss(latents[:, 0], latents[:, 1], wanted)
    rare = wanted.clone()
    rare[0, 2] = 1.0
    assert torch.equal(network.loss(latents[:, 0], latents[:, 1], rare), usual)


def test_frames_that_nothing_led_to_are_no_number_and_parts_of_a_chunk_count_alone() -> None:
    torch.manual_seed(0)
    network = InverseDynamics((1, SIDE, SIDE), 1, 3)
    latents, actions = moving(2, 5)
    executed = torch.tensor([[[True, False]], [[False, False]]])
    half = Actions(actions.values * executed[..., None], executed)
    assert torch.equal(mean_actions(half)[0, 0], actions.values[0, 0, 0])
    assert network.errors(latents, half).isnan().tolist() == [[False], [True]]
