"""Which pairs of links are neighbors or fingers, so that they are not kept apart."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import mujoco

from real_robot.contract.robot_file import JointFacts, leader

Pair = tuple[str, str]


@dataclass(frozen=True)
class Pairs:
    """Which pairs of links, boxes and planes are not kept apart, and why.

    Attributes:
        neighbors: joined by a joint, with no link between.
        fingers: nothing moves one against the other but joints that follow the same one: they close on each other.
        touching: they touch in the neutral pose.
        always: they touch in nearly every pose.
        told: the contract allows it.
        close: nearer than min_distance in the neutral pose, or in nearly every one: they must only not touch.
    """

    neighbors: frozenset[Pair] = frozenset()
    fingers: frozenset[Pair] = frozenset()
    touching: frozenset[Pair] = frozenset()
    always: frozenset[Pair] = frozenset()
    told: frozenset[Pair] = frozenset()
    close: frozenset[Pair] = frozenset()

    @property
    def ignored(self) -> frozenset[Pair]:
        return self.neighbors | self.fingers | self.touching | self.always | self.told


def in_order(first: str, second: str) -> Pair:
    """The pair as it is written everywhere: in alphabetical order."""
    return (first, second) if first < second else (second, first)


def find_neighbors(spec: mujoco.MjSpec) -> frozenset[Pair]:
    """Pairs of links with at most one joint between them, and no solid link."""
    found: set[Pair] = set()
    for body in spec.bodies:
        if body.name == "world" or not _is_solid(body):
            continue
        above, joints = body, 0
        while above.name != "world":
            joints += len(above.joints)
            above = above.parent
            if joints > 1:
                break
            if above.name != "world" and _is_solid(above):
                found.add(in_order(body.name, above.name))
                break
    return frozenset(found)


def find_fingers(spec: mujoco.MjSpec, facts: dict[str, JointFacts]) -> frozenset[Pair]:
    """See `Pairs`."""
    above: dict[str, frozenset[str]] = {}  # solid link -> joints that carry it
    for body in spec.bodies:
        if body.name == "world" or not _is_solid(body):
            continue
        joints, part = set(), body
        while part.name != "world":
            joints |= {joint.name for joint in part.joints}
            part = part.parent
        above[body.name] = frozenset(joints)
    found: set[Pair] = set()
    for first, second in combinations(above, 2):
        between = above[first] ^ above[second]
        if len(between) > 1 and len({leader(name, facts[name], facts)[0] for name in between}) == 1:
            found.add(in_order(first, second))
    return frozenset(found)


def _is_solid(body: mujoco.MjsBody) -> bool:
    return any(geom.contype or geom.conaffinity for geom in body.geoms)
