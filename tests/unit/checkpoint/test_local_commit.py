"""The commit on each tier: the winner, remains of an error or a race, and that committed data is never changed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierckpt.checkpoint import local_commit, shared_commit
from tierckpt.disk import durable
from tierckpt.errors import (
    AlreadyCommittedError,
    BucketNotFoundError,
    IntegrityError,
    ManifestError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
)
from tierckpt.format import manifest as manifests
from tierckpt.format.layout import (
    CLAIM,
    DRAINED,
    MANIFEST,
    METADATA,
    PRIVATE_DIR,
    REPLICATED,
    SUPERSEDED,
    Location,
    attempt_metadata,
    parse_uri,
    part,
    pending,
    removal_note,
)
from tierckpt.format.manifest import FileEntry, Manifest, digest_of
from tierckpt.stores.local import LocalStore

CHUNK = 4096


def shard(attempt: str) -> str:
    return f"__0_0-{attempt}.distcp"


def saved(directory: Path, attempt: str, *replaces: str) -> tuple[Manifest, dict[str, bytes]]:
    """The shard of a save, and its commit."""
    directory.mkdir(parents=True, exist_ok=True)
    data, metadata = f"data of {attempt}".encode(), f"metadata of {attempt}".encode()
    (directory / shard(attempt)).write_bytes(data)
    files = (FileEntry(shard(attempt), len(data), (digest_of(data),), 0, attempt),)
    source = attempt_metadata(attempt)
    entry = FileEntry(METADATA, len(metadata), (digest_of(metadata),), 0, attempt, source=source)
    manifest = Manifest(attempt, 1, CHUNK, (entry,), files, replaces, 1.0)
    local_commit.write_attempt_metadata(directory, manifest, {METADATA: metadata})
    return manifest, {METADATA: metadata}


def committed(directory: Path, attempt: str, *replaces: str) -> Manifest:
    manifest, metadata = saved(directory, attempt, *replaces)
    local_commit.commit_local(directory, at(directory), manifest, metadata)
    return manifest


def at(directory: Path) -> Location:
    return parse_uri(directory)


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def stands(directory: Path, attempt: str) -> bool:
    """True when ``attempt`` is committed, its files are there, and plain PyTorch reads it too."""
    manifest = local_commit.read_local_manifest(directory)
    return (
        manifest is not None
        and manifest.attempt == attempt
        and (directory / shard(attempt)).read_bytes() == f"data of {attempt}".encode()
        and (directory / METADATA).read_bytes() == f"metadata of {attempt}".encode()
    )


def denied(directory: Path) -> bool:
    raise PermissionError(13, "Permission denied")


# --- local tier ---------------------------------------------------------------------------------------------------


def test_a_save_that_was_not_told_of_another_does_not_replace_it(tmp_path: Path) -> None:
    committed(tmp_path, "one")
    with pytest.raises(AlreadyCommittedError, match="one"):
        committed(tmp_path, "two")
    assert stands(tmp_path, "one")


@pytest.mark.parametrize("before", [(), ("one",)], ids=["first", "replacing"])
@pytest.mark.parametrize("failing", [METADATA, "manifest.json"])
def test_a_commit_that_cannot_be_made_durable_is_taken_back(
    failing: str, before: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was renamed, and then the directory's fsync failed: the caller deletes the new shards."""
    for attempt in before:
        committed(tmp_path, attempt)
    failures = [StoreError("no fsync")]

    def durable_write(path: Path, data: bytes) -> None:
        durable.durable_write(path, data)
        if path.name == failing and failures:
            raise failures.pop()

    monkeypatch.setattr(local_commit, "durable_write", durable_write)
    with pytest.raises(StoreError, match="no fsync"):
        committed(tmp_path, "two", *before)
    assert local_commit.discard_attempt(tmp_path, "two")
    if before:
        assert stands(tmp_path, "one")
    else:
        assert local_commit.read_local_manifest(tmp_path) is None if tmp_path.exists() else True
        assert not (tmp_path / METADATA).exists()


@pytest.mark.parametrize("can_clean_up", [True, False])
def test_a_commit_removes_replaced_files(can_clean_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path, "one")
    with monkeypatch.context() as patch:
        if not can_clean_up:
            patch.setattr(local_commit, "finish_locked_removal", denied)
        committed(tmp_path, "two", "one")
    assert stands(tmp_path, "two")
    assert can_clean_up or local_commit.finish_removal(tmp_path)
    assert not {name for name in names(tmp_path) if "one" in name}


