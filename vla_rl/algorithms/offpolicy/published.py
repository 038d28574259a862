"""Published policies: a learner's snapshots for actors, each whole in a folder of its own, the newest named.

    published/policy-00000040/    never changed; some of the newest are kept
    published/newest.json         {"number": 40, "hash": "..."}: appears after the policy, whole or not at all

Nothing is acted with whose files do not have the hash that was written for them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vla_rl.common.atomic import write_text_atomic
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.interfaces import Policy
from vla_rl.policies.load import load_policy

POINTER = "newest.json"
_POLICY = re.compile(r"policy-(\d{8,})")


class PublishedError(ValueError):
    """A published policy that must not act; the message says which, and why."""


@dataclass(frozen=True)
class Published:
    """A policy as it was published. folder: its files. number: rises. hash: SHA-256 of its files, as it was written."""

    folder: Path
    number: int
    hash: str

    @property
    def version(self) -> str:
        """What recordings say of who acted."""
        return f"{self.folder.name} {self.hash[:12]}"

    def load(self, device: str = "cpu") -> Policy:
        """The policy, ready to act.

        Raises:
            PublishedError: it is not what was published, or cannot be loaded.
        """
        try:
            found = policy_hash(self.folder)
            if found != self.hash:
                raise PublishedError(
                    f"{self.folder}: its files have the hash {found[:12]}, not {self.hash[:12]}, with which they were "
                    "published: half-written or damaged"
                )
            policy = load_policy(self.folder, device)
        except PublishedError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise PublishedError(f"{self.folder}: cannot be loaded: {error}") from error
        policy.eval()
        return policy


def publish(folder: Path, number: int, policy: Policy, keep: int) -> Published:
    """Write a policy and name it the newest; only so many of the newest stay.

    Raises:
        OSError: the disk is full; the one before stays the newest.
    """
    path = folder / f"policy-{number:08d}"
    policy.save(path)
    published = Published(path, number, policy_hash(path))
    write_text_atomic(folder / POINTER, json.dumps({"number": number, "hash": published.hash}) + "\n")
    numbers = sorted(int(m.group(1)) for p in folder.glob("policy-*") if (m := _POLICY.fullmatch(p.name)))
    for old in [n for n in numbers if n <= number][:-keep]:
        shutil.rmtree(folder / f"policy-{old:08d}", ignore_errors=True)
    return published


def newest(folder: Path) -> Published | None:
    """What was published last; None where nothing was.

    Raises:
        PublishedError: what says so is damaged.
    """
    file = folder / POINTER
    try:
        values = json.loads(file.read_text())
        number, found = values["number"], values["hash"]
        if not (isinstance(number, int) and number >= 0 and isinstance(found, str)):
            raise ValueError(f"got number {number!r}, hash {found!r}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublishedError(f"{file}: damaged ({type(error).__name__}: {error})") from error
    return Published(folder / f"policy-{number:08d}", number, found)


class Followed:
    """The newest published policy that may act. One that may not leaves the one before acting, and this is told.

    Args:
        folder: where policies are published.
        check: refuses a policy that cannot act here; raises ValueError.
        tell: is told which policy acts from now on, and why another one does not.
        taken: what is said of a policy that is taken.

    Attributes:
        policy, published: the one that acts.

    Raises:
        PublishedError: nothing is published, or what is must not act: there is none before it.
    """

    def __init__(
        self,
        folder: Path,
        check: Callable[[Policy, Published], None],
        device: str = "cpu",
        tell: Callable[[str], None] = print,
        taken: str = "acts from here on",
    ) -> None:
        self._folder, self._check, self._device, self._tell, self._taken = folder, check, device, tell, taken
        self._refused = ""
        found = newest(folder)
        if found is None:
            raise PublishedError(f"{folder}: no policy is published there; `run: hil` publishes one when it begins")
        self.policy, self.published = self._loaded(found), found

    def look(self) -> bool:
        """Take the newest policy, where it is another one and may act. Returns whether it was taken."""
        try:
            found = newest(self._folder)
            if found is None or found == self.published:
                return False
            policy = self._loaded(found)
        except PublishedError as error:
            if str(error) != self._refused:  # Once.
                self._refused = str(error)
                self._tell(f"a published policy is refused, {self.published.version} goes on acting: {error}")
            return False
        self.policy, self.published, self._refused = policy, found, ""
        self._tell(f"{found.version} {self._taken}")
        return True

    def _loaded(self, found: Published) -> Policy:
        policy = found.load(self._device)
        try:
            self._check(policy, found)
        except (ValueError, RuntimeError) as error:
            raise PublishedError(f"{found.folder}: does not fit: {error}") from error
        return policy
