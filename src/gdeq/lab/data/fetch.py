"""Getting files from elsewhere: a resumable download, and other programs' downloads."""

from __future__ import annotations

import errno
import http.client
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from gdeq.lab.data.errors import DataError
from gdeq.lab.data.recipe import Progress

CHUNK = 2**20
ATTEMPTS = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)


def download(url: str, part: Path, progress: Progress, *, timeout: float = 30.0) -> Path:
    """Fill `part` from `url`, going on where an earlier call stopped; return it once whole."""
    for attempt in range(ATTEMPTS):
        before = _size(part)
        try:
            _continue(url, part, progress, timeout)
            return part
        except DataError:
            # Only a connection that brought something is worth another.
            if attempt == ATTEMPTS - 1 or _size(part) <= before:
                raise
    raise AssertionError("unreachable")


def _continue(url: str, part: Path, progress: Progress, timeout: float) -> None:
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "gdeq"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing is left from there on
            if error.headers.get("Content-Range") != f"bytes */{have}":
                part.unlink()  # nor is what we have the beginning of what is there
                _continue(url, part, progress, timeout)
            return
        raise DataError(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(f"no connection ({getattr(error, 'reason', None) or error})") from error
    with answer:
        if answer.status != 206:
            have = 0  # the server sends it from the start
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        _save(answer, part, have, total, progress)


def _save(
    answer: http.client.HTTPResponse, part: Path, have: int, total: int | None, progress: Progress
) -> None:
    what = f"downloading {part.name.removeprefix('.gdeq-').removesuffix('.part')}"
    try:
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            progress(what, have, total)
            while chunk := _read(answer, have, total):
                file.write(chunk)
                have += len(chunk)
                progress(what, have, total)
    except OSError as error:
        if error.errno in _FULL:
            part.unlink(missing_ok=True)  # give the full disk its space back
        raise
    if total is not None and have != total:
        raise DataError(f"the connection ended after {have:,} of {total:,} bytes")


def _read(answer: http.client.HTTPResponse, have: int, total: int | None) -> bytes:
    try:
        return answer.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        of = f" of {total:,}" if total is not None else ""
        raise DataError(f"the connection broke after {have:,}{of} bytes ({error})") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def run_downloader(command: list[str], folder: Path, result: str, *, timeout: float = 1800) -> Path:
    """Run another program that leaves one file like `result` in `folder`; return that file."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError as error:
        raise DataError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{command[0]} did not finish in {timeout:g} seconds") from error
    except OSError as error:
        raise DataError(f"{command[0]} could not be started: {error}") from error
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise DataError(f"`{' '.join(command)}` failed: {' | '.join(said[:3]) or 'no message'}")
    found = sorted(folder.glob(result))
    if not found:
        raise DataError(f"`{' '.join(command)}` left no {result}")
    return found[-1]
