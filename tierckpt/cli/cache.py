"""``tierckpt cache``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ..cache.node_cache import CacheCheck
from ..cache.pool import CacheRow, Pool
from ..cache.prefetch import FileFilter
from ..cache.space import shrink_cache
from ..errors import ConfigError, IntegrityError, ObjectNotFoundError
from ..format.layout import Location
from ..format.uris import local_path
from ..restore.prefetch import PrefetchRequest
from ..restore.prefetch import check as check_prefetched
from ..types import Json
from .ui.output import Report, facts, human_bytes, table
from .ui.session import Session, location_of, size_of, taking_options

PARTIAL = 3

Uris = Annotated[list[str], typer.Argument(metavar="URI...", help="Models, checkpoints or single objects.")]


def ls(session: Session) -> Report:
    """List cached files, the most recently used first: size, pins, processes that use them."""
    pool = Pool(session.settings())
    rows = pool.rows()[::-1]
    quota = pool.settings.cache_bytes_max
    document: Json = {
        "cache": str(pool.root),
        "cache_bytes": sum(row.reserved_bytes for row in rows),
        "cache_bytes_max": None if quota is None else int(quota),
        "entries": [
            {
                "uri": row.uri,
                "state": row.state,
                "directory": str(pool.directory(row.name)) if row.state == "complete" else None,
                "files": row.files,
                "size_bytes": row.size_bytes,
                "reserved_bytes": row.reserved_bytes,
                "pinned": row.is_pinned,
                "leases": len(pool.leases(row.name)),
                "used_unix_seconds": row.used_unix_ns / 1e9,
            }
            for row in rows
        ],
    }
    summary = {
        "cache": "{cache}",
        "held": "{cache_bytes:bytes} of " + ("what the disk has" if quota is None else "{cache_bytes_max:bytes}"),
    }
    columns = (
        "uri state >size=size_bytes:bytes pinned:yes >in_use=leases last_used_(UTC)=used_unix_seconds:day directory"
    )
    return Report(document, [facts(summary, document), table(columns, document["entries"])])


def check(
    session: Session,
    uris: Uris,
    to: Annotated[Path | None, Option(metavar="DIR", help="A directory that `prefetch --to` filled.")] = None,
    include: Annotated[list[str] | None, Option(metavar="GLOB", help="Only matching files.")] = None,
    exclude: Annotated[list[str] | None, Option(metavar="GLOB", help="No files that match.")] = None,
    read_data: Annotated[bool, Option(help="Digest every byte again.")] = False,
    hf_cache: Annotated[
        bool, Option(help="The Hugging Face cache (HF_HUB_CACHE, or --to): digest every file of hf://ORG/NAME.")
    ] = False,
) -> Report:
    """Compare the cached files with the source. Fetches nothing. Exit code 3 if any file is missing."""
    locations = [location_of(uri) for uri in uris]
    if to is not None and len(locations) != 1:
        raise ConfigError("--to takes one URI", hint="Give one URI at a time, each with a directory of its own")
    target = local_path(to, "--to") if to is not None else None
    files = FileFilter(tuple(include or ()), tuple(exclude or ()))
    with session.client() as client:

        async def look(location: Location) -> Report:
            found = await check_prefetched(client.mover, PrefetchRequest(location, target, files, hf_cache=hf_cache))
            if read_data and not hf_cache:
                await client.mover.node_cache.read_again(found)
            return _checked(found, hf_cache)

        return join_reports([client.run(look(location)) for location in locations])


def _checked(found: CacheCheck, hf_cache: bool) -> Report:
    summary = {
        "uri": "{uri}",
        "state": "{state}",
        "directory": "{directory}",
        "here": "{here_bytes:bytes} of {size_bytes:bytes}",
        "pinned": "{is_pinned:yes}",
        "in use by": "{leases} processes",
    }
    view = [
        facts(summary, found),
        table("missing >bytes:bytes", sorted(found.missing.items())),
        table("bad problem", sorted(found.bad.items())),
    ]
    if hf_cache and found.bad:
        view.append("A prefetch trusts blobs of the right size: remove the damaged ones first.")
    code = IntegrityError.exit_code if found.bad else 0 if found.state == "whole" else PARTIAL
    return Report(found.to_json(), view, code)


def pin(session: Session, uris: Uris) -> Report:
    """Keep the last used version of these URIs in the cache until it is unpinned."""
    pool = Pool(session.settings())
    found = {uri: pool.rows(location_of(uri).uri) for uri in uris}
    if missing := [uri for uri, rows in found.items() if not rows]:
        raise ObjectNotFoundError(
            f"the cache has no files of {', '.join(missing)}", hint="`tierckpt prefetch --pin` fetches and pins"
        )
    names = []
    for *older, newest in found.values():
        pool.pin(newest.name)
        names.append(newest.uri)
        for row in older:
            pool.pin(row.name, False)
    return Report({"pinned": names}, [facts({"pinned": ", ".join(names)})])


def unpin(session: Session, uris: Uris) -> Report:
    """Let the cache evict these URIs again."""
    locations = [location_of(uri) for uri in uris]
    with session.client() as client:
        names = [row.uri for location in locations for row in client.mover.node_cache.unpin(location)]
    return Report({"unpinned": names}, [facts({"unpinned": ", ".join(names) or "nothing was pinned"})])


def evict(
    session: Session,
    uris: Annotated[list[str] | None, Argument(metavar="[URI...]", help="Empty: see --max-bytes.")] = None,
    max_bytes: Annotated[
        str | None, Option(metavar="SIZE", help="Evict the least recently used files down to this size.")
    ] = None,
) -> Report:
    """Remove these URIs from the cache, or the least recently used ones. Exit code 3 if some are pinned or in use."""
    size_bytes_max = size_of("--max-bytes", max_bytes)
    if (size_bytes_max is None) == (not uris):
        raise ConfigError("give URIs or --max-bytes", hint="`tierckpt cache ls` lists the cached files")
    if size_bytes_max is None:
        went: list[CacheRow] = []
        stayed: list[CacheRow] = []
        locations = [location_of(uri) for uri in uris or ()]
        with session.client() as client:
            for location in locations:
                evicted, kept = client.mover.node_cache.evict(location)
                went += evicted
                stayed += kept
        return _eviction(went, stayed)
    pool = Pool(session.settings())
    before = pool.rows()
    shrink_cache(pool, sum(row.reserved_bytes for row in before) - size_bytes_max)
    left = pool.rows()
    names = {row.name for row in left}
    is_too_much = sum(row.reserved_bytes for row in left) > size_bytes_max
    return _eviction([row for row in before if row.name not in names], left if is_too_much else [])


cache = typer.Typer(help="Show and manage the cache of this node.", no_args_is_help=True, rich_markup_mode=None)
for _verb in (ls, check, pin, unpin, evict):
    cache.command()(taking_options(_verb))


def _eviction(went: Sequence[CacheRow], stayed: Sequence[CacheRow]) -> Report:
    freed = sum(row.reserved_bytes for row in went)
    document: Json = {
        "evicted": [{"uri": row.uri, "version": row.version, "size_bytes": row.size_bytes} for row in went],
        "kept": [{"uri": row.uri, "version": row.version, "pinned": row.is_pinned} for row in stayed],
        "freed_bytes": freed,
    }
    summary = {
        "evicted": f"{len(went)} entries, {human_bytes(freed)}",
        "kept": ", ".join(f"{row.uri} ({'pinned' if row.is_pinned else 'in use'})" for row in stayed),
    }
    return Report(document, [facts(summary)], PARTIAL if stayed else 0)


def join_reports(reports: Sequence[Report]) -> Report:
    if len(reports) == 1:
        return reports[0]
    code = max(report.exit_code for report in reports)
    view = [part for report in reports for part in report.view]
    return Report({"uris": [report.document for report in reports]}, view, code)
