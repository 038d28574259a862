"""`vla-rl push`: a run's policy or a dataset onto the Hugging Face Hub, with a card made from what is recorded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from httpx import HTTPError
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from vla_rl.common.hub import parse_name
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.data.dataset_check import is_dataset
from vla_rl.workflows.cards import dataset_card, policy_card

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
