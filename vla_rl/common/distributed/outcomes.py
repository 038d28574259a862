"""Outcomes of other processes' episodes, without pixels and actions, for statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Keyframe, Observation


def gather(world: ProcessGroup, episodes: Sequence[Episode]) -> list[Episode]:
    """See `ProcessGroup.gather_outcomes`."""
    return [_episode(values) for part in world.gather([_outline(e) for e in episodes]) for values in part]


def _outline(episode: Episode) -> dict[str, Any]:
    spec = episode.spec
    names = ("task", "split", "index", "instruction", "perturbation")
    return {
        "spec": {name: getattr(spec, name) for name in names},
        "keyframe": None if spec.keyframe is None else {"env": spec.keyframe.env, "step": spec.keyframe.step},
        "arrays": {n: getattr(episode, n).tolist() for n in ("reward", "terminated", "truncated", "num_steps")},
        "success": bool(episode.success),
        "group": int(episode.group),
        "lost": bool(episode.lost),
        "info": {name: np.asarray(values).tolist() for name, values in episode.info.items()},
    }


def _episode(values: Mapping[str, Any]) -> Episode:
    task, arrays = values["spec"]["task"], values["arrays"]
    keyframe = None if values["keyframe"] is None else Keyframe(task=task, arrays={}, **values["keyframe"])
    nothing = Observation(images={}, state=np.zeros((0, 0), np.float32), instruction=[])
    return Episode(
        spec=EpisodeSpec(**values["spec"], keyframe=keyframe),
        obs=nothing,
        chunks=ActionChunk(np.zeros((0, 0, 0), np.float32)),
        reward=np.array(arrays["reward"], np.float32),
        terminated=np.array(arrays["terminated"], bool),
        truncated=np.array(arrays["truncated"], bool),
        num_steps=np.array(arrays["num_steps"], np.int64),
        success=values["success"],
        final_obs=nothing,
        group=values["group"],
        lost=values["lost"],
        info={name: np.array(row) for name, row in values["info"].items()},
    )
