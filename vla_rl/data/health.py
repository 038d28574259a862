"""What is wrong with a dataset before a policy is trained on it: `vla-rl doctor --dataset D`.

Each check looks at the recorded numbers or pictures alone; none knows the robot. What a check cannot tell it says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vla_rl.common.tables import Check, Status
from vla_rl.data.recorded import Recorded, read

MAX_LAG = 0.5  # seconds that an action may be away from its motion, either way, to be found
LATE = 0.15  # seconds from an action to its motion that are too many
CUT_OFF = 0.7  # share of frames at a limit
TOLD = 0.3  # correlation below which the lag cannot be told
NEIGHBORS = 5


def check_datasets(paths: Sequence[Path]) -> list[Check]:
    """Return every check of each dataset, then what has drifted from the first one to the others.

    Raises:
        DatasetError: one is missing, of another format, or damaged.
    """
    sets = [read(path) for path in paths]
    several = len(sets) > 1
    checks = []
    for one in sets:
        for check in check_recorded(one):
            checks.append(
                Check(f"{one.name}: {check.name}" if several else check.name, check.status, check.found, check.fix)
            )
    return checks + [check for other in sets[1:] for check in check_drift(sets[0], other)]


def check_recorded(data: Recorded) -> list[Check]:
    """Every check of one dataset, in the order of the report."""
    content = Check(
        "content",
        "ok",
        f"{len(data.lengths)} episodes, {len(data.actions)} frames at {data.fps:g} Hz, {len(set(data.instruction))} "
        f"instructions, cameras {', '.join(data.cameras) or 'none'}",
    )
    finite = check_finite(data)
    if finite.is_fault:
        return [content, finite]
    return [
        content,
        finite,
        check_time(data),
        check_duplicates(data),
        check_lengths(data),
        check_actions(data),
        check_gripper(data),
        check_lag(data),
        check_cameras(data),
        check_texts(data),
        check_instructions(data),
    ]


# --- the numbers ---------------------------------------------------------------------------------


def check_finite(data: Recorded) -> Check:
    """Whether all numbers are numbers."""
    bad = ~(np.isfinite(data.state).all(1) & np.isfinite(data.actions).all(1) & np.isfinite(data.time))
    found = _episodes_of(data, bad)
    return _check("numbers", found, "wrong", "NaN or infinite values", "Remove those episodes, or record again.")


def check_time(data: Recorded) -> Check:
    """Whether frames come every 1 / fps seconds."""
    step = np.diff(data.time, prepend=data.time[0])
    step[data.starts] = 1 / data.fps
    found = _episodes_of(data, np.abs(step - 1 / data.fps) > 0.5 / data.fps)
    remedy = "Frames are missing or came late there: a policy would learn that the arm jumps. Remove those episodes."
    return _check("time", found, "wrong", f"steps in time other than {1000 / data.fps:.0f} ms", remedy)


def check_duplicates(data: Recorded) -> Check:
    """Whether an episode is there twice."""
    seen: dict[bytes, int] = {}
    twice = []
    for number, frames in enumerate(data.episodes()):
        key = data.actions[frames].tobytes() + data.state[frames].tobytes()
        if key in seen:
            twice.append(number)
        seen.setdefault(key, number)
    remedy = "They count twice in training, and stand on both sides of a hold-out. Remove one of each."
    return _check("duplicates", twice, "wrong", "the same actions and states as an earlier episode", remedy)


def check_lengths(data: Recorded) -> Check:
    """Whether an episode ends long before others with its instruction do."""
    short, counts = [], Counter(data.instruction)
    if max(counts.values()) < NEIGHBORS:
        return Check("lengths", "unknown", f"cannot be told: no instruction has {NEIGHBORS} episodes")
    for text in sorted(set(data.instruction)):
        same = [number for number, own in enumerate(data.instruction) if own == text]
        median = float(np.median(data.lengths[same]))
        if len(same) >= NEIGHBORS:
            short += [number for number in same if data.lengths[number] < 0.3 * median]
    remedy = "A recording that was cut off teaches to stop half-way. Watch them, and remove what is not whole."
    return _check("lengths", sorted(short), "warning", "less than .3 of the usual length for the instruction", remedy)


def check_actions(data: Recorded) -> Check:
    """Whether actions are cut off at a limit, or have values far from all others; says which never change."""
    faults, constant = [], []
    for number in _motions(data):
        values, called = data.actions[:, number], _called(data, number)
        low, high = np.quantile(values, (0.01, 0.99))
        spread = high - low
        if np.ptp(values) == 0:
            constant.append(called)
        elif spread > 0 and max(low - values.min(), values.max() - high) > 10 * spread:
            far = int(((values < low - 10 * spread) | (values > high + 10 * spread)).sum())
            faults.append(f"{called} has {far} values more than ten times its usual range away")
        elif CUT_OFF < (share := float(((values == values.min()) | (values == values.max())).mean())) < 1:
            faults.append(f"{called} stands at its limits in {100 * share:.0f} % of the frames")
    if faults:
        remedy = (
            "Far values: remove those episodes, or keep the normalization by quantiles (the default). At the limits: "
            "the demonstrator asked for more than was allowed, so the arm did not do what was shown."
        )
        return Check("actions", "warning", "; ".join(faults), remedy)
    idle = f"; never change: {', '.join(constant)}" if constant else ""
    return Check("actions", "ok", f"none far from the others, none cut off{idle}")


def check_gripper(data: Recorded) -> Check:
    """Whether each gripper opens and closes, in some episode."""
    if not data.grippers:
        return Check("gripper", "unknown", "no number of the action is named a gripper")
    values = data.actions[:, data.grippers]
    above = values > (values.max(0) + values.min(0)) / 2
    moved = np.array([above[frames].any(0) & ~above[frames].all(0) for frames in data.episodes()])
    if dead := [_called(data, n) for place, n in enumerate(data.grippers) if not moved[:, place].any()]:
        text = f"{', '.join(dead)}, a gripper, never opens or closes"
        return Check(
            "gripper", "warning", text, "Right for pushing; else the recording has lost it: see how it is read."
        )
    count = int(moved.any(1).sum())
    found = f"opens or closes in {count} of {len(moved)} episodes"
    return Check("gripper", "ok", found + (" (others push, or were cut off)" if count < 0.5 * len(moved) else ""))


def _motions(data: Recorded) -> list[int]:
    """The numbers of the action but for grippers."""
    return [number for number in range(data.actions.shape[1]) if number not in data.grippers]


def _called(data: Recorded, number: int) -> str:
    """A number of the action, for people."""
    name = data.action_names[number] if data.action_names else ""
    return f"dimension {number}" + (f" ({name})" if name and name != f"action_{number}" else "")


def check_lag(data: Recorded) -> Check:
    """How long after an action the arm moves, by the correlation of the first three dimensions with the state's."""
    size = min(3, data.state.shape[1], len(_motions(data)))
    reach = max(2, round(MAX_LAG * data.fps))
    if size < 1 or data.observed_every > 1:
        return Check("action and motion", "unknown", "cannot be told: no state, or not one for each frame")
    best, lag = 0.0, 0
    for relative in (True, False):  # actions that move the arm by so much, or to a place
        for shift in range(-reach, reach + 1):
            value = _correlation(data, size, shift, relative)
            if value > best + 1e-3:
                best, lag = value, shift
    if best < TOLD:
        return Check(
            "action and motion", "unknown", f"cannot be told: they hardly go together (correlation {best:.2f})"
        )
    found = f"the arm moves {lag / data.fps * 1000:.0f} ms after the action ({lag} frames; correlation {best:.2f})"
    if lag < 0:
        found = f"the arm has moved {-lag} frames before the action (correlation {best:.2f})"
        remedy = (
            "Each action stands beside what was seen after it: a policy would learn to repeat the last one. Shift it."
        )
        return Check("action and motion", "wrong", found, remedy)
    if lag / data.fps > LATE:
        remedy = "A policy learns to act that much early. Find the delay (camera, driver, clock), or shift the actions."
        return Check("action and motion", "warning", found, remedy)
    return Check("action and motion", "ok", found)


