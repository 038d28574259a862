"""The identity of the policy that made a chunk: told with every answer, so that a swap in mid-run is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

POLICY_KEY = "policy"  # of an answer


@dataclass(frozen=True)
class PolicyIdentity:
    """A policy as its server names it. All fields are "" where the server does not say, as openpi's own.

    Attributes:
        name: the checkpoint's folder, or 'pretrained:NAME'. version: what recordings say of who acted.
        hash: SHA-256 of the checkpoint.
    """

    name: str = ""
    version: str = ""
    hash: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the server said anything."""
        return bool(self.name or self.version or self.hash)

    def __str__(self) -> str:
        if not self.is_known:
            return "an unknown policy (its server does not say which)"
        return self.version or f"{self.name} {self.hash[:12]}".strip()

    def to_wire(self) -> dict[str, str]:
        """The map that travels in an answer."""
        return asdict(self)


UNKNOWN = PolicyIdentity()


def read_identity(reply: Mapping[Any, Any], metadata: Mapping[Any, Any]) -> PolicyIdentity:
    """Who made an answer: what it says itself, else what the connection's metadata said, else `UNKNOWN`."""
    told = reply.get(POLICY_KEY)
    if not isinstance(told, Mapping):
        told = {
            "name": metadata.get("checkpoint"),
            "version": metadata.get("policy_version"),
            "hash": metadata.get("policy_hash"),
        }
    texts = {name: told.get(name) for name in ("name", "version", "hash")}
    return PolicyIdentity(**{name: text for name, text in texts.items() if isinstance(text, str)})
