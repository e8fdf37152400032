"""Open Clip Art and sets of emoji as one table for `dfm prepare`, split by author: the data of the model `drawings`.

    python scripts/fetch_openclipart.py data/openclipart
    for SET in fluent flat noto noto-v1; do python scripts/fetch_emoji.py data/$SET --set $SET; done
    python scripts/drawings_table.py data/openclipart data/fluent data/flat data/noto data/noto-v1 data/drawings-table

Writes train.parquet and test.parquet (columns image, caption, tags, weight) and held_out.txt, the files of the split
`test`. It has every drawing by an author of whom the package's held-out drawings (`dfm prepare --source drawings`)
have one. All emoji are for training. Drawings have weight 2, as there are half as many of them.
"""

import argparse
import csv
import io
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SIZE_PX = 128
HELD_OUT = Path(__file__).parents[1] / "dfm_nb/offline/drawings/test/metadata.csv"


def read(table: Path) -> list[dict[str, str]]:
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def author_key(author: str) -> str:
    """The longest word: "A.J. Ashton" and "AJ Ashton" are one author, and so is "Balin (balin_j@epita.fr)"."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"\(.*?\)", "", author).lower())
    return max(words, key=len, default="")


def picture(path: Path) -> bytes:
    """The picture with sides of at most SIZE_PX, as a PNG."""
    with Image.open(path) as opened:
        image = opened.convert("RGBA")
    image.thumbnail((SIZE_PX, SIZE_PX), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clipart", type=Path, help="output folder of fetch_openclipart.py")
    parser.add_argument("emoji", type=Path, nargs="+", help="output folders of fetch_emoji.py")
    parser.add_argument("output", type=Path, help="output folder; created if missing")
    args = parser.parse_args()
    held_out = {author_key(row["author"]) for row in read(HELD_OUT)} - {""}
    tables: dict[str, list[dict]] = {"train": [], "test": []}
    files = []
    for folder in (args.clipart, *args.emoji):
        for row in read(folder / "captions.csv"):
            name, _, more = row["caption"].partition(", ")
            # Open Clip Art's keywords follow the title in its caption
            tags = [name, *(more if "author" in row else row["keywords"]).split(", ")]
            held = author_key(row.get("author", "")) in held_out
            files += [row["file"]] if held else []
            tables["test" if held else "train"].append(
                {
                    "image": picture(folder / row["file"]),
                    "caption": row["caption"],
                    "tags": ", ".join(dict.fromkeys(t for t in tags if t)),
                    "weight": 2.0 if "author" in row else 1.0,
                }
            )
    args.output.mkdir(parents=True, exist_ok=True)
    for split, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), args.output / f"{split}.parquet")
    (args.output / "held_out.txt").write_text("\n".join(files) + "\n")
    print(f"{len(tables['train']):,} pictures for training, {len(tables['test'])} held out, in {args.output}")


if __name__ == "__main__":
    main()
