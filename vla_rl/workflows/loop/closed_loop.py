"""The closed loop on one screen: real episodes, world model, trust, RL in imagination, evaluation.

    vla-rl loop tabletop_closed_loop

Each stage leaves a file or folder that appears whole; stopped anywhere, the same command resumes there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.progress import RunStatus
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.data.keyframes import KeyframeError
from vla_rl.evaluation.gate import STEPS_AFTER_SUCCESS
from vla_rl.evaluation.probability import CalibrationError
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.verdict import outcome
from vla_rl.interfaces import TrustError
from vla_rl.recipe.checks import LOOP
from vla_rl.recipe.recipe import Run
from vla_rl.recipe.runs import LoopRecipe
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.rollout.source import with_steps_after_success
from vla_rl.training.run import NoSuccessError
from vla_rl.workflows.collect import collect
from vla_rl.workflows.jobs import BASE, FINAL
from vla_rl.workflows.loop.before import check_loop
from vla_rl.workflows.loop.controls import evaluations, run_beside_controls, run_online, summarize_controls
from vla_rl.workflows.loop.rounds import (
    FIRST_STATE,
    HELD_OUT_START,
    Round,
    calibrates,
    check_budget,
    gate_checks,
    groups_of_a_round,
    learned_from,
    rounds_table,
)
from vla_rl.workflows.recipe_parts import imagining, world_model_section
from vla_rl.workflows.world_model import (
    DATASETS_OF_A_FIT,
    fit_world_model,
    measure_world_model,
    mine_keyframes,
)
from world_model.imagination.reward import branch_steps, check_reward
from world_model.model.world_model import load_world_model
from world_model.trust.report import PAGE_FILE, TRUST_FILE

ONLINE = "online_grpo"
# What a round's episodes can say against its RL; from the second round on the loop then ends with the round before.
REFUSALS = (TrustError, CalibrationError, KeyframeError, NoSuccessError)


def loop(recipe: LoopRecipe, folder: Path, program: Sequence[str], show: Callable[[str], None] = print) -> Round:
    """Run all rounds of the recipe in its folder; each starts from the policy and world model of the one before.

    Where a later round is refused, the loop ends with the policy of the round before: trust says no, its episodes give
    no threshold or no keyframe, its fit has lost a part that RL is paid by, or nothing is imagined to succeed.

    Args:
        program: how `vla-rl` is started, for controls in processes of their own.

    Returns:
        the last round whose RL ran. `folder`/report.html is about all of them.

    Raises:
        ConfigError: the recipe's env is no world model, it lacks a section that a stage needs, its budget of real
            episodes is too small, or a round's episodes are there already and were collected otherwise.
        TrustError: the first world model cannot be trusted enough, and `env.trust.ignore` is not set; or its fit lost
            a part that RL is paid by.
        CalibrationError, KeyframeError, NoSuccessError: the first round gives no threshold, no keyframe, no success.
    """
    config = recipe.loop
    check_loop(recipe)
    check_plan(recipe, show)
    policy, world_model = str(recipe.policy.path), str(imagining(recipe).path)
    explorer, rounds = policy, [Round(folder / f"round_{n}") for n in range(1, config.rounds + 1)]
    show = telling(RunFolder(folder), rounds, show)
    for number, done in enumerate(rounds):
        before = rounds[number - 1] if number else None
        title = f"round {number + 1} of {config.rounds}: " if config.rounds > 1 else ""
        acting = with_parts(recipe, policy=policy)
        collected, weights = learned_from(rounds, number)
        show(f"{title}real episodes of {explorer}")
        section, keeps = world_model_section(recipe), bool(recipe.sampling.keyframe_share)
        first = FIRST_STATE + number * config.episodes
        more = {"keyframes": keeps, "structure": section.needs_structure, "objects": section.needs_objects}
        collect_real(with_parts(recipe, explorer), done.rollouts, config.episodes, first, show, **more)
        first = HELD_OUT_START + number * config.held_out
        more = {"group_size": config.held_out_group, "objects": section.needs_objects}
        collect_real(acting, done.held_out, config.held_out, first, show, **more)
        if before and not (done.trust_before / PAGE_FILE).is_file():
            show(f"{title}how far the world model can be trusted where the new policy goes")
            measure_world_model(acting, Path(world_model), [done.held_out], train=collected, folder=done.trust_before)
        try:
            if config.refit or not before:
                show(f"{title}fitting the world model from {world_model}")
                choosing = calibrates(rounds, number)
                fit_world_model(acting, done.folder / "fit", collected, world_model, weights, "last", choosing)
                world_model = str(done.world_model)
                check_parts(acting, done.world_model)
                if not (done.world_model / PAGE_FILE).is_file():
                    show(f"{title}how far it can be trusted")
                    measure_world_model(acting, done.world_model, [done.held_out], train=collected)
            if recipe.sampling.keyframe_share and not done.keyframes.is_file():
                show(f"{title}moments that decide an episode")
                mine_keyframes(acting, Path(world_model), [done.rollouts], done.keyframes)
            show(f"{title}RL in imagination")
            in_imagination = in_round(recipe, rounds, number, policy, world_model)
            controls = config.negative_controls
            run_beside_controls(in_imagination.training(), controls, done, before, program, show)
        except REFUSALS as refusal:
            if before is None:
                raise
            show(f"{title}no RL. {refusal}")
            write_text_atomic(done.refusal, str(refusal))
            rounds = rounds[: number + 1]
            break
        conclude_round(in_imagination, done, before, collected, show)
        policy, explorer = str(RunFolder(done.run).policy), str(done.explorer)
    conclude(recipe, RunFolder(folder), rounds, program, show)
    return [done for done in rounds if done.finished][-1]


def telling(run: RunFolder, rounds: Sequence[Round], show: Callable[[str], None]) -> Callable[[str], None]:
    """`show`, which also writes what begins to the loop's status.json."""

    def tell(text: str) -> None:
        number = min(1 + sum(done.finished for done in rounds), len(rounds))
        RunStatus(step=text, number=number, of=len(rounds)).write(run.status)
        show(text)

    return tell


