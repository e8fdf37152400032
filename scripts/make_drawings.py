"""Recreate the pictures of the source `drawings` from the Open Clip Art Library.

    python scripts/fetch_openclipart.py data/openclipart
    python scripts/make_drawings.py data/openclipart

The list is dfm_nb/offline/drawings/{train,test}/metadata.csv: `source` is the file in the library. Captions were
written manually, because titles are in five languages and many name a collection. Pictures are 96 px, on white, RGB.
"""

import argparse
import csv
from pathlib import Path

from PIL import Image

SIZE_PX = 96
FOLDER = Path(__file__).parents[1] / "dfm_nb/offline/drawings"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clipart", type=Path, help="output folder of fetch_openclipart.py")
    clipart = parser.parse_args().clipart
    for table in sorted(FOLDER.glob("*/metadata.csv")):
        with table.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            drawing = (
                Image.open(clipart / row["source"]).convert("RGBA").resize((SIZE_PX, SIZE_PX), Image.Resampling.LANCZOS)
            )
            on_white = Image.alpha_composite(Image.new("RGBA", drawing.size, "white"), drawing).convert("RGB")
            on_white.save(table.parent / row["file_name"], optimize=True)
        print(f"{len(rows)} drawings in {table.parent}")


if __name__ == "__main__":
    main()
