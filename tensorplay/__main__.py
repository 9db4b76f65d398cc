"""``python -m tensorplay``: the command line."""

from __future__ import annotations

from tensorplay.cli import main

if __name__ == "__main__":
    main()
