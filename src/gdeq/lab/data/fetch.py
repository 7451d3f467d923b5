"""Getting files from elsewhere: single files by pooch, packages by their own programs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from gdeq.lab.data.errors import DataError
from gdeq.lab.data.recipe import Progress

CHUNK = 2**20  # bytes
RETRIES = 2


class _Bar:
    """What pooch calls a progress bar: passes on how far a download is."""

    def __init__(self, what: str, tell: Progress) -> None:
        self.what, self.tell = what, tell
        self.total = self.done = 0

    def update(self, amount: int) -> None:
        self.done += amount
        if self.total:
            self.done = min(self.done, self.total)  # pooch counts whole chunks
        self.tell(self.what, self.done, self.total or None)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def download(url: str, md5: str | None, folder: Path, progress: Progress) -> Path:
    """The file behind `url` in `folder`; it appears there only if its MD5 is the known one.

    md5: None where the caller checks what the file holds.
    """
    import pooch  # with requests half a second to import  # noqa: PLC0415
    import requests  # noqa: PLC0415

    pooch.get_logger().setLevel("WARNING")  # `progress` tells the rest
    name = url.rsplit("/", 1)[-1]
    bar: Any = _Bar(f"downloading {name}", progress)
    files = pooch.create(
        folder, "", registry={name: md5 and f"md5:{md5}"}, urls={name: url}, retry_if_failed=RETRIES
    )
    try:
        fetch = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=30)
        return Path(files.fetch(name, downloader=fetch))
    except requests.HTTPError as error:
        answer = error.response
        assert answer is not None  # it is made from one
        raise DataError(f"the server answered {answer.status_code} {answer.reason}") from error
    except requests.RequestException as error:
        broken = isinstance(error, requests.exceptions.ChunkedEncodingError)
        said = "the connection broke" if broken else "no connection"
        raise DataError(f"{said} ({_first_cause(error)})") from error
    except ValueError as error:  # how pooch says that the sum is another
        raise DataError(f"{name} is not the official file: {error}") from error


def _first_cause(error: BaseException) -> BaseException:
    """Below the layers of HTTP libraries, what the system said."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


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
