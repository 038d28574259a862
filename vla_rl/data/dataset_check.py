"""Whether datasets are on the disk, and which shipped recipe collects one that is not. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vla_rl.config import read_yaml, recipes_folder
from vla_rl.data.config import DatasetError


def check_datasets(paths: Iterable[str], field: str = "sft.datasets") -> None:
    """Look for each dataset before hours are spent on what comes before its use; the Hub is asked for what it has.

    Args:
        field: of the recipe that names them, for the message.

    Raises:
        DatasetError: a dataset is not there; the message names the command that makes it.
    """
    from vla_rl.data.hub import on_hub

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
