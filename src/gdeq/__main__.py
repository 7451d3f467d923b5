"""`python -m gdeq` and the `gdeq` command."""

import sys


def main() -> None:
    try:
        from gdeq.lab.cli import app  # noqa: PLC0415 (the library itself needs none of its packages)
    except ModuleNotFoundError as missing:
        sys.exit(f"the gdeq command needs {missing.name}: pip install 'gdeq[train]'")
    app()


if __name__ == "__main__":
    main()
