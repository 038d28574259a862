"""A node between the camera and the bridge, which does to its pictures what /fault (String) says.

none: passes them on. stale: stamps of ten seconds ago. shuffled: each picture is followed by an older one.
corrupt: cut off in the middle. black: covered. frozen: the same picture again and again, newly stamped.
ahead, behind: the clock that stamps them has jumped by an hour; skewed: by 0.9 s.

At the first picture of each it prints "FAULT TAKEN PUBLISHED", monotonic seconds: when the picture was taken, and now.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from graph_node import this_node

from real_robot.bridge.codec import encode_image

SHIFT = {"stale": -10.0, "ahead": 3600.0, "behind": -3600.0, "skewed": 0.9}
IMAGE = "sensor_msgs/CompressedImage"


def main() -> None:
    fault, told = ["none"], ["none"]
    earlier: list[Any] = []
    frozen: dict[str, bytes] = {}
    covered = encode_image(np.zeros((64, 64, 3), np.uint8), "jpeg")
    node = this_node("faulty_camera")
    publisher = node.publisher("/faulty/image/compressed", IMAGE)

    def forward(message: Any) -> None:
        stamp, data = node.stamp_of(message), bytes(message.data)
        if fault[0] != told[0]:
            told[0] = fault[0]
            print(told[0], stamp / 1e9 - time.time() + time.monotonic(), time.monotonic(), flush=True)
        earlier.append(message)
        del earlier[:-4]
        if fault[0] == "corrupt":
            data = data[: len(data) // 2]
        if fault[0] == "black":
            data = covered
        if fault[0] == "frozen":
            data = frozen.setdefault("data", data)
        else:
            frozen.clear()
        stamp += int(SHIFT.get(fault[0], 0) * 1e9)
        publisher.publish(node.message(IMAGE, stamp, format=message.format, data=data))
        if fault[0] == "shuffled":
            publisher.publish(earlier[0])

    node.subscribe("/fault", "std_msgs/String", lambda message: fault.__setitem__(0, message.data))
    node.subscribe("/agentview/image/compressed", IMAGE, forward)
    print("ready", flush=True)
    time.sleep(10_000)


if __name__ == "__main__":
    main()
