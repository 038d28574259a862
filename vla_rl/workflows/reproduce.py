"""`vla-rl reproduce`: published results, what repeating one costs and can tell; the run, its verdict, and a row of it.

What is claimed, the number of episodes and the rule of the decision are written before the first episode is run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import yaml

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.distributed.process_group import current
from vla_rl.common.next_command import next_command
from vla_rl.common.run_folder import RunFolder, flat, git_commit, is_free
from vla_rl.config import ConfigError
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.evaluation.results import Evaluation, SuccessRate
from vla_rl.evaluation.verdict import POWER, TEST, Claim, verdict
from vla_rl.recipe.checks import EVAL
from vla_rl.recipe.recipe import Recipe, Run, TrainRecipe, load_recipe
from vla_rl.training import train as training
from vla_rl.training.published_sizes import GIGABYTE, PUBLISHED
from vla_rl.workflows.evaluate_policy import evaluate, evaluate_suites, finished
from vla_rl.workflows.jobs import BASE, FINAL
from vla_rl.workflows.plan.costs import Costs, Curve
from vla_rl.workflows.plan.plan import work_of
from vla_rl.workflows.plan.simulate import Dice, Placement, roll_out, synchronous
from vla_rl.workflows.recipe_parts import policy_path

EVIDENCE = "published_checkpoints.md#reproduce-a-published-figure"
SIZES = {checkpoint.name: checkpoint for checkpoint in PUBLISHED}
FOUR = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
# Measured on an H200, eager (docs/gpu.md): seconds to act for 1, 16 and 64 environments; to learn from 8 decisions with
# checkpointing. A second camera takes OpenVLA 1.8 times as long, computed (gpu_bench/roofline.py).
OPENVLA = (((1.0, 0.0245), (16.0, 0.172), (64.0, 0.603)), 0.290)
SMOLVLA = (((1.0, 0.493), (16.0, 0.502), (64.0, 0.550)), 0.175)
SECOND_CAMERA = 1.8
STEP_SECONDS, IMAGE_SECONDS = 0.004, 0.045  # LIBERO's, of one core: docs/libero.md.
# Time relative to an H200's: peak rates in bfloat16 are 989, 989 and 312 TFLOP/s. Flow policies wait for the host.
CARDS = {"H200": 1.0, "H100": 1.0, "A100": 3.2}
OFT = (
    "OpenVLA-OFT, its L1 head, both cameras",
    "OpenVLA-OFT (7 B)",
    "openvla_oft_libero_grpo",
    "arXiv 2502.19645, Table 1 (with wrist camera and state)",
)
OF_SIMPLEVLA = (
    "512 steps in place of libero_10's official 520 (env.horizon=512), as the authors have it",
    "their training drew its episodes from the 50 states that are evaluated",
)


@dataclass(frozen=True)
class Packet:
    """A published result, and the command that repeats it.

    Attributes:
        title, source: for people; where the figure stands.
        policy: for the table of docs/support.md. size: of `PUBLISHED`, what is downloaded.
        recipe, settings: shipped recipe and overrides. suites: evaluated one after the other and taken together.
        trains: the figure is of the policy after RL, which the recipe runs first.
        caveats: in what this is not the published protocol, or what others found.
    """

    title: str
    policy: str
    recipe: str
    source: str
    claim: Claim
    checkpoint: str
    size: str
    settings: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    trains: bool = False
    caveats: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """All of its `key=value`."""
        return [f"policy.path={self.checkpoint}", "eval.temperatures=[0]", *self.settings]


def _oft(suite: str, rate: float) -> Packet:
    checkpoint = f"moojink/openvla-7b-oft-finetuned-{suite.replace('_', '-')}"
    settings = (f"policy.norm_key={suite}", f"env.suite={suite}")
    return Packet(*OFT, Claim(rate=rate, num_episodes=500), checkpoint, "OpenVLA-OFT 7B (discrete)", settings)


def _simplevla(checkpoint: str, *settings: str, **more: Any) -> Packet:
    return Packet(
        "OpenVLA-OFT, one demonstration a task, after GRPO",
        "OpenVLA-OFT, discrete (7 B)",
        "openvla_libero_grpo",
        "SimpleVLA-RL, arXiv 2509.09674 (17.3 % before RL)",
        Claim(rate=0.917, num_episodes=500),
        checkpoint,
        "OpenVLA-OFT 7B (discrete)",
        ("policy.norm_key=libero_10", "policy.decoder=parallel", "env.suite=libero_10", "env.horizon=512", *settings),
        **more,
    )


PACKETS = {
    "oft_libero_spatial": _oft("libero_spatial", 0.976),
    "oft_libero_object": _oft("libero_object", 0.984),
    "oft_libero_goal": _oft("libero_goal", 0.979),
    "oft_libero_10": _oft("libero_10", 0.945),
    "simplevla_libero_10": _simplevla("Haozhan72/openvla-oft-libero10-traj1-rl", caveats=OF_SIMPLEVLA),
    "grpo_libero_10": _simplevla(
        "Haozhan72/Openvla-oft-SFT-libero10-traj1",
        "train.groups=64",
        "train.temperature=1.6",
        trains=True,
        caveats=(
            *OF_SIMPLEVLA,
            "LoRA at a rate of 2e-5 in place of all weights at 5e-6; initial states of its own",
            "50 iterations: how many the authors took is not published",
        ),
    ),
    "smolvla_libero": Packet(
        "SmolVLA, four suites together",
        "SmolVLA",
        "smolvla_libero_grpo",
        "arXiv 2506.01844, Table 2: 90, 96, 92 and 71 % of 100 each",
        Claim(rate=0.8725, num_episodes=400),
        "HuggingFaceVLA/smolvla_libero",
        "SmolVLA",
        ("policy.num_actions=1", "env.num_envs=64"),
        suites=FOUR,
        caveats=(
            "these weights are LeRobot's own; the paper's were not published, and others report less of them "
            "(LeRobot's issue 2354)",
        ),
    ),
}


def packet_of(name: str) -> Packet:
    """
    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PACKETS:
        raise ConfigError(f"reproduce: got {name!r}; there are: {', '.join(PACKETS)}")
    return PACKETS[name]