def _correlation(data: Recorded, size: int, shift: int, relative: bool) -> float:
    """Mean over dimensions: of actions at t with the state's change from t + shift, or its value at t + shift + 1."""
    asked: list[np.ndarray] = []
    done: list[np.ndarray] = []
    for frames in data.episodes():
        actions, state = data.actions[frames, :size], data.state[frames, :size]
        moved = np.diff(state, axis=0) if relative else state[1:]
        times = np.arange(len(moved))
        inside = (times + shift >= 0) & (times + shift < len(moved))
        asked.append(actions[:-1][inside])
        done.append(moved[times[inside] + shift])
    a, b = _without_outliers(np.concatenate(asked)), _without_outliers(np.concatenate(done))
    if len(a) < 20:
        return 0.0
    a, b = a - a.mean(0), b - b.mean(0)
    scale = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return float(np.mean((a * b).sum(0)[scale > 0] / scale[scale > 0])) if (scale > 0).any() else 0.0


def _without_outliers(values: np.ndarray) -> np.ndarray:
    """Each column (N, D) cut to its 1 % and 99 % quantiles."""
    return np.clip(values, *np.quantile(values, (0.01, 0.99), axis=0)) if len(values) else values


# --- pictures and texts --------------------------------------------------------------------------


def check_cameras(data: Recorded) -> Check:
    """Whether a camera stands still while the arm moves, or shows nothing."""
    faults = []
    moves = np.zeros(len(data.state), bool)
    if data.state.shape[1]:
        moves[1:] = (np.abs(np.diff(data.state, axis=0)) > 1e-4).any(1)
    seen = np.concatenate([np.arange(length) % data.observed_every == 0 for length in data.lengths])
    for number, camera in enumerate(data.cameras):
        frozen = _episodes_of(data, data.still[:, number] & moves & seen, share=0.3)
        dark = _episodes_of(data, data.brightness[:, number].max(1) < 0.02)
        if frozen:
            faults.append(f"{camera} stands still while the arm moves in {_list(frozen)}")
        if dark:
            faults.append(f"{camera} is black in {_list(dark)}")
    remedy = "Remove those episodes; look at the camera's cable and driver." if faults else ""
    if not (faults or (data.state.shape[1] and data.cameras)):
        return Check(
            "cameras", "unknown", "cannot be told: without a camera and a state, none is held against the other"
        )
    few = len(data.looked_at) < len(data.lengths)
    alive = f"live in {len(data.looked_at)} of {len(data.lengths)} episodes" if few else "live in every episode"
    if few:
        alive += ", the others were not looked at (`vla-rl doctor --dataset` looks at all)"
    return Check("cameras", "wrong" if faults else "ok", "; ".join(faults) or alive, remedy)


