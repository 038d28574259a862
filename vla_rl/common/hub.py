"""Names on the Hugging Face Hub, `ORGANIZATION/NAME[@REVISION]`, and its library's errors as one for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