def listing() -> list[str]:
    """A line for each packet."""
    width = max(map(len, PACKETS))
    return [
        f"{name:<{width}}  {100 * packet.claim.rate:g} %  {packet.title}: {packet.source}"
        for name, packet in PACKETS.items()
    ]


# --- before -------------------------------------------------------------------------------------


def parts(packet: Packet, recipe: Recipe) -> dict[str, Recipe]:
    """The recipe of each suite that is evaluated, by its name; of one alone the recipe itself."""
    if not packet.suites:
        return {"": recipe}
    return {suite: recipe.model_copy(update={"env": recipe.env.in_suite(suite)}) for suite in packet.suites}


def num_episodes(packet: Packet, recipe: Recipe) -> int:
    """Greedy episodes that the verdict rests on."""
    greedy = recipe.eval.model_copy(update={"temperatures": (0.0,)})
    return sum(greedy.num_episodes(one.acting_env.env_spec()) for one in parts(packet, recipe).values())


def hours(packet: Packet, recipe: Recipe, card: str) -> float:
    """Hours on one card, at most: no episode ends early. Played through as `vla-rl plan` does, from measured parts."""
    is_openvla = recipe.policy.kind == "openvla"
    (act, update), factor = (OPENVLA, CARDS[card]) if is_openvla else (SMOLVLA, 1.0)
    cameras, size = len(recipe.acting_env.env_spec().cameras), int(getattr(recipe.policy, "num_actions", 0) or 8)
    slower = factor * (SECOND_CAMERA if is_openvla and cameras > 1 else 1.0)
    placement = Placement("synchronous", 1, recipe.env.num_envs, getattr(recipe.env, "num_workers", 0))
    costs = Costs(
        act=Curve(act).times(slower),
        forward=Curve(((8.0, update),)).times(0.25 * slower),
        update=Curve(((8.0, update),)).times(slower),
        **{name: 0.0 for name in ("optimizer", "other", "trained_bytes")},
        step=(size * STEP_SECONDS + cameras * IMAGE_SECONDS,),
        reset=(10 * STEP_SECONDS,),
        chunks=(1,),
        active=1.0,
        sources={},
    )
    seconds = 0.0
    for one in parts(packet, recipe).values():
        spec = one.acting_env.env_spec()
        long = replace(costs, chunks=tuple(math.ceil(horizon / size) for horizon in spec.horizon.values()))
        rounds = math.ceil(one.eval.num_episodes(spec) / placement.envs) * (2 if packet.trains else 1)
        seconds += rounds * roll_out(long, placement.envs, placement, Dice(long, 0)).seconds
        if packet.trains:
            training_recipe = cast(TrainRecipe, one)
            seconds += training_recipe.train.iterations * synchronous(long, work_of(training_recipe), placement).seconds
    return seconds / 3600


