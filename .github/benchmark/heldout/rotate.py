"""Keep a directory of numbered files below a total size."""

import os
import re
import sys
import argparse


_NUMBERED = re.compile(r"^(?P<stem>.+)\.(?P<number>\d+)$")


def numbered_files(directory):
    """Yield (number, path, size) for each numbered file in directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _NUMBERED.match(entry.name)
            if match is None or not entry.is_file():
                continue
            yield int(match.group("number")), entry.path, entry.stat().st_size


def rotate(directory, limit, *, dry_run=False):
    """Remove the oldest files until the rest is not larger than limit bytes.

    Return the list of paths that were removed.
    """
    files = sorted(numbered_files(directory), reverse=True)
    total = sum(size for number, path, size in files)
    removed = []
    while files and total > limit:
        number, path, size = files.pop()
        if not dry_run:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
        total -= size
        removed.append(path)
    return removed


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="directory with the files")
    parser.add_argument("--limit", type=int, default=1024, help="size in bytes")
    parser.add_argument("-n", "--dry-run", action="store_true",
                        help="only print what would be removed")
    args = parser.parse_args(argv)
    if not os.path.isdir(args.directory):
        print(f"{args.directory!r} is not a directory", file=sys.stderr)
        return 1
    for path in rotate(args.directory, args.limit, dry_run=args.dry_run):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
