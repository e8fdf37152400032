"""README.md and all pages: every `dfm` line parses with the real parsers, every link, figure and flag is there;
docs/index.md and troubleshooting.md run (README's Python block: tests/test_wheel.py).
"""

import itertools
import re
import shlex

import pytest

from dfm_nb import cli, train
from dfm_nb import config as cfg
from dfm_nb.base.argv import ArgumentParser, pop_nproc
from scripts.flags_tables import with_tables
from tests.docs.docs_pages import FENCE, ROOT, Page, all_pages, desk

NAMES = [str(p.relative_to(ROOT)) for p in all_pages()]
README, INDEX, TROUBLES = Page("README.md"), Page("docs/index.md"), Page("docs/troubleshooting.md")


class Parsed(Exception):
    """The parser has accepted the words."""


def commands(page: Page) -> list[tuple[list[str], bool]]:
    """(words, whether it is a fragment) of every `dfm ...` line of a block, and of what the text says with a flag or a
    setting; such a fragment may leave out what is required. Not what is meant to fail, with `||` behind it.
    """
    lines = [(line, False) for _, c in page.fences for line in c.replace("\\\n", " ").splitlines()]
    said = re.findall(r"`(dfm [^`\n]+)`", FENCE.sub("", page.text))
    lines += [(re.sub(r"\bN\b", "2", c), True) for c in said if " -" in c or "=" in c]
    found = []
    for line, fragment in lines:
        if line.startswith("dfm ") and "||" not in line:
            lexer = shlex.shlex(re.sub(r"\$\{?\w+\}?", "1", line), posix=True, punctuation_chars="();<>|&")
            lexer.whitespace_split = True
            words = list(itertools.takewhile(lambda word: not set(word) <= set("();<>|&"), lexer))[1:]
            found += [(words, fragment)] if not {"...", "VERB", "COMMAND"} & set(words) else []
    return found


def _stopping(parse, fragment: bool):
    def stop_after(self, *given, **named):
        for action in self._actions:
            action.required = action.required and not fragment
        parse(self, *given, **named)
        raise Parsed

    return stop_after


def check(words: list[str], monkeypatch, fragment: bool = False) -> None:
    """Hand the words to the verb's own parser; AssertionError or SystemExit when it refuses them."""
    verb, rest = words[0], words[1:]
    if verb.startswith("-"):
        assert verb in ("--help", "--version")
        return
    assert verb in cli.verbs(), f"dfm has no verb {verb}"
    if verb == "pretrain":
        args = train.TrainOptions.parse(pop_nproc(rest)[1])
        cfg.resolve(args.recipe, None, [*args.overrides, *([f"model.size={args.model}"] if args.model else [])])
        return
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(ArgumentParser, name, _stopping(getattr(ArgumentParser, name), fragment))
    try:
        code = cli.main([verb, *rest])
    except Parsed:
        return
    raise AssertionError(f"no parser was asked; exit code {code}")


# extending.md has flags of a package that test_extending.py installs; test_skills.py runs the commands of the skills
@pytest.mark.parametrize("name", [n for n in NAMES if n != "docs/extending.md" and not n.startswith("skills/")])
def test_every_command_of_the_page_is_accepted_by_its_parser(name, monkeypatch, capsys):
    refused = []
    for words, fragment in commands(Page(name)):
        if words[-1] in ("--help", "-h"):
            continue
        with monkeypatch.context() as patch:
            try:
                check(words, patch, fragment)
            except (SystemExit, ValueError, AssertionError) as error:
                said = capsys.readouterr().err.strip().splitlines()
                refused.append(f"dfm {' '.join(words)}: {said[-1] if said else error}")
    assert refused == []


@pytest.mark.parametrize("name", NAMES)
def test_links_and_figures_of_the_page_are_there(name):
    assert Page(name).missing_links() == []


def test_tables_of_flags_are_those_of_help():
    old = [name for name in NAMES if with_tables(Page(name).text) != Page(name).text]
    assert old == [], "python scripts/flags_tables.py writes them anew"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_blocks_of_index_and_troubleshooting_and_cheap_lines_of_readme_run(tmp_path):
    here = desk(tmp_path)
    here.run_page(INDEX)
    here.run_page(TROUBLES)
    cheap = [c for c, _ in commands(README) if c[0] in ("plan", "generate", "export") and "runs/mine" not in c]
    assert {c[0] for c in cheap} == {"plan", "generate", "export"}
    for words in cheap:
        here.run("bash", shlex.join(["dfm", *words]))
