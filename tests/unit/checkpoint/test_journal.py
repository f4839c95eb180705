"""The journal: durable before the first byte (J1), one owner at a time (J2), and it tolerates damaged entries (J4)."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.format.test_manifest import checkpoint, entry
from tierckpt.checkpoint import journal as journals
from tierckpt.checkpoint.journal import FILE, READY, Journal, JournalEntry
from tierckpt.errors import ManifestError
from tierckpt.format import manifest as manifests
from tierckpt.format.layout import local_dir, parse_uri

LOCATION = parse_uri("s3://bucket/run/step-1")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A journal with the entry ``aa``."""
    made = Journal(tmp_path)
    made.open("aa", LOCATION, 0, 4096)
    return made


def test_an_entry_comes_back_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    opened = journal.open("aa", LOCATION, 3, 4096)
    written = journal.write(replace(opened, files=(entry(token="aa"),), manifest=checkpoint(), state=READY, error="x"))
    assert journal.read("aa") == written
    assert journal.entries() == [written]
    assert written.location == LOCATION


def test_entries_are_newest_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for index, token in enumerate(("a", "b", "c")):
        journal.write(replace(journal.open(token, LOCATION, 0, 4096), created_unix_seconds=float(index)))
    assert [item.token for item in journal.entries()] == ["c", "b", "a"]


def test_remove_syncs_the_directory_first(journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_durable = []
    directory = local_dir(tmp_path, LOCATION)
    directory.mkdir(parents=True)

    def fsync_dir(path: Path) -> None:
        made_durable.append((path, journal.read("aa") is not None))

    monkeypatch.setattr(journals, "fsync_dir", fsync_dir)
    journal.remove("aa")
    assert made_durable == [(directory, True)]


def test_an_unreadable_entry_hides_no_other(journal: Journal) -> None:
    for name, data in {"torn": b'{"token": "to', "empty": b"", "list": b"[]"}.items():
        (journal.directory / f"{name}.json").write_bytes(data)
    assert [item.token for item in journal.entries()] == ["aa"]


def test_one_owner_at_a_time_even_in_one_process(journal: Journal) -> None:  # J2
    with journal.own("aa") as first, journal.own("aa") as second:
        assert (bool(first), bool(second)) == (True, False)
    with journal.own("aa") as again:
        assert again


def test_no_lock_file_outlives_its_entry(journal: Journal) -> None:
    with journal.own("gone"):
        pass
    assert [path.name for path in journal.directory.iterdir()] == ["aa.json"]


def test_a_damaged_entry_is_an_error_that_names_it(journal: Journal) -> None:  # J4
    """One wrong digit in its URI would send a checkpoint to another place."""
    path = journal.directory / "aa.json"
    path.write_bytes(path.read_bytes().replace(b"step-1", b"step-3"))
    with pytest.raises(ManifestError, match=r"aa\.json.*digest"):
        journal.read("aa")
    assert journal.entries() == []
    assert path.exists()  # left for a person to look at


def test_an_entry_under_another_name_is_refused(journal: Journal) -> None:  # J4
    (journal.directory / "aa.json").rename(journal.directory / "bb.json")
    with pytest.raises(ManifestError, match=r"bb\.json.*entry of aa"):
        journal.read("bb")
    assert journal.entries() == []


IMPOSSIBLE: dict[str, list[object]] = {
    "token": ["../aa"],
    "uri": ["/../../../etc/x", "s3://", "file://[x/y", "/a\0b", "/\ud800", 5],  # the first leaves the local root
    "rank": [-1, True],
    "state": ["done", None],
    "created_unix_seconds": ["now"],
    "chunk_size_bytes": [0, 4096.0],
    "manifest": [5, "\u00e9", "{}"],
    "files": [{}, [{"path": "../x", "size_bytes": 0, "digests": []}]],
    "error": [None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in IMPOSSIBLE for value in IMPOSSIBLE[field]])
def test_an_entry_with_an_impossible_value_is_refused(field: str, value: object, journal: Journal) -> None:  # J4
    path = journal.directory / "aa.json"
    body = json.loads(path.read_bytes())
    del body["self_digest"]
    path.write_bytes(manifests.seal({**body, field: value}))
    with pytest.raises(ManifestError, match=r"aa\.json"):
        journal.read("aa")


def test_the_error_of_the_last_try_is_kept_once(journal: Journal) -> None:
    journal.fail("aa", "no network")
    before = (journal.directory / "aa.json").stat().st_ino
    journal.fail("aa", "no network")  # said already: not written again
    assert (journal.directory / "aa.json").stat().st_ino == before
    journal.fail("gone", "no network")
    [entry] = journal.entries()
    assert entry.error == "no network"


def test_an_entry_removed_during_a_read_is_skipped(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.open("bb", LOCATION, 0, 4096)
    read = journals.read_entry

    def read_while_others_work(path: Path) -> journals.JournalEntry:
        if path.name == "aa.json":
            path.unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(journals, "read_entry", read_while_others_work)
    assert [item.token for item in journal.entries()] == ["bb"]


def test_a_damaged_entry_can_be_removed(journal: Journal) -> None:
    (journal.directory / "aa.json").write_bytes(b"{")
    journal.remove("aa")
    assert list(journal.directory.iterdir()) == []


@pytest.mark.parametrize("step_seconds", [-3600, -86400 * 20000, 86400 * 20000])
def test_files_are_in_the_order_of_their_entries_whatever_the_clock_says(
    step_seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # J5
    journal, names = Journal(tmp_path), [f"s3://bucket/{name}" for name in ("data", "latest", "data", "gone")]
    now, offset = time.time_ns(), 0
    monkeypatch.setattr(time, "time_ns", lambda: now + offset)
    monkeypatch.setattr(time, "time", lambda: (now + offset) / 1e9)
    tokens = []
    for index, name in enumerate(names):
        offset = index % 2 * step_seconds * 10**9  # there and back
        token, earlier = Journal(tmp_path).next_file_token(name)
        assert earlier == (tokens[:1] if index == 2 else [])
        journal.write(JournalEntry(token, name, 0, FILE, time.time(), 1 << 20, ()))
        tokens.append(token)
    assert [entry.token for entry in journal.files()] == tokens
    assert [entry.token for entry in journal.files(before=tokens[2])] == tokens[:2]


def test_an_adoption_whose_token_looks_like_a_file_does_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open("file-a-" + "9" * 30, parse_uri("s3://bucket/run/step-1"), 0, 1 << 20)
    token, _ = journal.next_file_token("s3://bucket/data")
    journal.write(JournalEntry(token, "s3://bucket/data", 0, FILE, 1.0, 1 << 20, ()))
    assert [entry.token for entry in journal.files()] == [token]
