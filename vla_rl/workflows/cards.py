"""Model and dataset cards for the Hub, from what a run or recording left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vla_rl.common.hub import parse_name
from vla_rl.data.health import check_datasets
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.compare import Comparison, PairedResult, format_p
from vla_rl.evaluation.report.read import Run, control_of, made_by, read_run
from vla_rl.evaluation.report.report import warnings_of
from vla_rl.evaluation.results import SuccessRate
from vla_rl.evaluation.statistics import SEEDS_ALIKE
from vla_rl.workflows.ablate import Ablation

TAGS = ["robotics", "vision-language-action", "vla-rl"]


def policy_card(name: str, run_folder: Path, license_name: str | None = None) -> str:
    """Return the card of a run's policy: success with n and intervals, controls, the recipe, how to use it.

    Args:
        name: ORGANIZATION/NAME on the Hub.
        run_folder: of `train`, `sft` or `loop`.
        license_name: the Hub's word for it, such as mit; None: the card names none.
    """
    run = read_run(run_folder)
    recipe, command = run.recipe, made_by(run)
    base = str(recipe.get("policy", {}).get("path") or "")
    tags = [*TAGS, *_tags(recipe, command)]
    head: dict[str, Any] = {"library_name": "vla-rl", "pipeline_tag": "robotics", "tags": tags}
    if license_name:
        head["license"] = license_name
    if "/" in base and not Path(base).exists() and (hub := parse_name(base)) is not None:
        head["base_model"] = hub.repo
    how = _how(recipe, command) + (f", a negative control (`{control}`)," if (control := control_of(run)) else "")
    parts = [
        f"# {name.rpartition('/')[2]}",
        str(recipe.get("description", "")),
        f"A policy {how} with vla-rl {run.versions.get('vla-rl', '')}, from `{base or 'random weights'}`.",
        "## Success",
        _success(run),
    ]
    if run.ablation:
        parts += ["## Negative controls", _controls(Ablation.model_validate(run.ablation))]
    parts += [
        "## Use",
        f"```\nvla-rl eval {recipe.get('name', 'RECIPE')}.yaml policy.path={name}\nvla-rl serve {name}\n```",
        "## How it was made",
        f"```\n{run.command.strip()}\n```" if run.command else "",
        f"<details><summary>The whole recipe</summary>\n\n```yaml\n{run.config.strip()}\n```\n\n</details>",
        "Versions: "
        + ", ".join(f"{key} {value}" for key, value in run.versions.items() if isinstance(value, str))
        + ".",
    ]
    return _joined(head, parts)


def dataset_card(name: str, folder: Path, license_name: str | None = None) -> str:
    """Return the card of a LeRobotDataset: what is in it, and what `vla-rl doctor --dataset` says of it.

    Raises:
        DatasetError: missing, of another format, or damaged.
    """
    source = LeRobotSource(folder)
    head: dict[str, Any] = {
        "task_categories": ["robotics"],
        "tags": ["LeRobot", *TAGS],
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    if license_name:
        head["license"] = license_name
    rows = [
        ("episodes", len(source.lengths)),
        ("frames", source.num_frames),
        ("rate", f"{source.fps:g} Hz"),
        ("cameras", ", ".join(source.cameras)),
        ("numbers", f"state {source.state_dim}, action {source.action_dim}"),
        ("instructions", len(source.instructions)),
    ]
    if source.success is not None:
        rows.append(("successes", f"{int(source.success.sum())} of {len(source.success)}"))
    facts = _table(("", ""), rows)
    checks = _table(("check", "", "found"), [(c.name, c.status, c.found) for c in check_datasets([folder])])
    notes = folder / "collect.json"
    parts = [f"# {name.rpartition('/')[2]}", "A LeRobotDataset v3, written by vla-rl.", facts, "## Checked", checks]
    if notes.is_file():
        made = json.dumps(json.loads(notes.read_text(encoding="utf-8")), indent=1)
        parts += ["## How it was made", f"<details><summary>Settings</summary>\n\n```json\n{made}\n```\n\n</details>"]
    load = f'from lerobot.datasets.lerobot_dataset import LeRobotDataset\n\ndataset = LeRobotDataset("{name}")'
    parts += ["## Use", f"```python\n{load}\n```"]
    return _joined(head, parts)


def _how(recipe: Mapping[str, Any], command: str) -> str:
    """What made the policy, by the run's command: a recipe may have the sections of several."""
    if command == "offline":
        return f"improved from logged episodes by `{recipe['offline']['method']}`"
    if command == "online":
        return "improved by a critic that learned from its own episodes"
    if command == "hil":
        return "improved by a critic that learned from its own episodes and a person's corrections"
    algorithm, control = recipe.get("algo") or {}, (recipe.get("train") or {}).get("control")
    is_cloned = command == "sft" or not algorithm or control == "continue_bc"
    return "cloned from demonstrations" if is_cloned else f"post-trained by `{algorithm['kind']}`"


