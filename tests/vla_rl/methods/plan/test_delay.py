"""Chunks that come late, by hand: what is played, what a policy is told, what is refused."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.methods.plan.delay import DelayConfig
from vla_rl.types import ActionChunk, ActionPrefix, Observation


class Counter(torch.nn.Module, Policy):
    """Action i of a chunk is 100 times what the state shows, plus i; continued, the frozen ones are what was given."""

    chunk_size, action_dim, cameras, uses_state = 8, 1, ("wrist",), True

    def __init__(self) -> None:
        super().__init__()
        self.given: list[ActionPrefix] = []

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk((100 * obs.state[:, :1, None] + np.arange(8)[None, :, None]).astype(np.float32))


class Continuing(Counter):
    def act_with_prefix(
        self, obs: Observation, prefix: ActionPrefix, generator: torch.Generator | None = None
    ) -> ActionChunk:
        self.given.append(prefix)
        return ActionChunk(self.act(obs).actions + 0.5)


def seen(*values: float) -> Observation:
    images = {"wrist": np.zeros((len(values), 8, 8, 3), np.uint8)}
    return Observation(images, np.array(values, np.float32)[:, None], ["go"] * len(values))


def late(policy: Policy, **options: Any) -> Any:
    return DelayConfig.model_validate(options).build(policy)


def played(plan: Any, ids: list[int], begins: list[bool], *values: float) -> list[list[float]]:
    plan.watch(ids, begins, ["reach"] * len(ids))
    return plan.act(seen(*values), temperature=0.0).actions[..., 0].tolist()


def test_the_last_chunk_plays_on_until_the_answer_comes() -> None:
    plan = late(Counter(), delay=2, every=4)
    assert plan.chunk_size == 4
    assert played(plan, [0, 3], [True, True], 1, 2) == [[100, 101, 102, 103], [200, 201, 202, 203]]
    # Decided at step 4 and there at 6: actions 4 and 5 of the last chunk, then from action 2 of the new one.
    assert played(plan, [3], [False], 7) == [[204, 205, 702, 703]]
    assert played(plan, [0, 3], [False, False], 4, 5) == [[104, 105, 402, 403], [704, 705, 502, 503]]
    assert played(plan, [0, 3], [True, False], 6, 8) == [[600, 601, 602, 603], [504, 505, 802, 803]]


def test_without_delay_it_is_the_policy() -> None:
    plan = late(Counter(), delay=0, every=3)
    assert [played(plan, [0], [begins], 1 + i) for i, begins in enumerate((True, False))] == [
        [[100, 101, 102]],
        [[200, 201, 202]],
    ]


def test_a_policy_that_continues_is_told_what_is_played_meanwhile() -> None:
    policy = Continuing()
    plan = late(policy, delay=2, every=3, continues=True)
    assert played(plan, [0], [True], 1) == [[100, 101, 102]]
    assert played(plan, [1, 0], [True, False], 2, 3) == [[200, 201, 202], [103, 104, 302.5]]
    (prefix,) = policy.given
    assert prefix.num_frozen == 2 and prefix.actions[..., 0].tolist() == [[103, 104, 105, 106, 107]]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (Counter, {"delay": 3, "every": 2}, "plan.every: got 2, must be at least plan.delay, 3"),
        (Counter, {"delay": 4, "every": 5}, "9 steps .* policy's last 8"),
        (Counter, {"delay": 1, "every": 4, "continues": True}, "Counter cannot go on"),
    ],
)
def test_refusals(policy: type[Counter], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        late(policy(), **options)


def test_continuing_is_greedy() -> None:
    plan = late(cast(Policy, Continuing()), delay=1, every=2, continues=True)
    plan.watch([0], [True], ["reach"])
    with pytest.raises(ConfigError, match=r"eval.temperatures=\[0\]"):
        plan.act(seen(1), temperature=1.0)
