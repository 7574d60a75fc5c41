"""NVML through a made-up module in place of pynvml: no GPU was there when this was written."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.probe import nvml
from crater_slurm.probe.tools.run import Output
from crater_slurm.probe.tools.values import Card, Peer, Report


class NVMLError(Exception):
    """As pynvml's: what is not supported, and everything else that fails."""


class FakeNvml:
    """Answers like pynvml. A GPU is a dict; what it lacks is not supported."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, *gpus: dict[str, Any] | None) -> None:
        self.gpus = gpus
        self.running = False

    def __getattr__(self, name: str) -> Any:
        """Any other call answers with the GPU's own entry of that name."""
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(handle: dict[str, Any], *_: Any) -> Any:
            if name not in handle:
                raise NVMLError("Not Supported")
            return handle[name]

        return call

    def nvmlInit(self) -> None:  # noqa: N802
        self.running = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.running = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        gpu = self.gpus[index]
        if gpu is None:
            raise NVMLError("GPU is lost")
        return gpu

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"590.48.01"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 13010

    def nvmlDeviceGetNvLinkState(self, gpu: dict[str, Any], link: int) -> int:  # noqa: N802
        if link >= len(gpu.get("links", ())):
            raise NVMLError("Invalid Argument")
        return int(gpu["links"][link] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: dict[str, Any], link: int) -> int:  # noqa: N802
        return 2 if gpu["links"][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: dict[str, Any], link: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=gpu["links"][link].encode())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: dict[str, Any], index: int) -> Any:  # noqa: N802
        if gpu["instances"][index] is None:
            raise NVMLError("Not Found")
        return {"nvmlDeviceGetName": gpu["instances"][index]}


def gpu(bus: str, **more: Any) -> dict[str, Any]:
    return {"nvmlDeviceGetPciInfo": SimpleNamespace(busId=bus.encode())} | more


def speed(mb_s: int, status: int = 0) -> list[Any]:
    return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=mb_s))]


def survey(*gpus: dict[str, Any] | None) -> tuple[Report, list[str]]:
    notes: list[str] = []
    library = FakeNvml(*gpus)
    report = nvml.survey(library, notes)
    assert not library.running
    return report, notes


def test_all_that_a_card_can_tell() -> None:
    (card,), notes = (
        survey(
            gpu(
                "00000000:0A:00.0",
                nvmlDeviceGetName="NVIDIA H100 80GB HBM3",
                nvmlDeviceGetUUID=b"GPU-a",
                nvmlDeviceGetMinorNumber=3,
                nvmlDeviceGetMemoryInfo=SimpleNamespace(total=81559 * 2**20),
                nvmlDeviceGetCudaComputeCapability=(9, 0),
                nvmlDeviceGetMemoryAffinity=[0, 2, 0],
                nvmlDeviceGetMigMode=[0, 0],
            )
        )[0].cards,
        survey()[1],
    )
    assert card == Card(
        address="0000:0a:00.0",
        model="NVIDIA H100 80GB HBM3",
        uuid="GPU-a",
        minor=3,
        memory_mib=81559,
        compute_capability="9.0",
        numa_node=65,
        mig=False,
    )
    assert notes == []


def test_versions_of_driver_and_cuda() -> None:
    report, _ = survey()
    assert report == Report(driver="590.48.01", cuda="13.1")


def test_what_is_not_supported_is_unknown() -> None:
    (card,) = survey(gpu("0000:01:00.0"))[0].cards
    assert card == Card(address="0000:01:00.0")


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    report, notes = survey(gpu("0000:01:00.0"), None, gpu("not an address"))
    assert [card.address for card in report.cards] == ["0000:01:00.0"]
    assert notes == [
        "NVML can't read the GPU with its number 1: GPU is lost",
        "NVML can't read the GPU with its number 2: 'not an address' is no PCI address such as "
        "0000:0a:00.0",
    ]


def test_mig_instances_have_the_names_of_their_profiles() -> None:
    report, _ = survey(
        gpu(
            "0000:01:00.0",
            nvmlDeviceGetMigMode=[1, 1],
            nvmlDeviceGetMaxMigDeviceCount=4,
            instances=["NVIDIA A100-SXM4-40GB MIG 3g.20gb", None, b"A100 MIG 1g.5gb+me", None],
        )
    )
    assert report.cards[0].mig
    assert report.cards[0].mig_instances == ("3g.20gb", "1g.5gb+me")


