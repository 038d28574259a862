"""Who may read what is written: whom the umask names, also where a library writes for its owner alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vla_rl.common.atomic import atomic_folder, write_text_atomic
from vla_rl.policies.fake_input import fake_env_spec, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.openvla.config import OpenVLAConfig

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("vla_rl", "sim", "world_model", "real_robot")


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    with atomic_folder(tmp_path / "made", what="test") as partial:
        save_file({"a": np.zeros(2)}, partial / "weights.safetensors")
        (partial / "inner").mkdir()
        save_file({"a": np.zeros(2)}, partial / "inner" / "weights.safetensors")
        (partial / "config.json").write_text("{}")
        (partial / "run.sh").write_text("true")
        (partial / "run.sh").chmod(0o700)
    write_text_atomic(tmp_path / "text", "x")
    folder, file = 0o777 & ~umask, 0o666 & ~umask
    found = modes(tmp_path)
    assert found.pop("made/run.sh") == 0o700 | file
    assert found == {
        "made": folder,
        "made/inner": folder,
        "made/weights.safetensors": file,
        "made/inner/weights.safetensors": file,
        "made/config.json": file,
        "text": file,
    }


@pytest.mark.parametrize("config", [OpenVLAConfig(), LeRobotConfig(type="pi0", preset="tiny")], ids=lambda c: c.kind)
def test_a_policys_weights_are_as_open_as_its_config(config, tmp_path: Path) -> None:
    policy = config.build(fake_env_spec())
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(tmp_path / "policy")
    found = {name: mode for name, mode in modes(tmp_path).items() if (tmp_path / name).is_file()}
    assert "policy/model.safetensors" in found and len(set(found.values())) == 1, found


def test_nobody_writes_by_files_for_the_owner_alone() -> None:
    """`tempfile` makes them; folders of its kind are for what is thrown away."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    makers = ("NamedTemporaryFile(", "mkstemp(")
    assert not [str(path) for path in files if any(maker in path.read_text(encoding="utf-8") for maker in makers)]
