"""Forms made from what the settings say about themselves.

`ConfigForm` is for `dfm pretrain`, `PrepareForm` for `dfm prepare`. The rules are those of the command line, run at
every change; each fault stands beside its control. What follows a form in a notebook reads `form.values()`.
"""

from __future__ import annotations

import functools
import html
import inspect
import re
import shlex
import threading
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as w
import psutil

from dfm_nb import config as cfg
from dfm_nb.base import cpu, plugins
from dfm_nb.base.log import duration
from dfm_nb.base.memory import GIB
from dfm_nb.base.options import fields as fields_of
from dfm_nb.config import notation, sizes
from dfm_nb.planning.ranking import training_cost
from workbench import controls
from workbench.controls import Control
from workbench.live import Live

if typing.TYPE_CHECKING:
    from dfm_nb.data.preparation import PrepareConfig

GROUPS = ("model", "train", "optimizer", "dataset")


class Form(Live):
    """What both forms have: controls by name, their values, and the command and the call that they amount to."""

    controls: dict[str, Control]
    _box: Any = None

    def values(self) -> dict[str, Any]:
        raise NotImplementedError

    def command(self) -> str:
        """The command line."""
        raise NotImplementedError

    def python(self) -> str:
        """The same as a call of the Python API."""
        raise NotImplementedError

    def _build(self) -> Any:
        raise NotImplementedError

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a control, as a user would."""
        if key not in self.controls:
            raise ValueError(f"the form has no {key!r}; it shows {', '.join(self.controls)}")
        self.controls[key].value = value

    @property
    def widget(self) -> Any:
        if self._box is None:
            self._box = self._build()
            self._box.add_class("dfm-form")
        return self._box

    def _to_copy(self) -> str:
        return controls.copied("shell", self.command()) + controls.copied("Python", self.python())


def _call(function: str, **keywords: Any) -> str:
    return f"{function}({', '.join(f'{k}={v!r}' for k, v in keywords.items() if v is not None)})"


class ConfigForm(Form):
    """A form over groups of settings, on top of a recipe.

    Parameters
    ----------
    groups : of `model`, `train`, `optimizer`, `scheduler`, `dataset`, `validation`, ..., or single dotted keys
        (`train.train_iters`, `mixed_precision`), in the order to show.
    defaults : {key: value} filled in at the start, on top of the recipe; or a recipe's name.
    recipe : the layer below; pass the same one to the run (`--recipe`).
    nproc : also check that the parallel layout fits this many processes.
    run_dir : named in the command and the call.

    >>> form = ConfigForm(["train.train_iters"], {"train.train_iters": 20}, recipe="demo")
    >>> form.overrides()
    ['train.train_iters=20']
    """

    def __init__(
        self,
        groups: Sequence[str] = GROUPS,
        defaults: Mapping[str, Any] | str | None = None,
        recipe: str = "default",
        nproc: int | None = None,
        run_dir: str | None = None,
    ):
        if isinstance(defaults, str):
            recipe, defaults = defaults, None
        self.recipe, self.nproc, self.run_dir = recipe, nproc, run_dir
        self._base = cfg.resolve(recipe)
        chosen = _select([groups] if isinstance(groups, str) else groups)
        _known(defaults or {})
        self.controls: dict[str, Control] = {}
        for key, field in chosen.items():
            start = (defaults or {}).get(key, self._below(key))
            self.controls[key] = control_for(field, start)
        self._hidden = {k: v for k, v in (defaults or {}).items() if k not in self.controls}
        self._edited = {k for k in (defaults or {}) if k in self.controls}
        self._filling = False
        for key, control in self.controls.items():
            control.observe(functools.partial(self._changed, key))
            control.reset.on_click(functools.partial(self._was_reset, key))
        self._general, self._summary, self._copy = w.HTML(), w.HTML(), w.HTML()
        self._sections: dict[str, Any] = {}
        self.faults: list[cfg.Fault] = []
        self._fill_in()
        self.validate()

    def _below(self, key: str) -> Any:
        """What the layers under the form give; a null that the resolver fills in stays null here."""
        derived = self._base.provenance[key].startswith(cfg.DERIVED)
        return None if derived else self._base.get(key)

    def _changed(self, key: str) -> None:
        if self._filling:
            return
        self._edited.add(key)
        self._fill_in()
        self.validate()

    def _was_reset(self, key: str, _button: Any) -> None:
        self._edited.discard(key)  # a size sets it again
        self._fill_in()
        self.validate()

    def _fill_in(self) -> None:
        """A size chosen in the form shows its layers, width and heads, unless those were edited themselves."""
        if "model.size" not in self.controls:
            return
        name = self.controls["model.size"].value
        row = sizes.SIZES[name].settings() if name else {}
        self._filling = True
        try:
            for short, value in row.items():
                key = f"model.{short}"
                if key in self.controls and key not in self._edited:
                    self.controls[key].value = value
        finally:
            self._filling = False

    # ---- what leaves ----------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """The value of every key in the form, and of the hidden defaults."""
        return {**self._hidden, **{k: c.value for k, c in self.controls.items()}}

    def overrides(self) -> list[str]:
        """`group.key=value` for every key that differs from the recipe; `model.size` first, as it sets others."""
        below = self._all_below()
        changed = {k: v for k, v in self.values().items() if not _equal(v, below[k])}
        out = [f"{key}={notation.write_value(value)}" for key, value in changed.items()]
        return sorted(out, key=lambda s: not s.startswith("model.size="))

    def _all_below(self) -> dict[str, Any]:
        """For every key of the form what stands without it: the recipe's value, or that of the chosen size."""
        name = self.values().get("model.size")
        from_row = {f"model.{k}": v for k, v in sizes.SIZES[name].settings().items()} if name in sizes.SIZES else {}
        resized = name != self._below("model.size")
        return {k: from_row[k] if resized and k in from_row else self._below(k) for k in self.values()}

    def command(self) -> str:
        words = ["dfm", "pretrain", "--recipe", self.recipe]
        words += ["--nproc-per-node", str(self.nproc)] if self.nproc else []
        words += ["--run-dir", self.run_dir] if self.run_dir else []
        return shlex.join([*words, *self.overrides()])

    def python(self) -> str:
        given = {"recipe": self.recipe, "run_dir": self.run_dir, "num_processes": self.nproc}
        return _call("train_model", **given, overrides=self.overrides() or None)

    @property
    def valid(self) -> bool:
        return not self.faults

    def validate(self) -> list[cfg.Fault]:
        """Check all settings by the rules of the command line, and show each fault beside its control."""
        cost = ""
        try:
            resolved = cfg.resolve(self.recipe, overrides=self.overrides(), world_size=self.nproc)
            cost, self.faults = self._cost(resolved), []
        except cfg.ConfigError as error:
            self.faults = error.faults
        said: dict[str, list[str]] = {}
        for fault in self.faults:
            shown = ""
            if fault.key:
                shown = next((k for k in (fault.key, *fault.also) if k in self.controls), "")
            text = str(replace(fault, key="" if fault.key == shown else fault.key, origin=""))
            said.setdefault(shown, []).append(text)
        below, values = self._all_below(), self.values()
        for key, control in self.controls.items():
            control.set_fault("; ".join(said.get(key, [])))
            control.mark(below[key], not _equal(values[key], below[key]))
        self._general.value = "".join(controls.fault_html(t) for t in said.get("", []))
        self._summary.value = _summary(self.overrides(), len(self.faults), cost)
        self._copy.value = self._to_copy()
        self.keep()
        self._title_sections()
        return self.faults

    def _cost(self, resolved: cfg.Resolved) -> str:
        """Parameters, memory and time of the training; the time once this machine's rate is known."""
        processes, there = self.nproc or 1, psutil.virtual_memory().total
        found = training_cost(resolved, processes)
        parts = [f"{_short(found.parameters / 1e6)} M parameters", f"{_short(found.bytes / GIB)} GiB a process"]
        if found.bytes * processes > there:
            parts[-1] += f" (this machine has {_short(there / GIB)})"
        rate = _RATES.get(cpu.precision(resolved.config.mixed_precision))
        if rate:
            parts.append(f"about {duration(found.flops / rate / REACHED)} on this machine when it is idle")
        return ", ".join(parts)

    def _title_sections(self) -> None:
        """A section's title counts what is wrong and what was changed in it, so that a closed one tells, too."""
        wrong = Counter(_section(k) for k, c in self.controls.items() if c.fault)
        changed = Counter(_section(text.partition("=")[0]) for text in self.overrides())
        for name, section in self._sections.items():
            marks = [f"✖ {wrong[name]} to correct"] if wrong[name] else []
            marks += [f"{changed[name]} changed"] if changed[name] else []
            section.titles = (" · ".join([name, *marks]),)

    def check(self) -> ConfigForm:
        """Raise every fault as one `ConfigError`; use it before a launch."""
        if self.validate():
            raise cfg.ConfigError(self.faults)
        return self

    def _build(self) -> Any:
        """A section for each group, of which several may be open, and below them what differs and what it costs."""
        boxes: dict[str, list[Any]] = {}
        for key, control in self.controls.items():
            boxes.setdefault(_section(key), []).append(control.box)
        self._sections = {name: w.Accordion([w.VBox(inside)], titles=(name,)) for name, inside in boxes.items()}
        next(iter(self._sections.values())).selected_index = 0
        self._title_sections()
        threading.Thread(target=self._measure, name="dfm-form", daemon=True).start()
        return w.VBox([*self._sections.values(), self._general, self._summary, self._copy])

    def _measure(self) -> None:
        """The rate of this machine, which takes a moment and may be busy, and then the time in the summary."""
        for precision in ("fp32", "bf16"):
            _RATES[precision] = max(_RATES.get(precision, 0.0), cpu.cpu_flops(precision == "bf16"))
        self.validate()

    def __repr__(self) -> str:
        return (
            f"ConfigForm({len(self.controls)} settings, {len(self.faults)} faults): {' '.join(self.overrides())}"
            + "".join(f"\n{fault}" for fault in self.faults)
        )


