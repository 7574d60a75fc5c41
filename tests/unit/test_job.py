"""What crater_slurm.job promises without torch: it loads at once, fails clearly, writes whole files."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from crater_slurm import job
from crater_slurm.job import memory, trace
from crater_slurm.job.memory import MemoryTrace, TraceError
from crater_slurm.model import memory_trace as reader

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = MemoryTrace(
    peak_bytes=3 * 2**30,
    by_category=dict.fromkeys(memory.CATEGORIES, 0) | {"parameters": 2**31, "activations": 2**30},
    by_phase={"forward": 3 * 2**30, "backward": 2**31, "optimizer": 0},
    torch="2.13.0",
    precision="bf16",
    device="cuda",
    steps=2,
)


def other_pythons() -> list[str]:
    """Pythons of other versions that this machine has, as jobs may run."""
    found = (shutil.which(f"python3.{minor}") for minor in (9, 10, 12, 13))
    return [path for path in found if path and subprocess.run([path, "-V"]).returncode == 0]


def in_a_new_process(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "module",
    ["job", "job.trace", "job.memory", "job.checkpoint", "job.start", "job.loader", "job.casting"],
)
def test_importing_it_loads_the_standard_library_alone(module: str) -> None:
    loaded = in_a_new_process(
        f"import sys; before = set(sys.modules); import crater_slurm.{module}; "
        "print(*sorted(set(sys.modules) - before))"
    )
    own = {"crater_slurm", "crater_slurm.job"}
    assert own <= set(loaded)
    foreign = [m for m in loaded if m.split(".")[0] not in sys.stdlib_module_names]
    assert all(m in own or m.startswith("crater_slurm.job.") for m in foreign)


def test_importing_it_costs_less_than_20_ms() -> None:
    """Of processor time, at the best of five: what else the machine does counts for nothing."""
    code = (
        "import time; start = time.process_time(); import crater_slurm.job; "
        "print(time.process_time() - start)"
    )
    assert min(float(in_a_new_process(code)[0]) for _ in range(5)) < 0.020


def test_its_names_are_there_when_asked_for_and_no_others() -> None:
    assert [getattr(job, name).__name__.split(".")[-1] for name in job.__all__] == job.__all__
    with pytest.raises(AttributeError, match="trace_memry"):
        _ = job.trace_memry


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()])
def test_it_needs_nothing_but_its_own_folder(python: str, tmp_path: Path) -> None:
    """As a job finds it: this package's folder on PYTHONPATH, no site-packages, any Python."""
    (tmp_path / "crater_slurm").mkdir()
    shutil.copy(ROOT / "crater_slurm" / "__init__.py", tmp_path / "crater_slurm")
    shutil.copytree(ROOT / "crater_slurm" / "job", tmp_path / "crater_slurm" / "job")
    code = (
        "import crater_slurm.job as job; env = job.init(); job.loader_kwargs();"
        "job.checkpoint.save({'b': b'x' * 10000, 'n': [1]}, 3, wait=True);"
        "assert job.checkpoint.load().state == {'b': b'x' * 10000, 'n': [1]}; print(env.rank)"
    )
    env = {"PYTHONPATH": str(tmp_path), "CRATER_CHECKPOINT_DIR": str(tmp_path / "c")}
    done = subprocess.run(
        [python, "-S", "-W", "error", "-c", code], env=env, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_without_torch_it_says_what_is_missing_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TraceError, match=r"needs torch 2\.4 or newer, and .*python.* has none"):
        trace.trace_memory(lambda: None, lambda: None)


@pytest.mark.parametrize("version", ["1.13.0a0+gitunknown", "2.3.1+cu121", "", "unknown"])
def test_a_torch_too_old_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    with pytest.raises(TraceError) as refused:
        trace.trace_memory(lambda: None, lambda: None)
    assert "torch 2.4 or newer" in str(refused.value)
    assert (version or "without a version") in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps is 0; give 1 to 100"),
        ({"steps": 101}, "steps is 101"),
        ({"device": "tpu"}, "device is 'tpu'; known are cuda, cpu"),
        ({"precision": "fp8"}, "precision is 'fp8'; autocast knows bf16, fp16"),
    ],
)
def test_wrong_options_are_refused_before_torch_is_loaded(
    wrong: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TraceError, match=message):
        trace.trace_memory(lambda: None, lambda: None, **wrong)  # type: ignore[arg-type]


