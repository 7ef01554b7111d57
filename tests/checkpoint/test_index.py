"""What a directory of safetensors files may look like, and the one error for each way in which it may be broken."""

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slotpy.checkpoint.index import INDEX_NAME, TensorIndex
from slotpy.errors import CheckpointError, ReadError
from tests.checkpoint.raw_files import write_raw, write_tensors

U8_4 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        TensorIndex.open(directory)
    return caught.value


# Reading what is right


def test_open_finds_every_tensor_that_the_reference_writer_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(0, 2**32, (4, 2), np.uint32),
        "c": rng.standard_normal(7).astype(np.float16),
        "scalar": np.array(2.5, np.float64),
        "ids": np.array([-1, 2**60], np.int64),
        "mask": np.array([True, False, True]),
        "none": np.zeros((0, 3), np.float32),
    }
    save_file({name: arrays[name] for name in ("a", "b", "none")}, tmp_path / "x-1.safetensors")
    save_file({name: arrays[name] for name in ("c", "scalar", "ids", "mask")}, tmp_path / "x-2.safetensors")
    index = TensorIndex.open(tmp_path)
    assert [path.name for path in index.files] == ["x-1.safetensors", "x-2.safetensors"]
    assert index.spans.keys() == arrays.keys()
    for name, array in arrays.items():
        span = index.spans[name]
        raw = index.files[span.file].read_bytes()[span.offset : span.offset + span.nbytes]
        assert raw == array.tobytes() == index.read(name).tobytes()
        assert span.shape == array.shape
        found = index.read_array(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_read_array_widens_bf16_exactly_and_leaves_fp8_codes(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 0.0, np.inf, 2.0**-130], np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    codes = bytes([0x38, 0x7E, 0x80])
    write_tensors(
        tmp_path / "m.safetensors",
        {"w": ("BF16", (5,), bf16.tobytes()), "q": ("F8_E4M3", (3,), codes), "s": ("F8_E8M0", (), b"\x7f")},
    )
    index = TensorIndex.open(tmp_path)
    found = index.read_array("w")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)
    assert index.read_array("q").tobytes() == codes
    assert index.read_array("s").shape == ()


def test_empty_tensors_do_not_overlap(tmp_path: Path) -> None:
    header = {
        "w": entry(offsets=[0, 4]),
        "e1": entry(shape=[0], offsets=[0, 0]),
        "e2": entry(shape=[3, 0], offsets=[0, 0]),
        "e3": entry(shape=[0], offsets=[2, 2]),
        "e4": entry("BF16", [0], [4, 4]),
    }
    write_raw(tmp_path / "m.safetensors", header, bytes(4))
    index = TensorIndex.open(tmp_path)
    assert index.read("e3").shape == (0,)
    assert index.read_array("e2").shape == (3, 0)
    assert index.read_array("e4").shape == (0,)


def test_header_may_have_metadata_and_trailing_spaces(tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, "w": U8_4}).encode() + b" " * 37
    write_raw(tmp_path / "m.safetensors", text, b"abcd")
    index = TensorIndex.open(tmp_path)
    assert list(index.spans) == ["w"]
    assert index.read("w").tobytes() == b"abcd"


def test_symlinked_directory_and_files_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_raw(blobs / "5feb", {"w": U8_4}, b"abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/5feb")
    link = tmp_path / "current"
    link.symlink_to(snapshot)
    index = TensorIndex.open(link)
    assert index.files == (snapshot.resolve() / "model.safetensors",)
    link.unlink()
    link.symlink_to(tmp_path)
    assert index.read("w").tobytes() == b"abcd"


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    write_raw(tmp_path / "m.safetensors", {"w": U8_4}, b"abcd")
    (tmp_path / "._m.safetensors").write_bytes(b"left by macOS")
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "m.safetensors.incomplete").write_bytes(b"x")
    assert len(TensorIndex.open(tmp_path).files) == 1


def test_index_need_not_name_every_file(tmp_path: Path) -> None:
    write_raw(tmp_path / "m.safetensors", {"w": U8_4}, b"abcd")
    write_raw(tmp_path / "mtp.safetensors", {"v": U8_4}, b"abcd")
    write_index(tmp_path, {"w": "m.safetensors"})
    assert TensorIndex.open(tmp_path).spans.keys() == {"v", "w"}