def check_texts(data: Recorded) -> Check:
    """Whether instructions are empty, or differ by capitals and blanks alone."""
    counts = Counter(data.instruction)
    spelled = defaultdict(set)
    for text in counts:
        spelled[" ".join(text.lower().split()).rstrip(".")].add(text)
    faults = [f"{counts[text]} episodes without one" for text in counts if not text.strip()]
    faults += [
        "spelled in several ways: " + ", ".join(map(repr, sorted(same))) for same in spelled.values() if len(same) > 1
    ]
    remedy = "A policy takes each spelling for another task. Write them alike (lerobot-edit-dataset)." if faults else ""
    return Check("instructions", "warning" if faults else "ok", "; ".join(faults) or f"{len(counts)}", remedy)


def check_instructions(data: Recorded) -> Check:
    """Whether an episode looks and ends like those of another instruction, by its nearest neighbors."""
    name, texts = "pictures and instruction", np.array(data.instruction)[data.looked_at]
    counts = Counter(texts.tolist())
    if len(counts) < 2 or min(counts.values()) <= NEIGHBORS:
        return Check(
            name, "unknown", f"cannot be told: needs two instructions with more than {NEIGHBORS} episodes each"
        )
    ends = (data.starts + data.lengths - 1)[data.looked_at]
    views = [data.first, data.last, data.state[ends], _signs(data)[data.looked_at]]
    scaled = [(view - view.mean(0)) / np.sqrt(view.var(0).sum() + 1e-12) for view in views if view.shape[1]]
    features = np.concatenate(scaled, 1).astype(np.float64)
    squares = (features**2).sum(1)
    distance = squares[:, None] + squares - 2 * features @ features.T  # Never all pairs' differences: E x E x 3,000.
    np.fill_diagonal(distance, np.inf)
    nearest = texts[np.argsort(distance, 1)[:, :NEIGHBORS]]
    agreeing = (nearest == texts[:, None]).mean(1)
    if agreeing.mean() < 0.8:
        return Check(
            name, "unknown", f"cannot be told: the tasks look alike ({100 * agreeing.mean():.0f} % of neighbors agree)"
        )
    strange = [number for number in np.flatnonzero(agreeing == 0) if len(set(nearest[number])) == 1]
    remedy = "Watch them: their instruction may be another's."
    found = data.looked_at[strange].tolist() if strange else []
    return _check(name, found, "warning", "all neighbors have one other instruction", remedy)


