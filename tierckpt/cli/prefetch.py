"""``tierckpt prefetch``."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..agent.rollout import RolloutWatch, line
from ..cache.prefetch import FileFilter, PrefetchResult
from ..errors import ConfigError, ObjectNotFoundError, PartialTransferError, TierckptError
from ..format.layout import Location
from ..format.uris import local_path
from ..mover import Mover
from ..process_start import is_ready
from ..restore.prefetch import PrefetchRequest, fetch
from ..restore.prefetch import check as check_prefetched
from ..restore.prefetch import plan as plan_prefetch
from ..types import Json
from . import cache
from .cache import join_reports
from .ui.output import Report, facts, human_bytes, redrawing
from .ui.session import ProgressSession, Session, location_of, size_of

PENDING_SECONDS = 1800.0

MANAGED = ("check", "evict", "unpin")
"""Options that are verbs of `tierckpt cache` too."""

EXCLUDED = (
    *(
        ({one, other}, f"--{one} and --{other.replace('_', '-')} exclude each other")
        for one, other in product(MANAGED, (*MANAGED, "pin", "dry_run", "watch"))
        if one != other
    ),
    *(({one, "hf_cache"}, f"--{one} is about the node cache, not the cache of --hf-cache") for one in MANAGED[1:]),
    ({"watch", "several URIs"}, "--watch shows a fetch of one URI"),
    ({"watch", "dry_run"}, "--dry-run fetches nothing that --watch could show"),
    ({"pin", "dry_run"}, "--dry-run fetches nothing that --pin could keep"),
    ({"pin", "hf_cache"}, "--pin keeps files in the node cache, not in the cache of --hf-cache"),
    ({"dry_run", "hf_cache"}, "--dry-run plans a fetch to the node cache, not to the cache of --hf-cache"),
    ({"to", "several URIs"}, "--to takes one URI"),
    ({"to", "no URI"}, "--to takes one URI"),
)


def prefetch(
    session: ProgressSession,
    uris: Annotated[list[str] | None, Argument(metavar="URI...", help="Models, checkpoints or single objects.")] = None,
    to: Annotated[
        Path | None, Option(metavar="DIR", help="Directory to fill (one URI). Default: this node's cache.")
    ] = None,
    hf_cache: Annotated[
        bool,
        Option(
            help="Of hf://ORG/NAME: fill the Hugging Face cache (HF_HUB_CACHE, or --to), where from_pretrained "
            "finds it."
        ),
    ] = False,
    include: Annotated[list[str] | None, Option(metavar="GLOB", help="Only matching files; may be repeated.")] = None,
    exclude: Annotated[list[str] | None, Option(metavar="GLOB", help="No matching files; may be repeated.")] = None,
    pin: Annotated[bool, Option(help="Keep it in the cache until it is unpinned.")] = False,
    unpin: Annotated[bool, Option(hidden=True, help="`tierckpt cache unpin`.")] = False,
    check: Annotated[bool, Option(hidden=True, help="`tierckpt cache check`.")] = False,
    read_data: Annotated[bool, Option(hidden=True, help="`tierckpt cache check --read-data`.")] = False,
    evict: Annotated[bool, Option(hidden=True, help="`tierckpt cache evict`.")] = False,
    dry_run: Annotated[bool, Option(help="Show which files would be fetched and evicted.")] = False,
    max_bytes: Annotated[
        str | None,
        Option(metavar="SIZE", help="Size limit of the cache, including these files; with --to, of these files."),
    ] = None,
    wait: Annotated[bool, Option(help="Wait until each URI exists and is committed.")] = False,
    timeout: Annotated[
        float, Option(metavar="SECONDS", min=0, help="With --wait: limit of the wait.")
    ] = PENDING_SECONDS,
    watch: Annotated[
        bool, Option(help="Show the progress of all nodes (peers) until all are done. No URI: only show.")
    ] = False,
) -> Report:
    """Fetch models, checkpoints or any files to this node, completely or not at all.

    A directory appears after every file in it is verified and durable. A killed prefetch continues where it stopped;
    concurrent processes share the work. Exit code 3 if any file is missing, with the list.
    """
    given = {name for name, value in locals().items() if value is True}
    locations = [location_of(uri) for uri in uris or ()]
    given |= {"several URIs"} if len(locations) > 1 else set() if locations else {"no URI"}
    given |= {"to"} if to is not None else set()
    for options, message in EXCLUDED:
        if options <= given:
            raise ConfigError(message, hint="`tierckpt prefetch --help` describes the options")
    if check and not locations and not hf_cache:
        return cache.ls(session)
    if not locations and not watch:
        raise ConfigError("no URI is given", hint="`tierckpt cache ls` lists the cached files")
    if not locations and watch:
        return _watch_rollout(session, None)
    if check:
        return cache.check(session, uris or [], to, include, exclude, read_data, hf_cache)
    if evict or unpin:
        return cache.evict(session, uris) if evict else cache.unpin(session, uris or [])
    size_bytes_max = size_of("--max-bytes", max_bytes)
    is_cached = to is None and not hf_cache
    limits: dict[str, Any] = {"cache_bytes_max": size_bytes_max} if size_bytes_max is not None and is_cached else {}
    call = partial(
        PrefetchRequest,
        directory=local_path(to, "--to") if to is not None else None,
        files=FileFilter(tuple(include or ()), tuple(exclude or ())),
        pin=pin,
        hf_cache=hf_cache,
        size_bytes_max=None if is_cached else size_bytes_max,
        wait_seconds=timeout if wait else None,
    )
    requests = [call(location) for location in locations]
    if watch and session.settings().peers is not None:
        return _watched(session, requests[0], limits)
    with session.progress_bar() as listener, session.client(listener, **limits) as client:
        if not dry_run:
            reports: list[Report] = []
            errors: dict[str, TierckptError] = {}
            for request in requests:
                try:
                    begun = time.monotonic()
                    result = client.start(fetch(client.mover, request)).result()
                    reports.append(_report(request, result, time.monotonic() - begun))
                except TierckptError as error:
                    errors[request.location.uri] = error
            if errors and not reports:
                raise next(iter(errors.values()))
            if errors:
                raise PartialTransferError(
                    f"{len(errors)} of {len(locations)} URIs could not be fetched; the others are complete",
                    hint="Run it again: it fetches only missing data",
                    failures={uri: f"{type(error).__name__}: {error}" for uri, error in errors.items()},
                )
            return join_reports(reports)
        return join_reports([client.run(_plan(client.mover, request)) for request in requests])


def _report(request: PrefetchRequest, result: PrefetchResult, seconds: float) -> Report:
    document: Json = {"uri": request.location.uri, **result.to_json(), "seconds": seconds}
    came_bytes = result.fetched_bytes + result.peer_bytes
    summary = {
        "directory": "{directory}",
        "files": "{files}, {size_bytes:bytes}",
        "fetched now": "{came_bytes:bytes} in {seconds:seconds}, {rate:rate}",
        "was here": "{here_bytes:bytes}",
        "sources": "{fetched_bytes:bytes} from the store, {cached_bytes:bytes} from the node cache"
        if result.cached_bytes
        else "",
        "from peers": "{peer_bytes:bytes} of {nodes} nodes" if result.peers else "",
        "from shared storage": "{fetched_bytes:bytes}" if result.peers else "",
        "read for slow peers": "{stead}",
        "slowest chunk": "{slowest}, {slowest_seconds:.2f} s, from {slowest_from}" if result.slowest else "",
        "pinned": "yes" if result.is_pinned else "",
    }
    more = {
        "came_bytes": came_bytes,
        "seconds": seconds,
        "rate": came_bytes / max(seconds, 1e-3),
        "nodes": len(result.peers),
        "stead": ", ".join(f"{n} ({why})" for why, n in result.fallbacks.items()),
    }
    return Report(document, [facts(summary, result, **more)])


async def _plan(mover: Mover, request: PrefetchRequest) -> Report:
    found = await check_prefetched(mover, request)
    fetch_bytes = 0 if found.state == "whole" else found.size_bytes - found.here_bytes
    room, copy_bytes = None, 0
    if request.directory is not None and fetch_bytes:
        near = await check_prefetched(mover, replace(request, directory=None))
        copy_bytes = min(fetch_bytes, near.size_bytes if near.state == "whole" else near.here_bytes)
        fetch_bytes -= copy_bytes
    if request.directory is None and fetch_bytes:
        room = await plan_prefetch(mover, request)
    going = room.evicted if room is not None else []
    fits = room is None or room.fits
    document: Json = {
        "uri": request.location.uri,
        "would_fetch_bytes": fetch_bytes,
        "would_copy_bytes": copy_bytes,
        "would_fetch": found.missing if fetch_bytes else [],
        "would_evict": [{"uri": row.uri, "size_bytes": row.size_bytes} for row in going],
        "fits": fits,
    }
    summary = {
        "uri": "{uri}",
        "would fetch": "{would_fetch_bytes:bytes} in {count} files",
        "would copy": "{would_copy_bytes:bytes} of this node",
        "would evict": "{going}",
        "fits": "{fits:yes}",
    }
    names = ", ".join(f"{row.uri} ({human_bytes(row.size_bytes)})" for row in going) or "none"
    view = [facts(summary, document, count=len(document["would_fetch"]), going=names)]
    return Report(document, view, 0 if fits else 1)


def _watched(session: Session, request: PrefetchRequest, limits: Mapping[str, Any]) -> Report:
    with session.client(**limits) as client:
        fetching = client.start(_reported(client.mover, request))
        seen = _watch_rollout(session, request.location, fetching)
        fetched = fetching.result()
    return Report({**seen.document, "fetched": fetched.document}, [*seen.view, *fetched.view], fetched.exit_code)


async def _reported(mover: Mover, request: PrefetchRequest) -> Report:
    """The time does not include that of other nodes, which ``_watched`` waits for."""
    begun = time.monotonic()
    result = await fetch(mover, request)
    return _report(request, result, time.monotonic() - begun)


# --- --watch -----------------------------------------------------------------------------------------------------

TICK_SECONDS = 0.5
LINE_SECONDS = 2.0
BEGIN_SECONDS = 60.0
SETTLED_TICKS = 2


def _watch_rollout(session: Session, location: Location | None, fetching: Future[Report] | None = None) -> Report:
    """Watch one version fill all nodes, until it is complete on all of them, or Ctrl-C.

    Raises ConfigError without ``peers``, ObjectNotFoundError if no node fills it within a minute.
    """
    settings = session.settings()
    if settings.peers is None:
        raise ConfigError("peers is not set, so this is the only node", hint="Set peers (TIERCKPT_PEERS)")
    uri = location.uri if location is not None else None
    seen = RolloutWatch(uri, settings)
    with contextlib.suppress(*(() if fetching is not None else (KeyboardInterrupt,))):
        asyncio.run(_watch_nodes(seen, fetching, is_quiet=session.as_json))
    if seen.rollout is None:
        return Report({"uri": uri, "done": False, "nodes": []}, ["No node was filling anything."])
    return Report(seen.rollout.to_json(), [line(seen.rollout)])


async def _watch_nodes(seen: RolloutWatch, fetching: Future[Report] | None, *, is_quiet: bool) -> None:
    begun, settled, said_at = time.monotonic(), 0, float("-inf")
    with redrawing(sys.stderr, transient=True) as draw:
        try:
            while settled < SETTLED_TICKS and (fetching is not None or not is_ready(1 if is_quiet else 2, 0)):
                await seen.poll()
                if fetching is not None and fetching.done():
                    if fetching.exception() is not None:
                        return
                    settled += seen.rollout is None  # nodes do not report a checkpoint as a fill
                elif seen.rollout is None and fetching is None and time.monotonic() - begun > BEGIN_SECONDS:
                    raise ObjectNotFoundError(
                        f"no node is filling {seen.uri or 'anything'}",
                        hint="`tierckpt prefetch URI` on each node fills it",
                    )
                if seen.rollout is not None:
                    settled = settled + 1 if seen.rollout.is_done else 0
                if not is_quiet and time.monotonic() - said_at >= (0 if sys.stderr.isatty() else LINE_SECONDS):
                    said_at = time.monotonic()
                    nobody = f"none of {seen.members} nodes is filling anything yet"
                    draw(nobody if seen.rollout is None else line(seen.rollout))
                await asyncio.sleep(TICK_SECONDS)
        finally:
            await seen.close()
