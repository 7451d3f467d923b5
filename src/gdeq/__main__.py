"""`python -m gdeq` and the `gdeq` command."""

import signal
import sys


def main() -> None:
    try:
        from gdeq.lab.cli import app  # noqa: PLC0415 (the library itself needs none of its packages)
    except ModuleNotFoundError as missing:
        sys.exit(f"the gdeq command needs {missing.name}: pip install 'gdeq[train]'")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in place of that of gdeq._command
    app()


if __name__ == "__main__":
    main()
