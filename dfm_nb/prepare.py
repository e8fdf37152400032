"""`dfm prepare`, or `torchrun ... -m dfm_nb.prepare`: its flags; the work is `data.preparation`'s."""

from __future__ import annotations

import dataclasses
import os
import typing

from dfm_nb.base import plugins
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.log import start_logging
from dfm_nb.data.preparation import PrepareConfig, check, prepare

MENUS = {"source": "sources", "tokenizer": "tokenizers", "text_encoder": "text_encoders"}


def parser() -> ArgumentParser:
    """A flag for each field of `PrepareConfig`, and those that the plugins bring along."""
    p = ArgumentParser(prog="dfm prepare", description="Encode captioned images and clips into WebDataset shards.")
    hints = typing.get_type_hints(PrepareConfig)
    for field in PrepareConfig.own_fields():
        _add(p, field, hints[field.name])
    for kind in plugins.KINDS:
        group = p.add_argument_group(f"flags of {kind.replace('_', ' ')}")
        for flag in plugins.flags(kind).values():
            group.add_argument(flag.option, type=flag.type, help=flag.help)
    return p


def _add(p: ArgumentParser, field: dataclasses.Field, hint: type) -> None:
    """The flag of one field."""
    flags = list(field.metadata["flags"]) or ["--" + field.name.replace("_", "-")]
    if field.name == "text_encoder_path":
        modules = plugins.load_all("text_encoders").values()
        flags = [m.PATH_FLAG for m in modules if hasattr(m, "PATH_FLAG")] + flags
    help = field.metadata["help"]
    if field.name in MENUS:
        help += ", ".join(plugins.names(MENUS[field.name]))
    if isinstance(field.default, bool):
        p.add_argument(*flags, dest=field.name, action="store_true", help=help)
        return
    required = field.default is dataclasses.MISSING
    kind = next(t for t in (*typing.get_args(hint), hint) if t is not type(None))  # `int | None` is read by int
    default = None if required else field.default
    p.add_argument(*flags, dest=field.name, type=kind, default=default, required=required, help=help)


def parse(argv: list[str] | None) -> PrepareConfig:
    return PrepareConfig.of(**vars(parser().parse_args(argv)))


def preflight(argv: list[str], nproc: int) -> None:
    """Say a mistake once and at once, before torchrun starts processes."""
    check(parse(argv), nproc)


def main(argv: list[str] | None = None) -> int:
    config = parse(argv)
    start_logging(rank=int(os.environ.get("RANK", 0)))
    prepare(config)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