def description(name: str, recipe: Recipe, typed: Sequence[str]) -> list[str]:
    """What a packet claims, downloads and costs, and what so many episodes tell."""
    packet, claim, n = packet_of(name), packet_of(name).claim, num_episodes(packet_of(name), recipe)
    low, high = claim.interval
    size, together = SIZES[packet.size], f" --suites {','.join(packet.suites)}" if packet.suites else ""
    command = ["train" if packet.trains else f"eval{together}", packet.recipe, *packet.overrides, *typed]
    needs = size.with_adapters if packet.trains else size.acting
    lines = [
        f"{name}: {packet.title}",
        f"published: {100 * claim.rate:g} % [{100 * low:.1f}, {100 * high:.1f}], n = {claim.num_episodes}; "
        f"{packet.source}",
        f"downloads: {packet.checkpoint}, {2 * size.parameters / 1e9:.1f} GB (computed: its parameters in bfloat16); "
        "LIBERO's assets, 0.1 GB",
        f"memory of the GPU: {needs / GIGABYTE:.1f} GB (computed, docs/gpu.md)",
        f"runs: vla-rl {' '.join(command)}",
        f"hours at most, as if no episode ended early, in {recipe.env.num_envs} environments, without the download:",
    ]
    for card in CARDS:
        how = "simulated from parts measured on one" if card == "H200" else "computed from the H200's by peak rates"
        how = how if recipe.policy.kind == "openvla" else "simulated from parts measured on an H200: the host decides"
        lines.append(f"  {card:<6}{hours(packet, recipe, card):6.2g}  {how}")
    lines.append(f"decision: {claim.rule}. {TEST}.")
    for episodes in sorted({math.ceil(n / 5), math.ceil(n / 2), n}):
        drop, power = claim.detectable_drop(episodes), claim.power(episodes)
        found = "no drop" if drop is None else f"a drop of {100 * drop:.1f} points"
        lines.append(
            f"  {episodes:5d} episodes find {found} with {100 * POWER:.0f} % power, and reproduce an equal policy in "
            f"{100 * power:.0f} %"
        )
    lines += [f"not as published: {caveat}" for caveat in packet.caveats]
    return [*lines, next_command("reproduce", name, *typed, "--execute")]


def registered(name: str, recipe: Recipe) -> dict[str, Any]:
    """What is written down before the first episode, with the settings that are not the packet's own."""
    packet = packet_of(name)
    claim, n = packet.claim, num_episodes(packet, recipe)
    own, here = (flat(r.model_dump(mode="json")) for r in (load_recipe(packet.recipe, packet.overrides), recipe))
    changed = {key: value for key, value in here.items() if own.get(key) != value}
    reproduced, refuted = claim.bounds(n)
    return {
        "name": name,
        "published": {**claim.model_dump(), "interval": list(claim.interval), "source": packet.source},
        "num_episodes": n,
        "test": TEST,
        "rule": claim.rule,
        "reproduced_from_successes": reproduced,
        "not_reproduced_up_to_successes": refuted,
        "power": round(claim.power(n), 4),
        "detectable_drop": claim.detectable_drop(n),
        "not_as_published": list(packet.caveats),
        "settings": [f"{key}={value}" for key, value in changed.items() if not is_free(key, ("policy.path",))],
    }