def test_bridged_cards_are_peers_with_the_sum_of_their_links() -> None:
    """Two A100 PCIe with three bridges: 12 links of 25 GB/s each way are 600 GB/s."""
    one, other = "00000000:3B:00.0", "00000000:D8:00.0"
    report, _ = survey(
        gpu(one, links=[other] * 12, nvmlDeviceGetFieldValues=speed(25_000)),
        gpu(other, links=[one] * 12, nvmlDeviceGetFieldValues=speed(25_000)),
    )
    assert [card.peers for card in report.cards] == [
        (Peer(address="0000:d8:00.0", bandwidth_gb_s=600),),
        (Peer(address="0000:3b:00.0", bandwidth_gb_s=600),),
    ]


def test_cards_on_switches_reach_each_other_with_all_links() -> None:
    """18 links of H100, 26.562 GB/s on the line: 25 after error correction, 900 both ways."""
    cards = [
        gpu(f"0000:{n}:00.0", links=["switch"] * 18, nvmlDeviceGetFieldValues=speed(26_562))
        for n in (1, 2, 3)
    ]
    report, _ = survey(*cards, gpu("0000:4:00.0"))
    assert report.cards[0].peers == (
        Peer(address="0000:02:00.0", bandwidth_gb_s=900),
        Peer(address="0000:03:00.0", bandwidth_gb_s=900),
    )
    assert report.cards[3].peers == ()


def test_inactive_links_are_no_links_and_an_unknown_speed_is_unknown() -> None:
    one, other = "0000:01:00.0", "0000:02:00.0"
    report, _ = survey(
        gpu(one, links=[None, other, None], nvmlDeviceGetFieldValues=speed(0, status=3)),
        gpu(other, links=[None, one, None]),
    )
    assert report.cards[0].peers == (Peer(address=other),)
    assert report.cards[1].peers == (Peer(address=one),)


def test_a_library_that_can_t_start_raises_its_own_error() -> None:
    library = FakeNvml()
    library.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded"))  # type: ignore[method-assign]
    with pytest.raises(NVMLError, match="Driver Not Loaded"):
        nvml.survey(library, [])


def child(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: Any) -> str:
    """What the child prints with this module as pynvml."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    nvml.main()
    return capsys.readouterr().out


def test_the_child_s_report_comes_back_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = (
        gpu("0000:01:00.0", links=["0000:02:00.0"], nvmlDeviceGetFieldValues=speed(25_000)),
        gpu("0000:02:00.0", nvmlDeviceGetMigMode=[1, 1]),
    )
    printed = child(monkeypatch, capsys, FakeNvml(*cards, None))
    notes: list[str] = []
    expected, told = survey(*cards, None)
    assert nvml.decode("driver library: hello\n" + printed, notes) == expected
    assert notes == told
    assert expected.cards[0].peers == (Peer(address="0000:02:00.0", bandwidth_gb_s=50),)


def test_the_child_says_why_it_has_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = FakeNvml()
    library.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError("Library Not Found"))  # type: ignore[method-assign]
    printed = child(monkeypatch, capsys, library)
    with pytest.raises(CraterError, match="^Library Not Found$"):
        nvml.decode(printed, [])
    with pytest.raises(CraterError, match="nvidia-ml-py is not installed"):
        nvml.decode(child(monkeypatch, capsys, None), [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "NVML's process printed no JSON"),
        ("{}", "printed no report: report"),
        ('{"report": {"cards": [{}]}}', r"printed no report: report.cards.0.address"),
    ],
)
def test_what_is_no_report_says_so(text: str, why: str) -> None:
    with pytest.raises(CraterError, match=why):
        nvml.decode(text, [])


def test_reading_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def run(argv: list[str], **how: Any) -> Output:
        asked.update(how, argv=argv)
        return Output("", "python3 took longer than 30 s")

    monkeypatch.setattr(nvml, "run", run)
    notes: list[str] = []
    assert nvml.read(notes) is None
    assert notes == ["NVML says nothing of the GPUs: its process python3 took longer than 30 s"]
    assert asked["timeout_s"] == 30
    assert asked["argv"][:3] == [sys.executable, "-P", "-c"]


def test_reading_takes_the_child_s_report(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(cards=(Card(address="0000:01:00.0"),), driver="590.48.01")
    text = json.dumps({"report": dataclasses.asdict(report), "notes": ["one is lost"]})
    monkeypatch.setattr(nvml, "run", lambda argv, **_: Output(text))
    notes: list[str] = []
    assert nvml.read(notes) == report
    assert notes == ["one is lost"]


def test_a_real_child_answers_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU it reports, without it says why; a user's pynvml.py near by is not run."""
    for name in ("pynvml.py", "json.py", "crater_slurm.py"):
        (tmp_path / name).write_text("raise SystemExit('taken in')")
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []
    report = nvml.read(notes)
    assert (report is None) == any(n.startswith("NVML says nothing of the GPUs: ") for n in notes)
    assert not any("Traceback" in note or "taken in" in note for note in notes)
