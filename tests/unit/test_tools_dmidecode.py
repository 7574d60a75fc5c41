"""Memory modules of ``dmidecode -t memory``: samples written by hand after real boards' names."""

from __future__ import annotations

import pytest
import tool_samples as samples

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import Dimm
from crater_slurm.probe.tools import dmidecode
from crater_slurm.probe.tools.dmidecode import channel_of, parse, theoretical_bandwidth_gb_s
from crater_slurm.probe.tools.run import Output


def test_supermicro_names_the_channel_in_the_bank() -> None:
    dimms = parse(samples.DMI_SUPERMICRO)
    assert dimms == (
        Dimm(
            slot="P1-DIMMA1",
            size_mib=16384,
            kind="DDR4",
            speed_mt_s=3200,
            channel="P0_Node0_Channel0",
        ),
        Dimm(
            slot="P1-DIMMA2",
            size_mib=16384,
            kind="DDR4",
            speed_mt_s=3200,
            channel="P0_Node0_Channel0",
        ),
        Dimm(
            slot="P1-DIMMC1",
            size_mib=32768,
            kind="DDR4",
            speed_mt_s=2933,
            channel="P0_Node0_Channel2",
        ),
    )
    # Two channels are populated, and both run at the slowest module's 2933 MT/s.
    assert theoretical_bandwidth_gb_s(dimms) == 2 * 2933 * 8 / 1000 == 46.928


def test_dell_names_slots_by_socket_so_channels_are_unknown() -> None:
    dimms = parse(samples.DMI_DELL)
    assert [d.slot for d in dimms] == ["A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8"]
    assert {(d.size_mib, d.speed_mt_s, d.channel) for d in dimms} == {(65536, 3200, None)}
    assert theoretical_bandwidth_gb_s(dimms) is None


def test_amd_s_reference_boards_name_socket_and_channel() -> None:
    dimms = parse(samples.DMI_AMD)
    assert len(dimms) == 24
    assert dimms[0] == Dimm(
        slot="P0 CHANNEL A DIMM 0",
        size_mib=65536,
        kind="DDR5",
        speed_mt_s=4800,
        channel="P0 CHANNEL A",
    )
    assert len({d.channel for d in dimms}) == 24
    # Twelve channels of DDR5-4800 on each of two sockets: 460.8 GB/s each.
    assert theoretical_bandwidth_gb_s(dimms) == 921.6


def test_a_virtual_machine_has_memory_but_no_modules_to_speak_of() -> None:
    dimms = parse(samples.DMI_QEMU)
    assert dimms == (Dimm(slot="DIMM 0", size_mib=16384, kind="RAM"),)
    assert theoretical_bandwidth_gb_s(dimms) is None


def test_older_releases_say_clock_speed_in_mhz_and_mean_transfers() -> None:
    dimms = parse(samples.DMI_OLD)
    assert {d.speed_mt_s for d in dimms} == {2133}
    assert [d.channel for d in dimms][:5] == [
        *("NODE 0 DIMM_A", "NODE 0 DIMM_B", "NODE 0 DIMM_C", "NODE 0 DIMM_D", "NODE 1 DIMM_A"),
    ]
    assert theoretical_bandwidth_gb_s(dimms) == pytest.approx(136.512)


