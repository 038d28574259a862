"""Bag import: recordings (MCAP, rosbag2, ROS 1) into a LeRobotDataset, by the contract that drives the robot.

One bag is one episode. A frame each 1 / rate seconds holds the observation as the contract aligns it, and the
command that was in force at the end of that control step.
"""

from __future__ import annotations

import bisect
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rosbags.highlevel import AnyReader, AnyReaderError

from real_robot.bridge.codec import begins_near, check_frame, read_action, read_image, read_state
from real_robot.contract.channels import ActionSink, AlignConfig, ImageSource, StateSource
from real_robot.contract.contract import RobotContract
from real_robot.transports.messages import Message, MessageError
from real_robot.transports.ros.typestore import ros2_name, store_of, tree_of
from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import RecordedEpisode, dataset_features, encode_png, write_shard

ACTION_ALIGN = AlignConfig(strategy="hold", timeline="receive")


class BagError(ValueError):
    """A recording that cannot become an episode; the message names the file and what is missing."""


@dataclass
class _Stream:
    """One topic's decoded messages, by time in ns."""

    source: ImageSource | StateSource | ActionSink
    align: AlignConfig
    times: list[int] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    every: int = 0  # ns: what comes sooner after the last one is not decoded
    near: np.ndarray | None = None  # of commands: the numbers before it; a pose's axis-angle is near theirs

    def take(self, tree: Any, received: int) -> None:
        """Add a message that is given as a tree."""
        try:
            self.add(self.source.message_type.from_tree(tree), received)
        except MessageError as error:
            self.dropped[str(error)[:60]] += 1

    def add(self, message: Message, received: int) -> None:
        moment = message.stamp if self.align.timeline == "header" else received
        if self.times and moment <= self.times[-1]:
            self.dropped["out of order"] += 1
            return
        if self.times and moment - self.times[-1] < self.every:
            return
        value = self._decode(message)
        self.times.append(moment)
        self.values.append(value)

    def _decode(self, message: Message) -> np.ndarray:
        if isinstance(self.source, ActionSink):
            self.near = read_action(self.source, message, self.near)
            return self.near
        check_frame(self.source, message)
        return (
            read_image(self.source, message)
            if isinstance(self.source, ImageSource)
            else read_state(self.source, message)
        )

    def at(self, moment: int) -> np.ndarray | None:
        """The newest value that is not after that time, and not older than its tolerance allows."""
        place = bisect.bisect_right(self.times, moment) - 1
        oldest = moment - round(self.align.tolerance * 1e9)
        if place < 0 or (self.align.strategy != "hold" and self.times[place] < oldest):
            return None
        return self.values[place]


def import_bags(
    contract: RobotContract,
    bags: Sequence[Path],
    dataset: Path,
    instruction: str,
    success: bool = True,
    report: Callable[[str], None] = print,
) -> dict[str, int]:
    """Write a LeRobotDataset v3 with an episode for each bag.

    Args:
        bags: .mcap or .bag files, or rosbag2 folders.
        dataset: folder to make; must not exist.
        instruction: what the robot was asked to do, in all of them.
        success: whether they show success.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        BagError: a bag without one of the contract's topics, or in which they never come together; a rate that is no
            whole number.
    """
    if dataset.exists():
        raise BagError(f"{dataset} exists already; choose another folder")
    if contract.rate != round(contract.rate):
        raise BagError(
            f"rate: {contract.rate:g}; a LeRobotDataset has a whole number of frames per second: give another rate="
        )
    episodes = [read_episode(contract, bag, instruction, success, index, report) for index, bag in enumerate(bags)]
    sizes = {png_size for e in episodes for png_size in e.sizes.values()}
    if len(sizes) > 1:
        raise BagError(f"pictures of different sizes, {sorted(sizes)}: set `size` in the contract's images")
    features = dataset_features(
        tuple(contract.observation.images),
        next(iter(sizes), (0, 0)),
        contract.observation.state_names,
        contract.action_names,
    )
    with tempfile.TemporaryDirectory(prefix="vla-rl-bags-") as staging:
        for index, episode in enumerate(episodes):
            write_shard(Path(staging) / f"shard_{index:05d}", [episode.recorded], [], features)
        notes = {"source": "bags", "robot": contract.name, "bags": [bag.name for bag in bags]}
        return assemble(
            Path(staging), dataset, fps=round(contract.rate), features=features, robot=contract.name, notes=notes
        )


@dataclass(frozen=True)
class ImportedEpisode:
    """An episode and its pictures' sizes, camera -> (height, width)."""

    recorded: RecordedEpisode
    sizes: dict[str, tuple[int, int]]


def read_episode(
    contract: RobotContract,
    bag: Path,
    instruction: str,
    success: bool,
    index: int = 0,
    report: Callable[[str], None] = print,
) -> ImportedEpisode:
    """One bag as an episode.

    Raises:
        BagError: see `import_bags`.
    """
    frames, missing = read_frames(contract, bag, report)
    if len(frames) < 2:
        raise BagError(f"{bag}: {len(frames)} whole frames; most often missing: {dict(missing.most_common(3))}")
    if missing:
        report(f"{bag.name}: {sum(missing.values())} frames left out, for want of {dict(missing)}")
    return ImportedEpisode(
        _record(frames, contract, instruction, success, index), {n: v.shape[:2] for n, v in frames[0][0].items()}
    )


