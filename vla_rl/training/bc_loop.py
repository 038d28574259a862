"""Behavior-cloning loop: data, steps, validation, checkpoints, interruption.

train_bc(policy, SFTConfig(datasets=["data/demos"], steps=2000), folder, log, seed=0)
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.common.distributed.process_group import current
from vla_rl.common.distributed.tensor_files import CheckpointError, load_weights, trained_weights
from vla_rl.common.progress import step_progress
from vla_rl.common.run_folder import flat, is_free
from vla_rl.data.dataset import BCDataset
from vla_rl.data.statistics import compute_statistics, unlike
from vla_rl.training.bc_trainer import DATA, VALIDATION, BCTrainer, derive_seed, open_bc_dataset
from vla_rl.training.checkpoint import checkpoint_path, keep_last, latest_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.training.config import SFTConfig
from vla_rl.training.trainer import TrainingDivergedError
from vla_rl.types import EnvSpec

_VALIDATION_BATCHES = 4


def train_bc(
    policy: Any,
    config: SFTConfig,
    run_folder: Path,
    log: Callable[[int, dict[str, Any]], None],
    seed: int = 0,
    *,
    env_spec: EnvSpec | None = None,
    progress: bool = True,
    choose: Callable[[BCDataset], BCDataset] | None = None,
    trainer: type[BCTrainer] | None = None,
) -> dict[str, Any]:
    """Train a policy by behavior cloning; continue from the last whole checkpoint in the folder.

    Writes `run_folder/checkpoints/step_*` while it trains and `run_folder/policy` at the end. On a CPU the losses
    of a resumed run equal those of an uninterrupted one to the bit.

    Args:
        policy: trained in place. Its normalization statistics are set from the data unless it has some.
        log: called with (step, metrics) every `config.log_every` steps.
        env_spec: the environment's facts; datasets must have its control rate and state size. None: not checked.
        progress: show a progress bar.
        choose: which examples of the config's datasets count, and how often; None: all alike.
        trainer: what makes an update of them; None: cloning.

    Returns:
        policy (folder), steps, samples_per_second, num_bad_steps, episodes, frames, and the last logged metrics.

    Raises:
        DatasetError: a dataset that is missing, damaged or does not fit.
        TrainingDivergedError: `max_bad_steps` in a row; the last good state is kept as a checkpoint.
    """
    folder = Path(run_folder)
    world = current()
    with world.main_first():  # It decodes the datasets into their caches.
        data = open_bc_dataset(config, policy, env_spec)
    held_out, content = None, {str(part.path): part.cache.name for part in data.parts}
    if config.validation_fraction:
        data, held_out = data.hold_out(config.validation_fraction, seed)
    if choose is not None:
        data = choose(data)
    _set_statistics(policy, config, data)
    world.distribute(policy)
    cloning = (trainer or BCTrainer)(policy, config, seed, world=world)
    metrics = _make_steps(cloning, data, held_out, content, folder / "checkpoints", log, progress)
    with cloning.averaged_weights(), world.saving(policy):
        if world.is_main:
            policy.save(folder / "policy")
    cloning.trainer.finish()
    totals = {"policy": str(folder / "policy"), "steps": config.steps, "num_bad_steps": cloning.trainer.num_bad_steps}
    return {**metrics, **totals, "episodes": data.num_episodes, "frames": data.num_frames}


def _make_steps(
    cloning: BCTrainer,
    data: BCDataset,
    held_out: BCDataset | None,
    content: Mapping[str, str],
    checkpoints: Path,
    log: Callable[[int, dict[str, Any]], None],
    progress: bool,
) -> dict[str, float]:
    """Make all steps that the newest checkpoint leaves; return the metrics that were logged last."""
    world, config, data_seed = cloning.world, cloning.config, derive_seed(cloning.seed, DATA)
    window: defaultdict[str, list[float]] = defaultdict(list, _restore(cloning, checkpoints, content))
    metrics: dict[str, float] = {}
    started, first = time.monotonic(), cloning.trainer.num_steps
    bar = step_progress("behavior cloning", config.steps, progress and world.is_main)
    with bar as advance, _interrupt_flag() as interrupted:
        advance(cloning.trainer.num_steps, "")
        while cloning.trainer.num_steps < config.steps:
            try:
                values = cloning.learn(data, data_seed)
            except TrainingDivergedError as error:
                saved = _save(cloning, checkpoints, window, content)
                raise TrainingDivergedError(f"{error} Saved as {saved}.") from None
            for name, value in values.items():
                window[name].append(value)
            step = cloning.trainer.num_steps
            if held_out is not None and (step % config.save_every == 0 or step == config.steps):
                window |= {f"validation/{n}": [v] for n, v in _validate(cloning, held_out).items()}
            if step % config.log_every == 0 or step == config.steps:
                metrics = {name: float(np.mean(values)) for name, values in window.items() if name != "bad_step"}
                metrics["num_bad_steps"] = float(cloning.trainer.num_bad_steps)
                metrics["samples_per_second"] = (step - first) * config.batch_size / (time.monotonic() - started)
                window.clear()
                if world.is_main:
                    log(step, metrics)
            advance(step, f"loss {metrics['loss']:.4f}" if "loss" in metrics else "")
            stopping = any(world.gather(interrupted.is_set()))
            if step % config.save_every == 0 or step == config.steps or stopping:
                _save(cloning, checkpoints, window, content)
            if stopping:
                raise KeyboardInterrupt(f"stopped at step {step}; saved, the same command resumes there")
    return metrics


def _set_statistics(policy: Any, config: SFTConfig, data: BCDataset) -> None:
    """Give a policy without statistics those of the data; warn of one whose own are of other actions than these."""
    if policy.norm_stats is None:
        statistics = compute_statistics(data.parts)
        if config.action_scale == "environment":
            statistics["action"]["mask"] = [False] * policy.action_dim
        policy.set_norm_stats(statistics["action"], statistics.get("proprio"), name=data.parts[0].name)
    elif current().is_main and (how := unlike(policy.norm_stats, data.parts)):
        warnings.warn(
            f"{how}. The policy keeps its own, by which these are out of reach or hardly told apart. If they are of "
            "another robot or in other units, start with policy.norm_key=from_data",
            stacklevel=1,
        )


def _validate(cloning: BCTrainer, held_out: BCDataset) -> dict[str, float]:
    """Mean metrics on the same few batches of held-out episodes each time, with the averaged weights if any."""
    seed, size = derive_seed(cloning.seed, VALIDATION), cloning.config.batch_size
    with cloning.averaged_weights(), cloning.world.unsharded(cloning.policy):
        results = [cloning.evaluate(held_out.batch(size, seed, i)) for i in range(_VALIDATION_BATCHES)]
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}


def _save(cloning: BCTrainer, folder: Path, window: Mapping[str, list[float]], content: Mapping[str, str]) -> Path:
    """Write a checkpoint.

    Args:
        window: each metric's values since they were last logged. content: each dataset's path -> what stands for it.
    """
    path = checkpoint_path(folder, cloning.trainer.num_steps)
    tensors, state = cloning.trainer.state()
    tensors = {**trained_weights(cloning.policy), **tensors}
    with cloning.world.gathers(tensors.values()):
        if cloning.world.is_main:
            config = cloning.config.model_dump(mode="json")
            kept = {"config": config, "seed": cloning.seed, "window": dict(window), "datasets": list(content.values())}
            save_checkpoint(path, tensors, {**state, **kept})
            keep_last(path, cloning.config.keep_checkpoints)
    return path


def _restore(cloning: BCTrainer, folder: Path, content: Mapping[str, str]) -> dict[str, list[float]]:
    """Go on from the newest whole checkpoint, if there is one; return what it had not logged yet.

    Raises:
        CheckpointError: it was made with other options, or of other data.
    """
    path = latest_checkpoint(folder)
    if path is None:
        return {}
    tensors, state = load_checkpoint(path)
    now = flat({**cloning.config.model_dump(mode="json"), "seed": cloning.seed})
    then = flat({**state["config"], "seed": state["seed"]})
    lengths = ("sft.steps",) if cloning.config.final_lr_fraction == 1 else ()
    fixed = [n for n in now if not is_free(f"sft.{n}", lengths)]
    changed = [f"{n}: there {then.get(n)!r}, now {now[n]!r}" for n in fixed if now[n] != then.get(n)]
    if changed:
        raise CheckpointError(
            f"{path} was made with other options (sft.{'; sft.'.join(changed)}). Use those, or another run folder."
        )
    if other := [n for (n, key), old in zip(content.items(), state["datasets"], strict=False) if key != old]:
        raise CheckpointError(
            f"{path} was made of other data: {', '.join(other)} has changed since, and with it what is drawn and the "
            "statistics that actions are normalized by. Put it back as it was, or use another run folder."
        )
    load_weights(cloning.policy, tensors, str(path))
    cloning.trainer.load_state(tensors, state)
    return state["window"]


@contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets, so that a step is never cut in two; the second one stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
