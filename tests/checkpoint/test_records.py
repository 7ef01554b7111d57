"""`RecordSet.locate` against slices cut out with numpy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slotpy.checkpoint.records import DTYPE_BYTES, RecordSet, Role

ROLES = (Role("gate.weight", "U32", (3, 2)), Role("gate.scales", "BF16", (3,)), Role("scale_2", "F32", ()))


def test_role_counts_the_bytes_of_its_dtype_and_shape() -> None:
    assert [role.nbytes for role in ROLES] == [24, 6, 4]
    assert Role("w", "F8_E4M3", (5, 7)).nbytes == 35
    assert set(DTYPE_BYTES.values()) == {1, 2, 4, 8}


@given(
    num_shards=st.integers(1, 4),
    rows_per_shard=st.integers(1, 5),
    gaps=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_locate_points_at_the_slices_that_hold_each_record(
    num_shards: int, rows_per_shard: int, gaps: list[int], seed: int
) -> None:
    """Scatter known records over random files, at random places, with gaps between rows; `locate` finds each piece."""
    rng = np.random.default_rng(seed)
    num_roles = len(ROLES)
    num_files = 3
    contents = [bytearray() for _ in range(num_files)]
    strides = np.array([role.nbytes + gap for role, gap in zip(ROLES, gaps, strict=True)])
    files = rng.integers(0, num_files, (num_shards, num_roles)).astype(np.int32)
    bases = np.zeros((num_shards, num_roles), np.int64)
    records: dict[tuple[int, int], bytes] = {}
    for shard in range(num_shards):
        for piece in rng.permutation(num_roles):
            file = contents[files[shard, piece]]
            file += rng.bytes(rng.integers(0, 20))
            bases[shard, piece] = len(file)
            for row in range(rows_per_shard):
                data = rng.bytes(ROLES[piece].nbytes)
                records[shard * rows_per_shard + row, int(piece)] = data
                file += data + rng.bytes(gaps[piece])
    record_set = RecordSet(ROLES, rows_per_shard, files, bases, strides)
    assert record_set.num_records == num_shards * rows_per_shard
    assert record_set.record_nbytes == 34

    keys = rng.integers(0, record_set.num_records, 7)
    found_files, found_offsets = record_set.locate(keys)
    assert found_files.shape == found_offsets.shape == (7, num_roles)
    assert found_offsets.dtype == np.int64
    for place, key in enumerate(keys.tolist()):
        for piece, role in enumerate(ROLES):
            begin = found_offsets[place, piece]
            assert contents[found_files[place, piece]][begin : begin + role.nbytes] == records[key, piece]


def test_locate_of_fused_rows_gives_both_halves() -> None:
    """A fused (experts, 2 * out, in) tensor is two roles over one span with one stride."""
    fused = np.arange(4 * 6 * 2, dtype=np.uint8).reshape(4, 6, 2)
    roles = (Role("gate.weight", "U8", (3, 2)), Role("up.weight", "U8", (3, 2)))
    records = RecordSet(
        roles,
        rows_per_shard=4,
        files=np.zeros((1, 2), np.int32),
        bases=np.array([[0, 6]], np.int64),
        strides=np.array([12, 12], np.int64),
    )
    _, offsets = records.locate(np.arange(4))
    flat = fused.ravel()
    for expert in range(4):
        gate, up = (flat[at : at + 6].reshape(3, 2) for at in offsets[expert])
        np.testing.assert_array_equal(gate, fused[expert, :3])
        np.testing.assert_array_equal(up, fused[expert, 3:])


def test_locate_takes_no_keys_and_offsets_beyond_32_bits() -> None:
    records = RecordSet(
        ROLES[:1],
        rows_per_shard=320_001_536,
        files=np.zeros((1, 1), np.int32),
        bases=np.array([[1 << 40]], np.int64),
        strides=np.array([320], np.int64),
    )
    assert records.locate(np.empty(0, np.int64))[1].shape == (0, 1)
    assert records.locate(np.array([320_001_535], np.int64))[1][0, 0] == (1 << 40) + 320_001_535 * 320
    assert records.locate(np.array([320_001_535], np.int32))[1][0, 0] == (1 << 40) + 320_001_535 * 320