Frame = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]  # pictures, state, action


def read_frames(
    contract: RobotContract, bag: Path, report: Callable[[str], None] = print, picture_every: float = 0.0
) -> tuple[list[Frame], Counter[str]]:
    """A frame each 1 / rate seconds while all topics speak, and topic -> frames that were left out for want of it.

    Args:
        picture_every: seconds; pictures that come sooner after the last one are not decoded, nor kept in memory.

    Raises:
        BagError: no readable bag, or no usable message of a topic.
    """
    config = contract.observation
    if own := [name for name, source in config.images.items() if source.camera is not None]:
        raise BagError(
            f"{bag}: {own[0]} is a camera of this machine, which no recording of topics has; give it a topic"
        )
    every = round(picture_every * 1e9)
    images = {name: _Stream(source, source.align, every=every) for name, source in config.images.items()}
    states = [_Stream(source, source.align) for source in config.state]
    if goals := [sink for sink in contract.action if sink.is_goal]:
        raise BagError(
            f"{goals[0].topic}: {goals[0].type} is an action or a service, which recordings of topics do not hold; in "
            "a copy of the contract, name a topic that the controller was commanded by"
        )
    actions = [_Stream(sink, ACTION_ALIGN, near=begins_near(contract, sink)) for sink in contract.action]
    streams = [*images.values(), *states, *actions]
    _read_streams(bag, streams)
    for stream in streams:
        if stream.dropped:
            report(f"{bag.name}: {stream.source.topic}: left out {dict(stream.dropped)}")
        if not stream.times:
            raise BagError(f"{bag}: no usable message of {stream.source.topic} ({stream.source.type})")
    return _frames(images, states, actions, contract)


def _frames(
    images: dict[str, _Stream], states: list[_Stream], actions: list[_Stream], contract: RobotContract
) -> tuple[list[Frame], Counter[str]]:
    """A frame each 1 / rate seconds while all topics speak, and what was missing where there is none."""
    frames: list[Frame] = []
    missing: Counter[str] = Counter()
    period = round(1e9 / contract.rate)
    seen = [*images.values(), *states]
    for moment in range(max(s.times[0] for s in seen), min(s.times[-1] for s in seen) + 1, period):
        pictures = {name: stream.at(moment) for name, stream in images.items()}
        parts = {stream.source.topic: stream.at(moment) for stream in states}
        commands = {stream.source.topic: stream.at(moment + period - 1) for stream in actions}
        absent = [name for values in (pictures, parts, commands) for name, value in values.items() if value is None]
        if absent:
            missing.update(absent)
            continue
        action = np.zeros(contract.action_dim, np.float32)
        for sink in contract.action:
            action[list(sink.indices)] = commands[sink.topic]
        state = np.concatenate([np.zeros(0, np.float32), *(v for v in parts.values() if v is not None)])
        frames.append(({n: v for n, v in pictures.items() if v is not None}, state, action))
    return frames, missing


def _read_streams(bag: Path, streams: Sequence[_Stream]) -> None:
    if not bag.exists():
        raise BagError(f"{bag}: no such file or folder")
    by_topic: dict[str, list[_Stream]] = {}
    for stream in streams:
        by_topic.setdefault(stream.source.topic, []).append(stream)
    try:
        with AnyReader([bag], default_typestore=store_of("humble")) as reader:
            chosen = [c for c in reader.connections if c.topic in by_topic]
            for connection in chosen:
                expected = ros2_name(by_topic[connection.topic][0].source.message_type)
                if connection.msgtype != expected:
                    raise BagError(
                        f"{bag}: {connection.topic} holds {connection.msgtype}, the contract says {expected}"
                    )
            for connection, received, data in reader.messages(connections=chosen) if chosen else ():
                native = reader.deserialize(data, connection.msgtype)
                for stream in by_topic[connection.topic]:
                    stream.take(tree_of(native), received)
    except AnyReaderError as error:
        raise BagError(f"{bag}: not a readable recording: {error}") from error


def _record(
    frames: list[Frame],
    contract: RobotContract,
    instruction: str,
    success: bool,
    index: int,
) -> RecordedEpisode:
    """The last frame's observation is that after the last action."""
    *steps, last = frames
    reward = np.zeros(len(steps), np.float32)
    reward[-1] = float(success)
    actions = np.stack([action for _, _, action in steps])
    return RecordedEpisode(
        task=instruction,
        split="train",
        index=index,
        instruction=instruction,
        png={name: [encode_png(images[name]) for images, _, _ in steps] for name in last[0]},
        state=np.stack([state for _, state, _ in steps]),
        actions=actions,
        executed_actions=actions,
        reward=reward,
        success=success,
        control_source=["expert"] * len(steps),
        policy_version=f"recorded:{contract.name}",
        final_png={name: encode_png(image) for name, image in last[0].items()},
        final_state=last[1],
    )
