"""Quantities as people write them: every unit, every rounding, every refusal."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.model import health, profile, units


@pytest.mark.parametrize(
    ("text", "default", "size"),
    [
        ("512", "MiB", 536_870_912),
        ("512", "B", 512),
        ("16GiB", "MiB", 17_179_869_184),
        ("16G", "MiB", 17_179_869_184),  # Slurm's own letter is binary
        ("40GB", "MiB", 40_000_000_000),
        ("1.5k", "MiB", 1536),
        (" 2 TiB ", "B", 2_199_023_255_552),
        ("0.3B", "B", 1),  # never less than was asked for
        ("1pb", "B", 10**15),
    ],
)
def test_sizes_are_read_with_their_unit_or_the_fields(text: str, default: str, size: int) -> None:
    assert units.parse_bytes(text, default) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e3", "16 XB", "1,5G", "0x10", "16GiBs", "١٦", "9" * 19, "1 000"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|unit"):
        units.parse_bytes(text, "MiB")


def test_mib_and_gb_are_rounded_up() -> None:
    assert units.parse_mib("1000000B") == 1
    assert units.parse_mib("16GB") == 15_259  # 16e9 / 2^20 = 15258.8
    assert units.parse_gb("200GiB") == 215  # 214.75
    assert units.parse_gb("1B") == 1


@pytest.mark.parametrize(
    ("text", "gb_s"),
    [("140", 140), ("140GB/s", 140), ("800MB/s", 0.8), ("1.5TB/s", 1500), ("140GBps", 140)],
)
def test_bandwidths_are_gigabytes_per_second(text: str, gb_s: float) -> None:
    assert units.parse_bandwidth_gb_s(text) == gb_s


@pytest.mark.parametrize("text", ["140Gb/s", "140gbps", "140Gb"])
def test_bits_are_asked_about_and_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="reads as bits"):
        units.parse_bandwidth_gb_s(text)


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_beyond_floating_point_is_refused_and_no_overflow(digits: int) -> None:
    for parse in (units.parse_bandwidth_gb_s, units.parse_latency_us, units.parse_count):
        with pytest.raises(ValueError, match="must be a number"):
            parse("9" * digits)


@pytest.mark.parametrize(
    ("text", "count"), [("800000", 800_000), ("800k", 800_000), ("1.2M", 1_200_000), ("1G", 10**9)]
)
def test_counts_take_decimal_letters(text: str, count: int) -> None:
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["0.5", "1.0001k", "800K/s", "k"])
def test_half_a_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole number|unit|count"):
        units.parse_count(text)


@pytest.mark.parametrize(
    ("text", "us"), [("100", 100), ("100us", 100), ("100µs", 100), ("0.2ms", 200), ("500ns", 0.5)]
)
def test_latencies_are_microseconds(text: str, us: float) -> None:
    assert units.parse_latency_us(text) == us


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1800", 1800),
        ("30m", 1800),
        ("1.5h", 5400),
        ("2d", 172_800),
        ("05:30", 330),
        ("01:00:00", 3600),
        ("1-00:00:01", 86_401),
        ("1-02:30", 95_400),  # Slurm's days-hours:minutes
    ],
)
def test_times_are_read_as_slurm_writes_them(text: str, seconds: int) -> None:
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["1-2-00:00", "1:2:3:4", "a:b", "-1:00", "1-", "30 fortnights"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"time"):
        units.parse_seconds(text)


@pytest.mark.parametrize(
    ("field", "unit"),
    [
        ("memory_mib", "MiB"),
        ("memory_bandwidth_gb_s", "GB/s"),
        ("cache_gb", "GB"),
        ("sequential_write_mb_s", "MB/s"),
        ("random_read_iops", "IOPS"),
        ("read_latency_us", "µs"),
        ("sm_count", "1"),
        ("model", ""),
    ],
)
def test_the_unit_is_in_the_name(field: str, unit: str) -> None:
    assert units.unit_of(field) == unit


#: Plain numbers: names of things, and how many of them there are.
NUMBERS = {
    "xid",
    *("index", "id", "peer", "socket", "numa_node", "width", "load", "time"),
    *("sockets", "cores_per_socket", "threads_per_core"),
    *("ecc_uncorrected", "ecc_corrected", "critical_warning"),
}


def test_every_number_of_a_profile_and_of_health_has_its_unit_in_its_name() -> None:
    kinds = [
        kind
        for module in (profile, health)
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind)
    ]
    numbers = {
        field.name
        for kind in kinds
        for field in dataclasses.fields(kind)
        if str(field.type).split(" ")[0] in ("int", "float")
    }
    assert len(numbers) > 40
    assert {name for name in numbers - NUMBERS if not units.unit_of(name)} == set()


@pytest.mark.parametrize(
    ("mib", "text"),
    [(512, "512 MiB"), (1024, "1 GiB"), (40_960, "40 GiB"), (1536, "1.5 GiB"), (2**21, "2 TiB")],
)
def test_memory_is_shown_in_its_largest_unit(mib: int, text: str) -> None:
    assert units.format_mib(mib) == text


def test_numbers_are_shown_short_but_comparable() -> None:
    assert units.format_number(142) == "142"
    assert units.format_number(138.7) == "138.7"
    assert units.format_number(1_200_000) == "1,200,000"
    assert units.format_number(80.256) == "80.26"


@given(st.integers(1, 10**12))
def test_whole_mib_survive_being_written_and_read(mib: int) -> None:
    assert units.parse_mib(f"{mib}MiB") == mib
    assert units.parse_mib(str(mib)) == mib


@given(st.text(max_size=60))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (
        units.parse_mib,
        units.parse_gb,
        units.parse_bandwidth_gb_s,
        units.parse_count,
        units.parse_latency_us,
        units.parse_seconds,
    ):
        try:
            assert parse(text) >= 0
        except ValueError as error:
            assert str(error)