def register(name: str, recipe: Recipe, run: RunFolder) -> None:
    """Write the claim, atomically; or compare it, where episodes have been run.

    Raises:
        ConfigError: episodes have been run without one, or under another.
    """
    now, begun = registered(name, recipe), any(run.evaluations.iterdir()) or run.metrics.is_file()
    before = json.loads(run.claim.read_text()) if run.claim.is_file() else {}
    other = [key for key, value in now.items() if before.get(key) != value]
    if other and begun:
        raise ConfigError(
            f"{run.claim}: {'differs in ' + ', '.join(other) if before else 'is not there'}, and episodes have been "
            "run, before which it must be said what they are to show. Choose another --output"
        )
    if other:
        made = {"written": datetime.now(UTC).isoformat(timespec="seconds"), "git_commit": git_commit()}
        write_text_atomic(run.claim, json.dumps(now | made, indent=1) + "\n")


# --- the run, and after it ----------------------------------------------------------------------


def run_of(name: str) -> Run[Any]:
    """What runs a packet, or goes on with it."""
    packet = packet_of(name)

    def start(recipe: Any, folder: Path, resume: bool, say: Callable[[str], None]) -> list[str]:
        run, world = RunFolder(folder), current()
        if world.is_main:
            register(name, recipe, run)
        world.wait()
        names = [FINAL]
        if packet.trains:
            training.train(recipe, folder, resume)
        elif packet.suites:
            evaluate_suites(parts(packet, recipe), folder, FINAL, say)
            names = [f"{FINAL}-{suite}" for suite in packet.suites]
        else:
            done = finished(run.evaluation(FINAL), recipe.eval, policy_path(recipe))
            world.wait()  # Nobody writes that file before all have looked.
            if done is None:
                evaluate(recipe, folder, FINAL)
        return conclusion(name, recipe, run, names) if world.is_main else []

    own = training.RUN if packet.trains else Run("", EVAL, start)
    return replace(own, name=f"reproduce {name} --execute", start=start)


def conclusion(name: str, recipe: Recipe, run: RunFolder, names: Sequence[str]) -> list[str]:
    """The verdict, in lines; writes the row that can be sent back."""
    packet, evaluations = packet_of(name), [Evaluation.load(run.evaluation(one)) for one in names]
    rate = SuccessRate.of("greedy", None, [e for one in evaluations for e in one.select("greedy")])
    finding = packet.claim.judge(rate.num_successes, rate.num_episodes)
    low, high = packet.claim.difference(rate.num_successes, rate.num_episodes)
    published = f"{100 * packet.claim.rate:g} % published"
    said = (
        f"{finding}: {rate.text()}; {published}, difference {100 * (rate.rate - packet.claim.rate):+.1f} points "
        f"[{100 * low:+.1f}, {100 * high:+.1f}]"
    )
    level = "measured"
    if packet.trains:
        gained = verdict(compare(Evaluation.load(run.evaluation(BASE)), evaluations[0]).result("greedy"))
        level = {"better": "gain", "worse": "harm"}.get(gained.word, "no gain")
        said += f"; RL: {gained.text('the policy')}"
    path = policy_path(recipe)
    assert path is not None, "a packet names a checkpoint"
    is_whole = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) > SIZES[packet.size].parameters
    settings = json.loads(run.claim.read_text())["settings"]
    changed = f", with {' '.join(settings)}" if settings else ""
    row = {
        "simulator": "LIBERO" if recipe.acting_env.kind == "libero" else recipe.acting_env.kind,
        "policy": packet.policy,
        "algorithm": "grpo" if packet.trains else "evaluation",
        "level": level,
        "weights": "published" if is_whole else "random",
        "evidence": EVIDENCE,
        "note": f"{name}{changed}: {said}; weights {policy_hash(path)[:12]}, commit {git_commit()}",
    }
    text = yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    write_text_atomic(run.row, f"  - {text}")
    row_text = f"row of docs/support.yaml, to send back: {run.row}"
    return [said, f"claimed beforehand: {run.claim}", row_text, f"report: {run.report}"]
