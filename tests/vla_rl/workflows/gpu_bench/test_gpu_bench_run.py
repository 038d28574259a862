"""The GPU benchmark's logic: attempts, time, memory, faults, resuming, parts in processes of their own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from vla_rl.workflows.gpu_bench import command, parts
from vla_rl.workflows.gpu_bench.command import finish, main, open_results, run_parts
from vla_rl.workflows.gpu_bench.parts import Part
from vla_rl.workflows.gpu_bench.record import Results, ResultsError, Target
from vla_rl.workflows.gpu_bench.sheet import LeftOutError, Sheet

CPU = torch.device("cpu")


@pytest.fixture
def results(tmp_path) -> Results:
    return open_results(tmp_path, "full", "cpu", resume=False)


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def broken():
    raise RuntimeError("an illegal memory access was encountered")


def read(results: Results) -> dict:
    return json.loads(results.file.read_text())["parts"]


def test_out_of_memory_leaves_one_attempt_out(results):
    sheet = Sheet(results, "act", CPU, 60)
    sheet.run([("B=64", out_of_memory), ("B=1", lambda: sheet.add("B=1", 1.0, "ms"))])
    record = read(results)["act"]
    assert record["state"] == "done" and [row["what"] for row in record["rows"]] == ["B=1"]
    assert record["left_out"] == ["B=64: out of memory (CUDA out of memory. Tried to allocate 20.00 GiB)"]
    assert finish(results) == 0


def test_an_attempt_that_raises_is_recorded_and_the_others_go_on(results, capsys):
    sheet = Sheet(results, "act", CPU, 60)
    sheet.run([("first", broken), ("second", lambda: sheet.add("second", 1.0, "ms"))])
    record = read(results)["act"]
    assert record["state"] == "failed" and len(record["rows"]) == 1
    assert "first: RuntimeError at" in record["errors"][0] and "illegal memory access" in record["errors"][0]
    assert finish(results) == 1
    assert "FAULT act: first: RuntimeError" in capsys.readouterr().out


def test_a_package_that_is_missing_is_no_fault_but_a_module_of_ours_is(results):
    def missing():
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    def ours():
        raise ModuleNotFoundError("No module named 'vla_rl.gone'", name="vla_rl.gone")

    def chosen():
        raise LeftOutError("there is no display")

    Sheet(results, "act", CPU, 60).run([("a", missing), ("b", chosen)])
    assert results.parts["act"].left_out == ["a: needs the package timm", "b: there is no display"]
    assert results.is_good
    Sheet(results, "update", CPU, 60).run([("c", ours)])
    assert not results.is_good


def test_out_of_time_says_what_was_left_out_and_resuming_makes_only_that(results):
    sheet = Sheet(results, "act", CPU, 60)
    made = []

    def slow():
        made.append("slow")
        sheet._seconds = 0.0

    sheet.run([("slow", slow), ("later", lambda: made.append("later"))])
    assert read(results)["act"]["state"] == "out of time" and results.parts["act"].pending == ["later"]
    again = Results.load(results.folder)
    sheet = Sheet(again, "act", CPU, 60)
    sheet.run([("slow", slow), ("later", lambda: made.append("later"))])
    assert made == ["slow", "later"] and again.parts["act"].state == "done"


@pytest.mark.parametrize("value", [2e-3, math.nan, math.inf])
def test_a_required_figure_that_misses_fails_the_benchmark(results, value):
    sheet = Sheet(results, "correctness", CPU, 60)
    sheet.add("gap", value, "from the CPU", Target(1e-3, required=True))
    assert results.parts["correctness"].rows[0].verdict == "wrong" and finish(results) == 1


def test_a_target_for_another_device_judges_nothing(results):
    sheet = Sheet(results, "act", CPU, 60)
    sheet.add("B=16", 500.0, "ms", Target(160.0, device="H200"))
    results.machine["device"] = "NVIDIA H200"
    sheet.add("B=16", 500.0, "ms", Target(160.0, device="H200"))
    sheet.add("rate", 500.0, "frames/s", Target(160.0, at_least=True, device="H200"))
    assert [row.verdict for row in results.parts["act"].rows] == ["", "missed", "met"]
    assert results.parts["act"].rows[0].target == "≤ 160 on H200" and results.is_good


def test_results_of_another_machine_or_without_resume_are_not_continued(results, tmp_path):
    results.save()
    with pytest.raises(ResultsError, match="--resume"):
        open_results(tmp_path, "full", "cpu", resume=False)
    with pytest.raises(ResultsError, match="size was full, here it is tiny"):
        open_results(tmp_path, "tiny", "cpu", resume=True)
    results.file.write_text(results.file.read_text()[:40])
    with pytest.raises(ResultsError, match="damaged"):
        open_results(tmp_path, "full", "cpu", resume=True)


def plant(monkeypatch, tmp_path: Path, body: str, minutes: float = 1.0) -> None:
    """Replace the parts by one with this source, measured in a process of its own."""
    folder = tmp_path / "planted"
    folder.mkdir(exist_ok=True)
    (folder / "planted_bench.py").write_text(
        "import sys, os, time\nfrom pathlib import Path\nfrom vla_rl.workflows.gpu_bench.record import Results\n"
        "results = Results.load(Path(dict(zip(sys.argv[1::2], sys.argv[2::2]))['--output']))\n" + body
    )
    root = Path(__file__).resolve().parents[4]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{folder}")
    monkeypatch.setattr(command, "MODULE", "planted_bench")
    monkeypatch.setattr(command, "PARTS", {"rates": Part("rates", "planted", minutes)})


def test_a_part_that_dies_keeps_its_figures_and_names_what_it_was_at(results, tmp_path, monkeypatch):
    body = "import torch\nfrom vla_rl.workflows.gpu_bench.sheet import Sheet\n"
    body += "sheet = Sheet(results, 'rates', torch.device('cpu'), 60)\n"
    body += (
        "sheet.run([('good', lambda: sheet.add('good', 1.0, 'ms')), ('bad', lambda: os._exit(11)), ('next', print)])"
    )
    plant(monkeypatch, tmp_path, body)
    found = run_parts(results, ["rates"], "cpu")
    record = found.parts["rates"]
    assert record.state == "died" and [row.what for row in record.rows] == ["good"]
    assert record.errors == ["bad: the part's process ended with exit code 11"]
    assert record.left_out == ["bad: not reached", "next: not reached"] and finish(found) == 1


def test_a_part_that_hangs_is_ended_and_is_no_fault(results, tmp_path, monkeypatch):
    body = (
        "results.parts['rates'].under_way, results.parts['rates'].pending = 'hang', ['hang', 'next']; results.save()\n"
    )
    plant(monkeypatch, tmp_path, body + "time.sleep(600)", minutes=0.1)
    monkeypatch.setattr(command, "GRACE", 0.0)
    record = run_parts(results, ["rates"], "cpu").parts["rates"]
    assert record.state == "out of time" and record.left_out == ["hang: no time left", "next: no time left"]


def test_done_parts_are_not_measured_again_and_missing_packages_are_named(results, monkeypatch):
    monkeypatch.setattr(command, "PARTS", {
        "rates": Part("rates", "planted", 1.0), "other": Part("other", "planted", 1.0, ("torch", "no_such_package")),
    })  # fmt: skip
    Sheet(results, "rates", CPU, 60).run([("a", lambda: None)])
    monkeypatch.setattr(command, "_run_child", lambda *_: pytest.fail("measured again"))
    found = run_parts(results, ["rates", "other"], "cpu")
    assert found.parts["other"].left_out == ["needs no_such_package, which this Python lacks"]
    assert found.parts["other"].state == "left out" and finish(found) == 0


def test_time_for_all_parts_together_is_kept(results, monkeypatch):
    monkeypatch.setattr(command, "_run_child", lambda *_: pytest.fail("measured"))
    found = run_parts(results, ["rates"], "cpu", minutes=0.0)
    assert found.parts["rates"].left_out == ["no time left"]


def test_the_command_measures_in_a_process_and_writes_a_page(tmp_path, capsys):
    out = tmp_path / "gpu"
    options = ["--device", "cpu", "--size", "tiny", "--part", "rates", "--output", str(out)]
    assert main(options) == 0
    record = Results.load(out).parts["rates"]
    assert record.state == "done" and len(record.rows) >= 6 and record.facts["flops_bf16"] > 0
    assert "bf16 product of 128 x 128" in (out / "report.html").read_text()
    assert main(options) == 2 and "--resume" in capsys.readouterr().err
    assert main([*options, "--resume"]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_and_starts_nothing(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "gpu")]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err and not (tmp_path / "gpu").exists()


@pytest.mark.parametrize(
    ("device", "size", "message"),
    [
        ("cpux", "tiny", "--device: got 'cpux', allowed: auto, cuda, cuda:N, and cpu with --size tiny"),
        ("meta", "tiny", "--device: got 'meta', allowed"),
        ("cuda:x", "full", "--device: got 'cuda:x', allowed"),
        ("cpu", "full", "--device cpu: at full size a CPU would need hours and 30 GB"),
        ("cuda:9", "full", "--device cuda:9: the GPUs here are cuda:0 to cuda:1; name one of them"),
    ],
)
def test_a_device_that_cannot_be_measured_is_refused_before_anything_starts(
    device, size, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("vla_rl.workflows.gpu_bench.command.run_parts", lambda *_, **__: pytest.fail("started"))
    assert main(["--device", device, "--size", size, "--output", str(tmp_path / "gpu")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "gpu").exists()
    assert command.find_device("cuda:1", "full") == "cuda:1" and command.find_device("auto", "full") == "cuda"


def test_the_parts_fit_into_their_time():
    assert all(part.minutes <= 8 for part in parts.PARTS.values())
    assert sum(part.minutes for part in parts.PARTS.values()) <= command.MINUTES == 51
