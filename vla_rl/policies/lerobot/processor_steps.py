"""The steps of a checkpoint's processors, read from JSON, and refused where one would run more than LeRobot's own code.

LeRobot finds a step's class by the import path that the file gives, and calls it with the options that the file gives:
as written by a stranger, any function of any installed package.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from lerobot.processor import ActionTokenizerProcessorStep, ProcessorStep, ProcessorStepRegistry

PREPROCESSOR_FILE, POSTPROCESSOR_FILE = "policy_preprocessor.json", "policy_postprocessor.json"
_OF_ENVIRONMENTS = "lerobot.processor.hil_processor"  # One of its steps loads a model, whose code it runs.


def read_steps(folder: Path, policy_type: str) -> dict[str | None, dict[str, Any]]:
    """The preprocessor's steps, registered name -> options, after those of both processors were checked.

    Args:
        policy_type: LeRobot's name of the policy.

    Raises:
        ValueError: a file is missing or damaged, or has a step that is not LeRobot's for this policy.
    """
    file = folder / PREPROCESSOR_FILE
    if not file.is_file():
        raise ValueError(
            f"{file}: not found. Checkpoints of LeRobot before 0.4 keep normalization in the weights; convert it with "
            "`python -m lerobot.processor.migrate_policy_normalization`."
        )
    steps = _checked(file, policy_type)
    if (folder / POSTPROCESSOR_FILE).is_file():
        _checked(folder / POSTPROCESSOR_FILE, policy_type)
    return {step.get("registry_name"): step.get("config", {}) for step in steps}


def _checked(file: Path, policy_type: str) -> list[dict[str, Any]]:
    try:
        steps = list(json.loads(file.read_text())["steps"])
        names = [str(step["registry_name"] if "registry_name" in step else step["class"]) for step in steps]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a LeRobot processor: {error}. Copy the checkpoint again.") from error
    for step, name in zip(steps, names, strict=True):
        if not _is_safe(step, policy_type):
            raise ValueError(
                f"{file}: the step {name!r} is none of LeRobot's processor steps for {policy_type!r}, and what a "
                "checkpoint names is not run. If it is a step of your own, import its module first; if you did not "
                "write this file, do not trust the checkpoint."
            )
    return steps


def _is_safe(step: dict[str, Any], policy_type: str) -> bool:
    """Whether a step's class is a registered one, or one of LeRobot's, that brings no code from elsewhere."""
    ours = ("lerobot.processor.", f"lerobot.policies.{policy_type}.")
    if "registry_name" in step:
        found = ProcessorStepRegistry._registry.get(step["registry_name"])
        if found is None:
            return True  # LeRobot says that it does not know it.
    else:
        module, _, name = str(step["class"]).rpartition(".")
        try:
            known = importlib.import_module(module) if module.startswith(ours) else sys.modules.get(module)
        except ImportError:
            return False
        found = getattr(known, name, None)
    if not (isinstance(found, type) and issubclass(found, ProcessorStep)):
        return False
    where = found.__module__
    if where.startswith("lerobot.") and (not where.startswith(ours) or where == _OF_ENVIRONMENTS):
        return False
    # It runs the code of a tokenizer's folder, but for pi0-FAST, where `fast_tokens.read_as_data` stands in.
    return policy_type == "pi0_fast" or not issubclass(found, ActionTokenizerProcessorStep)
