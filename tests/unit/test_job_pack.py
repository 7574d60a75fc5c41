"""A state as a safetensors file and back: every kind of tensor, what is shared, what can't be."""

from __future__ import annotations

import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from crater_slurm.job import copying, layout
from crater_slurm.job.pack import SKELETON, Packer
from crater_slurm.job.tensorfile import DamagedError
from crater_slurm.job.tree import StateError
from crater_slurm.job.unpack import read_state

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")


def written(state: Any, path: Path, packer: Packer | None = None) -> layout.FileEntry:
    image = (packer or Packer()).pack(state, {"step": "1", "rank": "0", "world_size": "1"})
    data = bytearray(image.size)
    image.copy(0, image.size, copying.pointer_of(data))
    path.write_bytes(data)
    return layout.FileEntry(path.name, 0, len(data), layout.chunk_sums(memoryview(data)))


def again(state: Any, tmp_path: Path, **options: Any) -> Any:
    path = tmp_path / "rank-00000.safetensors"
    return read_state(str(path), written(state, path), **options)


TENSORS = {
    **{f"plain {t}": torch.arange(24).reshape(4, 6).to(t) for t in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2)},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "channels last": torch.arange(96.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "part of a larger one": torch.arange(100.0).reshape(10, 10)[2:5, ::3],
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 1000),
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "reversed": torch.arange(5).flip(0),
}  # fmt: skip


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_comes_back_as_it_was(kind: str, mmap: bool, tmp_path: Path) -> None:
    tensor = TENSORS[kind]
    back = again({"t": tensor, "odd": torch.ones(3, dtype=torch.int8)}, tmp_path, mmap=mmap)["t"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))


