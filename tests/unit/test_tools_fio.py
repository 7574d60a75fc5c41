"""fio's JSON and logs, on captures of real runs and on text that is cut off or garbled."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools.fio import iops_by_second, parse_report, parse_version

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("CRATER_TEST_DATA", ROOT / "../shared/data"))
CAPTURES = DATA / "captures" / "fio-json"
needs_captures = pytest.mark.skipif(
    not CAPTURES.is_dir(), reason=f"no captures in {CAPTURES}; set CRATER_TEST_DATA"
)

DIRECTION = {"io_bytes": 8192, "total_ios": 2, "iops": 4.0, "bw": 16, "clat_ns": {"mean": 2500.0}}
REPORT = {
    "fio version": "fio-3.33",
    "jobs": [{"jobname": "one", "error": 0, "read": DIRECTION, "write": DIRECTION}],
}


def capture(name: str) -> str:
    return (CAPTURES / name).read_text()


@needs_captures
def test_a_random_write_has_its_operations_and_its_bytes_apart() -> None:
    report = parse_report(capture("FIOExample.txt"))
    assert report.version == "fio-3.26"
    (job,) = report.jobs
    assert job.name == "fio_randwrite_1GB_4k_d1_th1_direct"
    assert job.write.total_ios == 262144
    assert job.write.iops == pytest.approx(2167.231601)
    assert job.write.bandwidth_mb_s == pytest.approx(8.876980)  # 8,876,980 B/s, 8668 KiB/s
    assert job.write.clat_mean_us == pytest.approx(418.473267)  # 418,473.267 ns
    assert (job.write.iops_min, job.write.iops_max) == (1, 3798)
    assert (job.read.iops, job.read.bandwidth_mb_s, job.read.clat_mean_us) == (0, 0, None)
    # 4 KiB each: what it did in a second, in operations and in bytes, is the same thing.
    assert job.write.iops * 4096 / 1e6 == pytest.approx(job.write.bandwidth_mb_s, rel=1e-4)


@needs_captures
def test_reads_and_writes_of_a_mix_are_not_taken_for_each_other() -> None:
    (job,) = parse_report(capture("Results_FIO_JSON.txt")).jobs
    assert (job.read.total_ios, job.write.total_ios) == (258144, 262144)
    assert job.read.iops == pytest.approx(2160.561601)
    assert job.read.clat_mean_us == pytest.approx(418.273267)
    assert job.read.bandwidth_mb_s == pytest.approx(7.876980)


@needs_captures
def test_an_older_version_with_other_latency_units_is_read() -> None:
    report = parse_report(capture("TestFioJson.txt"))
    (job,) = report.jobs
    assert report.version == "fio-3.13"
    assert job.read.iops == pytest.approx(35516.054735)
    assert job.read.bandwidth_mb_s == pytest.approx(145.473760)
    assert job.read.clat_mean_us == pytest.approx(7843.056612)


@needs_captures
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TestFioJsonWithError.txt", ["fiotest failed, error=42", "Illegal byte sequence"]),
        ("Results_FIO_Error_1.txt", ["Invalid or incomplete multibyte or wide character"]),
        ("Results_FIO_Error_2.txt", ["wide character 1", "and 1 more lines"]),
        ("Results_FIO_Verification_Error_1.txt", ["sha256: verify failed at file"]),
    ],
)
def test_a_failed_run_is_refused_with_fio_s_own_words(name: str, words: list[str]) -> None:
    with pytest.raises(CraterError) as caught:
        parse_report(capture(name))
    for word in words:
        assert word in str(caught.value)


def test_text_in_front_of_the_json_is_kept() -> None:
    report = parse_report("fio: a note\n" + json.dumps(REPORT))
    assert report.messages == ("fio: a note",)
    assert report.jobs[0].read.clat_mean_us == 2.5


@pytest.mark.parametrize(
    ("key", "mean_us"), [("clat_us", 7.0), ("clat", 7.0), ("clat_ms", 7000.0), ("clat_ns", 0.007)]
)
def test_latency_is_in_microseconds_whatever_fio_used(key: str, mean_us: float) -> None:
    direction = {k: v for k, v in DIRECTION.items() if k != "clat_ns"} | {key: {"mean": 7}}
    job = {"jobname": "one", "error": 0, "read": direction, "write": DIRECTION}
    report = parse_report(json.dumps(REPORT | {"jobs": [job]}))
    assert report.jobs[0].read.clat_mean_us == pytest.approx(mean_us)


def test_bandwidth_without_bytes_is_of_kib_per_second() -> None:
    assert parse_report(json.dumps(REPORT)).jobs[0].read.bandwidth_mb_s == 0.016384


@given(st.integers(min_value=0, max_value=len(json.dumps(REPORT)) - 1))
def test_json_that_is_cut_off_is_an_error_with_a_sentence(length: int) -> None:
    with pytest.raises(CraterError):
        parse_report(json.dumps(REPORT)[:length])


@given(st.integers(0, len(json.dumps(REPORT)) - 1), st.text(max_size=3))
def test_garbled_json_never_ends_in_a_traceback(place: int, noise: str) -> None:
    text = json.dumps(REPORT)
    try:
        parse_report(text[:place] + noise + text[place + 1 :])
    except CraterError as error:
        assert str(error)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_values_of_any_kind_never_end_in_a_traceback(value: object) -> None:
    for key in DIRECTION:
        job = {"jobname": "one", "error": 0, "read": DIRECTION | {key: value}, "write": DIRECTION}
        try:
            parse_report(json.dumps(REPORT | {"jobs": [job]}))
        except CraterError as error:
            assert str(error)


@pytest.mark.parametrize("text", ["{" * 100_000, '{"jobs": ' + "[" * 100_000, "{}", "", "\x00"])
def test_what_is_not_fio_s_is_refused(text: str) -> None:
    with pytest.raises(CraterError):
        parse_report(text)


def test_iops_of_a_second_are_the_sum_of_jobs_and_directions() -> None:
    first = "1000, 10, 0, 4096, 0\n1000, 3, 1, 4096, 0\n2000, 12, 0, 4096, 0\n"
    second = "1001, 20, 0, 4096, 0\n2003, 22, 0, 4096, 0\n3000, 99, 0, 4096, 0\n"
    # The third second has only one of the two jobs: its sum would be too low.
    assert iops_by_second([first, second]) == (33, 34)


@pytest.mark.parametrize("line", ["x, 1", "1000", "1000, nan", "inf, 3"])
def test_a_log_that_is_not_fio_s_is_refused(line: str) -> None:
    with pytest.raises(CraterError, match="IOPS log"):
        iops_by_second([line])


@pytest.mark.parametrize(
    ("text", "version"),
    [("fio-3.33\n", (3, 33)), ("fio-3.1", (3, 1)), ("fio-3.36-12-gab", (3, 36))],
)
def test_versions_are_read(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_no_version_is_an_error() -> None:
    with pytest.raises(CraterError, match="no version of fio"):
        parse_version("bash: fio: command not found")
