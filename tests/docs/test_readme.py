"""README.md and all pages: every `dfm` line parses with the real parsers, every link and figure is there;
docs/index.md and troubleshooting.md run (README's Python block: tests/test_wheel.py).
"""

from __future__ import annotations

import re
import shlex

import pytest

from dfm_nb import cli, train
from dfm_nb import config as cfg
from dfm_nb.base.argv import ArgumentParser, pop_nproc
from tests.docs.docs_pages import FENCE, ROOT, Page, all_pages, desk

NAMES = [str(p.relative_to(ROOT)) for p in all_pages()]
README, INDEX, TROUBLES = Page("README.md"), Page("docs/index.md"), Page("docs/troubleshooting.md")
MODULES = {
    "dfm_nb.prepare": "prepare",
    "dfm_nb.train": "pretrain",
    "dfm_nb.generate": "generate",
    "dfm_nb.text.cli": "text",
}


class Parsed(Exception):
    """The parser has accepted the words."""


def commands(page: Page) -> list[list[str]]:
    """The words of every `dfm ...` and `torchrun ... -m dfm_nb...` in blocks; none with `...`."""
    return _commands([line for _, c in page.fences for line in c.replace("\\\n", " ").splitlines()])


def fragments(page: Page) -> list[list[str]]:
    """Those in the text that have a flag or a setting; they may leave out what is required."""
    said = re.findall(r"`(dfm [^`\n]+)`", FENCE.sub("", page.text))
    return _commands([re.sub(r"\bN\b", "2", c) for c in said if " -" in c or "=" in c])


def _commands(lines: list[str]) -> list[list[str]]:
    """Not those that are meant to fail: after `!`, or with `||` behind them."""
    found = []
    for line in lines:
        if "dfm" not in line or line.lstrip().startswith(("#", "!")) or "||" in line:
            continue
        line = re.sub(r"\b\d>", ">", line)
        line = re.sub(r"\$\(\(?[^)]*\)\)?|\$\{?\w+\}?", "1", line.replace('"$@"', ""))
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        try:
            parts = _split(list(lexer))
        except ValueError:  # prose in a block
            continue
        found += [c for c in map(_command, parts) if c and not {"...", "VERB", "COMMAND"} & set(c)]
    return found


def _split(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("();<>|&"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _command(words: list[str]) -> list[str] | None:
    """[verb, argument, ...] when the words run one of our commands."""
    for i, word in enumerate(words):
        if word == "dfm" and i + 1 < len(words):
            return words[i + 1 :]
        if word in MODULES and words[i - 1] == "-m":
            return [MODULES[word], *words[i + 1 :]]
    return None


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
    if verb in cli.UNDER_TORCHRUN:
        _, rest = pop_nproc(rest)
    if verb == "pretrain":
        args = train.parse(rest)
        cfg.resolve(args.recipe, None, [*args.overrides, *([f"model.size={args.model}"] if args.model else [])])
        return
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(ArgumentParser, name, _stopping(getattr(ArgumentParser, name), fragment))
    try:
        code = cli.main([verb, *rest])
    except Parsed:
        return
    raise AssertionError(f"no parser was asked; exit code {code}")


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_the_page_is_accepted_by_its_parser(name, monkeypatch, capsys):
    refused = []
    page = Page(name)
    for words, fragment in [*((c, False) for c in commands(page)), *((c, True) for c in fragments(page))]:
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_blocks_of_index_and_troubleshooting_and_cheap_lines_of_readme_run(tmp_path):
    here = desk(tmp_path)
    here.run_page(INDEX)
    here.run_page(TROUBLES)
    known = commands(README) + fragments(README)
    cheap = [c for c in known if c[0] in ("plan", "generate", "export") or c[:2] == ["inspect", "data"]]
    assert {c[0] for c in cheap} == {"plan", "generate", "export", "inspect"}
    for words in cheap:
        here.run("bash", shlex.join(["dfm", *words]))
