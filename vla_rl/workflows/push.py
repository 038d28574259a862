"""`vla-rl push`: a run's policy or a dataset onto the Hugging Face Hub, and the card made from what is recorded."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from httpx import HTTPError
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from vla_rl.common.hub import parse_name
from vla_rl.common.run_folder import RunFolder
from vla_rl.common.tables import markdown_table
from vla_rl.config import ConfigError
from vla_rl.data.health import check_datasets
from vla_rl.data.hub import is_dataset
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.compare import Comparison, PairedResult, format_p
from vla_rl.evaluation.report.read import Run, control_of, made_by, read_run
from vla_rl.evaluation.report.report import warnings_of
from vla_rl.evaluation.statistics import SEEDS_ALIKE
from vla_rl.workflows.sweep import Ablation

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
    facts = markdown_table(("", ""), rows)
    checks = markdown_table(("check", "", "found"), [(c.name, c.status, c.found) for c in check_datasets([folder])])
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
    rows = [(rate.mode, rate.task or "**all tasks**", rate.text()) for rate in evaluation.rates()]
    table = markdown_table(("mode", "task", "success, 95 % interval"), rows)
    return "\n\n".join([table, evaluation.meta.protocol, *_as_list(warnings_of(run))])


def _as_list(warnings: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {warning}" for warning in warnings)] if warnings else []


def _compared(comparison: Comparison, warnings: Sequence[str]) -> str:
    def row(result: PairedResult) -> tuple[str, ...]:
        return (
            result.mode,
            comparison.label(result) or "**all tasks**",
            f"{100 * result.rate_a:.1f} %",
            f"{100 * result.rate_b:.1f} %",
            f"{100 * result.difference:+.1f} {result.bootstrap.percent('+')}",
            str(result.num_pairs),
            format_p(result.p_value_by_state),
        )

    head = ("mode", "task", "before", "after", "points, 95 % interval", "n", comparison.p_name)
    said = [f"On {comparison.env}, {comparison.split} split: {comparison.population}."] if comparison.population else []
    return "\n\n".join(
        [markdown_table(head, [row(result) for result in comparison.results]), *said, *_as_list(warnings)]
    )


def _controls(ablation: Ablation) -> str:
    rows = []
    for gain in ablation.gains:
        interval = gain.interval.percent("+") if len(ablation.seeds) > 2 else "no interval over seeds: needs three"
        by_seed = ", ".join(f"{100 * one:+.1f}" for one in gain.per_seed)
        rows.append((gain.mode, f"{gain.of} minus {gain.over}", f"{100 * gain.mean:+.1f} {interval}", by_seed))
    return (
        markdown_table(("mode", "difference", "points", "by seed"), rows)
        + f"\n\nn = {ablation.num_episodes} a run and mode. {SEEDS_ALIKE}"
    )


def _joined(head: Mapping[str, Any], parts: Sequence[str]) -> str:
    return (
        f"---\n{yaml.safe_dump(dict(head), sort_keys=False)}---\n\n"
        + "\n\n".join(part for part in parts if part)
        + "\n"
    )


RUN_FILES = (
    "config.yaml",
    "command.txt",
    "versions.json",
    "metrics.jsonl",
    "ablation.json",
    "gate.json",
    "rounds.json",
)


def push(
    folder: Path,
    name: str,
    *,
    private: bool = True,
    license_name: str | None = None,
    card_only: bool = False,
    show: Callable[[str], None] = print,
) -> str:
    """Upload a policy or a dataset in one commit, its card as README.md; a policy takes its run's JSON files along.

    Args:
        folder: of a run (its policy is uploaded), or of a LeRobotDataset.
        name: ORGANIZATION/NAME on the Hub; made where it is not there yet.
        private: of a repository that is made.
        license_name: the Hub's word for it, such as mit; None: the card names none.
        card_only: upload nothing, and return the card.
        show: told what is uploaded.

    Returns:
        the commit's address, or with `card_only` the card.

    Raises:
        ConfigError: neither a run with a policy nor a dataset, a name that is none, no token, or the Hub refuses.
        DatasetError: a dataset that is damaged.
    """
    if parse_name(name) is None:
        raise ConfigError(f"push: {name!r} is no name on the Hub; expected ORGANIZATION/NAME")
    if is_dataset(folder):
        kind, content, card = "dataset", folder, dataset_card(name, folder, license_name)
    elif (policy := _policy(folder)) is not None:
        kind, content, card = "model", policy, policy_card(name, folder, license_name)
    else:
        raise ConfigError(
            f"push: {folder} is neither a run with a policy (config.yaml and policy/ in it) nor a LeRobotDataset "
            "(meta/info.json in it)"
        )
    if card_only:
        return card
    with tempfile.TemporaryDirectory(prefix="vla-rl-push-") as extra:
        beside = Path(extra)
        (beside / "README.md").write_text(card, encoding="utf-8")
        if kind == "model":
            _copy_run(folder, beside / "run")
        return _upload(name, kind, [content, beside], private, show)


def _policy(folder: Path) -> Path | None:
    """The policy of a run, or of the last round of a loop that has one."""
    rounds = sorted(folder.glob("round_*/train"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    found = [run.policy for run in map(RunFolder, [*rounds, folder]) if run.policy.is_dir()]
    return found[-1] if found and RunFolder(folder).exists else None


def _copy_run(folder: Path, target: Path) -> None:
    target.mkdir()
    for name in RUN_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    for file in sorted(RunFolder(folder).evaluations.glob("*.json")):
        (target / "evaluations").mkdir(exist_ok=True)
        shutil.copyfile(file, target / "evaluations" / file.name)


def _upload(name: str, kind: str, folders: list[Path], private: bool, show: Callable[[str], None]) -> str:
    files: dict[str, Path] = {}  # The card and the run's files come last, and so in place of others of that name.
    for folder in folders:
        files |= {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    size = sum(path.stat().st_size for path in files.values())
    show(f"{name}: {len(files)} files, {size / 1e6:.1f} MB")
    api = HfApi()
    try:
        api.create_repo(name, repo_type=kind, private=private, exist_ok=True)
        operations = [CommitOperationAdd(path, file) for path, file in files.items()]
        return str(
            api.create_commit(name, operations, commit_message="Upload by vla-rl push", repo_type=kind).commit_url
        )
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            f"push: you are not logged in to the Hub. Run `hf auth login`, or set HF_TOKEN ({error})"
        ) from None
    except (HfHubHTTPError, HTTPError, OSError) as error:
        said = str(error).strip().splitlines()
        raise ConfigError(
            f"push: the Hub did not take {name}: {said[0] if said else type(error).__name__}. May the token write "
            "there, and is the connection up? Nothing is there half: files appear with the commit alone."
        ) from error
