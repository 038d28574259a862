"""Checkpoints: exact round trips, atomicity, and what is said of broken ones."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vla_rl.common.atomic import atomic_folder, restore_replaced, write_text_atomic
from vla_rl.common.distributed.tensor_files import TENSOR_DTYPES, load_weights, write_tensors
from vla_rl.training import checkpoint as ck


def make_checkpoint(folder: Path, step: int) -> Path:
    return ck.save_checkpoint(ck.checkpoint_path(folder, step), {"w": torch.full((8, 8), float(step))}, {"step": step})


def test_round_trip_keeps_tensors_state_and_extra_files(tmp_path):
    shared = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": shared, "tied": shared, "transposed": shared.T, "half": shared.to(torch.bfloat16)}
    path = ck.checkpoint_path(tmp_path, 7)
    ck.save_checkpoint(path, tensors, {"step": 7, "name": "x"}, extra=lambda p: (p / "note.txt").write_text("hi"))
    loaded, state = ck.load_checkpoint(path)
    assert state == {"step": 7, "name": "x"}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype
    assert (path / "note.txt").read_text() == "hi"
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000007"]  # No temporary folder is left.


def test_saving_again_replaces_the_whole_folder(tmp_path):
    path = ck.checkpoint_path(tmp_path, 1)
    ck.save_checkpoint(path, {"w": torch.zeros(1)}, {"n": 1}, extra=lambda p: (p / "old").write_text(""))
    ck.save_checkpoint(path, {"w": torch.ones(1)}, {"n": 2})
    tensors, state = ck.load_checkpoint(path)
    assert state["n"] == 2 and tensors["w"].item() == 1
    assert not (path / "old").exists()


def test_an_error_while_writing_leaves_the_previous_checkpoint(tmp_path):
    path = make_checkpoint(tmp_path, 1)

    def fail(folder: Path) -> None:
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError, match="killed here"):
        ck.save_checkpoint(path, {"w": torch.zeros(1)}, {}, extra=fail)
    assert ck.load_checkpoint(path)[1] == {"step": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    import socket

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    leftover = tmp_path / f".step_00000001.partial-{socket.gethostname()}-{dead.pid}"
    leftover.mkdir()
    alive = tmp_path / f".step_00000001.partial-{socket.gethostname()}-1"
    alive.mkdir()
    make_checkpoint(tmp_path, 1)
    assert not leftover.exists() and alive.exists()


KILLED_REPLACING = """
import os, signal, sys
from pathlib import Path
from vla_rl.common import atomic
rename = os.rename
def kill_at_ours(source, target):
    if Path(target) == Path(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
os.rename = kill_at_ours
with atomic.atomic_folder(Path(sys.argv[1]), "folder", replace=True) as partial:
    (partial / "new").touch()
"""


@pytest.mark.parametrize(("name", "reader"), [("best", True), ("best", False), ("best[1]", True)])
def test_a_writer_killed_while_it_replaces_leaves_the_old_folder(tmp_path, name, reader):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "old").touch()
    code = subprocess.run([sys.executable, "-c", KILLED_REPLACING, str(folder)], check=False).returncode
    assert code == -signal.SIGKILL and not folder.exists(), "killed between the two renames"
    if reader:
        restore_replaced(folder)
    else:
        with pytest.raises(ZeroDivisionError), atomic_folder(folder, "folder", replace=True):
            1 / 0  # noqa: B018 (this writer does not get to its end)
    assert [p.name for p in folder.iterdir()] == ["old"]
    with atomic_folder(folder, "folder", replace=True) as partial:
        (partial / "newest").touch()
    assert [p.name for p in folder.iterdir()] == ["newest"] and list(tmp_path.iterdir()) == [folder]


def test_latest_skips_truncated_and_corrupt_ones_with_a_warning(tmp_path):
    good, truncated, corrupt, no_manifest = (make_checkpoint(tmp_path, step) for step in (1, 2, 3, 4))
    weights = truncated / ck.TENSORS_FILE
    weights.write_bytes(weights.read_bytes()[:-10])
    data = bytearray((corrupt / ck.TENSORS_FILE).read_bytes())
    data[-1] ^= 0xFF
    (corrupt / ck.TENSORS_FILE).write_bytes(bytes(data))
    (no_manifest / ck.MANIFEST_FILE).unlink()
    with pytest.warns(UserWarning) as caught:
        assert ck.latest_checkpoint(tmp_path) == good
    text = " ".join(str(w.message) for w in caught)
    assert "truncated" in text and "checksum" in text and ck.MANIFEST_FILE in text
    with pytest.raises(ck.CheckpointError, match="truncated"):
        ck.load_checkpoint(truncated)


def test_a_damaged_only_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path):
    weights = make_checkpoint(tmp_path, 7) / ck.TENSORS_FILE
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ck.CheckpointError, match=r"no checkpoint in it is whole, .*truncated .*to start over"):
        ck.latest_checkpoint(tmp_path)


def test_missing_checkpoints(tmp_path):
    assert ck.latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(ck.CheckpointError, match="not found"):
        ck.load_checkpoint(tmp_path / "step_00000001")
    with pytest.raises(ck.CheckpointError, match="step_00000100"):
        ck.checkpoint_step(tmp_path / "best")


def test_keep_last(tmp_path):
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
    ck.keep_last(paths[3], 2)
    assert ck.list_checkpoints(tmp_path) == paths[2:]
    with pytest.raises(ValueError, match="at least 1"):
        ck.keep_last(paths[3], 0)


def test_a_broken_later_checkpoint_pushes_out_no_whole_one(tmp_path):
    """A run that resumes before it keeps what it saves, also where it keeps one."""
    earlier, broken = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 10)
    (broken / ck.TENSORS_FILE).unlink()
    with pytest.warns(UserWarning, match="skipping a broken checkpoint"):
        assert ck.latest_checkpoint(tmp_path) == earlier
    ck.keep_last(saved := make_checkpoint(tmp_path, 7), 1)
    with pytest.warns(UserWarning, match="skipping a broken checkpoint"):
        assert ck.latest_checkpoint(tmp_path) == saved
    assert not earlier.exists()
    ck.keep_last(again := make_checkpoint(tmp_path, 10), 1)
    assert again == broken and ck.list_checkpoints(tmp_path) == [again] and ck.latest_checkpoint(tmp_path) == again


@pytest.mark.parametrize("moment", ["write_tensors", "_crc32"])
def test_a_kill_while_the_next_checkpoint_is_written_leaves_the_only_one(tmp_path, moment):
    def save_twice() -> None:
        ck.keep_last(make_checkpoint(tmp_path, 1), 1)
        setattr(ck, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        ck.keep_last(make_checkpoint(tmp_path, 2), 1)

    process = multiprocessing.get_context("fork").Process(target=save_twice)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert ck.latest_checkpoint(tmp_path) == ck.checkpoint_path(tmp_path, 1)


def test_disk_full_is_said_and_keeps_the_old_one(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ck, "write_tensors", full)
    with pytest.raises(OSError, match=r"disk full while writing the checkpoint .*MiB free") as caught:
        ck.save_checkpoint(path, {"w": torch.zeros(1)}, {})
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert ck.load_checkpoint(path)[1] == {"step": 1}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "muon":
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizer_resumes_to_the_bit(tmp_path, name):
    model = make_model()
    optimizer = make_optimizer(name, model)
    train(model, optimizer, 3)
    tensors, optimizer_state = ck.flatten_optimizer(optimizer)
    rng = torch.get_rng_state()
    weights = {f"policy.{k}": v for k, v in model.state_dict().items()}
    path = ck.save_checkpoint(
        ck.checkpoint_path(tmp_path, 3),
        {**tensors, **weights},
        {"optimizer": optimizer_state},
    )
    train(model, optimizer, 3)

    loaded, state = ck.load_checkpoint(path)
    other = make_model(seed=99)
    other_optimizer = make_optimizer(name, other)
    load_weights(other, loaded, "test")
    ck.restore_optimizer(other_optimizer, loaded, state["optimizer"])
    torch.set_rng_state(rng)
    train(other, other_optimizer, 3)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_weights_that_do_not_fit_are_refused():
    model = make_model()
    weights = {f"policy.{k}": v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ck.CheckpointError, match=r"1 missing \['0.bias'\]"):
        load_weights(model, {k: v for k, v in weights.items() if k != "policy.0.bias"}, "file")
    with pytest.raises(ck.CheckpointError, match=r"0.bias has shape \(3,\), the model needs \(8,\)"):
        load_weights(model, {**weights, "policy.0.bias": torch.zeros(3)}, "file")
    weights["policy.0.bias"][0] = float("nan")
    with pytest.raises(ck.CheckpointError, match=r"file: 0.bias holds NaN"):
        load_weights(model, weights, "file")


def test_optimizer_of_another_model_is_refused():
    tensors, state = ck.flatten_optimizer(make_optimizer("adamw", make_model()))
    other = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ck.CheckpointError, match="does not fit"):
        ck.restore_optimizer(other, tensors, state)


def test_write_text_atomic(tmp_path):
    write_text_atomic(tmp_path / "a.json", "1")
    write_text_atomic(tmp_path / "a.json", "2")
    assert (tmp_path / "a.json").read_text() == "2" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_tensor_files_are_those_of_safetensors(tmp_path, metadata):
    tensors = {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), 'é"': torch.ones(1), "t": torch.eye(3)[:, :2]}
    tensors |= {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in TENSOR_DTYPES}
    write_tensors(tmp_path / "ours", tensors, metadata=metadata)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    write_tensors(tmp_path / "narrow", {"w": torch.ones(3)}, {"w": torch.bfloat16})
    assert load_file(tmp_path / "narrow")["w"].dtype == torch.bfloat16