def test_forgetting_a_save_that_did_commit_deletes_nothing(tmp_path: Path) -> None:
    manifest = committed(tmp_path, "one")
    assert not local_commit.discard_attempt(tmp_path, "one", manifest)
    assert stands(tmp_path, "one")


def test_forgetting_a_save_leaves_the_one_that_stands(tmp_path: Path) -> None:
    committed(tmp_path, "one")
    manifest, metadata = saved(tmp_path, "two", "one")
    (tmp_path / METADATA).write_bytes(metadata[METADATA])  # it got that far
    assert local_commit.discard_attempt(tmp_path, "two", manifest)
    assert stands(tmp_path, "one")
    assert not {name for name in names(tmp_path) if "two" in name}


def test_nothing_is_forgotten_beside_a_damaged_manifest(tmp_path: Path) -> None:
    committed(tmp_path, "one")
    (tmp_path / MANIFEST).write_bytes(b"{")
    with pytest.raises(ManifestError):
        local_commit.discard_attempt(tmp_path, "one")
    assert (tmp_path / shard("one")).exists()


def test_what_is_not_there_is_forgotten_and_removed_already(tmp_path: Path) -> None:
    assert local_commit.discard_attempt(tmp_path / "none", "one")
    assert not local_commit.finish_removal(tmp_path / "none")
    local_commit.mark_drained(tmp_path / "none", "one")
    assert not (tmp_path / "none").exists()


def test_a_commit_elsewhere_is_adopted_only_over_what_it_may_replace(tmp_path: Path) -> None:
    committed(tmp_path, "one")
    other, metadata = saved(tmp_path, "other")
    local_commit.record_commit(tmp_path, other, metadata)  # not told to replace "one", which is nowhere else
    assert stands(tmp_path, "one")
    local_commit.mark_drained(tmp_path, "one")
    local_commit.record_commit(tmp_path, other, metadata)
    local_commit.record_commit(tmp_path, other, metadata)
    assert stands(tmp_path, "other")


def test_a_removal_asks_which_attempt_it_is_of(tmp_path: Path) -> None:
    committed(tmp_path, "one")
    assert not local_commit.remove_local(tmp_path, "two")
    assert stands(tmp_path, "one")
    assert local_commit.remove_local(tmp_path, "one")
    assert not tmp_path.exists()


def test_a_damaged_note_of_a_removal_removes_nothing(tmp_path: Path) -> None:
    manifest = committed(tmp_path, "one")
    note = tmp_path / removal_note("gone")
    note.parent.mkdir(exist_ok=True)
    note.write_bytes(replace(manifest, attempt="gone").encode().replace(b"gone", b"lost"))
    (tmp_path / MANIFEST).unlink()
    assert local_commit.finish_removal(tmp_path)
    assert (tmp_path / shard("one")).exists()
    assert note.exists()  # for a person to look at


