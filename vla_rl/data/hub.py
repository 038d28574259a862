"""LeRobotDatasets on the Hugging Face Hub: which one a path names, its commit, and of its files what is asked for.

Files lie in the Hub's own cache (HF_HOME), where LeRobot and others find them too.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

from vla_rl.common.hub import HubName, explained, parse_name
from vla_rl.config import Config, read_yaml, recipes_folder
from vla_rl.data.config import DatasetConfig, DatasetError

_INFO = "meta/info.json"


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the Hub. `name`: with its commit."""

    name: HubName

    def fetch(self, *patterns: str) -> Path:
        """The dataset's folder in the cache, downloading first which of the files of these patterns it lacks.

        Raises:
            DatasetError: the Hub cannot be reached, and they are not there.
        """
        with explained(self.name, "dataset", "dataset", DatasetError):
            return Path(
                snapshot_download(
                    self.name.repo, repo_type="dataset", revision=self.name.revision, allow_patterns=[*patterns]
                )
            )


def on_hub(path: str | Path) -> HubDataset | None:
    """The dataset on the Hub that a path names, with its commit; None where the path is, or would be, a folder here.

    A folder of that name wins; `data/...`, `datasets/...`, `runs/...` and `checkpoints/...`, and names beside datasets
    that lie here, always mean folders.

    Raises:
        DatasetError: no such dataset or revision, it is not LeRobot's v3, or the Hub cannot be reached.
    """
    name = parse_name(str(path))
    if name is None or name.may_be_local or Path(path).expanduser().exists():
        return None
    with explained(name, "dataset", "dataset", DatasetError):
        try:
            info = hf_hub_download(name.repo, _INFO, repo_type="dataset", revision=name.revision)
        except LocalEntryNotFoundError:
            raise
        except RemoteEntryNotFoundError as error:
            raise DatasetError(
                f"dataset '{name}': the hub has it, but without {_INFO}, so it is no LeRobotDataset. Name one that is, "
                "or download it and convert it (docs/own_data.md)."
            ) from error
    dataset = HubDataset(HubName(name.repo, Path(info).parent.parent.name))
    try:
        check_version(json.loads(Path(info).read_text(encoding="utf-8"))["codebase_version"], dataset)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DatasetError(f"dataset '{name}': its {_INFO} has no codebase_version; it is no LeRobotDataset") from error
    return dataset


def check_version(version: str, dataset: Path | HubDataset) -> None:
    """Raise `DatasetError` where a dataset is not LeRobotDataset v3; it names LeRobot's converter."""
    if str(version).startswith("v3."):
        return
    is_remote = isinstance(dataset, HubDataset)
    name, then = (
        (dataset.name, f", and name the folder that it writes, {_converted(dataset)}") if is_remote else (dataset, "")
    )
    raise DatasetError(
        f"{name}: is LeRobotDataset {version}; v3.0 is needed. Convert it with LeRobot's own "
        f"`{converter(dataset)}`{then}."
    )


def _converted(dataset: HubDataset) -> str:
    return f"datasets/{dataset.name.repo.rpartition('/')[2]}"


def converter(dataset: Path | HubDataset) -> str:
    """The command of LeRobot's that converts a dataset of version 2.1, in its folder or from the Hub."""
    command = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --push-to-hub=false"
    if isinstance(dataset, HubDataset):
        return f"{command} --repo-id={dataset.name.repo} --root={_converted(dataset)}"
    return f"{command} --repo-id=local/{shlex.quote(dataset.name)} --root={shlex.quote(str(dataset))}"


def pinned[C: Config](recipe: C, show: Callable[[str], None], *fields: str) -> C:
    """Return a recipe with the commit of each dataset that the Hub gives, so that it says for good what is learned.

    Args:
        show: told where each dataset of such a name comes from: the Hub, or a folder here that has its name.
        fields: `SECTION.FIELD`s of datasets.

    Raises:
        DatasetError: no such dataset or revision, or the Hub cannot be reached.
    """
    changes = {}
    for field in fields:
        section, _, name = field.partition(".")
        options = changes.get(section) or getattr(recipe, section, None)
        datasets = getattr(options, name, ())
        found = tuple(_pinned(one, show, field) for one in datasets)
        if options is not None and found != tuple(datasets):
            changes[section] = options.model_copy(update={name: found})
    return recipe.model_copy(update=changes) if changes else recipe


def _pinned(dataset: DatasetConfig, show: Callable[[str], None], field: str) -> DatasetConfig:
    name = parse_name(dataset.path)
    if name is None or name.may_be_local:
        return dataset
    remote = on_hub(dataset.path)
    if remote is None:
        show(f"{field}: {dataset.path} is the folder here of that name; the hub is not asked")
        return dataset
    show(f"{field}: {remote.name} from the hub")
    return dataset.model_copy(update={"path": str(remote.name)})


def check_datasets(paths: Iterable[str], field: str = "sft.datasets") -> None:
    """Look for each dataset before hours are spent on what comes before its use; the Hub is asked for what it has.

    Args:
        field: of the recipe that names them, for the message.

    Raises:
        DatasetError: a dataset is not there; the message names the command that makes it.
    """
    if absent := [path for path in paths if not is_dataset(path) and on_hub(path) is None]:
        raise DatasetError("\n".join(f"{field}: {path} {_lack(path)}. {how_to_get(path)}" for path in absent))


def is_dataset(path: str | Path) -> bool:
    """Whether a folder holds a LeRobotDataset."""
    return (Path(path).expanduser() / "meta" / "info.json").is_file()


def _lack(path: str) -> str:
    """What is wrong with a path that is no dataset."""
    return "holds no LeRobotDataset (no meta/info.json)" if Path(path).expanduser().exists() else "is not there"


def how_to_get(path: str) -> str:
    """What to do about a dataset that is not there."""
    for file in sorted(recipes_folder().glob("*.yaml")):
        collect = read_yaml(file).get("collect") or {}
        # A recipe also inherits `collect` from its base, to which the path then belongs.
        if str(collect.get("dataset", "")) == path and path in file.read_text(encoding="utf-8"):
            return f"Make it with `vla-rl collect {file.stem}`, or name another."
    return "Collect it (`vla-rl collect RECIPE`; on a robot `vla-rl deploy --record`), or name another."
