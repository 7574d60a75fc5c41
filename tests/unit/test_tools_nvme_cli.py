"""nvme-cli's lists and logs, old form and new: samples written by hand."""

from __future__ import annotations

import pytest
import tool_samples as samples

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools import nvme_cli
from crater_slurm.probe.tools.nvme_cli import Drive, Health, parse_list, parse_smart_log
from crater_slurm.probe.tools.run import Output

SAMSUNG = Drive(
    name="nvme0n1",
    model="SAMSUNG MZQL23T8HCLS-00A07",
    serial="S64000000000",
    firmware="GDC5602Q",
    pci_bus_id="0000:41:00.0",
)


def test_the_flat_form() -> None:
    assert parse_list(samples.NVME_FLAT) == (
        Drive(
            name="nvme0n1",
            model="INTEL SSDPF2KX076TZ",
            serial="PHAX0000000000",
            firmware="2CV1E007",
        ),
        Drive(
            name="nvme1n1",
            model="SAMSUNG MZQL23T8HCLS-00A07",
            serial="S64000000000",
            firmware="GDC5602Q",
        ),
    )


def test_the_nested_form_and_a_multipath_drive_over_the_network() -> None:
    assert parse_list(samples.NVME_NESTED) == (
        SAMSUNG,
        Drive(name="nvme1n1", model="dellemc-powerstore", serial="X1", firmware="4.1.0.0"),
    )


@pytest.mark.parametrize("text", ["", "\n", '{"Devices": []}'])
def test_no_drives_is_no_error(text: str) -> None:
    assert parse_list(text) == ()


def test_the_log_has_wear_temperature_and_warnings() -> None:
    # 306 K is 33 degrees.
    assert parse_smart_log(samples.SMART) == Health(
        wear_percent=3, temperature_c=33, critical_warning=0
    )


def test_numbers_may_be_strings_and_wear_may_pass_100() -> None:
    assert parse_smart_log(samples.SMART_STRINGS) == Health(
        wear_percent=104, temperature_c=37, critical_warning=4
    )


@pytest.mark.parametrize(
    ("parser", "text", "why"),
    [
        (parse_list, "Failed to open", "nvme list printed no JSON"),
        (parse_list, "[]", "nvme list printed no Devices"),
        (parse_list, '{"Devices": {}}', "nvme list printed no Devices"),
        (parse_smart_log, "", "nvme smart-log printed no JSON"),
        (parse_smart_log, '{"temperature": 300}', "printed no percent_used"),
    ],
)
def test_what_can_t_be_read_says_so(parser: object, text: str, why: str) -> None:
    with pytest.raises(CraterError, match=why):
        parser(text)  # type: ignore[operator]


def test_reading_joins_list_and_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"list": Output(samples.NVME_NESTED), "/dev/nvme0n1": Output(samples.SMART)}
    denied = Output("", "nvme needs root: Permission denied")
    monkeypatch.setattr(
        nvme_cli, "run", lambda argv: told.get(argv[1]) or told.get(argv[2], denied)
    )
    notes: list[str] = []
    drives = nvme_cli.read(notes)
    assert drives["nvme0n1"].wear_percent == 3
    assert drives["nvme1n1"].wear_percent is None
    assert notes == ["wear of nvme1n1 is unknown: nvme needs root: Permission denied"]


def test_one_reason_of_many_drives_is_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"list": Output(samples.NVME_FLAT)}
    monkeypatch.setattr(nvme_cli, "run", lambda argv: told.get(argv[1], Output("{}")))
    notes: list[str] = []
    assert list(nvme_cli.read(notes)) == ["nvme0n1", "nvme1n1"]
    assert notes == ["wear of nvme0n1, nvme1n1 is unknown: nvme smart-log printed no percent_used"]


@pytest.mark.parametrize(("user", "told"), [(0, 0), (1000, 1)])
def test_an_empty_list_may_be_for_lack_of_root(
    monkeypatch: pytest.MonkeyPatch, user: int, told: int
) -> None:
    monkeypatch.setattr(nvme_cli, "run", lambda argv: Output('{"Devices": []}'))
    monkeypatch.setattr("os.geteuid", lambda: user)
    notes: list[str] = []
    assert nvme_cli.read(notes) == {}
    assert len(notes) == told


def test_reading_says_why_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    for output in (Output("", "nvme is not installed"), Output("no")):
        monkeypatch.setattr(nvme_cli, "run", lambda argv, output=output: output)
        assert nvme_cli.read(notes) == {}
    assert notes[0] == "nvme-cli says nothing of the drives: nvme is not installed"
    assert notes[1].startswith("nvme-cli says nothing of the drives: nvme list printed no JSON")