def check_plan(recipe: LoopRecipe, show: Callable[[str], None]) -> None:
    """All rounds fit into the budget of real episodes; says what the checks of a round's gate can tell."""
    check_budget(recipe)
    if recipe.gate.every:
        show(recipe.gate.power(recipe.train.iterations))


def check_parts(recipe: LoopRecipe, world_model: Path) -> None:
    """A fit leaves out a part that tells nothing of the newest episodes: RL must not ask for it.

    Raises:
        TrustError: it does.
    """
    imagination, fitted = imagining(recipe).imagination, load_world_model(world_model)
    try:
        check_reward(fitted, imagination)
        branch_steps(fitted, imagination)
        if recipe.sampling.keyframe_share and "uncertain" in world_model_section(recipe).keyframes.kinds:
            fitted.check_value()
    except ConfigError as error:
        raise TrustError(f"the fit left nothing that RL could be paid by or start from: {error}") from None


def in_round(recipe: LoopRecipe, rounds: Sequence[Round], number: int, policy: str, world_model: str) -> LoopRecipe:
    """The recipe of a round's RL: its policy, world model and keyframes; initial states and noise of its own."""
    done, gate, sampling = rounds[number], recipe.gate, recipe.sampling
    checks = gate.num_checks(recipe.train.iterations)
    of_gate: dict[str, Any] = {"start_index": gate.start_index + number * checks * gate.pairs}
    section = world_model_section(recipe)
    if gate.every and not (section.needs_structure or section.needs_objects):
        of_gate["keep_episodes"] = "frames" if recipe.loop.every_frame else "decisions"
    else:  # Whatever the recipe says: the gate's environment shows neither, and a fit refuses what lacks structure.
        of_gate["keep_episodes"] = "none"
    changes: dict[str, Any] = {"gate": gate.model_copy(update=of_gate)}
    if sampling.train_states is None:  # No state twice: no task can draw more than all groups of a round.
        first = sampling.first_state + number * groups_of_a_round(recipe.train)
        sampling = sampling.model_copy(update={"first_state": first})
    if sampling.keyframe_share:
        sampling = sampling.model_copy(update={"keyframes": done.keyframes})
    changes["sampling"] = sampling
    if number:
        changes["train"] = recipe.train.model_copy(update={"evaluate": "after"})
    result = with_parts(recipe, policy=policy, world_model=world_model).model_copy(update=changes)
    env = imagining(result)
    own: dict[str, Any] = {"seed": env.seed + number}
    if not done.world_model.is_dir():  # Not fitted again: what was measured where this round's policy goes.
        own["trust"] = env.trust.model_copy(update={"report": done.trust_before / TRUST_FILE})
    return result.model_copy(update={"env": env.model_copy(update=own)})


def calibrate_newest(recipe: LoopRecipe, done: Round, learned: Sequence[Path], show: Callable[[str], None]) -> None:
    """Choose thresholds and probabilities anew, and measure trust where RL has led, on its last policy's episodes.

    No weight changes. Trust is measured without the inverse dynamics and AUC by frames.

    Args:
        recipe: of the round's RL. learned: datasets that its world model was fitted on.
    """
    newest = done.newest_episodes
    if newest is None or (done.calibrated / PAGE_FILE).is_file():
        return
    show("thresholds and probabilities anew, and how far the world model can be trusted where RL has led")
    section = world_model_section(recipe)
    measure = section.measure.model_copy(update={"inverse_updates": 0, "auc_frames": 0})
    unlearned = section.without_learning().model_copy(update={"measure": measure})
    brief = recipe.model_copy(update={"world_model": unlearned})
    ran_in = str(imagining(recipe).path)
    chosen_on = {"calibrate_on": done.calibrating, "needs_threshold": False}
    try:
        fit_world_model(brief, done.calibrated.parent, learned, ran_in, **chosen_on)
    except CalibrationError as error:  # All of them succeeded, or all failed.
        show(f"not known. {error}")
        return
    measure_world_model(brief, done.calibrated, [newest])


