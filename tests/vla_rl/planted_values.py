"""Action values that are the same in every process: an arbitrary function of the actions."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_rl.algorithms.base import ActionValuesConfig


class PlantedValuesConfig(ActionValuesConfig):
    kind: str = "planted_values:PlantedValuesConfig"

    def build(self, policy: Any, device: str = "cpu") -> PlantedValues:
        return PlantedValues()


class PlantedValues:
    def of(self, episodes, episode, chunk, actions) -> np.ndarray:
        return 0.5 + 0.5 * np.sin(20 * actions.sum((2, 3)) + chunk[:, None])
