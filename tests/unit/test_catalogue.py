"""The GPU table, how names find its rows, and what it fills in."""

from __future__ import annotations

import csv
import dataclasses
import re

import pytest
import tool_samples as samples

from crater_slurm import catalogue
from crater_slurm.model.profile import Cpu, Gpu, Method, NodeProfile, NumaNode, Provenance
from crater_slurm.model.request import REQUIREMENTS
from crater_slurm.probe.tools import nvidia_smi
from crater_slurm.store.readers import PRECISIONS

NAMES = [
    ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
    ("A100-PCIE-40GB", "a100-pcie-40gb"),
    ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
    ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
    ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
    ("NVIDIA Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
    ("Tesla P100-PCIE-12GB", "p100-pcie-12gb"),
    ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
    ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
    ("NVIDIA H100 NVL", "h100-nvl-94gb"),
    ("NVIDIA H200", "h200-sxm5-141gb"),
    ("NVIDIA L4", "l4"),
    ("NVIDIA L40S", "l40s"),
    ("Tesla T4", "t4"),
    ("NVIDIA B200", "b200-sxm-180gb"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
    ("NVIDIA RTX A6000", "rtx-a6000"),
    ("AMD Instinct MI300X", "mi300x"),
    ("AMD Instinct(TM) MI210", "mi210"),
]
STRANGERS = [
    "NVIDIA A10G",
    "NVIDIA A100X",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GH200 480GB",
    "Tesla V100-FHHL-16GB",
    "AMD Instinct MI250X",
    "Quadro RTX 6000",
    "a100",
    "",
]


@pytest.mark.parametrize(("name", "model"), NAMES)
def test_a_drivers_name_finds_its_model(name: str, model: str) -> None:
    found = catalogue.lookup(name)
    assert found is not None
    assert found.id == model
    assert catalogue.model_id(name) == model


@pytest.mark.parametrize("name", STRANGERS)
def test_a_name_that_only_resembles_a_model_finds_nothing(name: str) -> None:
    assert catalogue.lookup(name) is None


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx-4080-super"),
        ("NVIDIA GeForce RTX 2080 SUPER", "rtx-2080-super"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("", "unknown"),
    ],
)
def test_a_model_that_is_not_in_the_table_is_its_own_id(name: str, model: str) -> None:
    assert catalogue.model_id(name) == model
    assert catalogue.lookup(model) is None


#: Captured machines: the driver's name for the card, and our id (None: not in the table).
CAPTURED = {
    "geforce-rtx-2080-super__595.71.05": None,
    "geforce-rtx-4080-super__595.71.05": None,
    "h100-80gb-hbm3__590.48.01": "h100-sxm5-80gb",
    "h100-mig__590.48.01": "h100-sxm5-80gb",
    "h200__590.48.01": "h200-sxm5-141gb",
    "h200-mig__590.48.01": "h200-sxm5-141gb",
    "l40s__595.80": "l40s",
}


@pytest.mark.parametrize("machine", CAPTURED)
def test_a_captured_card_agrees_with_its_row_in_all_that_its_driver_tells(machine: str) -> None:
    (row,) = nvidia_smi.parse_table(samples.section(machine, "idle :: query-gpu (csv"))
    (card,) = nvidia_smi.cards([row]).cards
    model = catalogue.lookup(card.model or "")
    assert (model.id if model else None) == CAPTURED[machine]
    # 0x233010DE is device 2330 of vendor 10de.
    device, vendor = re.fullmatch(r"0x(....)(....)", row["pci.device_id"] or "").groups()  # type: ignore[union-attr]
    assert catalogue.by_pci_id(f"{vendor}:{device}") is model
    if model is not None:
        assert card.memory_mib == model.driver_memory_mib
        assert card.compute_capability == model.compute_capability
        assert model.mig_capable == (card.mig is not None)
        assert row["pcie.link.gen.max"] == str(model.pcie_generation)


def test_the_captured_t4_and_h100_of_other_tables_agree_too() -> None:
    for file, model in (("1xH100", "h100-sxm5-80gb"), ("1xT4-NA", "t4")):
        text = samples.capture(f"virtualclient/nvidia-smi__query-gpu-{file}.csv")
        (card,) = nvidia_smi.cards(nvidia_smi.parse_table(text)).cards
        assert catalogue.model_id(card.model or "") == model
        assert card.memory_mib == catalogue.gpu_models()[model].driver_memory_mib


#: Number formats of a generation apart from those that the reference table lists one by one.
BASE = {"pascal": "fp32 fp16", "volta": "fp32 fp16 int8", "turing": "fp32 fp16 int8"}
BASE |= dict.fromkeys(("ampere", "ada", "hopper", "blackwell"), "fp32 tf32 fp16 int8")
BASE |= {"cdna2": "fp32 fp16 int8", "cdna3": "fp32 tf32 fp16 int8"}


def test_the_table_agrees_with_the_reference_in_every_row() -> None:
    file = samples.CAPTURES.parents[1] / "reference/gpu_catalogue.csv"
    if not file.exists():
        pytest.skip("no reference table beside the captures (CRATER_TEST_DATA)")
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert [row["gpu_id"] for row in rows] == list(catalogue.gpu_models())
    for row in rows:
        ours = catalogue.gpu_models()[row["gpu_id"]]
        # The reference has the card; driver and Slurm count its two halves.
        halves = 2 if ours.id == "mi250" else 1
        told = [row[f] for f in ("bf16", "fp8", "fp4", "int4_tensor")]
        listed = {
            n for n, t in zip(("bf16", "fp8", "fp4", "int4"), told, strict=True) if t == "yes"
        }
        expected = dataclasses.replace(
            ours,
            vendor=row["vendor"],
            architecture=row["architecture"],
            sm_count=int(row["sm_count"]) // halves,
            tensor_cores=row["tensor_cores"] == "yes",
            memory_mib=int(row["memory_mb"]) // halves,
            driver_memory_mib=int(row["memory_mb_driver"]),
            # 3277 GB/s of a whole MI250 are 1638 of one die, rounded down.
            memory_bandwidth_gb_s=float(row["memory_bandwidth_gb_s"]) // halves,
            precisions=frozenset(BASE[row["architecture"]].split()) | listed,
            compute_capability=row["compute_capability"],
            nvlink_bandwidth_gb_s=float(row["nvlink_bandwidth_gb_s"]),
            pcie_generation=int(row["pcie_gen"]),
            mig_capable=row["mig_capable"] == "yes",
            mig_instances=int(row["mig_max_instances"]),
            confidence=row["confidence"],
        )
        assert ours == expected


@pytest.mark.parametrize(
    ("pci_id", "model"),
    [
        ("10de:20f1", "a100-pcie-40gb"),
        ("10DE:20B0", "a100-sxm4-40gb"),
        ("10de:1eb8", "t4"),
        ("1002:74a1", "mi300x"),
        ("1002:740c", None),  # MI250 and MI250X share it, and differ in compute units
        ("10de:1e81", None),
        ("", None),
    ],
)
def test_a_pci_id_finds_its_model(pci_id: str, model: str | None) -> None:
    found = catalogue.by_pci_id(pci_id)
    assert (found.id if found else None) == model


def test_no_two_models_share_a_pci_id() -> None:
    ids = [(i, model) for model in catalogue.gpu_models().values() for i in model.pci_ids]
    assert len({i for i, _ in ids}) == len(ids)
    for pci_id, model in ids:
        assert re.fullmatch(r"(10de|1002):[0-9a-f]{4}", pci_id)
        assert pci_id.startswith("1002") == (model.vendor == "amd")


def test_every_id_and_driver_name_belongs_to_one_model() -> None:
    for model in catalogue.gpu_models().values():
        for name in (model.id, *model.driver_names):
            found = catalogue.lookup(name)
            assert found is not None
            assert found.id == model.id, f"{name} of {model.id} is claimed by {found.id}"
    assert len(catalogue.gpu_models()) == 34


def test_every_row_is_sane() -> None:
    requested = next(r for r in REQUIREMENTS if r.key == "precision").choices
    for model in catalogue.gpu_models().values():
        assert 40 <= model.sm_count <= 304, model.id
        assert 0.9 * model.memory_mib <= model.driver_memory_mib <= model.memory_mib, model.id
        assert 300 <= model.memory_bandwidth_gb_s <= 8000, model.id
        assert model.precisions <= set(PRECISIONS), model.id
        assert {"fp32", "fp16"} <= model.precisions, model.id
        assert (model.mig_instances > 0) == model.mig_capable, model.id
        assert model.confidence in {"high", "medium"}, model.id
    assert set(requested) <= set(PRECISIONS)


def test_figures_that_are_often_confused() -> None:
    models = catalogue.gpu_models()
    assert models["a100-pcie-40gb"].memory_bandwidth_gb_s == 1555
    assert models["a100-pcie-80gb"].memory_bandwidth_gb_s == 1935
    assert models["a100-sxm4-80gb"].memory_bandwidth_gb_s == 2039
    assert models["l4"].sm_count == 58
    assert models["h100-nvl-94gb"].memory_bandwidth_gb_s == 3938
    assert not models["p100-pcie-16gb"].tensor_cores
    assert all(m.tensor_cores for m in models.values() if not m.id.startswith("p100"))
    # A MI250 is two devices: 208 compute units, 128 GiB and 3277 GB/s on the card.
    assert (models["mi250"].sm_count, models["mi250"].memory_mib) == (104, 65536)


@pytest.mark.parametrize(
    ("model", "has", "lacks"),
    [
        ("p100-pcie-16gb", "fp16", "int8"),
        ("v100-sxm2-32gb", "fp16", "bf16"),
        ("t4", "int4", "bf16"),
        ("a100-pcie-40gb", "bf16", "fp8"),
        ("l4", "fp8", "fp4"),
        ("h100-sxm5-80gb", "fp8", "int4"),
        ("b200-sxm-180gb", "fp4", "int4"),
        ("mi210", "bf16", "tf32"),
    ],
)
def test_precisions_follow_the_generation(model: str, has: str, lacks: str) -> None:
    precisions = catalogue.gpu_models()[model].precisions
    assert has in precisions
    assert lacks not in precisions


def test_completing_fills_what_is_unknown() -> None:
    gpu = catalogue.complete(Gpu(index=0, model="NVIDIA A100-PCIE-40GB", memory_mib=40960))
    assert gpu == Gpu(
        index=0,
        model="a100-pcie-40gb",
        sm_count=108,
        tensor_cores=True,
        memory_mib=40960,
        memory_bandwidth_gb_s=1555,
        precisions=frozenset({"fp32", "tf32", "fp16", "bf16", "int8", "int4"}),
        compute_capability="8.0",
        mig_capable=True,
    )


def test_completing_never_replaces_what_the_driver_said() -> None:
    gpu = catalogue.complete(Gpu(index=0, model="l4", sm_count=60, memory_mib=23000))
    assert (gpu.sm_count, gpu.memory_mib, gpu.memory_bandwidth_gb_s) == (60, 23000, 300)


def test_an_unknown_model_stays_as_it_is() -> None:
    gpu = Gpu(index=0, model="NVIDIA A10G", memory_mib=23028)
    assert catalogue.complete(gpu) is gpu


def test_what_was_filled_has_the_method_catalogue_and_the_rest_its_own() -> None:
    profile = NodeProfile(
        name="gn01",
        cpu=Cpu(sockets=1, cores_per_socket=1),
        numa_nodes=(NumaNode(id=0, cpus=(0,)),),
        gpus=(
            Gpu(index=0, model="NVIDIA A10G", memory_mib=23028),
            Gpu(index=1, model="Tesla T4", memory_mib=15360, compute_capability="7.5"),
        ),
        source=Provenance(Method.DERIVED),
    )
    completed = catalogue.complete_profile(profile)
    assert set(completed.provenance) == {
        "gpus[1].sm_count",
        "gpus[1].tensor_cores",
        "gpus[1].memory_bandwidth_gb_s",
        "gpus[1].precisions",
        "gpus[1].mig_capable",
    }
    assert completed.where_from("gpus[1].sm_count").method is Method.CATALOGUE
    assert completed.where_from("gpus[1].memory_mib").method is Method.DERIVED
    assert catalogue.complete_profile(completed) == completed


def test_doubts_quote_both_figures() -> None:
    assert catalogue.doubts("a100-pcie-40gb", bandwidth_gb_s=2038) == [
        "a100-pcie-40gb with 2038 GB/s of memory bandwidth is +31% off the catalogue's 1555 GB/s"
    ]
    assert catalogue.doubts("a100-pcie-40gb", sm_count=128) == [
        "a100-pcie-40gb with 128 SMs, but the catalogue has 108"
    ]


def test_five_percent_is_no_doubt_and_more_is() -> None:
    # 1555 x 1.05 = 1632.75
    assert catalogue.doubts("a100-pcie-40gb", bandwidth_gb_s=1632, sm_count=108) == []
    assert len(catalogue.doubts("a100-pcie-40gb", bandwidth_gb_s=1633)) == 1
    assert len(catalogue.doubts("a100-pcie-40gb", bandwidth_gb_s=1477)) == 1
    assert catalogue.doubts("NVIDIA A10G", bandwidth_gb_s=1) == []
