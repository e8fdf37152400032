import pytest

from dfm_nb import cli
from dfm_nb.base.argv import ArgumentParser, guard, pop_nproc


def test_flags_are_accepted_in_both_spellings():
    p = ArgumentParser()
    p.add_argument("--num-steps", type=int)
    assert p.parse_args(["--num_steps", "5"]).num_steps == 5
    assert p.parse_args(["--num_steps=6"]).num_steps == 6


def test_underscores_in_values_are_kept():
    p = ArgumentParser()
    p.add_argument("--prompt")
    p.add_argument("rest", nargs="*")
    args = p.parse_args(["--prompt=a_b", "model.num_layers=3"])
    assert args.prompt == "a_b" and args.rest == ["model.num_layers=3"]


@pytest.mark.parametrize("argv", [["--nproc-per-node", "2", "x"], ["x", "--nproc_per_node=2"]])
def test_process_count_is_taken_out_of_the_arguments(argv):
    assert pop_nproc(argv) == (2, ["x"])
    with pytest.raises(ValueError, match="positive whole number; got 'zero'"):
        pop_nproc(["--nproc-per-node", "zero"])


def test_unknown_verb_names_the_nearest(capsys):
    assert guard(cli.main, ["pretrian"]) == 2
    assert "did you mean 'pretrain'?" in capsys.readouterr().err


def test_every_verb_has_a_module_with_main():
    import importlib

    for verb, (module, text) in cli.VERBS.items():
        assert callable(importlib.import_module(module).main), verb
        assert text


def test_config_faults_are_said_once_before_torchrun(capsys):
    assert guard(cli.main, ["pretrain", "--nproc-per-node", "2", "--mock", "model.tensor_model_parallel_size=4"]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and "tensor_model_parallel_size" in error


def test_overlong_path_is_one_sentence(capsys):
    assert guard(cli.main, ["text", "inspect", "x" * 5000]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: a path must be shorter: xxx") and len(error) < 200


def test_doctor_finds_what_is_needed(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "megatron-core imports" in out and "weights found and checked" in out
