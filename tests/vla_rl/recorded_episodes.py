"""Episodes as a robot's recorder stores them, whose numbers say which they are."""

from __future__ import annotations

import numpy as np

from vla_rl.data.lerobot_io import RecordedEpisode, encode_png


def episode(index: int, sources: list[str], success: bool) -> RecordedEpisode:
    """A step per source; the first number of its state and action is 100 * index + the step."""
    steps = len(sources)
    number = (100.0 * index + np.arange(steps)).astype(np.float32)
    png = encode_png(np.full((32, 32, 3), index, np.uint8))
    actions = np.repeat(number[:, None], 7, 1)
    return RecordedEpisode(
        task="reach_red",
        split="train",
        index=index,
        instruction="move to the red square",
        png={"agentview": [png] * steps},
        state=np.repeat(number[:, None], 8, 1),
        actions=actions,
        executed_actions=actions,
        requested_actions=actions,
        time=np.arange(steps) / 10,
        reward=np.zeros(steps, np.float32),
        success=success,
        control_source=sources,
        policy_version="one",
        final_png={"agentview": png},
        final_state=np.zeros(8, np.float32),
        interventions=int("correction" in sources),
    )