def _tags(recipe: Mapping[str, Any], command: str) -> list[str]:
    names = ("env",) if command in ("sft", "offline", "online", "hil") else ("algo", "env")
    sections = [recipe.get(name) or {} for name in names]
    return [str(section["kind"]) for section in sections if "kind" in section and ":" not in str(section["kind"])]


def _success(run: Run) -> str:
    if run.comparison is not None:
        return _compared(run.comparison, warnings_of(run))
    if run.after is None and run.before is None:
        return "**Not evaluated.**"
    evaluation = run.after or run.before
    assert evaluation is not None, "one of them is there"
    rows = [(rate.mode, rate.task or "**all tasks**", _rate(rate)) for rate in evaluation.rates()]
    table = _table(("mode", "task", "success, 95 % interval"), rows)
    return "\n\n".join([table, evaluation.meta.protocol, *_as_list(warnings_of(run))])


def _rate(rate: SuccessRate) -> str:
    return rate.text()


def _as_list(warnings: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {warning}" for warning in warnings)] if warnings else []


def _compared(comparison: Comparison, warnings: Sequence[str]) -> str:
    def row(result: PairedResult) -> tuple[str, ...]:
        low, high = (f"{100 * end:+.1f}" for end in result.bootstrap)
        return (
            result.mode,
            comparison.label(result) or "**all tasks**",
            f"{100 * result.rate_a:.1f} %",
            f"{100 * result.rate_b:.1f} %",
            f"{100 * result.difference:+.1f} [{low}, {high}]",
            str(result.num_pairs),
            format_p(result.p_value_by_state),
        )

    head = ("mode", "task", "before", "after", "points, 95 % interval", "n", comparison.p_name)
    said = [f"On {comparison.env}, {comparison.split} split: {comparison.population}."] if comparison.population else []
    return "\n\n".join([_table(head, [row(result) for result in comparison.results]), *said, *_as_list(warnings)])


def _controls(ablation: Ablation) -> str:
    rows = []
    for gain in ablation.gains:
        low, high = (f"{100 * end:+.1f}" for end in gain.interval)
        interval = f"[{low}, {high}]" if len(ablation.seeds) > 2 else "no interval over seeds: needs three"
        by_seed = ", ".join(f"{100 * one:+.1f}" for one in gain.per_seed)
        rows.append((gain.mode, f"{gain.of} minus {gain.over}", f"{100 * gain.mean:+.1f} {interval}", by_seed))
    return (
        _table(("mode", "difference", "points", "by seed"), rows)
        + f"\n\nn = {ablation.num_episodes} a run and mode. {SEEDS_ALIKE}"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def _joined(head: Mapping[str, Any], parts: Sequence[str]) -> str:
    return (
        f"---\n{yaml.safe_dump(dict(head), sort_keys=False)}---\n\n"
        + "\n\n".join(part for part in parts if part)
        + "\n"
    )
