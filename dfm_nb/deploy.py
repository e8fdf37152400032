"""`dfm deploy`: job files of a cluster (Slurm, Kubernetes, Kubeflow) from one description.

What enters: a YAML file (see deploy/cluster.yaml) and `group.key=value` strings. What leaves: the text of a file, on stdout or in a folder.
Guarantees: nothing is written unless the description is free of faults; the same description gives the same bytes. No cluster is contacted.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.cluster import load
from dfm_nb.deploy_files import KINDS, render


def main(argv: list[str] | None = None) -> int:
    kinds = "\n".join(f"  {kind:<17} {text}" for kind, (_, text, _) in KINDS.items())
    p = ArgumentParser(
        prog="dfm deploy",
        description="Job files of a cluster from one description (deploy/cluster.yaml). Kinds:\n" + kinds,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("kind", metavar="KIND", help=f"{', '.join(KINDS)}, or all")
    p.add_argument("--config", help="YAML; without it the defaults")
    p.add_argument("--output-dir", help="write the file (all: every file) here instead of to stdout")
    p.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the file, for example nodes=4 training.model=DiT-L"
    )
    args = p.parse_intermixed_args(argv)
    if args.kind not in (*KINDS, "all"):
        near = difflib.get_close_matches(args.kind, KINDS, 1)
        raise ValueError(
            f"there is no kind {args.kind!r}; "
            + (f"did you mean {near[0]}?" if near else f"choose {', '.join(KINDS)} or all")
        )
    if args.kind == "all" and not args.output_dir:
        raise ValueError("`all` writes several files: give --output-dir DIR")
    cluster = load(args.config, args.overrides)
    for kind in KINDS if args.kind == "all" else [args.kind]:
        text, name = render(kind, cluster), KINDS[kind][2]
        if not args.output_dir:
            print(text, end="")
            continue
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        print(folder / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
