"""Facts about the tabletop that need no MuJoCo: tasks, horizons, the camera that stands still."""

from __future__ import annotations

from sim.base import FixedCamera, check_known

# task -> instruction; {colour} is filled in by the initial state. In order of rising difficulty.
INSTRUCTIONS: dict[str, str] = {
    "push_to_zone": "push the red block to the green zone",
    "pick_place": "put the red block on the plate",
    "pick_colour": "put the {colour} block on the plate",
    "stack": "stack the red block on the blue block",
    "bowl_push": "put the red block into the bowl and push the bowl to the zone",
    "take_off": "take the red block off the plate",
}
# task that undoes another one -> that one, whose scene it shares; not among the tasks of a section that names none.
RESET_TASKS: dict[str, str] = {"take_off": "pick_place"}
# task -> the same in other words: a polite frame, other words, another sentence.
PARAPHRASES: dict[str, tuple[str, str, str]] = {
    "push_to_zone": (
        "please push the red block to the green zone",
        "shove the red cube onto the green circle",
        "the green circle is where the red cube belongs, slide it there",
    ),
    "pick_place": (
        "please put the red block on the plate",
        "set the red cube down on the white dish",
        "the white dish is empty, the red cube should end up on it",
    ),
    "pick_colour": (
        "please put the {colour} block on the plate",
        "set the {colour} cube down on the white dish",
        "the white dish is empty, the {colour} cube should end up on it",
    ),
    "stack": (
        "please stack the red block on the blue block",
        "set the red cube on top of the blue cube",
        "build a tower with the blue cube below and the red cube above",
    ),
    "bowl_push": (
        "please put the red block into the bowl and push the bowl to the zone",
        "drop the red cube in the orange dish and shove the dish onto the green circle",
        "the orange dish should carry the red cube to the green circle, load it and slide it there",
    ),
    "take_off": (
        "please take the red block off the plate",
        "lift the red cube from the white dish and set it down on the table",
        "the white dish should be empty, the red cube belongs beside it",
    ),
}
# task -> control steps before truncation; multiples of 8, about twice what the expert needs on average.
HORIZONS: dict[str, int] = {
    "push_to_zone": 32, "pick_place": 32, "pick_colour": 32, "stack": 32, "bowl_push": 56, "take_off": 32,
}  # fmt: skip
CONTROL_HZ = 20.0
# agentview, without camera jitter: it looks from +x down on the table.
VIEW = FixedCamera(position=(0.5, 0, 0.62), right=(0, 1, 0), up=(-0.7349, 0, 0.6782), fovy=32.5)


def scene_of(task: str) -> str:
    """The task whose scene a task plays in: its own, or that of the task which it undoes."""
    return RESET_TASKS.get(task, task)


def check_tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    """`names`, if all are tasks of the tabletop.

    Raises:
        ValueError: an unknown name; the message lists the tasks and the nearest.
    """
    for name in names:
        check_known("tabletop task", name, INSTRUCTIONS)
    return names
