"""Facts about robosuite's tasks that need no simulator: instructions, horizons, robots."""

from __future__ import annotations

from dataclasses import dataclass

BENCHMARK_HORIZON = 500  # control steps, of robosuite's benchmark
ALL_OBJECTS_HORIZON = 1000  # robosuite's default, where several objects are to be placed


@dataclass(frozen=True)
class Task:
    """One of robosuite's environments. horizon: control steps. robots: robosuite's names, one an arm."""

    instruction: str
    horizon: int = BENCHMARK_HORIZON
    robots: tuple[str, ...] = ("Panda",)


# The nine tasks of robosuite 1.4, two of them as their variants with one object or all. The first three have scripted
# experts, and horizons of about twice what these need.
TASKS: dict[str, Task] = {
    "Lift": Task("lift the red cube", 120),
    "Stack": Task("stack the red cube on the green cube", 200),
    "PickPlaceCan": Task("pick up the can and put it in its bin", 240),
    "PickPlaceMilk": Task("pick up the milk and put it in its bin"),
    "PickPlaceBread": Task("pick up the bread and put it in its bin"),
    "PickPlaceCereal": Task("pick up the cereal box and put it in its bin"),
    "PickPlace": Task("put each of the four things in its bin", ALL_OBJECTS_HORIZON),
    "NutAssemblyRound": Task("put the round nut on the round peg"),
    "NutAssemblySquare": Task("put the square nut on the square peg"),
    "NutAssembly": Task("put each nut on its peg", ALL_OBJECTS_HORIZON),
    "Door": Task("open the door"),
    "Wipe": Task("wipe the dirt off the table"),
    "TwoArmLift": Task("lift the pot with both arms and keep it level", robots=("Panda", "Panda")),
    # The benchmark's second arm is a Sawyer, whose head MuJoCo 3.8 does not load: its mesh has no volume.
    "TwoArmPegInHole": Task("put the peg into the hole", robots=("Panda", "Panda")),
    "TwoArmHandover": Task("pick up the hammer with one arm and hand it to the other", robots=("Panda", "Panda")),
}
WITH_EXPERT = ("Lift", "Stack", "PickPlaceCan")


def tasks_with(arms: int) -> dict[str, Task]:
    """The tasks of so many arms."""
    return {name: task for name, task in TASKS.items() if len(task.robots) == arms}
