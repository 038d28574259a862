"""Names and checkpoints on the Hugging Face Hub, `ORGANIZATION/NAME[@REVISION]`; its library's errors for people."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from vla_rl.common.errors import ConfigError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")
_OWN_FOLDERS = ("checkpoints", "data", "datasets", "runs")  # Where recipes keep what they make.


@dataclass(frozen=True)
class HubName:
    """A model or dataset on the Hub. `revision`: a branch, a tag or a commit; None: the newest of its main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def may_be_local(self) -> bool:
        """Whether it rather is a folder here that has not been made yet: datasets/demos, or beside other datasets."""
        folder = self.repo.partition("/")[0]
        return folder in _OWN_FOLDERS or any(Path(folder).glob("*/meta/info.json"))


def parse_name(text: str) -> HubName | None:
    """The model or dataset that a text names; None where it has not the form of a name on the Hub."""
    match = _NAME.fullmatch(text)
    return HubName(match[1], match[2]) if match else None


def is_offline() -> bool:
    """Whether the user has said that the Hub is not to be asked (HF_HUB_OFFLINE): the cache is all there is."""
    return constants.HF_HUB_OFFLINE


@contextmanager
def explained(name: HubName, field: str, kind: str, error_class: type[ValueError] = ConfigError) -> Iterator[None]:
    """Errors of the Hub's library in a block as one for people.

    Args:
        field: what named it, such as 'policy path'. kind: model or dataset. error_class: of what is raised.
    """
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionNotFoundError

    try:
        yield
    except RevisionNotFoundError as error:
        raise error_class(
            f"{field} '{name}': the hub has {name.repo}, and no revision {name.revision or 'main'!r} of it. Give a "
            "branch, a tag or a commit."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, OSError) as error:
        if isinstance(error, LocalEntryNotFoundError) and is_offline():
            raise error_class(
                f"{field} '{name}': no such folder, and it is not whole in the hub's cache; HF_HUB_OFFLINE is set, so "
                "the hub is not asked. Unset it, or download it elsewhere and give its folder."
            ) from error
        raise error_class(
            f"{field} '{name}': no such folder, and the hub did not give a {kind} of this name: {error}. Check "
            "the name and the connection, or download it elsewhere and give its folder."
        ) from error


_UNREAD = ["*.bin", "*.msgpack", "*.h5"]  # Copies of the weights in formats that are not read.
_MOST_BYTES = 20 * 1024**2  # Of a file that describes: larger ones are vocabularies or weights.
_DESCRIBING = (".json", ".py")
_VOCABULARIES = ("tokenizer.json", "vocab.json")


def download(name: HubName) -> Path:
    """The snapshot of a model, downloaded unless it is in the cache already.

    Raises:
        ConfigError: no such model or revision, or the Hub cannot be reached.
    """
    with explained(name, "policy path", "model"):
        return Path(huggingface_hub.snapshot_download(name.repo, revision=name.revision, ignore_patterns=_UNREAD))


@contextmanager
def described(name: HubName) -> Iterator[tuple[Path, HubName]]:
    """A folder that says what a model is, for the block, and the model's name with its commit.

    The small files are downloaded. Of weights in safetensors, the headers are read, and files of the right names and
    sizes stand for them, whose values are a hole in the file; parts in other formats are empty files.

    Raises:
        ConfigError: no such model or revision, or the Hub cannot be reached.
    """
    from huggingface_hub.errors import NotASafetensorsRepoError

    api = huggingface_hub.HfApi()
    with tempfile.TemporaryDirectory(prefix=name.repo.replace("/", "--")) as temporary:
        folder = Path(temporary)
        with explained(name, "policy path", "model"):
            info = api.model_info(name.repo, revision=name.revision, files_metadata=True)
            assert info.sha is not None, "the Hub gives a model's commit"
            for file in info.siblings or ():
                target = folder / file.rfilename
                target.parent.mkdir(parents=True, exist_ok=True)
                describes = target.suffix in _DESCRIBING and target.name not in _VOCABULARIES
                if describes and (file.size or 0) <= _MOST_BYTES:
                    target.write_bytes(
                        Path(api.hf_hub_download(name.repo, file.rfilename, revision=info.sha)).read_bytes()
                    )
                elif target.suffix != ".safetensors":
                    target.touch()
            try:
                weights = api.get_safetensors_metadata(name.repo, revision=info.sha).files_metadata
            except NotASafetensorsRepoError:
                weights = {}
        for file_name, metadata in weights.items():
            _write_stand_in(folder / file_name, metadata)
        yield folder, HubName(name.repo, info.sha)


def _write_stand_in(file: Path, metadata: Any) -> None:
    """A safetensors file of that header, whose values are a hole: it takes no room on the disk."""
    header: dict[str, Any] = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
        for name, tensor in metadata.tensors.items()
    }
    text = json.dumps({"__metadata__": metadata.metadata or {}, **header}).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + max((entry["data_offsets"][1] for entry in header.values()), default=0))
