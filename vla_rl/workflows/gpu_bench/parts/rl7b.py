"""A whole iteration of the recipe `openvla_oft_libero_grpo`, its weights and rewards drawn, by stage, and its plan."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sim.libero.library import AssetsError, find_assets
from vla_rl.algorithms.learner import Learner
from vla_rl.common.distributed.tensor_files import trained_weights
from vla_rl.common.progress import Stopwatch
from vla_rl.common.run_folder import RunFolder
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.recipe.checks import PLAN
from vla_rl.recipe.recipe import TrainRecipe, check, load_recipe
from vla_rl.training.memory import estimate
from vla_rl.training.run import TrainingRun
from vla_rl.workflows.gpu_bench.large_policy import DRAWN_KIND, DrawnRewardConfig
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import LeftOutError, Sheet
from vla_rl.workflows.gpu_bench.timed_libero import TimedLiberoConfig, share_of_rendering
from vla_rl.workflows.gpu_bench.timing import peak_bytes
from vla_rl.workflows.plan.command import gather
from vla_rl.workflows.plan.plan import Machines, make_plan, work_of

RECIPE = "openvla_oft_libero_grpo"
GIB = 1024**3
CLOSE = Target(0.10)  # By which plans may be off.
UNTOLD = Target(0.05)  # Share of the time that no stage tells.
# Beside the recipe's own: what stands for the download and for success, one iteration, and its clocks.
ALWAYS = (
    f"policy.kind={DRAWN_KIND}",
    "policy.merge_lora=true",
    f"env.kind={TimedLiberoConfig.__module__}:{TimedLiberoConfig.__name__}",
    f"env.reward.kind={DrawnRewardConfig.__module__}:{DrawnRewardConfig.__name__}",
    "train.iterations=1", "train.evaluate=after", "eval.videos=0",
    "log.exact_times=true", "log.console=false", "log.tensorboard=false",
)  # fmt: skip
# 64 episodes of 10 chunks, and 20 to evaluate: about 4 of the 7 minutes.
FULL = ("train.groups=8", "env.horizon=80", "eval.episodes_per_task=2")
TINY = (
    "train.groups=2", "train.group_size=4", "algo.minibatch_size=8", "algo.micro_batch_size=4",
    "eval.episodes_per_task=2", "env.tasks=['0']", "env.horizon=16", "env.image_size=64", "env.num_envs=2",
    "env.num_workers=2", "policy.lora.rank=4",
)  # fmt: skip
# What a run's log calls the stages -> for people.
STAGES = {
    "image_chain": "image chain",
    "inference": "act",
    "transfer": "transfer to the device",
    "forward_backward": "update",
    "optimizer": "optimizer",
    "other": "advantages, batches, log",
}


class NestedStopwatch(Stopwatch):
    """A run's stopwatch whose stages may nest: each has the time that is none of those inside it."""

    _inside = 0.0

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """See `Stopwatch.measure`."""
        outer, self._inside, before = self._inside, 0.0, self.seconds[stage]
        try:
            with super().measure(stage):
                yield
        finally:
            spent = self.seconds[stage] - before
            self.seconds[stage] -= self._inside
            self._inside = outer + spent

    def watch(self, thing: object, method: str, stage: str) -> None:
        """Count what an object's method takes."""
        call: Callable[..., object] = getattr(thing, method)

        def watched(*args: object, **options: object) -> object:
            with self.measure(stage):
                return call(*args, **options)

        setattr(thing, method, watched)


def measure(sheet: Sheet) -> None:
    """The plan comes first, as for a user."""
    with tempfile.TemporaryDirectory() as name:
        whole = _Whole(sheet, Path(name))
        sheet.run([("plan", whole.plan), ("iteration", whole.iteration)])