@pytest.mark.parametrize(
    ("slot", "bank", "channel"),
    [
        ("DIMM 0", "P0_Node0_Channel0_Dimm0", "P0_Node0_Channel0"),
        ("P1-DIMMC1", "P0_Node1_Channel2_Dimm0", "P0_Node1_Channel2"),
        ("P1-DIMMC1", "Not Specified", "P1-DIMMC"),
        ("CPU1_DIMM_A1", "NODE 1", "CPU1_DIMM_A"),
        ("CPU1_DIMM_A2", "NODE 1", "CPU1_DIMM_A"),
        ("DIMM_P0_A1", "BANK 0", "DIMM_P0_A"),
        ("DIMM_A1", "BANK 0", "DIMM_A"),
        ("DIMM_A1", "NODE 1", "NODE 1 DIMM_A"),
        ("DIMMB2", "Not Specified", "DIMMB"),
        ("NODE 1 / CHANNEL 2", "Not Specified", "NODE 1 / CHANNEL 2"),
        ("DIMM 0", "NODE 1 CHANNEL 2 DIMM 0", "NODE 1 CHANNEL 2"),
        ("DIMM 1", "P0 CHANNEL A", "P0 CHANNEL A"),
        ("ChannelA-DIMM0", "BANK 0", "ChannelA"),
        ("Controller0-ChannelB-DIMM1", "BANK 1", "Controller0-ChannelB"),
        ("A1", "Not Specified", None),
        ("PROC 1 DIMM 1", "Not Specified", None),
        ("DIMM 0", "BANK 0", None),
        ("DIMM 0", "Not Specified", None),
        ("", "", None),
    ],
)
def test_channels_are_told_where_a_name_tells_them(
    slot: str, bank: str, channel: str | None
) -> None:
    assert channel_of({"Locator": slot, "Bank Locator": bank}) == channel


@pytest.mark.parametrize(
    ("size", "size_mib"),
    [("16384 MB", 16384), ("64 GB", 65536), ("1 TB", 1048576), ("512 kB", None)],
)
def test_sizes(size: str, size_mib: int | None) -> None:
    found = parse(samples.memory_device(size, "A1", "B"))
    assert [d.size_mib for d in found] == ([size_mib] if size_mib else [])


@pytest.mark.parametrize("size", ["No Module Installed", "Unknown", ""])
def test_empty_slots_are_left_out(size: str) -> None:
    assert parse(samples.memory_device(size, "A1", "B")) == ()


def test_a_size_that_is_none_says_so() -> None:
    with pytest.raises(CraterError, match="'16 apples' is no size of a memory module"):
        parse(samples.memory_device("16 apples", "A1", "B"))


def test_modules_of_one_name_may_be_on_two_sockets() -> None:
    twice = "\n".join(2 * [samples.memory_device("16 GB", "DIMM_A1", "Not Specified")])
    assert [d.channel for d in parse(twice)] == [None, None]


def test_non_volatile_modules_carry_no_bandwidth() -> None:
    memory = Dimm(slot="A", size_mib=1, kind="DDR4", speed_mt_s=3200, channel="A")
    optane = Dimm(slot="B", size_mib=1, kind="Logical non-volatile device")
    assert theoretical_bandwidth_gb_s((memory, optane)) == 25.6
    assert theoretical_bandwidth_gb_s((optane,)) is None
    assert theoretical_bandwidth_gb_s(()) is None


@pytest.mark.parametrize("missing", ["speed_mt_s", "channel"])
def test_one_unknown_module_makes_the_bandwidth_unknown(missing: str) -> None:
    known = {"slot": "A", "size_mib": 1, "kind": "DDR4", "speed_mt_s": 3200, "channel": "A"}
    dimms = (Dimm(**known), Dimm(**{**known, missing: None}))
    assert theoretical_bandwidth_gb_s(dimms) is None


def test_reading_notes_why_modules_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    outputs = (
        Output("", "dmidecode needs root: /dev/mem: Permission denied"),
        Output("# dmidecode 3.3\n# No SMBIOS nor DMI entry point found, sorry.\n"),
        Output(samples.memory_device("16 apples", "A1", "B")),
    )
    for output in outputs:
        monkeypatch.setattr(dmidecode, "run", lambda argv, output=output: output)
        assert dmidecode.read(notes) == ()
    assert notes == [
        "memory modules are unknown: dmidecode needs root: /dev/mem: Permission denied",
        "memory modules are unknown: the firmware's tables list none",
        "memory modules are unknown: dmidecode: '16 apples' is no size of a memory module",
    ]
    monkeypatch.setattr(dmidecode, "run", lambda argv: Output(samples.DMI_QEMU))
    assert dmidecode.read(notes) == parse(samples.DMI_QEMU)
