"""Speed of imagination: frames per second, as it is and with the dynamics compiled, in turns.

    vla-rl bench imagination               (or: python -m world_model.imagination.bench --help)

A frame is imagined, remembered, judged by both heads and decoded for each episode, as a step of the environment does
with chunks of one frame. Times are of the processor where there is no GPU, so that other processes count less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel, load_world_model
from world_model.types import Frames

NUM_TURNS = 5


def run_bench(load: Callable[[], WorldModel], num_envs: int) -> dict[str, float]:
    """Seconds of a frame of `num_envs` episodes, the median of the turns: "eager", "compiled", and "noise" of them."""
    plain, fast = load(), load()
    fast.dynamics.compile_imagining()
    first, memory = _begun(plain, num_envs)

    def noise() -> None:
        memory.noise.frames(first, 1)
        memory.noise.frames(first, 1)

    return in_turns(
        {"eager": imagined_frame(plain, num_envs), "compiled": imagined_frame(fast, num_envs), "noise": noise},
        plain.device,
    )


def in_turns(parts: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, float]:
    """Seconds of each of `parts`, the median of `NUM_TURNS`, in which they run one after another."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for run in parts.values():
        run()  # Compiles.
    for _ in range(NUM_TURNS):
        for name, run in parts.items():
            seconds[name].append(_seconds(run, device))
    return {name: float(np.median(values)) for name, values in seconds.items()}


def _begun(world_model: WorldModel, num_envs: int) -> tuple[Frames, Memory]:
    metadata, rng = world_model.metadata, np.random.default_rng(0)
    images = rng.integers(0, 255, (num_envs, 1, len(metadata.cameras), *metadata.image_size, 3), np.uint8)
    first = world_model.encode(images, np.zeros((num_envs, 1, metadata.state_dim), np.float32))
    return first, world_model.begin(first, list(metadata.tasks)[:1] * num_envs, range(num_envs))


def imagined_frame(world_model: WorldModel, num_envs: int) -> Callable[[], None]:
    """A frame of `num_envs` episodes: imagined, judged, decoded and remembered."""
    _, memory = _begun(world_model, num_envs)
    facts = world_model.metadata
    shape = (num_envs, world_model.frame_steps, facts.action_dim + facts.body_dim)
    chunk = np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)
    actions = world_model.actions(chunk, np.full(num_envs, world_model.frame_steps))

    def run() -> None:
        nonlocal memory
        frames = world_model.dynamics.imagine(memory.context, actions, memory.noise)
        world_model.scores(memory, frames)
        world_model.decode(frames)
        memory = world_model.extend(memory, frames, actions)

    return run


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `vla-rl bench imagination`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="vla-rl bench imagination", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world-model", default="pretrained:tabletop", help="a folder or pretrained:NAME")
    parser.add_argument("--num-envs", type=int, default=16, help="episodes imagined together (16)")
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    args = parser.parse_args(argv)
    if args.num_envs <= 0:
        parser.error("--num-envs must be above 0")
    seconds = run_bench(
        lambda: load_world_model(args.world_model, args.device).compute_in(args.precision), args.num_envs
    )
    if args.json:
        print(json.dumps(seconds))
        return 0
    for name in ("eager", "compiled"):
        print(f"{name:<10}{args.num_envs / seconds[name]:>10.1f} frames/s  {1000 * seconds[name]:>9.1f} ms")
    print(
        f"compiled is {seconds['eager'] / seconds['compiled']:.2f}x; noise is {seconds['noise'] / seconds['eager']:.1%}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