def test_dense_strides_come_back_and_wasteful_ones_don_t(tmp_path: Path) -> None:
    back = again({kind: TENSORS[kind] for kind in TENSORS}, tmp_path)
    assert back["transposed"].stride() == (1, 4)
    assert back["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert back["part of a larger one"].is_contiguous()
    assert back["expanded"].stride() == (1, 0)
    assert (tmp_path / "rank-00000.safetensors").stat().st_size < 20_000, (
        "the expanded one was laid out"
    )


def test_what_is_one_object_or_one_storage_is_one_again(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    flat = torch.arange(100.0)
    state = {
        "a": weight,
        "b": weight,
        "row": weight.detach()[2],
        "x": flat[10:30],
        "y": flat[20:60:2],
    }
    back = again(state, tmp_path)
    assert back["a"] is back["b"] and isinstance(back["a"], torch.nn.Parameter)
    assert back["a"].requires_grad
    back["a"].data.zero_()
    assert not back["row"].any()
    back["x"][10] = -7
    assert back["y"][0] == -7 and torch.equal(back["y"][1:], flat[22:60:2])


def test_parts_of_one_buffer_that_don_t_overlap_have_names_of_their_own(tmp_path: Path) -> None:
    flat = torch.arange(20.0)
    path = tmp_path / "f"
    written({"model": {"w": flat[:12].view(3, 4), "b": flat[12:]}}, path)
    loaded = pytest.importorskip("safetensors.torch").load_file(path)
    assert torch.equal(loaded["model.w"], flat[:12].view(3, 4))
    assert torch.equal(loaded["model.b"], flat[12:])


def test_the_file_is_one_of_safetensors_under_the_state_s_paths(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    path = tmp_path / "f"
    written({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, path)
    loaded = pytest.importorskip("safetensors.torch").load_file(path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.pop(f"model.{name}"), tensor)
    assert torch.equal(
        loaded["optimizer.state.0.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    assert SKELETON in loaded
    header = path.read_bytes()[8 : 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]]
    assert (
        b'"__metadata__":{"crater": "1", "step": "1", "rank": "0", "world_size": "1", "format": "pt"}'
        in header
    )


def test_optimizer_and_model_go_on_from_what_was_loaded(tmp_path: Path) -> None:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 4)
        return model, torch.optim.Adam(model.parameters())

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()

    one, two = made(), made()
    step(*one)
    back = again([part.state_dict() for part in one], tmp_path)
    for part, state in zip(two, back, strict=True):
        part.load_state_dict(state)
    step(*one)
    step(*two)
    assert torch.equal(one[0].weight, two[0].weight)


OTHERS = [
    np.arange(12).reshape(3, 4), np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.float32(3),
    np.array(3.5), np.zeros((0, 3)), np.arange(5, dtype=">i4"), np.arange(10)[::-2],
    np.array(["2020-01-01"], dtype="M8[D]"), np.array(["ab", "c"]),
    np.array([{"a": 1}], dtype=object), np.zeros(2, dtype=[("x", "i4")]), np.ones(3, np.complex64),
]  # fmt: skip


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_arrays_come_back(value: Any, tmp_path: Path) -> None:
    back = again({"v": value}, tmp_path)["v"]
    assert type(back) is type(value) and back.dtype == value.dtype and back.shape == value.shape
    assert np.array_equal(back, value)
    if isinstance(value, np.ndarray):
        assert back.flags.f_contiguous == value.copy("K").flags.f_contiguous or value.ndim < 2


def test_everything_else_comes_back_by_the_skeleton(tmp_path: Path) -> None:
    state = {
        "n": 1, "f": 2.5, "none": None, "text": "ä", "long": b"x" * 10000, "edit": bytearray(b"y" * 10000),
        "short": b"z", "tuple": (1, [2, {"k": (3,)}]), "ordered": OrderedDict(b=1, a=2), 5: "five",
        (1, 2): torch.ones(2), "device": torch.device("cpu"), "size": torch.Size([1, 2]),
        "sparse": torch.eye(3).to_sparse(), "generator": torch.get_rng_state(),
    }  # fmt: skip
    back = again(state, tmp_path)
    assert torch.equal(back.pop("sparse").to_dense(), state.pop("sparse").to_dense())
    assert torch.equal(back.pop("generator"), state.pop("generator"))
    assert torch.equal(back.pop((1, 2)), state.pop((1, 2)))
    assert (
        back == state and type(back["ordered"]) is OrderedDict and type(back["edit"]) is bytearray
    )


def test_a_state_that_holds_itself_does_not_hang(tmp_path: Path) -> None:
    state: dict[str, Any] = {"t": torch.ones(3)}
    state["self"] = state
    back = again(state, tmp_path)
    assert back["self"] is back and torch.equal(back["t"], torch.ones(3))


def test_names_that_clash_or_are_no_text_are_made_fit(tmp_path: Path) -> None:
    state = {
        1: torch.tensor([1]), "1": torch.tensor([2]), "a.b": torch.tensor([3]),
        "a": {"b": torch.tensor([4])}, "__metadata__": torch.tensor([5]), SKELETON: torch.tensor([6]),
        "\udc80": torch.tensor([7]), '"\n\\': torch.tensor([8]), "x" * 5000: torch.tensor([9]),
    }  # fmt: skip
    path = tmp_path / "f"
    entry = written(state, path)
    loaded = pytest.importorskip("safetensors.torch").load_file(path)
    assert sorted(int(t[0]) for n, t in loaded.items() if n != SKELETON) == list(range(1, 10))
    back = read_state(str(path), entry)
    assert back.keys() == state.keys()
    assert torch.equal(back.pop("a")["b"], state.pop("a")["b"])
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_what_can_t_be_pickled_is_named_by_its_place() -> None:
    state = {"model": {"w": torch.ones(2)}, "extra": [1, {"hook": lambda: 0}]}
    with pytest.raises(StateError, match=r"state\[extra\.1\.hook\] \(function: .*Leave it out"):
        Packer().pack(state, {})


def test_the_plan_is_kept_until_a_shape_changes(tmp_path: Path) -> None:
    packer = Packer()
    state = {"w": torch.zeros(1000), "lr": 0.1}
    packer.pack(state, {})
    plan = packer._plan
    entry = written({"w": torch.ones(1000), "lr": 0.2}, tmp_path / "f", packer)
    assert packer._plan is plan
    assert read_state(str(tmp_path / "f"), entry)["lr"] == 0.2
    packer.pack({"w": torch.ones(1001)}, {})
    assert packer._plan is not plan


def test_large_tensors_begin_where_the_copy_is_fast() -> None:
    """Half a page from the place of the source in its own page: neither runs into the other."""
    big = torch.zeros(20 << 20, dtype=torch.uint8)
    image = Packer().pack({"big": big, "small": torch.ones(3)}, {})
    segment = next(s for s in image.segments if s.nbytes == 20 << 20)
    apart = (segment.at - big.data_ptr()) % 4096
    assert 1024 <= apart <= 3072


def test_pieces_of_a_file_are_the_file(tmp_path: Path) -> None:
    """As a lane smaller than the file takes it, and also of tensors that don't lie in order."""
    state = {"t": torch.randn(300, 70).t(), "u": torch.randn(5000), "b": b"q" * 9999}
    image = Packer().pack(state, {})
    whole, pieces = bytearray(image.size), bytearray(image.size)
    image.copy(0, image.size, copying.pointer_of(whole))
    for at in range(0, image.size, 4096):
        count = min(4096, image.size - at)
        image.copy(at, count, copying.pointer_of(pieces) + at)
    assert pieces == whole


@pytest.mark.parametrize("where", ["header", "tensor", "skeleton"])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_flipped_bit_is_found(where: str, mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "f"
    entry = written({"w": torch.zeros(3 << 20)}, path)
    at = {"header": 30, "tensor": 9 << 20, "skeleton": entry.size - 5}[where]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises((DamagedError, StateError)):
        read_state(str(path), entry, mmap=mmap)


@pytest.mark.parametrize("data", [b"", b"x" * 7, b"\xff" * 8 + b"{}", struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 60) + b'{"crater.skeleton":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}'])  # fmt: skip
def test_what_is_no_file_of_this_kind_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="/f"):
        read_state(str(path), None)


def test_another_user_s_file_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    entry = written({"n": 1}, path)
    import os

    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(StateError, match="belongs to user"):
        read_state(str(path), entry)
    assert read_state(str(path), entry, trust=True) == {"n": 1}


def test_tensors_go_where_they_are_sent(tmp_path: Path) -> None:
    back = again({"t": torch.ones(4)}, tmp_path, map_location="meta")
    assert back["t"].device.type == "meta"


def test_loaded_tensors_don_t_hold_each_other_s_memory(tmp_path: Path) -> None:
    back = again({"a": torch.ones(1000), "b": torch.ones(10)}, tmp_path)
    assert back["b"].untyped_storage().nbytes() == 40
