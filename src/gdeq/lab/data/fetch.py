"""Getting files from elsewhere: single files by pooch, packages by their own programs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from gdeq.lab.data.errors import DataError
from gdeq.lab.data.recipe import Progress

CHUNK = 2**20  # bytes
RETRIES = 2
TIMEOUT = 1800  # seconds, of another program


class _Bar:
    """What pooch calls a progress bar: passes on how far a download is."""

    total = done = 0

    def __init__(self, what: str, tell: Progress) -> None:
        self.what, self.tell = what, tell

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


def run_downloader(command: list[str], folder: Path, result: str) -> Path:
    """Run another program that leaves one file like `result` in `folder`; return that file."""
    told = f"`{' '.join(command)}`"
    options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "errors": "replace"}
    try:
        subprocess.run(command, cwd=folder, timeout=TIMEOUT, check=True, **options)
    except FileNotFoundError as error:
        raise DataError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        said = [line for line in (error.stderr or error.stdout).splitlines() if line.strip()]
        raise DataError(f"{told} failed: {' | '.join(said[:3]) or 'no message'}") from error
    except (subprocess.TimeoutExpired, OSError) as error:
        raise DataError(f"{command[0]} did not finish: {error}") from error
    found = sorted(folder.glob(result))
    if not found:
        raise DataError(f"{told} left no {result}")
    return found[-1]