class _Whole:
    """The recipe, in a folder for its run and what it reads."""

    def __init__(self, sheet: Sheet, folder: Path) -> None:
        self.sheet, self.folder = sheet, folder
        self.clocks, self.run_folder = folder / "clocks", folder / "run"
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def recipe(self) -> TrainRecipe:
        """The shipped one, cut; at tiny size on a tiny checkpoint of the same layout."""
        try:
            find_assets(None)
        except AssetsError as error:
            raise LeftOutError(str(error)) from error
        self.clocks.mkdir(exist_ok=True)
        size, tiny = FULL, self.folder / "tiny"
        if not self.sheet.is_full:
            size = (*TINY, f"policy.path={tiny}", "policy.norm_key=fake")
            if not tiny.exists():
                write_checkpoint(tiny, "l1")
        overrides = [*ALWAYS, *size, f"env.clock_folder={self.clocks}", f"device={self.sheet.device}"]
        return check(load_recipe(RECIPE, overrides), PLAN)

    def plan(self) -> None:
        """What `vla-rl plan` says of it, from costs that it measures here; and `vla-rl plan --memory`."""
        recipe = self.recipe()
        costs = gather(recipe, [], roofline=False, seconds=20.0 if self.sheet.is_full else 1.0, say=print)
        workers = getattr(recipe.env, "num_workers", 0)
        outcome = make_plan(costs, work_of(recipe), Machines(1, recipe.env.num_envs, workers)).best
        self.sheet.fact("planned seconds", outcome.seconds)
        note = f"rollout {outcome.rollout:,.4g}, learning {outcome.learning:,.4g}"
        self.sheet.add("planned: an iteration", outcome.seconds, "s", note=note)
        self.sheet.fact("planned bytes", estimate(recipe).total)

    def iteration(self) -> None:
        """Rollout, advantages, update, checkpoint; then resumed: evaluation and merged weights."""
        recipe, started, row = self.recipe(), time.perf_counter(), dict[str, Any]()

        def whole() -> None:
            row.update(self._trained(recipe))
            gc.collect()  # The first policy, before there is a second.
            self._resumed(recipe)

        peak = peak_bytes(whole, self.sheet.device)
        self._tell(row, time.perf_counter() - started, peak)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - started

    @contextmanager
    def _open(self, recipe: TrainRecipe, resume: bool) -> Iterator[TrainingRun]:
        with self._timed(f"{'resuming' if resume else 'set-up'}: weights, simulators"):
            run = TrainingRun(recipe, self.run_folder, resume)
        with run:
            yield run
            ended = time.perf_counter()
        self.seconds["ending simulators, report"] += time.perf_counter() - ended

    def _trained(self, recipe: TrainRecipe) -> dict[str, Any]:
        """Log of one iteration, by the steps of `train`, each of which is timed."""
        with self._open(recipe, resume=False) as run:
            assert isinstance(run.learner, Learner)
            run.stopwatch = run.learner.stopwatch = clock = NestedStopwatch(str(self.sheet.device))
            clock.watch(run.policy, "prepare", "image_chain")
            clock.watch(run.policy, "_inputs", "transfer")
            assert run.goes_on(), "it begins anew"
            with gpu_busy(self.sheet.device) as busy:
                episodes = run.roll_out()
                metrics = run.learner.update(run.learner.prepare(episodes))
                run.finish_iteration(episodes, metrics)
            with self._timed("weights to disk"):
                run.save()
                run.keep_policy()
            self._kept = {name: x.detach().cpu().clone() for name, x in trained_weights(run.policy).items()}
        row = json.loads(RunFolder(self.run_folder).metrics.read_text())
        rendering = share_of_rendering(self.clocks) * row["time/simulation"]
        self.seconds |= {"simulation": row["time/simulation"] - rendering, "rendering": rendering}
        self.seconds |= {text: row[f"time/{stage}"] for stage, text in STAGES.items()}
        return row | {"busy": sum(busy) / len(busy) if busy else None}

    def _resumed(self, recipe: TrainRecipe) -> None:
        with self._open(recipe, resume=True) as run:
            assert not run.goes_on(), "its one iteration was in the checkpoint"
            weights = trained_weights(run.policy)
            gap = max(float((weights[name].detach().cpu() - kept).abs().max()) for name, kept in self._kept.items())
            self.sheet.add("a resumed run's weights", gap, "from the run's", Target(0.0, required=True))
            with self._timed("evaluation"):
                run.evaluate("final", run.folder.policy)
            assert isinstance(run.policy, OpenVLAPolicy)
            with self._timed("merging adapters"):
                run.policy.merge_lora()

    def _tell(self, row: dict[str, Any], whole: float, peak: int) -> None:
        sheet, told = self.sheet, sum(self.seconds.values())
        for stage, seconds in (self.seconds | {"other": whole - told}).items():
            sheet.add(stage, seconds, "s", note=f"{100 * seconds / whole:.1f} % of the whole")
        sheet.add("the whole", whole, "s")
        sheet.add("share that no stage tells", 1 - told / whole, "of 1", UNTOLD)
        sheet.add("norm of the gradient", row["grad_norm/policy"], "", Target(1e-9, at_least=True, required=True))
        taken = row["time/total"]
        sheet.add("episodes an hour", 3600 * row["rollout/num_episodes"] / taken, "", note="without set-up, saving")
        sheet.add("an iteration", taken, "s")
        self._compare("plan of an iteration", "planned seconds", taken)
        sheet.add("peak memory", peak / GIB, "GiB")
        self._compare("plan of the memory", "planned bytes", peak)
        if row["busy"] is None:
            sheet.leave_out("GPU busy share: no nvidia-smi of a GPU here")
        else:
            sheet.add("GPU busy share of an iteration", row["busy"], "of 1", Target(0.85, at_least=True))

    def _compare(self, what: str, fact: str, measured: float) -> None:
        planned = self.sheet.record.facts.get(fact)
        if planned is None:
            self.sheet.leave_out(f"{what}: it failed")
        else:
            self.sheet.add(f"{what}: off by", abs(planned / measured - 1), "of 1", CLOSE)


@contextmanager
def gpu_busy(device: torch.device) -> Iterator[list[float]]:
    """Samples of the share of the time in which the GPU computes, after the block; none without nvidia-smi."""
    program, samples = shutil.which("nvidia-smi"), list[float]()
    if device.type != "cuda" or program is None:
        yield samples
        return
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [program, f"--id={name}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield samples
        finally:
            child.terminate()
            said, _ = child.communicate()
    samples += [float(line) / 100 for line in said.split() if line.isdigit()]