def _signs(data: Recorded) -> np.ndarray:
    """float32 (E, 2 A): mean and spread of each episode's actions."""
    actions = _without_outliers(data.actions)
    return np.stack([np.concatenate([actions[f].mean(0), actions[f].std(0)]) for f in data.episodes()])


# --- two datasets --------------------------------------------------------------------------------


def check_drift(first: Recorded, other: Recorded) -> list[Check]:
    """What differs so much between two datasets that one policy should not learn from both as they are."""
    faults = []
    if first.fps != other.fps:
        faults.append(f"{other.fps:g} Hz, not {first.fps:g}")
    if missing := sorted(set(first.cameras) ^ set(other.cameras)):
        faults.append(f"only one has the cameras {', '.join(missing)}")
    for what, a, b in (("action", first.actions, other.actions), ("state", first.state, other.state)):
        if a.shape[1] != b.shape[1]:
            faults.append(f"{what}s of {b.shape[1]} numbers, not {a.shape[1]}")
            continue
        for number in range(a.shape[1]):
            faults += [f"{what} {number}: {text}" for text in _drift(a[:, number], b[:, number])]
    for camera in sorted(set(first.cameras) & set(other.cameras)):
        a, b = (np.nanmean(one.brightness[:, one.cameras.index(camera)], 0) for one in (first, other))
        if np.abs(a - b).max() > 0.15:
            faults.append(f"{camera}: mean color {_percent(b)} %, not {_percent(a)} %")
    remedy = "Other units, another frame, another camera place? Convert one, or train on one of them." if faults else ""
    title = f"{other.name} against {first.name}"
    return [Check(title, "warning" if faults else "ok", "; ".join(faults) or "alike in numbers and colors", remedy)]


def _drift(a: np.ndarray, b: np.ndarray) -> list[str]:
    spread_a, spread_b = (float(np.subtract(*np.quantile(values, (0.99, 0.01)))) for values in (a, b))
    if min(spread_a, spread_b) > 0 and max(spread_a, spread_b) / min(spread_a, spread_b) > 5:
        return [f"ranges over {spread_b:.3g}, not {spread_a:.3g}"]
    middle = float(np.median(b) - np.median(a))
    return [f"its median is {middle:+.3g} away"] if abs(middle) > max(spread_a, spread_b, 1e-9) else []


# --- parts ---------------------------------------------------------------------------------------


def _episodes_of(data: Recorded, frames: np.ndarray, share: float = 0.0) -> list[int]:
    """Episodes in which more than this share of the frames is marked."""
    return [number for number, own in enumerate(data.episodes()) if frames[own].mean() > share]


def _check(name: str, episodes: list[int], status: Status, fault: str, remedy: str) -> Check:
    if not episodes:
        return Check(name, "ok", f"no episode with {fault}" if " " in fault else f"no {fault}")
    return Check(name, status, f"{fault}: {_list(episodes)}", remedy)


def _list(episodes: Sequence[int]) -> str:
    shown = ", ".join(map(str, episodes[:8]))
    return f"episode{'s' * (len(episodes) > 1)} {shown}" + (
        f" and {len(episodes) - 8} more" if len(episodes) > 8 else ""
    )


def _percent(color: np.ndarray) -> str:
    return "/".join(f"{100 * value:.0f}" for value in color)
