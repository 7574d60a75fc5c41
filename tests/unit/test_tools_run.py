"""Running a tool: its output, or one sentence why there is none, and never a wait without end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from crater_slurm.probe.tools import run as module
from crater_slurm.probe.tools.run import run


def script(folder: Path, text: str, name: str = "tool") -> str:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_a_tool_is_run_in_the_c_locale_without_input(tmp_path: Path) -> None:
    output = run([script(tmp_path, 'cat; echo "$LC_ALL $1"'), "hello"])
    assert output == module.Output("C hello\n")


def test_a_missing_tool_is_not_installed() -> None:
    assert run(["no-such-tool", "-q"]).problem == "no-such-tool is not installed"


def test_a_failure_quotes_the_last_line_and_keeps_the_output(tmp_path: Path) -> None:
    output = run([script(tmp_path, "echo out; echo 'first' >&2; echo 'GPU is lost' >&2; exit 15")])
    assert output.text == "out\n"
    assert output.problem == "tool failed with exit status 15: GPU is lost"


def test_nvidia_smi_says_why_on_its_standard_output(tmp_path: Path) -> None:
    problem = run([script(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")]).problem
    assert problem == "tool failed with exit status 9: NVIDIA-SMI has failed"


def test_a_tool_that_prints_nothing_and_fails(tmp_path: Path) -> None:
    assert run([script(tmp_path, "exit 3")]).problem == (
        "tool failed with exit status 3: it printed nothing"
    )


def test_a_signal_is_told(tmp_path: Path) -> None:
    problem = run([script(tmp_path, "kill -SEGV $$")]).problem
    assert problem == "tool was ended by signal 11: it printed nothing"


def test_a_tool_that_needs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = script(tmp_path, "echo '/dev/mem: Permission denied' >&2; exit 1")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert run([tool]).problem == "tool needs root: /dev/mem: Permission denied"


def test_a_tool_that_can_t_be_executed(tmp_path: Path) -> None:
    file = tmp_path / "tool"
    file.write_bytes(b"\x7fELF broken")
    file.chmod(0o755)
    assert (run([str(file)]).problem or "").startswith("tool can't be run: ")


def test_a_deadline_ends_the_tool_and_what_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tool = script(tmp_path, f"echo early; (sleep 1; touch {mark}) & sleep 60")
    start = time.monotonic()
    output = run([tool], timeout_s=0.3)
    assert time.monotonic() - start < 2
    assert output == module.Output("early\n", "tool took longer than 0.3 s")
    time.sleep(1)
    assert not mark.exists()


def test_a_tool_that_no_signal_reaches_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in uninterruptible sleep: here the signal is simply never sent."""
    monkeypatch.setattr("os.killpg", lambda pid, number: None)
    monkeypatch.setattr(module, "_REAP_S", 0.1)
    start = time.monotonic()
    output = run([script(tmp_path, "exec sleep 3")], timeout_s=0.2)
    assert time.monotonic() - start < 2
    assert output.problem == "tool took longer than 0.2 s"


def test_a_tool_that_closes_its_output_and_stays_is_no_exception(tmp_path: Path) -> None:
    output = run([script(tmp_path, "echo all; exec >&- 2>&-; sleep 60")], timeout_s=0.5)
    assert output == module.Output("all\n", "tool took longer than 0.5 s")


def test_endless_output_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT_BYTES", 100_000)
    output = run([sys.executable, "-c", "while True: print('x' * 1000)"])
    assert len(output.text) == 100_000
    assert "printed more than" in (output.problem or "")


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    assert run([script(tmp_path, r"printf '\377ok'")]).text == "\ufffdok"
