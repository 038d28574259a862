"""Base of every policy family's config, where checkpoints are found, and their description. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from vla_rl.common.hub import described, download, is_offline, parse_name
from vla_rl.common.pretrained import how_to_make, pretrained_entry
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import KINDS, Config, ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint is.

    Attributes:
        family: for people, "OpenVLA-OFT, L1 head".
        kind: of the recipe's `policy` section.
        facts: name -> value, shown as a table: decoder, chunk size, cameras, state, sizes, precision.
        norm_keys: datasets whose statistics it holds.
        rl: algorithms' names that can train it as it is; empty: see `rl_reason`.
        rl_reason: why RL cannot train it and what to do, or what is special; "" for nothing.
        policy: the recipe's `policy` section with what must or should be said, `path` left out.
        warnings: what a person should know or choose.
    """

    family: str
    kind: str
    facts: dict[str, str]
    norm_keys: tuple[str, ...] = ()
    rl: tuple[str, ...] = ()
    rl_reason: str = ""
    policy: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def recipe_line(self, path: str) -> str:
        """The `policy` section in one line of YAML."""
        values = {"kind": self.kind, "path": path, **self.policy}
        return "policy: {" + ", ".join(f"{k}: {_yaml(v)}" for k, v in values.items()) + "}"

    def text(self, path: str) -> str:
        """For people."""
        width = max(len(name) for name in (*self.facts, "norm keys"))
        lines = [self.family, *(f"  {name:<{width}}  {value}" for name, value in self.facts.items())]
        if self.norm_keys:
            lines.append(f"  {'norm keys':<{width}}  {', '.join(self.norm_keys)}")
        lines.append(f"  {'RL':<{width}}  {', '.join(self.rl) if self.rl else 'no'}")
        if self.rl_reason:
            lines.append(f"  {'':<{width}}  {self.rl_reason}")
        lines += [f"  note: {warning}" for warning in self.warnings]
        return "\n".join([*lines, "", self.recipe_line(path)])


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return str(value)


CONFIG_FILE = "config.json"
OWN_FILE = "vla_rl.json"  # Our options beside a checkpoint in another project's layout.
_CHECKPOINT_FILES = (CONFIG_FILE, OWN_FILE, "adapter_config.json")  # A folder of a policy has one of these.