_RATES: dict[str, float] = {}
"""FLOP/s of all cores by precision, the best of every form that was shown; 0 where a GPU would do the work."""
REACHED = 1 / 3
"""What trainings of the demo reach of that rate; see benchmarks/results/speedrun.md."""


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _section(key: str) -> str:
    return key.rpartition(".")[0] or "precision"


def _summary(overrides: Sequence[str], faults: int, cost: str) -> str:
    state = f"✖ {faults} to correct" if faults else "✔ all settings are valid"
    changed = html.escape(" ".join(overrides)) or "nothing differs from the recipe"
    return f'<div role="status" aria-live="polite"><b>{state}</b> · <code>{changed}</code><br>{cost}</div>'


def _known(keys: Mapping[str, Any]) -> None:
    fields = cfg.fields()
    unknown = [k for k in keys if k not in fields]
    if unknown:
        raise ValueError(f"defaults: {unknown[0]!r} is not a setting; dfm pretrain --print-config lists them")


def _select(groups: Sequence[str]) -> dict[str, cfg.Field]:
    fields = cfg.fields()
    out: dict[str, cfg.Field] = {}
    for wanted in groups:
        found = {k: f for k, f in fields.items() if k == wanted or k.rpartition(".")[0] == wanted}
        if not found:
            names = sorted({k.rpartition(".")[0] for k in fields} - {""})
            raise ValueError(f"groups: {wanted!r} is no group and no setting; groups are {', '.join(names)}")
        out |= found
    return out


