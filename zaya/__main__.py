"""The `zaya` command: hears Ctrl-C and SIGTERM first, and imports what is slow afterwards."""

import os

try:
    from zaya import interrupts
except KeyboardInterrupt:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def main() -> None:
    """Entry point of the console script and of `python -m zaya`."""
    interrupts.listen()
    from zaya.cli import main as run

    run()


if __name__ == "__main__":
    main()
