"""How the two small RLDS datasets in `rlds` were made, by TensorFlow Datasets itself:

    pip install tensorflow-cpu tensorflow-datasets     # in an environment of its own
    python tests/vla_rl/data/make_rlds.py

`libero_tiny` has the layout of OpenVLA's modified_libero_rlds (features' names, shapes, encodings), in two files;
`arm_tiny` has what Open X datasets may have besides: actions in parts, text as bytes in the observation, PNG, no state.
The numbers follow from `values`, which the tests import too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent / "rlds"
LENGTHS, SIZE = (5, 4, 6), 32
TASKS = ("pick up the black bowl and place it on the plate", "put the mug on the stove")


def values(episode: int, step: int) -> dict[str, np.ndarray]:
    """Smooth pictures uint8 (SIZE, SIZE, 3), which JPEG keeps within a few steps of gray; action (7,), state (8,)."""
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    image = np.stack([6 * rows, 6 * columns, np.full_like(rows, 40 * episode + 20 * step)], axis=2)
    action = np.sin(np.arange(7) + episode + 0.1 * step)
    action[-1] = -1.0 if step < 2 else 1.0
    state = np.cos(np.arange(8) + episode + 0.1 * step)
    return {
        "image": image.clip(0, 255).astype(np.uint8),
        "wrist_image": image[::-1].clip(0, 255).astype(np.uint8),
        "action": action.astype(np.float32),
        "state": state.astype(np.float32),
    }


def _libero(episode: int) -> dict:
    length = LENGTHS[episode]
    steps = []
    for step in range(length):
        numbers = values(episode, step)
        observation = {name: numbers[name] for name in ("image", "wrist_image", "state")}
        steps.append(
            {
                "observation": {**observation, "joint_state": numbers["state"][:7]},
                "action": numbers["action"],
                "discount": 1.0,
                "reward": float(step == length - 1 and episode != 1),
                "is_first": step == 0,
                "is_last": step == length - 1,
                "is_terminal": step == length - 1,
                "language_instruction": TASKS[episode % 2],
            }
        )
    return {"steps": steps, "episode_metadata": {"file_path": f"demo_{episode}.hdf5"}}


def _arm(episode: int) -> dict:
    steps = []
    for step in range(3):
        numbers = values(episode, step)
        steps.append(
            {
                "observation": {
                    "front": numbers["image"],
                    "natural_language_instruction": f"Öffne Schublade {episode}",
                },
                "action": {
                    "world_vector": numbers["action"][:3],
                    "rotation_delta": numbers["action"][3:6],
                    "gripper_closedness_action": np.float32([step > 0]),
                },
                "is_first": step == 0,
                "is_last": step == 2,
                "is_terminal": False,
            }
        )
    return {"steps": steps}


def main() -> None:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    features = tfds.features
    picture = {"shape": (SIZE, SIZE, 3), "dtype": np.uint8}

    def vector(size: int) -> tfds.features.Tensor:
        return features.Tensor(shape=(size,), dtype=np.float32)

    class LiberoTiny(tfds.core.GeneratorBasedBuilder):
        """The layout of modified_libero_rlds."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            observation = {
                "image": features.Image(**picture, encoding_format="jpeg"),
                "wrist_image": features.Image(**picture, encoding_format="jpeg"),
                "state": vector(8),
                "joint_state": vector(7),
            }
            steps = {
                "observation": observation,
                "action": vector(7),
                "discount": features.Scalar(dtype=np.float32),
                "reward": features.Scalar(dtype=np.float32),
                "is_first": features.Scalar(dtype=np.bool_),
                "is_last": features.Scalar(dtype=np.bool_),
                "is_terminal": features.Scalar(dtype=np.bool_),
                "language_instruction": features.Text(),
            }
            episode = {"steps": features.Dataset(steps), "episode_metadata": {"file_path": features.Text()}}
            return tfds.core.DatasetInfo(builder=self, features=features.FeaturesDict(episode))

        def _split_generators(self, _):
            return {"train": ((number, _libero(number)) for number in range(len(LENGTHS)))}

        def _generate_examples(self):
            raise NotImplementedError

    class ArmTiny(tfds.core.GeneratorBasedBuilder):
        """What Open X datasets may have besides."""

        VERSION = tfds.core.Version("0.1.0")

        def _info(self):
            actions = {"world_vector": vector(3), "rotation_delta": vector(3), "gripper_closedness_action": vector(1)}
            steps = {
                "observation": {
                    "front": features.Image(**picture, encoding_format="png"),
                    "natural_language_instruction": features.Tensor(shape=(), dtype=tf.string),
                },
                "action": actions,
                **{name: features.Tensor(shape=(), dtype=np.bool_) for name in ("is_first", "is_last", "is_terminal")},
            }
            return tfds.core.DatasetInfo(
                builder=self, features=features.FeaturesDict({"steps": features.Dataset(steps)})
            )

        def _split_generators(self, _):
            return {"train": ((number, _arm(number)) for number in range(2))}

        def _generate_examples(self):
            raise NotImplementedError

    for builder, shards in ((LiberoTiny, 2), (ArmTiny, 1)):
        one = builder(data_dir=str(HERE))
        shutil.rmtree(one.data_dir, ignore_errors=True)
        one.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards))
        print(one.data_dir)


if __name__ == "__main__":
    main()
