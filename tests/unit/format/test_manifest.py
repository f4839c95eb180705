"""The manifest: M1 safe to act on, M2 canonical, M3 damaged ones are refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import ManifestError
from tierckpt.format import manifest as manifests
from tierckpt.format.manifest import FileEntry, Manifest, digest_of

CHUNK = 4096


def entry(path: str = "__0_0-aa.distcp", size: int = 5000, **fields: object) -> FileEntry:
    digests = tuple(digest_of(bytes([index])) for index in range(manifests.chunk_count(size, CHUNK)))
    return FileEntry(path, size, digests, **fields)  # type: ignore[arg-type]


def checkpoint(**fields: object) -> Manifest:
    base = {
        "attempt": "a1",
        "world_size": 2,
        "chunk_size_bytes": CHUNK,
        "metadata": (entry(".metadata", 10, source=".tierckpt/metadata/a1"),),
        "files": (entry(token="aa"), entry("__1_0-bb.distcp", rank=1, token="bb")),
        "replaces": ("old",),
        "created_unix_seconds": 12.5,
    }
    return Manifest(**{**base, **fields})  # type: ignore[arg-type]


def resealed(change: object) -> bytes:
    """A manifest with a change and a matching digest: only M1 rejects it."""
    body = json.loads(checkpoint().encode())
    body.pop("self_digest")
    change(body)  # type: ignore[operator]
    return manifests.seal(body)


def test_a_manifest_is_decoded_from_the_same_bytes_whatever_the_order_of_files() -> None:  # M2
    turned = checkpoint(files=tuple(reversed(checkpoint().files)))
    assert turned.encode() == checkpoint().encode()
    assert manifests.decode(turned.encode()) == checkpoint()


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_any_changed_byte_is_refused(position: int) -> None:  # M3
    data = bytearray(checkpoint().encode())
    data[position] ^= 0x01
    with pytest.raises(ManifestError):
        manifests.decode(data)


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_truncated_manifest_is_refused(cut: int) -> None:
    with pytest.raises(ManifestError):
        manifests.decode(checkpoint().encode()[:cut])


IMPOSSIBLE: dict[str, list[object]] = {
    "attempt": ["../x", "..", ".", "a1\n", 5],
    "chunk_size_bytes": [0, 1, "8"],
    "created_unix_seconds": ["now", 10**400, -1, True],  # no float holds the second
    "digest": ["md5"],
    "files": [{}],
    "metadata": [[]],
    "replaces": ["a/b", None, {}, [1]],
    "version": [3],
    "world_size": [0, 10_000_001],
}
IMPOSSIBLE_OF_A_FILE: dict[str, list[object]] = {
    "digests": [None],
    "path": [
        *("/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/.", "", "a\\b", "a\0b", "x" * 1025, 7, None, ["a"]),
        *("\ud800", "é" * 128, "a/" + "b" * 256),  # no name in any file system, and names of 256 bytes
    ],
    "rank": [-1, True, 10_000_000],
    "size_bytes": [-1, 1 << 51, 1 << 200, 1.5, "9", True, None],
    "source": [0, [], "../x"],
    "token": [0, "a/b"],
    "unknown": [1],
}


def each(table: dict[str, list[object]]) -> list[tuple[str, object]]:
    return [(field, value) for field, values in table.items() for value in values]


@pytest.mark.parametrize(("field", "value"), each(IMPOSSIBLE))
def test_fields_out_of_range_are_refused(field: str, value: object) -> None:  # M1
    with pytest.raises(ManifestError, match=field.split("_")[0]):
        manifests.decode(resealed(lambda body: body.__setitem__(field, value)))


@pytest.mark.parametrize(("field", "value"), each(IMPOSSIBLE_OF_A_FILE))
def test_fields_of_a_file_out_of_range_are_refused(field: str, value: object) -> None:  # M1
    """No path leaves the checkpoint, among others."""
    with pytest.raises(ManifestError):
        manifests.decode(resealed(lambda body: body["files"][0].__setitem__(field, value)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files.append(files[0]), "twice"),
        (lambda files: files.append("__0_0.distcp"), "fields"),
        (lambda files: files[0]["digests"].pop(), "digests"),
    ],
    ids=["a file named twice", "no object", "a digest too few"],
)
def test_files_that_cannot_be_are_refused(change: Callable[[Any], object], said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        manifests.decode(resealed(lambda body: change(body["files"])))


def test_duplicate_keys_are_refused() -> None:
    data = checkpoint().encode().replace(b'{"attempt"', b'{"attempt":"b","attempt"', 1)
    with pytest.raises(ManifestError, match="duplicate"):
        manifests.decode(data)


@pytest.mark.parametrize(
    "digest", ["", "0" * 31, "0" * 33, "0" * 64, "A" * 32, "g" * 32, "0" * 32 + "\n", "0x" + "0" * 30, 0, None]
)
def test_what_is_no_digest_is_refused(digest: object) -> None:  # M1
    with pytest.raises(ManifestError, match="digest"):
        manifests.decode(resealed(lambda body: body["files"][0]["digests"].__setitem__(0, digest)))


def test_a_manifest_with_another_digest_is_refused_by_name() -> None:
    """Sealed with that other algorithm, so the name must be read before the digest is."""
    body = {**json.loads(checkpoint().encode()), "digest": "blake3", "self_digest": "0" * 64}
    with pytest.raises(ManifestError, match=r"version 2 with digest 'blake3' .* digest 'xxh3-128'") as caught:
        manifests.decode(json.dumps(body).encode(), where="s3://b/run/step-1")
    assert "s3://b/run/step-1" in str(caught.value)
    assert "release that wrote it" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "99aa06d3014798d86001c324468d497f"),
        (bytes(range(256)) * 16, "03916578969f7a66eb4b7c3707879151"),
        (bytes(range(256)) * 1024, "63637e9b9c5891c0f34cc5c9153c3287"),
    ],
)
def test_the_digest_is_xxh3_128_of_seed_0_in_canonical_form(data: bytes, expected: str) -> None:
    """Fixed values: a manifest written today must still be believed after any change of library or machine."""
    assert digest_of(data) == digest_of(memoryview(data)) == digest_of(bytearray(data)) == expected
    assert expected == f"{xxhash.xxh3_128_intdigest(data, seed=0):032x}"


def test_the_digest_of_a_larger_chunk_is_that_of_the_digests_of_its_blocks() -> None:
    """A fixed value too; tests/unit/read/test_replicated_file_block_digests.py shows its derivation."""
    data = bytes(range(256)) * 4097
    assert digest_of(data) == digest_of(memoryview(data)) == "t1295ddf8c543ee248d02b6a84eb4706c"


@given(st.binary(max_size=50_000))
def test_a_file_has_the_digests_of_its_chunks(whole: bytes) -> None:
    expected = tuple(xxhash.xxh3_128_hexdigest(whole[start : start + CHUNK]) for start in range(0, len(whole), CHUNK))
    assert manifests.digests_of(whole, CHUNK) == expected


def fragment(rank: int, attempt: str = "a1") -> Manifest:
    return checkpoint(
        attempt=attempt,
        metadata=(entry(f"__{rank}.metadata", 10, rank=rank, source=f".tierckpt/metadata/{attempt}-{rank}"),),
        files=(entry(f"__{rank}_0-{attempt}-{rank}.distcp", rank=rank, token=f"{attempt}-{rank}"),),
    )


def test_fragments_of_all_ranks_make_one_manifest() -> None:
    whole = manifests.merge([fragment(0), fragment(1)])
    assert [item.path for item in whole.metadata] == ["__0.metadata", "__1.metadata"]
    assert whole.tokens == {"a1-0", "a1-1"}


@pytest.mark.parametrize("fragments", [[fragment(0), fragment(1, "a2")], [fragment(0)]], ids=["mixed", "missing"])
def test_fragments_of_different_saves_or_of_some_ranks_are_refused(fragments: list[Manifest]) -> None:
    with pytest.raises(ManifestError):
        manifests.merge(fragments)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
def test_a_number_that_json_takes_and_no_float_holds_is_refused(number: bytes) -> None:
    with pytest.raises(ManifestError):
        manifests.decode(checkpoint().encode().replace(b"12.5", number))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data + b"\n",
        lambda data: b" " + data,
        lambda data: data.replace(b":", b": ", 1),
        lambda data: data.decode().encode("utf-16"),
        lambda data: data.replace(b"12.5", b"12.50"),
        lambda data: data.replace(b'"a1"', b'"\\u00611"', 1),
    ],
)
def test_other_bytes_of_equal_meaning_are_refused(change: object) -> None:  # M3
    """No release ever wrote them, so something has happened to the file."""
    with pytest.raises(ManifestError, match="canonical"):
        manifests.decode(change(checkpoint().encode()))  # type: ignore[operator]


@pytest.mark.parametrize("data", [b"[]", resealed(lambda body: body.update(format="other"))])
def test_a_record_that_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError, match="not a tierckpt manifest"):
        manifests.decode(data)


# --- small records ------------------------------------------------------------------------------------------------

FIELDS = frozenset({"attempt"})


def unsealed(data: bytes) -> dict:
    return manifests.unseal(data, FIELDS, where="note.json")


def test_what_is_sealed_is_unsealed() -> None:
    assert unsealed(manifests.seal({"attempt": "a1"})) == {"attempt": "a1"}


def test_any_flipped_bit_of_a_record_is_found() -> None:  # M3
    data = manifests.seal({"attempt": "a1"})
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ManifestError, match=r"note\.json"):
            unsealed(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"attempt": "a1"}',
        b'{"attempt": "a1", "more": 1}',
        b'{"other": 1}',
        b'{"attempt": "a1", "self_digest": null}',
    ],
)
def test_records_with_other_fields_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        unsealed(data)