def conclude_round(
    recipe: LoopRecipe, done: Round, before: Round | None, learned: Sequence[Path], show: Callable[[str], None]
) -> None:
    """Calibrate the world model where RL has led, and put before and after side by side.

    A round's "before" is what the round before it ended with.

    Args:
        learned: datasets that the round's world model was fitted on.
    """
    calibrate_newest(recipe, done, learned, show)
    base = RunFolder(done.run).evaluation(BASE)
    if before is not None and not base.is_file():
        ended = Evaluation.load(RunFolder(before.run).evaluation(FINAL))
        ended.model_copy(update={"meta": ended.meta.model_copy(update={"name": "base"})}).save(base)
        write_report(done.run)
    if before is None and recipe.loop.negative_controls:
        summarize_controls(recipe, done.run, Evaluation.load(base), evaluations(recipe, done))


def conclude(
    recipe: LoopRecipe, run: RunFolder, rounds: Sequence[Round], program: Sequence[str], show: Callable[[str], None]
) -> None:
    """The control with as many real episodes, and the report on all rounds, in the loop's own folder."""
    finished = [done for done in rounds if done.finished]
    online, after = None, evaluations(recipe, finished[-1])
    if ONLINE in recipe.loop.controls:
        taken = rounds_table(recipe, rounds).total
        show(f"RL in the real simulator, with as many real episodes: {taken}")
        online = run_online(recipe, run.path / ONLINE, taken, program)
        after[ONLINE] = Evaluation.load(RunFolder(run.path / ONLINE).evaluation(FINAL))
    table = rounds_table(recipe, rounds, online)
    write_text_atomic(run.rounds, table.model_dump_json(indent=1) + "\n")
    base = Evaluation.load(RunFolder(rounds[0].run).evaluation(BASE))
    base.save(run.evaluation(BASE))
    after["none"].save(run.evaluation(FINAL))
    checks = [check.model_dump(mode="json") for done in rounds for check in gate_checks(done)]
    power = {"power": recipe.gate.power(recipe.train.iterations)} if recipe.gate.every else {}
    write_text_atomic(run.gate, json.dumps(power | {"checks": checks}, indent=1) + "\n")
    shutil.copyfile(RunFolder(finished[-1].run).admission, run.admission)
    write_text_atomic(run.metrics, _metrics(recipe, finished))
    RunStatus(step="report", number=len(rounds), of=len(rounds), state="finished").write(run.status)
    if len(after) > 1:
        summarize_controls(recipe, run.path, base, after)
    else:
        write_report(run.path)


def _metrics(recipe: LoopRecipe, rounds: Sequence[Round]) -> str:
    """The rounds' metrics one after another, iterations counted on."""
    lines = []
    for number, done in enumerate(rounds):
        for line in RunFolder(done.run).metrics.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            lines.append(json.dumps(row | {"step": row["step"] + number * recipe.train.iterations}))
    return "\n".join(lines) + "\n"


def collect_real(
    recipe: LoopRecipe,
    folder: Path,
    episodes: int,
    first_state: int,
    show: Callable[[str], None],
    **more: Any,
) -> None:
    """Real episodes of the recipe's policy, sampled, from `train` states; nothing where they are there already.

    Args:
        more: options of `collect`: keyframes, structure, objects, group_size.

    Raises:
        ConfigError: those there are of another policy, environment or number.
    """
    config = CollectConfig(
        source="policy",
        dataset=str(folder),
        episodes_per_task=episodes,
        start_index=first_state,
        temperature=recipe.train.temperature,
        every_frame=recipe.loop.every_frame or more.get("structure", False),
        **more,
    )
    real = with_steps_after_success(recipe.acting_env, STEPS_AFTER_SUCCESS)
    collect(recipe.model_copy(update={"real_env": real}), config, show)


def with_parts(recipe: LoopRecipe, policy: str, world_model: str | None = None) -> LoopRecipe:
    """The recipe with another policy, and another world model where one is given."""
    changes: dict[str, Any] = {"policy": recipe.policy.model_copy(update={"path": policy})}
    if world_model is not None:
        changes["env"] = recipe.env.model_copy(update={"path": Path(world_model)})
    return recipe.model_copy(update=changes)


def loop_run(program: Sequence[str]) -> Run[LoopRecipe]:
    """Return `loop`; `program`: how `vla-rl` is started, for the controls."""

    def start(recipe: LoopRecipe, folder: Path, _: bool, show: Callable[[str], None]) -> list[str]:
        loop(recipe, folder, program, show)
        return outcome(folder)

    def datasets(recipe: LoopRecipe) -> Sequence[str]:
        return (*(("sft.datasets",) if recipe.needs_demonstrations else ()), *DATASETS_OF_A_FIT)

    return Run("loop", replace(LOOP, looks=(check_loop,)), start, datasets=datasets)