def test_time_to_open_grows_with_the_number_of_tensors_only(tmp_path: Path) -> None:
    for file in range(20):
        header = {
            f"model.language_model.layers.{file}.mlp.experts.{n}.gate_proj.weight": entry(
                "BF16", [2], [4 * n, 4 * n + 4]
            )
            for n in range(2500)
        }
        write_raw(tmp_path / f"{file}.safetensors", header, bytes(10000))
    begin = time.perf_counter()
    assert len(TensorIndex.open(tmp_path).spans) == 50_000
    # 0.3 s on a slow core; comparing every span with every other would take minutes.
    assert time.perf_counter() - begin < 5


# Refusing what is wrong


def one_file(content: Callable[[Path], object]) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        content(directory / "m.safetensors")

    return build


def header_case(header: object, data: bytes = bytes(4)) -> Callable[[Path], None]:
    return one_file(lambda path: write_raw(path, header, data))


def text_case(text: bytes) -> Callable[[Path], None]:
    return one_file(lambda path: path.write_bytes(text))


def length_case(length: int) -> Callable[[Path], None]:
    return one_file(lambda path: write_raw(path, {"w": U8_4}, bytes(4), length=length))


def sparse_huge_header(path: Path) -> None:
    with open(path, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
TWICE = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'

# name: (build, problem, tensor, expected, found); a None is not looked at.
BROKEN: dict[str, tuple[Callable[[Path], None], str, str | None, str | None, str | None]] = {
    "empty file": (text_case(b""), "empty file", None, None, "0 bytes"),
    "cut inside the length": (text_case(b"\x10\0\0"), "impossible header length", None, None, "a file of 3 bytes"),
    "cut inside the header": (
        text_case((40).to_bytes(8, "little") + b'{"w":'),
        "impossible header length",
        None,
        "at most 5 bytes",
        "40 in a file of 13 bytes",
    ),
    "header beyond the file": (length_case(10_000), "impossible header length", None, None, "10000 in a file"),
    "header length like a text file": (
        text_case(b"<!DOCTYPE html><html>"),
        "impossible header length",
        None,
        None,
        None,
    ),
    "header over 100 MB": (
        one_file(sparse_huge_header),
        "impossible header length",
        None,
        "at most 100000000",
        "100000001",
    ),
    "Git LFS pointer": (text_case(LFS_POINTER), "Git LFS pointer", None, None, None),
    "header not JSON": (header_case(b"{not json}"), "the header is not JSON", None, None, "line 1 column 2"),
    "header not UTF-8": (header_case(b'{"\xff":1}'), "the header is not JSON", None, None, "utf-8"),
    "header nested without end": (header_case(b'{"a":' + b"[" * 200_000), "the header is not JSON", None, None, None),
    "header a list": (header_case(b"[]"), "the header is no JSON object", None, None, "list"),
    "header cut short": (length_case(30), "the header is not JSON", None, None, None),
    "one tensor twice in a file": (header_case(TWICE), "names one key twice", "w", None, None),
    "entry not an object": (header_case({"w": [1]}), "malformed tensor entry", "w", "data_offsets", "[1]"),
    "entry without shape": (
        header_case({"w": {"dtype": "U8", "data_offsets": [0, 4]}}),
        "malformed tensor entry",
        "w",
        "a shape",
        "data_offsets",
    ),
    "fractional size": (header_case({"w": entry(shape=[4.0])}), "malformed tensor entry", "w", "integers", "[4.0]"),
    "boolean size": (header_case({"w": entry(shape=[4, True])}), "malformed tensor entry", "w", "integers", "True"),
    "text for a shape": (header_case({"w": entry(shape="4")}), "malformed tensor entry", "w", "integers", "'4'"),
    "negative size": (header_case({"w": entry(shape=[-4])}), "malformed tensor entry", "w", ">= 0", "[-4]"),
    "size beyond reason": (header_case({"w": entry(shape=[10**4000])}), "malformed tensor entry", "w", None, None),
    "product beyond reason": (
        header_case({"w": entry(shape=[2**50] * 400)}),
        "malformed tensor entry",
        "w",
        None,
        None,
    ),
    "negative offset": (
        header_case({"w": entry(offsets=[-4, 0])}),
        "malformed tensor entry",
        "w",
        "0 <= begin",
        "[-4, 0]",
    ),
    "reversed offsets": (header_case({"w": entry(offsets=[4, 0])}), "malformed tensor entry", "w", "<= end", "[4, 0]"),
    "three offsets": (
        header_case({"w": entry(offsets=[0, 2, 4])}),
        "malformed tensor entry",
        "w",
        "[begin, end]",
        None,
    ),
    "unknown dtype": (header_case({"w": entry("F4_E2M1")}), "unknown dtype", "w", "BF16", "'F4_E2M1'"),
    "dtype not text": (header_case({"w": entry(7)}), "unknown dtype", "w", None, "7"),
    "dtype and shape against bytes": (
        header_case({"w": entry("F32", [2, 2], [0, 4])}),
        "dtype and shape disagree",
        "w",
        "16 bytes for F32 [2, 2]",
        "4 bytes",
    ),
    "truncated data": (
        header_case({"v": U8_4, "w": entry(shape=[8], offsets=[4, 12])}, bytes(10)),
        "truncated file",
        "w",
        "bytes",
        "bytes",
    ),
    "span out of range": (
        header_case({"v": U8_4, "w": entry(offsets=[1000, 1004])}, bytes(8)),
        "truncated file: a tensor lies beyond its end",
        "w",
        None,
        None,
    ),
    "empty tensor out of range": (
        header_case({"v": U8_4, "w": entry(shape=[0], offsets=[9, 9])}),
        "truncated file",
        "w",
        None,
        None,
    ),
    "trailing bytes": (header_case({"w": U8_4}, bytes(7)), "trailing bytes", None, "bytes", "bytes"),
    "overlapping spans": (
        header_case({"v": U8_4, "w": entry(offsets=[2, 6])}, bytes(6)),
        "overlapping tensors",
        "w",
        "after v",
        "it at byte",
    ),
    "identical spans": (header_case({"v": U8_4, "w": U8_4}), "overlapping tensors", "w", "after v", None),
    "unclaimed bytes": (
        header_case({"v": U8_4, "w": entry(offsets=[6, 10])}, bytes(10)),
        "unclaimed bytes before a tensor",
        "w",
        "after v",
        None,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_gets_one_error_naming_everything(tmp_path: Path, case: str) -> None:
    build, problem, tensor, expected, found = BROKEN[case]
    write_raw(tmp_path / "good.safetensors", {"good": U8_4}, bytes(4))
    build(tmp_path)
    error = refusal(tmp_path)
    assert problem in str(error)
    assert str(tmp_path / "m.safetensors") in str(error)
    assert error.tensor == tensor
    assert expected is None or expected in str(error.expected)
    assert found is None or found in str(error.found)
    assert error.hint and error.hint in str(error)
    assert len(str(error)) < 1000


def test_truncated_file_names_the_true_sizes(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m.safetensors", {"w": entry(shape=[8], offsets=[0, 8])}, bytes(8))
    size = path.stat().st_size
    os.truncate(path, size - 3)
    error = refusal(tmp_path)
    assert (error.expected, error.found) == (f"a file of {size} bytes", f"{size - 3} bytes")


def test_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.safetensors", {"w": U8_4}, bytes(4))
    write_raw(tmp_path / "b.safetensors", {"w": U8_4}, bytes(4))
    error = refusal(tmp_path)
    assert error.tensor == "w"
    assert "a.safetensors and b.safetensors" in str(error.found)
    write_index(tmp_path, {"w": "b.safetensors"})
    assert "Move a.safetensors" in refusal(tmp_path).hint
    write_index(tmp_path, {"w": "a.safetensors"})
    assert "Move b.safetensors" in refusal(tmp_path).hint


def test_missing_shard_named_by_the_index_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.safetensors", {"w": U8_4}, bytes(4))
    write_index(tmp_path, {"w": "a.safetensors", "x": "b.safetensors", "y": "c.safetensors"})
    error = refusal(tmp_path)
    assert "missing shard" in str(error)
    assert error.file == tmp_path / "b.safetensors"
    assert (error.expected, error.found) == (f"3 files named by {INDEX_NAME}", "1 of them")


@pytest.mark.parametrize(("elsewhere", "found"), [(False, "it in no file"), (True, "it in b.safetensors")])
def test_tensor_named_by_the_index_must_be_in_its_file(tmp_path: Path, elsewhere: bool, found: str) -> None:
    write_raw(tmp_path / "a.safetensors", {"w": U8_4}, bytes(4))
    write_raw(tmp_path / "b.safetensors", {"x" if elsewhere else "y": U8_4}, bytes(4))
    write_index(tmp_path, {"w": "a.safetensors", "x": "a.safetensors"})
    error = refusal(tmp_path)
    assert (error.file, error.tensor) == (tmp_path / "a.safetensors", "x")
    assert (error.expected, error.found) == ("it in a.safetensors", found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "the index is not JSON"),
        (b"{", "the index is not JSON"),
        (b"[1]", "the index is no JSON object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": ["a.safetensors"]}', "no weight_map"),
        (b'{"weight_map": {"w": 3}}', "no file of this directory"),
        (b'{"weight_map": {"w": "../a.safetensors"}}', "no file of this directory"),
        (b'{"weight_map": {"w": "pytorch_model.bin"}}', "no file of this directory"),
        (b'{"weight_map": {"w": "a.safetensors", "w": "a.safetensors"}}', "names one key twice"),
        (LFS_POINTER, "Git LFS pointer"),
    ],
)
def test_broken_index_is_refused(tmp_path: Path, text: bytes, problem: str) -> None:
    write_raw(tmp_path / "a.safetensors", {"w": U8_4}, bytes(4))
    (tmp_path / INDEX_NAME).write_bytes(text)
    error = refusal(tmp_path)
    assert problem in str(error)
    assert error.file == tmp_path / INDEX_NAME
    assert error.hint


def test_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    error = refusal(tmp_path)
    assert "no safetensors files" in str(error)
    assert error.file == tmp_path


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "m.safetensors", {"w": U8_4}, bytes(4))
    assert "not a directory" in str(refusal(file))
    assert "No such file" in str(refusal(tmp_path / "absent"))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot open the checkpoint directory" in str(refusal(loop))


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in str(refusal(tmp_path))
    (tmp_path / "pipe.safetensors").unlink()
    (tmp_path / "folder.safetensors").mkdir()
    assert "not a regular file" in str(refusal(tmp_path))


def test_link_to_nothing_says_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").symlink_to("../blobs/5feb")
    error = refusal(tmp_path)
    assert "a link to a file that is not there" in str(error)
    assert error.found == "../blobs/5feb"


@pytest.fixture
def unprivileged_directory() -> Iterator[Path]:
    """Give a directory that anyone may enter, as a user whom file modes bind (root is not bound)."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        directory.chmod(0o755)
        if root:
            os.chown(directory, 65534, -1)
            os.seteuid(65534)
        try:
            yield directory
        finally:
            if root:
                os.seteuid(0)
            directory.chmod(0o755)


@pytest.mark.parametrize("name", ["m.safetensors", INDEX_NAME, "."])
def test_permission_denied_names_the_path(unprivileged_directory: Path, name: str) -> None:
    directory = unprivileged_directory
    write_raw(directory / "m.safetensors", {"w": U8_4}, bytes(4))
    write_index(directory, {"w": "m.safetensors"})
    # Entering stays allowed: reading the list of files is what fails.
    (directory / name).chmod(stat.S_IXUSR if name == "." else 0)
    error = refusal(directory)
    assert "no permission to read" in str(error)
    assert error.file == directory / name
    assert "chmod" in error.hint


# Reading after something changed


def test_read_refuses_a_file_that_changed_after_open(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m.safetensors", {"w": U8_4}, b"abcd")
    index = TensorIndex.open(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ReadError, match="changed after it was opened"):
        index.read("w")
    other = write_raw(tmp_path / "other", {"w": U8_4}, b"efgh")
    other.rename(path)
    with pytest.raises(ReadError, match="changed after it was opened"):
        index.read("w")
    path.unlink()
    with pytest.raises(ReadError, match=r"Could not read 4 bytes at \d+ of .*m\.safetensors: No such file"):
        index.read("w")


def test_short_read_raises(tmp_path: Path) -> None:
    write_raw(tmp_path / "m.safetensors", {"w": U8_4}, b"abcd")
    index = TensorIndex.open(tmp_path)
    with pytest.raises(ReadError, match="2 bytes too early"):
        index.read_into(0, index.stamps[0].nbytes - 4, memoryview(bytearray(6)))


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    write_raw(tmp_path / "m.safetensors", {"w": U8_4}, b"abcd")
    with pytest.raises(CheckpointError, match=r"missing tensor.*tensor nothing"):
        TensorIndex.open(tmp_path).read("nothing")
