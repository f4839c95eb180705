"""Fuzz: any content of a manifest, journal entry or claim is rejected by a typed error, quickly and in bounded memory,
or is safe to act on (M1): no path leaves the root.

Mutated bytes test the parser; mutated values with a new, valid digest, as from an attacker, test the validation.
TIERCKPT_TEST_FUZZ_SECONDS sets the duration.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.format.test_manifest import checkpoint, entry
from tierckpt.checkpoint import journal, local_commit, shared_commit
from tierckpt.checkpoint.journal import READY, Journal, JournalEntry
from tierckpt.errors import ManifestError, TierckptError
from tierckpt.format import manifest as manifests
from tierckpt.format.layout import MANIFEST, local_dir, parse_uri
from tierckpt.format.manifest import Manifest

SECONDS = float(os.environ.get("TIERCKPT_TEST_FUZZ_SECONDS", "2"))
INPUT_SECONDS_MAX = 30.0
"""Most inputs take a millisecond; the limit finds endless loops."""
RSS_BYTES_MAX = 256 << 20
ROOT = "/root-of-a-checkpoint"


class OneObjectStore:
    """A store with the part of the API that reading a claim needs."""

    uri = "memory://run/step-1"

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def get(self, key: str) -> bytes:
        return self.data


def run_without_suspending(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the coroutine suspended")


def read_claim_and_replaced(data: bytes) -> Any:
    store: Any = OneObjectStore(data)
    return [run_without_suspending(read(store)) for read in (shared_commit.read_claim, shared_commit.replaced_by_claim)]


def read_fragment(data: bytes) -> Manifest:
    """Merge fragments of two ranks, one of them ``data``, as a mover does."""
    return manifests.merge([manifests.decode(data), fragment(1)])


def fragment(rank: int) -> Manifest:
    return checkpoint(
        metadata=(entry(f"__{rank}.metadata", 10, rank=rank, source=f".tierckpt/metadata/a1-{rank}"),),
        files=(entry(f"__{rank}_0-a1-{rank}.distcp", rank=rank, token=f"a1-{rank}"),),
    )


def journal_entry() -> JournalEntry:
    return JournalEntry(
        "aa", "s3://bucket/run/step-1", 0, READY, 12.5, 4096, checkpoint().files, checkpoint(), "an error"
    )


# --- checks of accepted records ---------------------------------------------------------------------------------------


def is_below(path: str, root: str = ROOT) -> bool:
    return os.path.normpath(f"{root}/{path}").startswith(f"{root}/") and "\0" not in path and "\\" not in path


def problems_of_files(files: Sequence[manifests.FileEntry], chunk_size_bytes: int) -> list[str]:
    found = []
    for file in files:
        for path in (file.path, file.key):
            if not is_below(path) or path.startswith("/") or os.path.normpath(path) != path:
                found.append(f"path {path!r}")
            if any(len(os.fsencode(name)) > 255 for name in path.split("/")):
                found.append(f"name too long: {path[:80]!r}")
        if not (type(file.size_bytes) is int and 0 <= file.size_bytes <= 1 << 50):
            found.append(f"size {file.size_bytes!r}")
        elif len(file.digests) != -(-file.size_bytes // chunk_size_bytes):
            found.append("digests do not cover the file")
        if any(len(digest) != 32 or set(digest) - set("0123456789abcdef") for digest in file.digests):
            found.append("an invalid digest")
        if not all(type(value) is kind for value, kind in ((file.rank, int), (file.token, str), (file.source, str))):
            found.append("a field of a wrong type")
    return found


def problems_of_manifest(manifest: Manifest) -> list[str]:
    found = problems_of_files(manifest.entries, manifest.chunk_size_bytes)
    keys = [key for file in manifest.entries for key in {file.path, file.key}]
    if len(set(keys)) != len(keys):
        found.append("duplicate name")
    if not is_below(f"{manifest.attempt}.json") or "/" in manifest.attempt:
        found.append(f"attempt {manifest.attempt!r}")
    if manifests.decode(manifest.encode()) != sorted_files(manifest):
        found.append("decoding its encoding gives another manifest")
    return found


def sorted_files(manifest: Manifest) -> Manifest:
    return replace(
        manifest,
        files=tuple(sorted(manifest.files, key=lambda file: file.path)),
        metadata=tuple(sorted(manifest.metadata, key=lambda file: file.path)),
        replaces=tuple(sorted(manifest.replaces)),
    )


def problems_of_entry(found: JournalEntry) -> list[str]:
    try:
        directory = str(local_dir(Path("/local"), parse_uri(found.uri)))
    except TierckptError as error:  # recovery would raise on this entry
        return [f"uri {found.uri!r}: {error}"]
    problems = [] if os.path.normpath(directory).startswith("/local/checkpoints/") else [f"uri {found.uri!r}"]
    if "/" in found.token or not is_below(f"{found.token}.json"):
        problems.append(f"token {found.token!r}")
    problems += problems_of_files(found.files, found.chunk_size_bytes)
    return problems + (problems_of_manifest(found.manifest) if found.manifest else [])


def problems_of_claim(claim: Any) -> list[str]:
    attempt, replaced = claim
    return [f"attempt {name!r}" for name in (attempt, *replaced) if not is_below(f"{name}.json") or "/" in name]


@dataclass(frozen=True)
class Format:
    """A kind of record: a valid one, its reader, and the check of accepted records."""

    name: str
    good: bytes
    read: Callable[[bytes], Any]
    problems: Callable[[Any], list[str]]


FORMATS = (
    Format("manifest", checkpoint().encode(), manifests.decode, problems_of_manifest),
    Format("fragment", fragment(0).encode(), read_fragment, problems_of_manifest),
    Format("journal", journal.encode(journal_entry()), lambda data: journal.decode(data, where=""), problems_of_entry),
    Format("claim", manifests.seal({"attempt": "a1", "replaces": ["old"]}), read_claim_and_replaced, problems_of_claim),
)


# --- inputs -----------------------------------------------------------------------------------------------------------

TOKENS = (b"[", b"{", b"]", b"}", b'"', b",", b":", b"\\", b"\\u0000", b"\\ud800", b"null", b"true", b"NaN",
          b"-Infinity", b"1e999", b"-0", b"9" * 400, b"[" * 3000, b'{"a":' * 3000, b"\xef\xbb\xbf", b"\xff\xfe", b"\0",
          b" ", b"\n", b"../", b"/", b'"path":"/x",', b'"self_digest":"",')  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 4095, 1 << 31, 1 << 50, (1 << 50) + 1, 1 << 63, 1 << 4000, 0.5, -0.0, 1e308, 5e-324,
    "", ".", "..", "/", "../x", "a/../../x", "a/..", "/etc/passwd", "a\\..\\x", "a\0b", "a//b", "./a", "a/.", "a" * 300,
    "x/" * 600, "\ud800", "é" * 200, "0" * 32, "G" * 32, "s3://b/../x", "/../../../../../x", "file:///etc",
    "memory://", "memory://", [], {}, [[]], [{}], {"path": "x"}, ["a"] * 1000, [0], "a\nb", "\x7f", "ready", "written",
    "gdrive://../../../x",
)  # fmt: skip


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, count = rng.randrange(len(result) + 1), rng.choice((1, 2, 8, 64))
        kind = rng.randrange(6)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del result[at : at + count]
        elif kind == 2:
            result[at:at] = rng.choice(TOKENS)
        elif kind == 3:
            result[at:at] = result[: rng.randrange(len(result) + 1)]
        elif kind == 4:
            result[at : at + count] = rng.choice(TOKENS)
        else:
            result = bytearray(bytes(result).decode("latin-1").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig"))))
    return bytes(result[: 1 << 20])


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in ``value`` with each of its keys."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [place for child in value.values() for place in places_of(child)]
    if isinstance(value, list):
        return [(value, index) for index in range(len(value))] + [
            place for child in value for place in places_of(child)
        ]
    return []


def mutated_values(data: bytes, rng: random.Random) -> bytes:
    """Return the record with changed values and a valid digest."""
    body = json.loads(data)
    body.pop("self_digest")
    inner = body.get("manifest")
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = places_of(body)
        if not places:
            break
        container, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind == 0 and isinstance(container, dict):
            container.pop(key, None)
        elif kind == 1 and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif kind == 2:
            other, name = rng.choice(places)
            container[key] = copy.deepcopy(other[name])
        elif kind == 3 and isinstance(container, dict):
            container[rng.choice(("source", "extra", "token", "path"))] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 4 and isinstance(inner, str) and isinstance(body.get("manifest"), str):
            body["manifest"] = mutated_values(inner.encode(), rng).decode()
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    try:
        return manifests.seal(body)
    except (ValueError, RecursionError):  # a circular or infinite value
        return data


@dataclass
class Findings:
    inputs: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0


def fuzz(seconds: float, seed: int, *, inputs_max: int = 1 << 62, stop_at_first: bool = False) -> Findings:
    findings, rng, end = Findings(), random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end and findings.inputs < inputs_max and not (stop_at_first and findings.violations):
        record_format = FORMATS[findings.inputs % len(FORMATS)]
        data = (mutated_values if rng.random() < 0.6 else mutated_bytes)(record_format.good, rng)
        findings.inputs += 1
        started = time.monotonic()
        try:
            result = record_format.read(data)
        except ManifestError:
            findings.rejected[record_format.name] += 1
        except Exception as error:
            findings.violations.append(f"{record_format.name}: {type(error).__name__}: {error} for {data[:2000]!r}")
        else:
            findings.accepted[record_format.name] += data != record_format.good
            findings.violations += [
                f"{record_format.name}: {text} in {data[:2000]!r}" for text in record_format.problems(result)
            ]
        findings.slowest_seconds = max(findings.slowest_seconds, time.monotonic() - started)
    return findings


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120 + 2 * SECONDS)
def test_mutated_records_are_rejected_or_safe() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seed = random.randrange(1 << 32) if SECONDS > 60 else 0
    findings = fuzz(SECONDS, seed)
    growth_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print(f"\nfuzz: seed {seed}, {findings}, {growth_bytes >> 20} MiB", file=sys.stderr)
    assert findings.violations == []
    assert all(findings.accepted[one.name] and findings.rejected[one.name] for one in FORMATS)
    assert findings.slowest_seconds < INPUT_SECONDS_MAX
    assert growth_bytes < RSS_BYTES_MAX


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(VALUES[:30]),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=int(40 * min(SECONDS, 60)), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(field=st.sampled_from(sorted(json.loads(FORMATS[2].good))), value=JSON)
def test_any_value_in_any_field_is_rejected_or_safe(field: str, value: Any) -> None:
    for record_format in FORMATS:
        body = {key: item for key, item in json.loads(record_format.good).items() if key != "self_digest"}
        if field not in body:
            continue
        try:
            result = record_format.read(manifests.seal({**body, field: value}))
        except ManifestError:
            continue
        except ValueError as error:
            assert "JSON compliant" in str(error)  # the test cannot encode infinity
            continue
        assert record_format.problems(result) == []


@pytest.mark.parametrize("record_format", FORMATS, ids=lambda item: item.name)
@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b"9" * 5_000_000,
        b'{"format":' + b"1" * 5_000_000 + b"}",
        b'"' + b"\\u0041" * 1_000_000 + b'"',
        b"{" + b",".join(b'"%d":0' % index for index in range(300_000)) + b"}",
        b"-" * 1_000_000,
    ],
    ids=["depth", "depth of objects", "digits", "digits within", "escapes", "keys", "signs"],
)
def test_bomb_is_rejected_quickly_in_bounded_memory(record_format: Format, bomb: bytes) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ManifestError):
        record_format.read(bomb)
    assert time.monotonic() - started < INPUT_SECONDS_MAX
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < RSS_BYTES_MAX


def test_oversized_record_is_rejected_unread(tmp_path: Path) -> None:
    """The files are sparse, 1 TiB each."""
    queue = Journal(tmp_path)
    queue.open("aa", parse_uri("s3://b/x"), 0, 4096)
    (tmp_path / MANIFEST).parent.mkdir()
    for path in (tmp_path / MANIFEST, queue.directory / "aa.json", tmp_path / ".tierckpt/drained.json"):
        with path.open("wb") as file:
            file.truncate(1 << 40)
    for read in (lambda: local_commit.read_local_manifest(tmp_path), lambda: queue.read("aa"),
                 lambda: local_commit.read_drained(tmp_path)):  # fmt: skip
        with pytest.raises(ManifestError, match="larger than any"):
            read()
    assert queue.entries() == []


def test_manifest_with_too_many_files_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FILES_MAX", 2)
    many = replace(checkpoint(), files=tuple(entry(f"__{index}_0-aa.distcp") for index in range(3)))
    with pytest.raises(ManifestError, match="sane length"):
        manifests.decode(many.encode())


# --- negative controls ------------------------------------------------------------------------------------------------


def lax_path(path: Any) -> bool:
    return isinstance(path, str) and bool(path) and not path.startswith(("/", "../")) and "\0" not in path


def lax_seal(body: dict[str, Any], data: Any, bad: Any) -> None:
    if body.pop("self_digest", None) != manifests.digest_of(manifests.canonical(body)):
        bad("its own digest does not match")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "replacement", "found"),
    [
        (manifests, "is_safe_path", lax_path, "path"),
        (manifests, "chunk_count", lambda size, chunk: min(2, -(-size // chunk)), "digests do not cover"),
        (manifests, "check_seal", lax_seal, "ValueError"),
        (manifests, "is_token", lambda value: isinstance(value, str), "attempt"),
        (manifests._CHECKS, "created_unix_seconds", lambda value: True, "Error"),  # private: it has the function
        (journal, "is_uri", lambda value: isinstance(value, str), "uri"),
    ],
)
def test_fuzz_finds_a_seeded_bug(
    owner: Any, name: str, replacement: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, replacement)
    findings = fuzz(60.0, seed=1, inputs_max=60_000, stop_at_first=True)
    assert any(found in text for text in findings.violations), f"{name}: not found in {findings.inputs} inputs"
