"""A place is where its spelling says: two names are two places, on the store and on the local tier."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tierckpt.errors import ConfigError
from tierckpt.format.layout import local_dir, location_at
from tierckpt.format.uris import Location, local_path, parse_uri

ROOTS = {
    "": "/d/",
    "file://": "/d/",
    "local://": "/d/",
    "s3://": "bucket/",
    "az://": "container/",
    "gs://": "bucket/",
    "hf://": "user/model/",
    "memory://": "d/",
    "hdfs://": "host:8020/d/",
    "hdfs:///": "d/",
    "tierckpt://file": "/d/",
    "tierckpt://s3/": "bucket/",
    "tierckpt://gs/": "bucket/",
    "tierckpt://hf/": "user/model/",
}
AS_FSSPEC = ["", "file://", "local://", "s3://", "memory://"]
"""Schemes with a file system installed here that parses a URL without a connection."""

printable = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/\ufffe\uffff")
names = st.text(printable | st.sampled_from("#?%~[]*{}|\\^`\"'<> +&=,;:@()!$."), min_size=1, max_size=12)


def usable(name: str) -> str:
    """Skip the names that are refused, for reasons that have their own tests below."""
    assume(name not in (".", "..") and "=" not in name and not name.isspace())
    return name


@pytest.mark.parametrize("prefix", ROOTS)
@given(name=names, other=names)
@example(name="a#1", other="a#2")
@example(name="a?x", other="a")
@example(name="a%20b", other="a b")
@example(name="a ", other="a")
def test_two_names_are_two_places_that_keep_each_character(prefix: str, name: str, other: str) -> None:
    assume(usable(name) != usable(other) and not (prefix == "az://" and "\\" in name + other))
    uri, twin = (f"{prefix}{ROOTS[prefix]}{one}" for one in (name, other))
    location = parse_uri(uri)
    assert location.name == name and parse_uri(location.uri) == location
    assert location.child("step-1").uri == f"{location.uri}/step-1"
    root = Path("/root")
    directory = local_dir(root, location)
    assert directory != local_dir(root, parse_uri(twin)) and location_at(root, directory) == location
    assert root / "checkpoints" in directory.parents


@pytest.mark.parametrize("prefix", AS_FSSPEC)
@settings(deadline=None)  # the first one imports the file system
@given(name=names)
@example(name="a#1")
@example(name="a?x=2")
@example(name="a%20b")
def test_a_place_is_where_fsspec_looks_for_it(prefix: str, name: str) -> None:
    assume("::" not in usable(name))  # fsspec chains file systems there
    uri = f"{prefix}{ROOTS[prefix]}{name}"
    location = parse_uri(uri)
    _, path = fsspec.url_to_fs(uri)
    assert path.lstrip("/") == f"{location.authority}/{location.path.lstrip('/')}".lstrip("/")


@pytest.mark.parametrize(
    ("spelled", "same"),
    [
        ("/d//a/./b/", "/d/a/b"),
        ("//d/a", "/d/a"),
        ("/d/c/../a", "/d/a"),
        ("/../../d", "/d"),
        ("file:///d//a/", "/d/a"),
        ("file:////d/a", "/d/a"),
        ("file:///d/../a", "/a"),
        ("FILE:///d/a", "/d/a"),
        ("file://localhost/d", "/d"),
        ("local:///d", "/d"),
        ("memory:///a/b/", "memory://a/b"),
        ("s3://bucket/a///", "s3://bucket/a"),
        ("gcs://bucket/a", "gs://bucket/a"),
        ("s3a://bucket/a", "s3://bucket/a"),
        ("abfss://box@account.dfs.core.windows.net/a", "az://box/a"),
    ],
)
def test_spellings_of_one_place_are_one_directory(spelled: str, same: str) -> None:
    assert parse_uri(spelled) == parse_uri(same)
    assert local_dir(Path("/root"), parse_uri(spelled)) == local_dir(Path("/root"), parse_uri(same))


def test_a_directory_has_no_query() -> None:
    assert parse_uri("file:///d/a?sig=1").path == "/d/a?sig=1"


def test_two_dots_go_up_from_the_target_of_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    monkeypatch.chdir(tmp_path / "real")
    assert parse_uri(f"{tmp_path}/link/../run").path == f"{tmp_path}/real/run"
    assert parse_uri("../run") == parse_uri(f"{tmp_path}/run")
    assert parse_uri(f"{tmp_path}/link/run").path == f"{tmp_path}/link/run"
    assert local_path("../..b/c", "--to") == tmp_path / "..b/c"


PATHS = ["-a", "a:b", "c:\\x", "foo:bar", "a\nb", " a", "a ", "~x", "a::b", "a::b::c", "$HOME", "a\x7f"]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_what_the_system_makes_of_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_uri(name).path == f"{tmp_path}/{name}"
    assert parse_uri(f"{tmp_path}/{name}").path == f"{tmp_path}/{name}"


PREFIXES = ["", "s3://", "file://", "az://", "hf://", "memory://", "hdfs://", "tierckpt://", "x::", "~", ".."]


@given(prefix=st.sampled_from(PREFIXES), rest=st.text(max_size=30) | st.text("/.:#?%@~ \\s3filez_-", max_size=30))
def test_any_text_is_refused_or_has_one_spelling(prefix: str, rest: str) -> None:
    try:
        location = parse_uri(prefix + rest)
    except ConfigError:
        return
    assert parse_uri(location.uri) == location
    assert ".." not in location.path.split("/")


REFUSED = {
    "s3://bucket//key": "s3://bucket/key",
    "s3://bucket/a//b": "s3://bucket/a/b",
    "gs://bucket/a/./b": "gs://bucket/a/b",
    "memory://../../etc": "memory://etc",
    "memory://a//b": "memory://a/b",
    "sftp://../x": "sftp://BUCKET/KEY",
    "hdfs://_/x": "hdfs://BUCKET/KEY",
    "s3://bucket/a\nb": "'\\n'",
    "s3://bucket/a\n": "s3://bucket/a",
    "file:///a\tb": "'\\t'",
    "s3://bucket/a?versionId=7": "s3://bucket/a",
    "az://box/a?versionid=7": "az://box/a",
    "az://box/a\\b": "az://box/a/b",
    "s3://": "s3://BUCKET/KEY",
    "az:///": "az://BUCKET/KEY",
    "s3://bucket?x/run": "'?'",
    "az://box#1/run": "'#'",
    "gs://buck%20et": "'%'",
    "s3://key@bucket/run": "'@'",
    "s3://key:secret-of-mine@bucket/run": "environment variables",
    "file://": "file:///",
    "file://relative/x": "file:///relative/x",
    "local:x": "file:///x",
    "simplecache::s3://bucket/run": "s3://bucket/run",
    "zip://in::simplecache::file:///a.zip": "file:///a.zip",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_no_store_can_hold_is_refused_with_a_spelling_that_works(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_uri(text)
    said = str(caught.value)
    assert REFUSED[text] in said, said
    assert "secret-of-mine" not in said


@pytest.mark.parametrize("variable", ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"])
def test_a_container_of_another_account_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "mine" if variable.endswith("NAME") else "AccountName=mine;AccountKey=a2V5")
    assert parse_uri("abfss://box@mine.dfs.core.windows.net/run") == Location("az", "box", "run")
    with pytest.raises(ConfigError, match="theirs") as caught:
        parse_uri("abfss://box@theirs.dfs.core.windows.net/run")
    assert "AZURE_STORAGE_ACCOUNT_NAME=theirs" in caught.value.hint
