"""Peak memory of reading parts, each from a file: prints {name: [bytes of the part, bytes that reading took]}."""

import json
import sys
from pathlib import Path

from dfm_nb.base.records import SampleError
from dfm_nb.data import shards


def status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10


def main(folder: Path) -> None:
    good = {part: (folder / f"good.{part}").read_bytes() for part in shards.PARTS}
    shards.decode_sample(good, "good")
    found = {}
    for path in sorted(folder.glob("*-*")):
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        parts = {**good, path.suffix[1:]: path.read_bytes()}
        try:
            shards.decode_sample(parts, path.stem)
        except SampleError:
            pass
        found[path.name] = [path.stat().st_size, status("VmHWM") - before]
        del parts
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
