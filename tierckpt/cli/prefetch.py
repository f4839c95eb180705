"""``tierckpt prefetch``."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..agent.rollout import Rollout, RolloutWatch, line
from ..cache.pool import Pool
from ..cache.prefetch import FileFilter
from ..errors import ConfigError, ObjectNotFoundError, PartialTransferError, TierckptError
from ..format.layout import Location
from ..format.uris import local_path
from ..mover import Mover
from ..process_start import has_reader
from ..restore.prefetch import PrefetchRequest, fetch
from ..restore.prefetch import check as check_prefetched
from ..restore.prefetch import plan as plan_prefetch
from ..types import Json
from .cache import cache_report, checked, evicted, join_reports, unpinned
from .ui.output import Report, facts, human_bytes, printable
from .ui.session import ProgressSession, Session, complete_uri, location_of, size_of

PENDING_SECONDS = 1800.0

_ONE = "give one of --check, --evict, --unpin, --dry-run", "--pin goes with a fetch"
EXCLUDED = (
    (
        "watch",
        {"several URIs", "check", "evict", "unpin", "dry_run"},
        "--watch shows a fetch of one URI",
        "Without a URI it shows what other nodes fetch",
    ),
    ("check", {"evict", "unpin", "dry_run", "pin"}, *_ONE),
    ("evict", {"unpin", "dry_run", "pin"}, *_ONE),
    ("unpin", {"dry_run", "pin"}, *_ONE),
    (
        "hf_cache",
        {"pin", "unpin", "evict", "dry_run"},
        "--hf-cache only fetches and checks",
        "`hf cache ls` and `hf cache rm` look after that cache",
    ),
    ("to", {"several URIs", "no URI"}, "--to takes one URI", "Give one URI at a time, each with its own directory"),
)
"""A flag, those that exclude it, and the error."""


def prefetch(
    session: ProgressSession,
    uris: Annotated[
        list[str] | None,
        Argument(metavar="URI...", help="Models, checkpoints or single objects.", autocompletion=complete_uri),
    ] = None,
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
    for flag, others, message, hint in EXCLUDED:
        if flag in given and not given.isdisjoint(others):
            raise ConfigError(message, hint=hint)
    if not locations and not watch and (hf_cache or not check):
        raise ConfigError("no URI is given", hint="`tierckpt cache ls` lists the cached files")
    if not locations and watch:
        return _watch_rollout(session, None)
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
    if not locations:
        return cache_report(Pool(session.settings()))
    if evict or unpin:
        return evicted(session, locations) if evict else unpinned(session, locations)
    if check:
        return checked(session, requests, read_data=read_data)
    with session.progress_bar() as listener, session.client(listener, **limits) as client:
        if not dry_run:
            reports: list[Report] = []
            errors: dict[str, TierckptError] = {}
            for request in requests:
                try:
                    reports.append(client.start(_fetch(client.mover, request)).result())
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


async def _fetch(mover: Mover, request: PrefetchRequest) -> Report:
    begun = time.monotonic()
    result = await fetch(mover, request)
    document: Json = {"uri": request.location.uri, **result.to_json(), "seconds": time.monotonic() - begun}
    came_bytes = result.fetched_bytes + result.peer_bytes
    summary = {
        "directory": "{directory}",
        "files": "{files}, {size_bytes:bytes}",
        "fetched now": "{came_bytes:bytes} in {seconds:seconds}, {rate:rate}",
        "was here": "{here_bytes:bytes}",
        "sources": "{fetched_bytes:bytes} from the store, {cached_bytes:bytes} from the node cache"
        if result.cached_bytes
        else "",
        "by other processes": "{others_bytes:bytes}" if result.others_bytes else "",
        "from peers": "{peer_bytes:bytes} of {nodes} nodes" if result.peers else "",
        "from shared storage": "{fetched_bytes:bytes}" if result.peers else "",
        "read for slow peers": "{stead}",
        "slowest chunk": "{slowest}, {slowest_seconds:.2f} s, from {slowest_from}" if result.slowest else "",
        "pinned": "yes" if result.is_pinned else "",
    }
    more = {
        "came_bytes": came_bytes,
        "seconds": document["seconds"],
        "rate": came_bytes / max(document["seconds"], 1e-3),
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
        fetching = client.start(_fetch(client.mover, request))
        seen = _watch_rollout(session, request.location, fetching)
        fetched = fetching.result()
    return Report({**seen.document, "fetched": fetched.document}, [*seen.view, *fetched.view], fetched.exit_code)


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
        asyncio.run(_watch_nodes(seen, _RolloutLine(is_quiet=session.as_json), fetching))
    if seen.rollout is None:
        return Report({"uri": uri, "done": False, "nodes": []}, ["No node was filling anything."])
    return Report(seen.rollout.to_json(), [line(seen.rollout)])


async def _watch_nodes(seen: RolloutWatch, out: _RolloutLine, fetching: Future[Report] | None) -> None:
    begun, settled = time.monotonic(), 0
    try:
        while settled < SETTLED_TICKS and (fetching is not None or has_reader(1 if out.is_quiet else 2)):
            await seen.poll()
            if fetching is not None and fetching.done():
                if fetching.exception() is not None:
                    return
                settled += seen.rollout is None  # nodes do not report a checkpoint as a fill
            elif seen.rollout is None and fetching is None and time.monotonic() - begun > BEGIN_SECONDS:
                raise ObjectNotFoundError(
                    f"no node is filling {seen.uri or 'anything'}", hint="`tierckpt prefetch URI` on each node fills it"
                )
            if seen.rollout is not None:
                settled = settled + 1 if seen.rollout.is_done else 0
            out.show(seen.rollout, seen.members)
            await asyncio.sleep(TICK_SECONDS)
    finally:
        out.end()
        await seen.close()


class _RolloutLine:
    """Rewrites one line on a terminal, else prints a new one now and then; none with ``--json``."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.is_quiet, self._is_live = is_quiet, sys.stderr.isatty()
        self._said_at, self._width = float("-inf"), 0

    def show(self, rollout: Rollout | None, members: int) -> None:
        if self.is_quiet or (not self._is_live and time.monotonic() - self._said_at < LINE_SECONDS):
            return
        self._said_at = time.monotonic()
        text = line(rollout) if rollout is not None else f"none of {members} nodes is filling anything yet"
        if self._is_live:
            text = printable(text)[: shutil.get_terminal_size().columns - 1]
            self._width, text = len(text), "\r" + text.ljust(self._width)
        sys.stderr.write(text if self._is_live else printable(text) + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._is_live and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
