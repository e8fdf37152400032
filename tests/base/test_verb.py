"""The environment of a launcher, for verbs that run under it and for all others."""

import os
from datetime import timedelta

import pytest

from dfm_nb.base.argv import from_launcher
from dfm_nb.base.options import option
from dfm_nb.base.torchrun import STORE, group_of_this_machine
from dfm_nb.base.verb import Report, Verb
from tests.refusals import refused


def set_all(monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


class Alone(Verb):
    def run(self):
        return {"rank": os.environ.get("RANK")}

    def report(self, result):
        return Report(result, f"rank {result['rank']}", 1)


class Ranked(Alone):
    module = "dfm_nb.ranked"
    name: str = option("", "a flag")


@pytest.mark.parametrize(
    ("verb", "env", "said"),
    [
        (Alone, {"RANK": "1"}, "rank None\n"),
        (Alone, {"RANK": "x"}, "rank None\n"),
        (Ranked, {"WORLD_SIZE": "2"}, "rank None\n"),
        (Ranked, {"RANK": "0", "WORLD_SIZE": "2"}, "rank 0\n"),
        (Ranked, {"RANK": "1", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_a_launchers_environment_counts_only_for_its_verbs(monkeypatch, capsys, verb, env, said):
    """A check of a damaged corpus passed, and said nothing, where a shell had RANK=1."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    set_all(monkeypatch, **env)
    assert verb.main([]) == 1
    assert capsys.readouterr().out == said


class Part(Alone):
    own_part = True
    name: str = option("", "a flag")


@pytest.mark.parametrize(("verb", "warned"), [(Part, True), (Ranked, False)])
def test_a_lost_flag_is_said_once(monkeypatch, caplog, verb, warned):
    set_all(monkeypatch, RANK="1", WORLD_SIZE="2")
    verb.main(["--name", "a", "--name", "b"])
    assert bool(caplog.records) == warned


@pytest.mark.parametrize("env", [{"RANK": "x"}, {"RANK": ""}, {"RANK": "1"}, {"RANK": "0", "LOCAL_RANK": "-1"}])
def test_an_impossible_place_is_reported_by_its_variable(monkeypatch, env):
    set_all(monkeypatch, **env)
    refused([*env][-1], from_launcher, "WORLD_SIZE")
    refused([*env][-1], Ranked.main, [])


def test_a_rank_that_no_launcher_set_is_named(monkeypatch):
    for name in ("MASTER_ADDR", STORE):
        monkeypatch.delenv(name, raising=False)
    set_all(monkeypatch, RANK="1", WORLD_SIZE="2")
    refused("RANK=1", group_of_this_machine, timedelta(seconds=1))


def test_text_of_a_file_reaches_the_terminal_escaped(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "\x1b[2J")
    monkeypatch.setattr(Alone, "own_part", True)
    Alone.main([])
    assert capsys.readouterr().out == "rank \\x1b[2J\n"