@pytest.mark.parametrize("remove", [local_commit.remove_local, local_commit.finish_removal])
def test_denied_removals_raise(remove: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(tmp_path, "one")
    monkeypatch.setattr(local_commit, "finish_locked_removal", denied)
    with pytest.raises(PermissionDeniedError):
        remove(tmp_path)


def test_the_directory_may_vanish_before_its_lock_is_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that ends just then takes the empty directory away."""
    real, tries = local_commit.lock, []

    @contextmanager
    def lock(path: Path, *rest: Any) -> Iterator[None]:
        tries.append(path)
        if len(tries) == 1:
            path.parent.rmdir()
        with real(path, *rest):
            yield

    manifest, metadata = saved(tmp_path, "one")
    shutil.rmtree(tmp_path / PRIVATE_DIR)  # files of a save there keep the directory
    monkeypatch.setattr(local_commit, "lock", lock)
    local_commit.commit_local(tmp_path, at(tmp_path), manifest, metadata)
    assert len(tries) == 2
    assert local_commit.read_local_manifest(tmp_path) == manifest


def fragment(directory: Path, rank: int, world_size: int = 2) -> Manifest:
    """Files of one rank of a save without collectives: a shard, and metadata of its own."""
    token, data, metadata = f"run-{rank}", f"data of {rank}".encode(), f"metadata of {rank}".encode()
    name = f"__{rank}_0-{token}.distcp"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data)
    files = (FileEntry(name, len(data), (digest_of(data),), rank, token),)
    path, source = f"__{rank}{METADATA}", attempt_metadata(token)
    entry = FileEntry(path, len(metadata), (digest_of(metadata),), rank, token, source=source)
    manifest = Manifest("run", world_size, CHUNK, (entry,), files, (), 1.0)
    local_commit.write_attempt_metadata(directory, manifest, {path: metadata})
    return manifest


@pytest.mark.parametrize("forget", [local_commit.discard_attempt, local_commit.remove_unfinished])
def test_a_fragment_that_is_forgotten_is_no_part_of_a_later_commit(forget: Any, tmp_path: Path) -> None:
    """Its rank's save failed after it was kept: otherwise the others would commit missing shards."""
    manifest = fragment(tmp_path, 1)
    assert local_commit.commit_local_fragment(tmp_path, at(tmp_path), manifest) is None
    (token,) = manifest.tokens
    forget(tmp_path, token)
    assert local_commit.commit_local_fragment(tmp_path, at(tmp_path), fragment(tmp_path, 0)) is None
    assert local_commit.read_local_manifest(tmp_path) is None


def test_the_last_fragment_commits_the_whole_and_none_before_it(tmp_path: Path) -> None:
    assert local_commit.commit_local_fragment(tmp_path, at(tmp_path), fragment(tmp_path, 1)) is None
    assert local_commit.read_local_manifest(tmp_path) is None
    whole = local_commit.commit_local_fragment(tmp_path, at(tmp_path), fragment(tmp_path, 0))
    assert whole == local_commit.read_local_manifest(tmp_path)
    assert whole is not None
    assert [entry.path for entry in whole.files] == ["__0_0-run-0.distcp", "__1_0-run-1.distcp"]
    assert (tmp_path / f"__1{METADATA}").read_bytes() == b"metadata of 1"
    assert not [name for name in names(tmp_path) if "/parts/" in name]


def test_what_is_committed_is_known_by_the_token_of_any_of_its_ranks(tmp_path: Path) -> None:
    assert not local_commit.is_committed(tmp_path, "one")
    committed(tmp_path, "one")
    assert local_commit.is_committed(tmp_path, "one")
    assert not local_commit.is_committed(tmp_path, "two")
    alone = tmp_path / "alone"
    local_commit.commit_local_fragment(alone, at(alone), fragment(alone, 1))
    assert local_commit.is_committed(alone, "run-1"), "its rank has done all that it does"
    assert not local_commit.is_committed(alone, "run-0")
    local_commit.commit_local_fragment(alone, at(alone), fragment(alone, 0))
    assert local_commit.is_committed(alone, "run-0") and local_commit.is_committed(alone, "run-1")


def test_what_an_unfinished_save_left_goes_and_what_stands_stays(tmp_path: Path) -> None:
    committed(tmp_path, "one")
    before = names(tmp_path)
    saved(tmp_path, "two")
    local_commit.remove_unfinished(tmp_path, "two")
    assert names(tmp_path) == before
    assert stands(tmp_path, "one")


def test_a_directory_that_no_save_of_ours_made_is_left_alone(tmp_path: Path) -> None:
    local_commit.remove_empty(tmp_path)
    assert tmp_path.is_dir()


# --- shared tier --------------------------------------------------------------------------------------------------


class Store(LocalStore):
    """A shared tier with a callback just before a put."""

    before_put: Callable[[str], None] = staticmethod(lambda key: None)

    async def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        self.before_put(key)
        await super().put(key, data, if_absent=if_absent)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "shared")


def drained(store: Store, attempt: str, *replaces: str) -> Manifest:
    manifest, _ = saved(store.root, attempt, *replaces)
    asyncio.run(shared_commit.commit_shared(store, at(store.root), manifest))
    return manifest


def test_a_rival_that_has_the_claim_wins(store: Store) -> None:
    drained(store, "one")
    with pytest.raises(AlreadyCommittedError, match="one"):
        drained(store, "two")
    assert stands(store.root, "one")


def test_a_later_save_that_takes_the_claim_over_meanwhile_is_not_covered(store: Store) -> None:
    def take_over(key: str) -> None:
        if key == METADATA:
            (store.root / CLAIM).write_bytes(manifests.seal({"attempt": "later", "replaces": ["one"]}))

    store.before_put = take_over  # type: ignore[method-assign]
    with pytest.raises(AlreadyCommittedError, match="replaced this one"):
        drained(store, "one")
    assert not (store.root / MANIFEST).exists()


@pytest.mark.parametrize("winner", ["one", "two", None])
def test_the_first_manifest_is_put_only_where_none_is(winner: str | None, store: Store) -> None:
    """``one`` finds a faster mover: another one of its own, a rival, or one that has exited."""

    def be_faster(key: str) -> None:
        if key != MANIFEST:
            return
        if winner is None:
            raise PreconditionFailedError("it exists")
        (store.root / MANIFEST).write_bytes(saved(store.root, winner)[0].encode())

    store.before_put = be_faster  # type: ignore[method-assign]
    if winner == "one":
        drained(store, "one")
        assert stands(store.root, "one")
    else:
        with pytest.raises(AlreadyCommittedError, match=winner or "unknown"):
            drained(store, "one")


