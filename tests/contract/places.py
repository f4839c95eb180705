"""Places for the store contract: each knows its backend by another way than the store under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec

from tests.contract.store_contract import Place
from tests.services import AzureServer, S3Server
from tierckpt.config import Settings
from tierckpt.format.layout import parse_uri
from tierckpt.stores import open_store
from tierckpt.stores.base import Store
from tierckpt.stores.fsspec_store import UniversalStore


class DirectoryPlace(Place):
    """A directory, looked at with pathlib."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> Store:
        return open_store(parse_uri(self.root), Settings.load())

    def raw_keys(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    def raw_get(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def raw_put(self, key: str, data: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(data)


class FsspecDirectoryPlace(DirectoryPlace):
    """The same directory through fsspec: a backend with real directories and a rename."""

    has_put_if_absent = False

    def open(self) -> Store:
        return UniversalStore(fsspec.filesystem("file"), str(self.root), str(self.root))


class MemoryPlace(Place):
    """fsspec's in-process store, looked at through its dictionary."""

    has_put_if_absent = False

    def __init__(self, name: str) -> None:
        self.prefix = f"/{name}/"
        self.fs = fsspec.filesystem("memory")

    def open(self) -> Store:
        return open_store(parse_uri(f"memory:/{self.prefix}"), Settings.load())

    def raw_keys(self) -> set[str]:
        return {path[len(self.prefix) :] for path in self.fs.store if path.startswith(self.prefix)}

    def raw_get(self, key: str) -> bytes:
        return bytes(self.fs.store[self.prefix + key].getvalue())

    def raw_put(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(self.prefix + key, data)


def inside(prefix: str, keys: set[str]) -> set[str]:
    assert all(key.startswith(prefix) for key in keys), "a store wrote outside its prefix"
    return {key.removeprefix(prefix) for key in keys}


class S3Place(Place):
    """A prefix of a bucket, looked at with boto3."""

    def __init__(self, server: S3Server, uri: str) -> None:
        self.uri = uri
        self.location = parse_uri(uri)
        self.bucket = self.location.authority
        self.prefix = f"{self.location.path}/"
        self.client: Any = server.client()

    def open(self) -> Store:
        return open_store(self.location, Settings.load())

    def raw_keys(self) -> set[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return inside(self.prefix, {item["Key"] for page in pages for item in page.get("Contents", [])})

    def raw_get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)["Body"].read()
        return data

    def raw_put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data)

    def unfinished(self) -> list[str]:
        return [item["Key"] for item in self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])]


class S3fsPlace(S3Place):
    """The same bucket through fsspec's s3fs: a backend that publishes a file on close."""

    has_put_if_absent = False

    def __init__(self, server: S3Server, uri: str) -> None:
        super().__init__(server, uri)
        keys = {"key": server.access_key, "secret": server.secret_key}
        self.fs = fsspec.filesystem("s3", endpoint_url=server.endpoint, skip_instance_cache=True, **keys)

    def open(self) -> Store:
        return UniversalStore(self.fs, f"{self.bucket}/{self.location.path}", self.uri)


class AzurePlace(Place):
    """A prefix of a container, looked at with Microsoft's client.

    ``unfinished`` stays empty: Azure has no abort, parts that were never committed vanish by themselves.
    """

    def __init__(self, server: AzureServer, uri: str) -> None:
        self.location = parse_uri(uri)
        self.prefix = f"{self.location.path}/"
        self.client: Any = server.client(self.location.authority)

    def open(self) -> Store:
        return open_store(self.location, Settings.load())

    def raw_keys(self) -> set[str]:
        return inside(self.prefix, {blob.name for blob in self.client.list_blobs()})

    def raw_get(self, key: str) -> bytes:
        data: bytes = self.client.download_blob(self.prefix + key).readall()
        return data

    def raw_put(self, key: str, data: bytes) -> None:
        self.client.upload_blob(self.prefix + key, data, overwrite=True)
