"""Where processes render: how devices are given, from counts alone, and what EGL really has here."""

import os

import pytest

from sim.dummy import DummyConfig
from sim.rendering import devices
from sim.rendering.devices import EglDevice, Place, RenderError, choose_device, list_devices, render_here
from sim.tabletop import TabletopConfig
from vla_rl.config import ConfigError, validate
from vla_rl.types import EpisodeSpec

# EGL's order is not CUDA's; Mesa's software device comes last.
EIGHT = [*(EglDevice(i, cuda=7 - i) for i in range(8)), EglDevice(8, software=True)]
MESA = [EglDevice(0, software=True)]


def workers(asked, devices, num_workers: int, local_rank: int | None = None, visible=None) -> list[int | None]:
    return [choose_device(asked, devices, Place(i, num_workers, local_rank, visible)) for i in range(num_workers)]


def test_one_training_process_spreads_its_workers_over_the_visible_gpus() -> None:
    assert workers("auto", EIGHT, 10) == [7, 6, 5, 4, 3, 2, 1, 0, 7, 6]
    assert workers("auto", EIGHT, 3, visible=(2, 5)) == [5, 2, 5]


@pytest.mark.parametrize("rank", range(8))
def test_each_of_several_ranks_renders_on_its_own_gpu(rank: int) -> None:
    assert workers("auto", EIGHT, 3, local_rank=rank) == [7 - rank] * 3
    assert workers("auto", EIGHT, 2, local_rank=rank % 2, visible=(6, 3)) == [[1, 4][rank % 2]] * 2


def test_numbers_are_dealt_over_the_workers_of_all_ranks() -> None:
    given = [workers((0, 1, 2, 3), EIGHT, 2, local_rank=rank) for rank in range(3)]
    assert given == [[0, 1], [2, 3], [0, 1]]
    assert workers((8, 2), EIGHT, 3) == [8, 2, 8]


def test_cpu_is_the_software_device_whatever_gpus_there_are() -> None:
    assert workers("cpu", EIGHT, 2, local_rank=3) == [8, 8]
    with pytest.raises(RenderError, match=r"no software device here; there are: 0 \(CUDA GPU 0\)"):
        workers("cpu", [EglDevice(0, cuda=0)], 1)


def test_auto_without_a_gpu_of_its_own() -> None:
    assert workers("auto", MESA, 2) == [None, None]  # MuJoCo takes the first that works
    assert workers("auto", [EglDevice(0, file="/dev/dri/card0"), *MESA], 1) == [None]
    assert workers("auto", EIGHT, 2, visible=()) == [8, 8]  # hidden from this process
    assert workers("auto", EIGHT[7:8], 1, visible=(5,)) == [7]  # a container with one GPU: CUDA's number is 0 inside


def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    expected = r"no EGL device 3, 5 here; there are: 0 \(software\)\. They are EGL's numbers, not CUDA's"
    with pytest.raises(RenderError, match=expected):
        workers((3, 0, 5), MESA, 1)


def test_place_is_read_from_the_launchers_variables() -> None:
    assert Place.of(1, 4, {}) == Place(1, 4)
    launched = {"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "4, 6"}
    assert Place.of(0, 1, launched) == Place(0, 1, local_rank=2, visible=(4, 6))
    assert Place.of(0, 1, {"CUDA_VISIBLE_DEVICES": ""}).visible == ()
    assert Place.of(0, 1, {"CUDA_VISIBLE_DEVICES": "-1"}).visible == ()
    assert Place.of(0, 1, {"CUDA_VISIBLE_DEVICES": "GPU-3f"}).visible is None


def test_option_reads_words_numbers_and_what_older_recipes_say() -> None:
    def read(**values):
        return validate(DummyConfig, values, prefix="env").render_devices

    assert read() == read(render_devices=[]) == "auto"
    assert read(render_devices=2) == (2,)
    assert read(render_devices=[0, 1]) == (0, 1)
    assert read(render_devices="cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"env\.render_devices.*'gpu'"):
        read(render_devices="gpu")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has rendered nothing yet, whose variables are put back."""
    for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", devices.DEVICE_VARIABLE, devices._OURS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("LIBGL_ALWAYS_SOFTWARE", "__EGL_VENDOR_LIBRARY_FILENAMES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setattr(devices, "_opened", None)
    return monkeypatch


def test_what_one_environment_set_does_not_bind_the_next(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(devices, "list_devices", lambda: EIGHT)
    clean.setattr(devices, "_NVIDIA", devices.Path("/"))
    render_here("cpu")
    assert (os.environ["MUJOCO_EGL_DEVICE_ID"], os.environ["LIBGL_ALWAYS_SOFTWARE"]) == ("8", "1")
    render_here("auto", 1, 2)
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "6"
    assert "LIBGL_ALWAYS_SOFTWARE" not in os.environ


def test_auto_leaves_the_users_own_choice(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(devices, "list_devices", lambda: EIGHT)
    clean.setattr(devices, "_NVIDIA", devices.Path("/"))
    clean.setenv("MUJOCO_EGL_DEVICE_ID", "5")
    render_here("auto", 1, 2)
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "5"


def test_a_process_that_renders_cannot_move(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(devices, "list_devices", lambda: EIGHT)
    render_here((2,))
    devices.note_opened()
    render_here((2,))
    with pytest.raises(RenderError, match=r"renders on EGL device 2 already, and cannot on 3 too"):
        render_here((3,))


def test_numbers_need_egl(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(RenderError, match=r"env.render_devices=\[0\] are EGL devices, and MUJOCO_GL=osmesa"):
        render_here((0,))
    render_here("auto")


# ---------------------------------------------------------------- the devices of this machine

needs_software = pytest.mark.skipif(
    not any(device.software for device in list_devices()), reason="EGL has no software device here"
)


@needs_software
def test_worker_renders_on_the_device_that_it_is_told() -> None:
    """By word and by number."""
    number = next(device.number for device in list_devices() if device.software)
    images = []
    for asked in ("cpu", (number,)):
        env = TabletopConfig(num_workers=1, render_devices=asked, image_size=32).build(1)
        try:
            task = next(iter(env.spec.tasks))
            images.append(env.reset([EpisodeSpec(task, "train", 0)]).images["agentview"])
        finally:
            env.close()
    assert images[0].std() > 0
    assert (images[0] == images[1]).all()


@needs_software
def test_worker_says_which_devices_there_are() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)worker 0 .*no EGL device 77 here; there are: .*0 \("):
        DummyConfig(num_workers=2, render_devices=(0, 77)).build(2)