def test_metadata_that_was_damaged_on_its_way_is_not_published(store: Store) -> None:
    manifest, _ = saved(store.root, "one")
    (store.root / attempt_metadata("one")).write_bytes(b"metadata of onE")
    with pytest.raises(IntegrityError, match="not what was saved"):
        asyncio.run(shared_commit.commit_shared(store, at(store.root), manifest))
    assert not {METADATA, MANIFEST} & names(store.root)


def test_what_a_lost_node_left_of_a_replaced_save_is_removed(store: Store) -> None:
    """``one`` was never committed: its coordinator left the manifest to be, a rank its shard and part record."""
    one, _ = saved(store.root, "one")
    rank = replace(one.files[0], path=shard("rank1"), token="rank1", rank=1)
    (store.root / shard("rank1")).write_bytes(b"data of rank1")
    asyncio.run(store.put(pending("one"), replace(one, files=(*one.files, rank)).encode()))
    asyncio.run(store.put(part("rank1"), b"{}"))
    asyncio.run(store.put(pending("zero"), b"{"))  # damaged: it names nobody
    drained(store, "two", "one", "zero")
    assert names(store.root) == {shard("two"), METADATA, MANIFEST, CLAIM, attempt_metadata("two")}


def test_a_clean_up_that_was_cut_short_is_finished_by_the_next_try(store: Store) -> None:
    one = drained(store, "one")
    two = drained(store, "two", "one")
    (store.root / shard("one")).write_bytes(b"data of one")
    asyncio.run(store.put(removal_note("one"), one.encode()))
    asyncio.run(shared_commit.commit_shared(store, at(store.root), two))
    assert stands(store.root, "two")
    assert not {name for name in names(store.root) if "one" in name}
    assert asyncio.run(shared_commit.replaced_by_claim(store)) == {"one"}


@pytest.mark.parametrize(
    "read", [shared_commit.read_shared_manifest, shared_commit.read_claim, shared_commit.replaced_by_claim]
)
def test_a_place_that_does_not_exist_is_not_an_empty_place(read: Callable[[Any], Any]) -> None:
    class NoBucket:
        uri = "s3://none/x"

        async def get(self, key: str) -> bytes:
            raise BucketNotFoundError("no bucket none")

    with pytest.raises(BucketNotFoundError):
        asyncio.run(read(NoBucket()))


@pytest.mark.parametrize(
    "body", [{"attempt": "a/b", "replaces": []}, {"attempt": "a", "replaces": "b"}, {"attempt": "a", "replaces": [1]}]
)
def test_a_claim_that_names_no_attempt_is_refused(body: dict[str, Any], store: Store) -> None:
    asyncio.run(store.put(CLAIM, manifests.seal(body)))
    with pytest.raises(ManifestError, match=r"claim\.json"):
        asyncio.run(shared_commit.read_claim(store))
    elsewhere = {"attempt": "one", "replaces": [], "uri": "s3://elsewhere/step-1"}  # it came with copied files
    asyncio.run(store.put(CLAIM, manifests.seal(elsewhere)))
    assert asyncio.run(shared_commit.read_claim(store)) is not None


@pytest.mark.parametrize(
    ("note", "mark", "is_marked"),
    [
        (DRAINED, local_commit.mark_drained, local_commit.is_drained),
        (SUPERSEDED, local_commit.mark_superseded, local_commit.is_evictable),
        (REPLICATED, local_commit.mark_replicated, local_commit.is_replicated),
    ],
)
def test_a_note_is_about_one_attempt_and_a_damaged_one_about_none(
    note: str, mark: Callable[[Path, str], None], is_marked: Callable[[Path, str], bool], tmp_path: Path
) -> None:
    committed(tmp_path, "one")
    assert not is_marked(tmp_path, "one")
    mark(tmp_path, "one")
    assert is_marked(tmp_path, "one") and not is_marked(tmp_path, "two")
    assert (tmp_path / note).exists()
    (tmp_path / note).write_bytes(b"{}")
    assert not is_marked(tmp_path, "one")


def test_peers_that_cannot_be_told_fail_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".tierckpt").write_text("in the way")
    local_commit.mark_origin(tmp_path, "one")
    assert "peers will not learn that this node saves it" in caplog.text