def control_for(field: cfg.Field, value: Any) -> Control:
    """The control that fits a field's type and limits."""
    name = field.key.rpartition(".")[2]
    help = f"{field.help} ({cfg.describe_limits(field)})"
    if field.key == "model.size":
        return controls.menu(field.key, name, list(sizes.SIZES), value, help, field.optional)
    if "choices" in field.limits:
        return controls.menu(field.key, name, field.limits["choices"], value, help, field.optional)
    if field.type is bool and not field.optional:
        return controls.check(field.key, name, bool(value), help)
    if field.type in (int, float) and not field.optional:
        return controls.number(field.key, name, field.type, value, help, field.limits)
    kind = list if typing.get_args(field.type) else field.type
    return controls.text(field.key, name, value, help, kind)


def _equal(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


class PrepareForm(Form):
    """A form over `dfm prepare`: source, tokenizer and text encoder are menus of the plugin files.

    Each plugin's own flags are shown, and passed on, while it is the one that is chosen.

    Parameters
    ----------
    output_dir : where the shards go. defaults : {flag: value}, for example {"source": "synthetic", "limit": 200}.
    fields : flags to show beside the three menus and the plugins' own.

    >>> PrepareForm("data/first", {"limit": 20}).argv()
    ['--output-dir', 'data/first', '--limit', '20']
    """

    MENUS = {"source": "sources", "tokenizer": "tokenizers", "text_encoder": "text_encoders"}
    FIELDS = ("limit", "short_side", "val_fraction", "shard_size")
    PATHS = {"tokenizer_path": ("tokenizer", "CARRIED"), "text_encoder_path": ("text_encoder", "BUNDLED")}
    SPEC = "source_spec"

    def __init__(self, output_dir: str, defaults: Mapping[str, Any] | None = None, fields: Sequence[str] = FIELDS):
        from dfm_nb import prepare  # which imports torch

        self.output_dir, self.fault = str(output_dir), ""
        self._config, self._parser = prepare.PrepareConfig, prepare.parser()
        known = {name: field.type for name, field in fields_of(prepare.PrepareConfig).items()}
        flags = {name: flag.type for name, flag in plugins.all_flags().items()}
        self._types = known | flags
        self._actions = {a.dest: a for a in self._parser._actions if a.dest not in ("help", "output_dir")}
        defaults = dict(defaults or {})
        unknown = [k for k in (*defaults, *fields) if k not in self._actions]
        if unknown:
            raise ValueError(f"dfm prepare has no flag {unknown[0]!r}; it has {', '.join(self._actions)}")
        self._flags = {name: menu for menu, kind in self.MENUS.items() for name in plugins.flags(kind)}
        defaults["source"], _, spec = str(defaults.get("source", "synthetic")).partition(":")
        self.controls = {}
        for menu in self.MENUS:
            self.controls[menu] = self._control(menu, defaults)
            if menu == "source":
                help = "table: a CSV or parquet file; folder: a folder; synthetic: a kind of pictures, or nothing"
                self.controls[self.SPEC] = controls.text(self.SPEC, "file or folder", spec or None, help)
            below = [name for name, (of, _) in self.PATHS.items() if of == menu]
            below += [name for name, of in self._flags.items() if of == menu]
            self.controls |= {name: self._control(name, defaults) for name in below}
        self.controls |= {name: self._control(name, defaults) for name in fields}
        self._hidden = {k: v for k, v in defaults.items() if k not in self.controls}
        self._specs = {defaults["source"]: spec or None}
        self._message, self._copy = w.HTML(), w.HTML()
        self._looked: tuple[Any, str] = (None, "")
        for control in self.controls.values():
            control.observe(self.validate)
        self.controls["source"].widget.observe(self._source_chosen, names="value")
        self.validate()

    def _control(self, dest: str, defaults: Mapping[str, Any]) -> Control:
        action = self._actions[dest]
        label, help, value = dest.replace("_", " "), action.help or "", defaults.get(dest, action.default)
        if dest in self.MENUS:
            choices = plugins.names(self.MENUS[dest])
            modules = plugins.load_all(self.MENUS[dest])
            first = {n: (inspect.getdoc(m) or "").partition("\n\n")[0].replace("\n", " ") for n, m in modules.items()}
            return controls.menu(dest, label, choices, value, " ".join(first[n] for n in choices).replace("`", ""))
        if action.nargs == 0:
            return controls.check(dest, label, bool(value), help)
        return controls.text(dest, label, value, help, self._types[dest], "default")

    def _source_chosen(self, change: Any) -> None:
        """A path belongs to the source that it was given for."""
        spec = self.controls[self.SPEC]
        self._specs[change["old"]] = spec.value
        spec.value = self._specs.get(change["new"])

    def _applies(self, dest: str) -> bool:
        """Whether a flag is of use to the chosen source, tokenizer and text encoder."""
        menu, has_own = self.PATHS.get(dest, (self._flags.get(dest), ""))
        if menu is None:
            return True
        module = plugins.load(self.MENUS[menu], self.controls[menu].value)
        return not getattr(module, has_own, False) if has_own else dest in plugins.own_flags(module)

    def values(self) -> dict[str, Any]:
        """The value of every flag that is of use now, the hidden ones among them; `source` has its file or folder."""
        shown = {d: c.value for d, c in self.controls.items() if d != self.SPEC}
        spec = self.controls[self.SPEC].value
        shown["source"] += f":{spec}" if spec else ""
        return {d: value for d, value in {**self._hidden, **shown}.items() if self._applies(d)}

    def _given(self) -> dict[str, Any]:
        """Without what is at its default."""
        default = {d: action.default for d, action in self._actions.items()}
        return {d: v for d, v in self.values().items() if v is not None and v is not False and v != default[d]}

    def argv(self) -> list[str]:
        """Arguments for `dfm prepare`; flags at their default are left out."""
        out = ["--output-dir", self.output_dir]
        for dest, value in self._given().items():
            action = self._actions[dest]
            out += [action.option_strings[0]] if action.nargs == 0 else [action.option_strings[0], str(value)]
        return out

    def command(self) -> str:
        return shlex.join(["dfm", "prepare", *self.argv()])

    def python(self) -> str:
        return _call("prepare_dataset", **{"source": "synthetic", "output_dir": self.output_dir} | self._given())

    @property
    def valid(self) -> bool:
        return not self.fault

    def validate(self) -> None:
        """Check by the command's own rules; the fault, if any, is kept in `fault` and stands beside its control."""
        self.fault = at = ""
        try:
            for dest, value in self._given().items():
                kind = self._types[dest]
                if kind not in (bool, str):
                    _convert(self._actions[dest].option_strings[0], kind, value)
            self._look(self._config(**vars(self._parser.parse_args(self.argv()))))
        except (ValueError, OSError) as error:
            self.fault = str(error)
            at = self._place_of(self.fault)
        given = self._given()
        for dest, control in self.controls.items():
            control.set_fault(self.fault if dest == at else "")
            control.box.layout.display = "" if self._applies(dest) else "none"
            if dest not in self.MENUS and dest != self.SPEC:
                control.mark(self._actions[dest].default, dest in given)
        self._message.value = controls.fault_html(self.fault) if self.fault and not at else ""
        self._copy.value = self._to_copy()
        self.keep()

    def _look(self, config: PrepareConfig) -> None:
        """Open the source, as the command does before any work; one that would be fetched is left alone."""
        if getattr(config.source_module, "FETCHES", False) or "://" in config.source:
            return
        asked = (config.source, sorted(config.options.items()), config.side_px)
        if self._looked[0] != asked:
            fault = ""
            try:
                config.open_source()
            except (ValueError, OSError) as error:
                fault = str(error)
            self._looked = (asked, fault)
        if self._looked[1]:
            raise ValueError(self._looked[1])

    def _place_of(self, fault: str) -> str:
        """The control that a sentence speaks of: the first whose flag or name is in it, else the source's."""
        names = {d: [*self._actions[d].option_strings, d, d.replace("_", " ")] for d in self.controls if d != self.SPEC}
        names["short_side"] = [*names.get("short_side", []), " px"]
        found = {
            d: min((m.start() for t in texts for m in re.finditer(rf"{re.escape(t)}\b", fault)), default=-1)
            for d, texts in names.items()
            if d in self.controls and d != "source" and self._applies(d)
        }
        places = [(at, d) for d, at in found.items() if at >= 0]
        return min(places)[1] if places else self.SPEC

    def check(self) -> PrepareForm:
        """Raise the fault as a ValueError; use it before a launch."""
        self.validate()
        if self.fault:
            raise ValueError(self.fault)
        return self

    def _build(self) -> Any:
        return w.VBox([*(c.box for c in self.controls.values()), self._message, self._copy])

    def __repr__(self) -> str:
        return f"PrepareForm: {self.command()}" + (f"\nmust be corrected: {self.fault}" if self.fault else "")


def _convert(flag: str, kind: type, value: Any) -> None:
    try:
        kind(str(value))
    except ValueError:
        word = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise ValueError(f"{flag} must be {word}; got {value!r}") from None