class PolicyConfig(Config):
    """Base of every policy's config; `kind` chooses the class.

    Attributes:
        merged: sections of which a recipe sets single options, over those of the checkpoint that it starts from.
    """

    merged: ClassVar[tuple[str, ...]] = ()
    bound_to_kind: ClassVar[tuple[str, ...]] = ("path",)

    kind: str
    path: str | None = Field(
        default=None,
        description="Start from this checkpoint: a folder, 'pretrained:NAME' for one that ships with the package, or "
        "the hub's ORGANIZATION/NAME[@REVISION] (a branch, tag or commit). `vla-rl inspect PATH` tells what it is.",
    )

    @model_serializer(mode="wrap")
    def _dump_what_was_chosen(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With a checkpoint, whose own options hold, only what was chosen anew: a dump must load to the same policy."""
        values = dump(self)
        if self.path is None:
            return values
        chosen = {name: value for name, value in values.items() if name == "kind" or name in self.model_fields_set}
        for name in self.merged:
            if chosen.get(name) is not None:
                chosen[name] = {key: chosen[name][key] for key in getattr(self, name).model_fields_set}
        return chosen

    @property
    def remote(self) -> str:
        """Where the policy acts, of one that has no checkpoint here; empty: here. `path` may then be empty too."""
        return ""

    def with_values(self, chosen: Mapping[str, Any], free: Sequence[str]) -> dict[str, Any]:
        """This checkpoint's options with those of `chosen` that are `free`; of sections in `merged`, one by one.

        An empty section ({}) stands for its defaults.
        """
        values = self.model_dump() | {name: value for name, value in chosen.items() if name in free}
        for name in self.merged:
            given, own = values[name], getattr(self, name)
            if isinstance(given, Config):
                given = {key: getattr(given, key) for key in given.model_fields_set}
            if given and own is not None:
                values[name] = own.model_dump() | given
        return values

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> Policy:
        """A policy for environments of this spec: fresh weights from `seed`, or those at `path`.

        Raises:
            ConfigError: the checkpoint or the config does not agree with the environment.
            ValueError: the checkpoint is missing or damaged.
        """
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> Policy:
        """The policy saved in a folder.

        Raises:
            ValueError: the folder is missing, incomplete or damaged.
        """
        raise NotImplementedError

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """Say what a checkpoint folder is, from JSON and headers alone; None where it is not of this family.

        Raises:
            ValueError: it is, but a file is missing or damaged.
        """
        return None


def check_adapters(trainable: str, has_adapters: bool, path: str | None) -> None:
    """Raise ConfigError where adapters are to be trained that are not there, or all weights with those that are.

    With a path, the checkpoint's own options decide, which are checked when it is read.
    """
    if path is None and trainable == "lora" and not has_adapters:
        raise ConfigError("policy.trainable: got 'lora', but policy.lora is not set, e.g. policy.lora.rank=32")
    if path is None and trainable != "lora" and has_adapters:
        raise ConfigError(
            f"policy.lora: given with policy.trainable={trainable}, which trains the other weights too; set "
            "policy.trainable=lora, or leave policy.lora out"
        )


def check_cameras(cameras: Sequence[str], env_spec: EnvSpec) -> None:
    """Check that an environment has the cameras that a policy reads under their own names.

    Raises:
        ConfigError: one is missing.
    """
    if missing := [camera for camera in cameras if camera not in env_spec.cameras]:
        raise ConfigError(
            f"policy.cameras: {missing} not in environment {env_spec.kind!r}, which has {list(env_spec.cameras)}; "
            "set env.cameras to include them, or policy.cameras to those there are"
        )


def check_sizes(policy: Policy, env_spec: EnvSpec) -> None:
    """Check a policy's action and state sizes against an environment's.

    Raises:
        ConfigError: one differs.
    """
    for name, own, theirs in (
        ("action_dim", policy.action_dim, env_spec.action_dim),
        ("state_dim", policy.state_dim, env_spec.state_dim),
    ):
        if own is not None and own != theirs:
            raise ConfigError(
                f"policy {name}: the policy has {own}, environment {env_spec.kind!r} has {theirs}; "
                "start from a policy made for this environment"
            )


def pretrained_folder() -> Path:
    """Where the policies that ship with the package lie."""
    return Path(__file__).resolve().parent / "pretrained"


def resolve_path(path: str | Path) -> Path:
    """A checkpoint folder from a path, 'pretrained:NAME', or the hub's 'ORGANIZATION/NAME[@REVISION]', downloaded.

    A run's folder stands for the policy that the run ended with.

    Raises:
        ConfigError: no such pretrained policy (lists those there are), no such folder, a run without a policy, or the
            hub cannot be reached.
    """
    shipped = pretrained_entry(path, pretrained_folder(), CONFIG_FILE, option="policy path", kind="policy")
    if shipped is not None:
        return shipped
    text = str(path)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return policy_of_run(RunFolder(folder)) if RunFolder(folder).exists else folder
    if name := parse_name(text):
        return download(name)
    raise ConfigError(
        f"policy path {text!r}: no such folder. Give a folder written by a run or downloaded, 'pretrained:NAME', or "
        f"ORGANIZATION/NAME[@REVISION] of a model on the Hugging Face hub.{how_to_make(folder)}"
    )


def policy_of_run(run: RunFolder) -> Path:
    """The policy that a run ended with.

    Raises:
        ConfigError: it has none so far.
    """
    if run.result is None:
        raise ConfigError(f"policy path: the run {run.path} has no policy so far; resume it, or name another")
    return run.result


def checkpoint_folder(config: PolicyConfig) -> Path:
    """`resolve_path` of a config's path, which of a kind of ours must hold a checkpoint.

    Raises:
        ConfigError: as `resolve_path`; or the folder holds no checkpoint.
    """
    folder = resolve_path(str(config.path))
    if config.kind in KINDS["policy"] and not any((folder / name).is_file() for name in _CHECKPOINT_FILES):
        raise ConfigError(f"policy.path: {config.path} holds no checkpoint (no {CONFIG_FILE}).")
    return folder


@contextmanager
def describing_folder(path: str | Path) -> Iterator[tuple[Path, str]]:
    """A folder that says what a checkpoint is, for the block, and its name; of one on the hub, without its weights.

    The name of one on the hub says its commit, so that it stays the same checkpoint.

    Raises:
        ConfigError: as `resolve_path`.
    """
    name = None if Path(path).expanduser().is_dir() else parse_name(str(path))
    if name is None or is_offline():
        yield resolve_path(path), str(path)
        return
    with described(name) as (folder, exact):
        yield folder, str(exact)


def read_json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file of a policy folder.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    if not file.is_file():
        raise ValueError(f"{file}: not found. A policy folder holds {CONFIG_FILE}, model.safetensors and more.")
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}). Copy the policy folder again.") from error
    return values if isinstance(values, dict) else {}


def read_policy_config(folder: Path, key: str = "kind") -> dict[str, Any]:
    """The contents of a policy folder's config.json.

    Args:
        key: names the kind of policy: "kind" in this package's folders, "type" in LeRobot's.

    Raises:
        ValueError: the file is missing, is not JSON, or has no `key`.
    """
    values = read_json(folder / CONFIG_FILE)
    if not isinstance(values.get(key), str):
        whose = "policy saved by this package" if key == "kind" else "LeRobot policy"
        raise ValueError(f"{folder / CONFIG_FILE}: has no {key!r}, so it is not a {whose}.")
    return values
