"""Ship a profile that ``hyscale profile run`` recorded: checked, merged, compressed, put with the others.

    python simulator/tools/ship_profile.py PROFILE.jsonl [MORE.jsonl ...] [--name h200-own]

writes simulator/hyscale_simulator/data/profiles/NAME.jsonl.gz. The files must be of one GPU model and of this
project's own measuring. Where several measured the same thing, the first file's point is kept; failed points
are counted and left out. Provenance (versions, commit, clocks, power limit, time) stays with every point.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from hyscale_ref.profile import ProfileError, best_of, read_profile, write_profile

HERE = Path(__file__).parents[1] / "hyscale_simulator" / "data" / "profiles"
LARGEST_BYTES = 2**20
"""Of one file; all of them together may take 5 MB of the wheel."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profiles", nargs="+", type=Path)
    parser.add_argument("--name", default="h200-own", help="of the file; default: h200-own")
    given = parser.parse_args(arguments)
    try:
        points = [point for path in given.profiles for point in read_profile(path)]
    except (OSError, ProfileError) as error:
        print(f"ship_profile: {error}", file=sys.stderr)
        return 2
    devices = {point.device for point in points}
    published = sorted({point.source for point in points if point.source})
    if len(devices) != 1 or published:
        what = f"devices {sorted(devices)}" if len(devices) != 1 else f"points from {published[0]!r}"
        print(f"ship_profile: {what}; allowed: one GPU model, measured by this project", file=sys.stderr)
        return 2
    kept = sorted(best_of(points).values(), key=lambda point: point.key)
    target = HERE / f"{given.name}.jsonl.gz"
    write_profile(target, kept)
    size = target.stat().st_size
    if size > LARGEST_BYTES:
        target.unlink()
        print(f"ship_profile: {size} bytes; allowed: {LARGEST_BYTES}", file=sys.stderr)
        return 1
    failed = sum(point.status != "ok" for point in points)
    repeated = len(points) - failed - len(kept)
    print(
        f"{target}: {len(kept)} points, {size} bytes; {failed} failed and {repeated} repeated ones left out"
    )
    for op, count in sorted(Counter(point.op for point in kept).items()):
        print(f"  {count:4} {op}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
