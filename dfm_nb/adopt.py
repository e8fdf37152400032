"""`dfm adopt DIR`: shards that someone else wrote become a whole data set; the work is `data.adoption`'s."""

from __future__ import annotations

from dfm_nb.base import plugins
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.log import start_logging
from dfm_nb.data.adoption import adopt_dataset

__all__ = ["adopt_dataset", "main"]


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="dfm adopt", description="Make a folder of shards of another writer whole.")
    p.add_argument("folder", help="folder with .tar shards; they are not changed")
    p.add_argument("--tokenizer", required=True, help="of the latents: " + ", ".join(plugins.names("tokenizers")))
    p.add_argument("--text-encoder", required=True, help="of the texts: " + ", ".join(plugins.names("text_encoders")))
    p.add_argument("--tokenizer-cache-dir", "--tokenizer-path", dest="tokenizer_path", help="its file or folder")
    p.add_argument(
        "--t5-cache-dir",
        "--text-encoder-path",
        dest="text_encoder_path",
        help="its folder; without it the empty caption is one token of zeros",
    )
    p.add_argument("--val-fraction", type=float, default=0.0, help="share of the samples to validate on, whole shards")
    p.add_argument("--device", default="cpu", help="where the encoders run")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    start_logging()
    adopt_dataset(**vars(args))
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
