"""Checkpoints on the Hub, by a server here that speaks its API: looked at without their weights, pinned, downloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_hub import answer, asking, local_hub

from vla_rl.common.hub import HubName, parse_name
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint

REPO = "someone/tiny-oft"


def test_names() -> None:
    assert parse_name("a/b") == HubName("a/b") and parse_name("a/b@v1.0") == HubName("a/b", "v1.0")
    assert str(HubName("a/b", "refs/pr/1")) == "a/b@refs/pr/1" and parse_name("a/b@refs/pr/1") is not None
    assert not [text for text in ("a", "a/b/c", "./a/b", "a/b@", "/a/b", "a/b@-x") if parse_name(text)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    folder = tmp_path_factory.mktemp("hub")
    write_checkpoint(folder / "new", "l1")
    write_checkpoint(folder / "old", "base")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        "run: train\nname: tiny\ndescription: For tests.\n"
        "env: {kind: 'sim.dummy:DummyConfig', cameras: [agentview, wrist], image_size: 56}\n"
        "algo: {kind: grpo, micro_batch_size: 2}\npolicy: {kind: openvla, precision: bf16, laplace: {}}\n"
    )
    with local_hub() as hub:
        commit = hub.add(REPO, folder / "new", "main")
        old = hub.add(REPO, folder / "old", "first")
        commands = {
            "folder": ["inspect", str(folder / "new")],
            "hub": ["inspect", REPO],
            "revision": ["inspect", f"{REPO}@first"],
            "no revision": ["inspect", f"{REPO}@third"],
            "no model": ["inspect", "someone/nothing"],
            "memory of the folder": ["plan", "--memory", str(recipe), f"policy.path={folder / 'new'}"],
            "memory": ["plan", "--memory", str(recipe), f"policy.path={REPO}"],
        }
        with asking(hub, folder / "home"):
            found = {name: answer(command) for name, command in commands.items()}
        looked_at = list(hub.sent)
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home")}
        load = f"from vla_rl.policies.base import resolve_path; print(resolve_path('{REPO}@first'))"
        done = subprocess.run(
            [sys.executable, "-c", load], env=environment, capture_output=True, text=True, check=False, cwd=folder
        )
        assert done.returncode == 0, done.stderr[-3000:]
    weights = {name: size for name, size in looked_at if name.endswith((".safetensors", ".pt"))}
    return found | {
        "about": (0, json.dumps([commit, old, weights, done.stdout.strip(), str(folder)]), ""),
    }


def test_inspect_says_the_same_of_a_folder_and_of_the_hub(answers) -> None:
    commit, old, _, _, folder = json.loads(answers["about"][1])
    (code, expected, _), (status, found, errors) = answers["folder"], answers["hub"]
    assert (code, status) == (0, 0), errors
    assert found == expected.replace(f"{folder}/new", f"{REPO}@{commit}")
    status, found, errors = answers["revision"]
    assert status == 0 and "autoregressive" in found and f"path: {REPO}@{old}" in found, errors


def test_memory_says_the_same(answers) -> None:
    assert answers["memory"][0] == 0 and "M parameters" in answers["memory"][1], answers["memory"][2]
    assert answers["memory"][1] == answers["memory of the folder"][1]


def test_no_weights_are_read(answers) -> None:
    """Of safetensors the first 100 kB, as the Hub's library asks for, in which their headers are; of others nothing."""
    weights = json.loads(answers["about"][1])[2]
    assert weights and not [name for name in weights if name.endswith(".pt")]
    assert max(weights.values()) <= 100_001


def test_a_wrong_name_is_one_message(answers) -> None:
    code, _, errors = answers["no revision"]
    assert code == 2 and errors.startswith(f"error: policy path '{REPO}@third': the hub has {REPO}, and no revision")
    code, _, errors = answers["no model"]
    assert code == 2 and errors.startswith("error: policy path 'someone/nothing': no such folder, and the hub did not")


def test_a_pinned_revision_is_what_is_downloaded(answers) -> None:
    _, old, _, snapshot, folder = json.loads(answers["about"][1])
    assert Path(snapshot).name == old
    ours = {p.name: p.read_bytes() for p in Path(snapshot).iterdir()}
    assert ours == {p.name: p.read_bytes() for p in (Path(folder) / "old").iterdir()}
