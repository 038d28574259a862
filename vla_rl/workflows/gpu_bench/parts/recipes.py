"""Every shipped recipe that starts from a published checkpoint: its policy at the published size, and two updates."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from vla_rl.algorithms.learner import Learner
from vla_rl.interfaces import Policy
from vla_rl.policies.lerobot.options import LeRobotOptions
from vla_rl.policies.openvla.files.fake_checkpoint import Variant, write_checkpoint
from vla_rl.recipe.checks import PLAN
from vla_rl.recipe.recipe import TrainRecipe, check, load_recipe
from vla_rl.workflows.gpu_bench.large_policy import DRAWN_KIND
from vla_rl.workflows.gpu_bench.learner_matrix import episodes
from vla_rl.workflows.gpu_bench.parts import flow
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import Sheet
from vla_rl.workflows.gpu_bench.timing import peak_bytes, synchronize

OFT_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
MOVES = Target(1e-9, at_least=True, required=True)


@dataclass(frozen=True)
class Published:
    """A recipe and the checkpoint that it is run with.

    Attributes:
        kind: of checkpoint: a variant of OpenVLA's layout, or LeRobot's type.
        suite: where it is not the recipe's own.
    """

    recipe: str
    kind: str
    suite: str = ""

    def load(self, tiny: Path | None = None) -> TrainRecipe:
        """The recipe, OpenVLA's weights drawn; `tiny`: a folder for a tiny checkpoint in place of the published."""
        overrides = []
        if self.suite:
            path = f"moojink/openvla-7b-oft-finetuned-{self.suite.replace('_', '-')}"
            overrides = [f"env.suite={self.suite}", f"policy.path={path}", f"policy.norm_key={self.suite}"]
        if self.kind not in flow.OPTIONS:
            overrides.append(f"policy.kind={DRAWN_KIND}")
            if tiny is not None:
                variant: Variant = "l1" if self.kind == "l1" else "base"
                overrides += [f"policy.path={write_checkpoint(tiny, variant)}", "policy.norm_key=fake"]
        return check(load_recipe(self.recipe, overrides), PLAN)

    def build(self, recipe: TrainRecipe, device: torch.device, is_full: bool) -> Policy:
        """Its policy with fresh weights, drawn on the device itself where it is a GPU."""
        spec, policy = recipe.env.env_spec(), recipe.policy
        if not isinstance(policy, LeRobotOptions):
            return policy.build(spec, device, recipe.seed)
        chosen = {name: getattr(policy, name) for name in policy.model_fields_set - {"path", "camera_map"}}
        chosen |= {"cameras": spec.cameras, "lora": policy.lora, "trainable": policy.trainable}
        return flow.on_device(self.kind, is_full, device, spec, **chosen)


RECIPES = {
    "openvla_libero_grpo": Published("openvla_libero_grpo", "base"),
    **{f"openvla_oft_libero_grpo, {s}": Published("openvla_oft_libero_grpo", "l1", s) for s in OFT_SUITES},
    "smolvla_libero_grpo": Published("smolvla_libero_grpo", "smolvla"),
    "pi0_libero_grpo": Published("pi0_libero_grpo", "pi0"),
}


def measure(sheet: Sheet) -> None:
    """Weights are random, and episodes made up: what is asked is whether it runs, how long, in what memory."""
    sheet.run([(name, lambda name=name: _two_updates(sheet, name)) for name in RECIPES])


def _two_updates(sheet: Sheet, name: str) -> None:
    published, device, found = RECIPES[name], sheet.device, list[tuple[float, float]]()

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            recipe = published.load(None if sheet.is_full else Path(folder) / "tiny")
            policy = published.build(recipe, device, sheet.is_full)
        sheet.add(f"{name}: parameters", sum(p.numel() for p in policy.parameters()) / 1e9, "billion")
        sheet.add(f"{name}: trained", sum(p.numel() for p in policy.parameters() if p.requires_grad) / 1e6, "million")
        learner = recipe.algo.build(policy, recipe.seed, temperature=recipe.train.temperature)
        assert isinstance(learner, Learner)
        given = episodes(policy, size=8 if sheet.is_full else 2, decisions=1, spec=recipe.env.env_spec())
        for _ in range(2):
            synchronize(device)
            started = time.perf_counter()
            metrics = learner.update(learner.prepare(given))
            synchronize(device)
            found.append((time.perf_counter() - started, metrics["grad_norm/policy"]))

    peak = peak_bytes(run, device)
    sheet.add(f"{name}: norm of the smaller gradient", min(norm for _, norm in found), "", MOVES)
    sheet.add(f"{name}: second update, of {16 if sheet.is_full else 4} decisions", 1000 * found[1][0], "ms")
    sheet.add(f"{name}: peak memory", peak / 1024**3, "GiB")