# The command line. torch only has to be there; none of these gets as far as to use it.


@pytest.fixture
def named_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "crater_trace_sample.py").write_text(
        "build = step = print\nseven = 7\ndef one(): return build\ndef pair(): return build, step\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.13.0"))
    return "crater_trace_sample"


@pytest.mark.parametrize("names", ["pair", "build,step"])
def test_build_and_step_are_found_by_name(named_module: str, names: str) -> None:
    assert trace._named(f"{named_module}:{names}") == (print, print)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "names no functions; give MODULE:FUNCTION"),
        ("build,step,more", "names no functions"),
        ("a b", "names no functions"),
        ("gone", "has no function gone"),
        ("seven", "has no function seven"),
        ("one", "gave builtin_function_or_method, not the pair"),
    ],
)
def test_a_wrong_name_ends_with_one_sentence_and_1(
    named_module: str, names: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace.main([f"{named_module}:{names}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("crater trace: ERROR: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_module_that_is_not_there_is_named(
    named_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace.main(["crater_no_such_module:pair"]) == 1
    assert "there is no module crater_no_such_module" in capsys.readouterr().err


# The file.


def test_the_writer_and_the_reader_know_the_same_words() -> None:
    assert memory.VERSION == reader.VERSION
    assert memory.CATEGORIES == reader.CATEGORIES
    assert memory.PHASES == reader.PHASES
    assert trace.DEVICES == reader.DEVICES
    assert trace.MOST_STEPS == reader.STEPS_LIMIT


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    path = SAMPLE.write(tmp_path / "trace.json")
    assert path == str(tmp_path / "trace.json")
    text = Path(path).read_text()
    assert json.loads(text)["version"] == 1
    assert reader.read_memory_trace(text).by_category == SAMPLE.by_category


def test_the_path_is_the_caller_s_else_the_environment_s_else_the_folder_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CRATER_MEMORY_TRACE", raising=False)
    assert SAMPLE.write() == "crater-memory.json"
    monkeypatch.setenv("CRATER_MEMORY_TRACE", "")
    assert SAMPLE.write() == "crater-memory.json"
    monkeypatch.setenv("CRATER_MEMORY_TRACE", "by-variable.json")
    assert SAMPLE.write() == "by-variable.json"
    assert SAMPLE.write("by-hand.json") == "by-hand.json"
    names = {"crater-memory.json", "by-variable.json", "by-hand.json"}
    assert {p.name for p in tmp_path.iterdir()} == names


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        SAMPLE.write(tmp_path / "trace.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "trace.json").stat().st_mode) == 0o640


def test_a_file_is_replaced_through_its_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    SAMPLE.write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == SAMPLE.as_json()


def test_a_pipe_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    """Renaming onto /dev/null, as root, would take it from the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        SAMPLE.write(pipe)
        assert os.read(reading, 65536).decode() == SAMPLE.as_json()
    finally:
        os.close(reading)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("target", ["missing/trace.json", "."])
def test_a_path_that_cannot_be_written_is_an_error_with_a_way_out(
    tmp_path: Path, target: str
) -> None:
    with pytest.raises(TraceError, match="can't be written to .*CRATER_MEMORY_TRACE"):
        SAMPLE.write(tmp_path / target)
    assert list(tmp_path.iterdir()) == []


def test_people_get_a_table() -> None:
    assert SAMPLE.as_text().splitlines() == [
        "peak              3,221,225,472 bytes      3.000 GiB",
        "parameters        2,147,483,648 bytes      2.000 GiB",
        "activations       1,073,741,824 bytes      1.000 GiB",
        "highest in GiB: forward 3.000, backward 2.000, optimizer 0.000",
        "2 steps, bf16, for cuda, torch 2.13.0",
    ]
