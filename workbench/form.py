"""Forms made from what the settings say about themselves.

`ConfigForm` is for `dfm pretrain`, `PrepareForm` for `dfm prepare`. The rules are those of the command line, run at
every change; each fault stands beside its control.
"""

from __future__ import annotations

import functools
import html
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as w

from dfm_nb import config as cfg
from dfm_nb.base import plugins
from dfm_nb.config import notation, sizes
from workbench import controls
from workbench.controls import Control
from workbench.headless import is_headless

GROUPS = ("model", "train", "optimizer", "dataset")


class ConfigForm:
    """A form over groups of settings, on top of a recipe.

    Parameters
    ----------
    groups : of `model`, `train`, `optimizer`, `scheduler`, `dataset`, `validation`, ..., or single dotted keys
        (`train.train_iters`, `mixed_precision`), in the order to show.
    defaults : {key: value} filled in at the start, on top of the recipe; or a recipe's name.
    recipe : the layer below; pass the same one to the run (`--recipe`).
    nproc : also check that the parallel layout fits this many processes.

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
    ):
        if isinstance(defaults, str):
            recipe, defaults = defaults, None
        self.recipe, self.nproc = recipe, nproc
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
        self._general, self._summary = w.HTML(), w.HTML()
        self.faults: list[cfg.Fault] = []
        self._box: Any = None
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
        name = self.controls["model.size"].value if "model.size" in self.controls else self._hidden.get("model.size")
        from_row = {f"model.{k}": v for k, v in sizes.SIZES[name].settings().items()} if name in sizes.SIZES else {}
        resized = name != self._below("model.size")
        out = []
        for key, value in self.values().items():
            below = from_row[key] if resized and key in from_row else self._below(key)
            if not _equal(value, below):
                out.append(f"{key}={notation.write_value(value)}")
        return sorted(out, key=lambda s: not s.startswith("model.size="))

    @property
    def valid(self) -> bool:
        return not self.faults

    def validate(self) -> list[cfg.Fault]:
        """Check all settings by the rules of the command line, and show each fault beside its control."""
        try:
            cfg.resolve(self.recipe, overrides=self.overrides(), world_size=self.nproc)
            self.faults = []
        except cfg.ConfigError as error:
            self.faults = error.faults
        said: dict[str, list[str]] = {}
        for fault in self.faults:
            shown = ""
            if fault.key:
                shown = next((k for k in (fault.key, *fault.also) if k in self.controls), "")
            text = str(replace(fault, key="" if fault.key == shown else fault.key, origin=""))
            said.setdefault(shown, []).append(text)
        for key, control in self.controls.items():
            control.set_fault("; ".join(said.get(key, [])))
        self._general.value = "".join(controls.fault_html(t) for t in said.get("", []))
        self._summary.value = _summary(self.overrides(), len(self.faults))
        return self.faults

    def check(self) -> ConfigForm:
        """Raise every fault as one `ConfigError`; use it before a launch."""
        if self.validate():
            raise cfg.ConfigError(self.faults)
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a control, as a user would."""
        if key not in self.controls:
            raise ValueError(f"the form has no {key!r}; it shows {', '.join(self.controls)}")
        self.controls[key].value = value

    # ---- what is shown --------------------------------------------------------------------------------------------

    @property
    def widget(self) -> Any:
        """An accordion with a section for each group, and below it the resulting overrides."""
        if self._box is None:
            sections: dict[str, list[Any]] = {}
            for key, control in self.controls.items():
                sections.setdefault(key.rpartition(".")[0] or "precision", []).append(control.box)
            parts = w.Accordion([w.VBox(boxes) for boxes in sections.values()], titles=tuple(sections))
            parts.selected_index = 0
            self._box = w.VBox([parts, self._general, self._summary])
            self._box.add_class("dfm-form")
        return self._box

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        if is_headless():
            return {"text/plain": repr(self)}
        return self.widget._repr_mimebundle_(**kwargs)

    def __repr__(self) -> str:
        return (
            f"ConfigForm({len(self.controls)} settings, {len(self.faults)} faults): {' '.join(self.overrides())}"
            + "".join(f"\n{fault}" for fault in self.faults)
        )


def _summary(overrides: Sequence[str], faults: int) -> str:
    state = f"✖ {faults} to correct" if faults else "✔ all settings are valid"
    changed = html.escape(" ".join(overrides)) or "nothing differs from the recipe"
    return f'<div role="status" aria-live="polite"><b>{state}</b> · <code>{changed}</code></div>'


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


class PrepareForm:
    """A form over `dfm prepare`: source, tokenizer and text encoder are menus of the plugin files.

    Parameters
    ----------
    output_dir : where the shards go. defaults : {flag: value}, for example {"source": "synthetic", "limit": 200}.
    fields : flags to show beside the three menus.

    >>> PrepareForm("data/first", {"limit": 20}).argv()[:4]
    ['--output-dir', 'data/first', '--limit', '20']
    """

    MENUS = {"source": "sources", "tokenizer": "tokenizers", "text_encoder": "text_encoders"}
    FIELDS = ("limit", "short_side", "val_fraction", "shard_size")

    def __init__(self, output_dir: str, defaults: Mapping[str, Any] | None = None, fields: Sequence[str] = FIELDS):
        from dfm_nb import prepare

        self._driver, self.output_dir, self.fault = prepare, str(output_dir), ""
        self._actions = {a.dest: a for a in prepare.parser()._actions if a.dest not in ("help", "output_dir")}
        defaults = dict(defaults or {})
        unknown = [k for k in (*defaults, *fields) if k not in self._actions]
        if unknown:
            raise ValueError(f"dfm prepare has no flag {unknown[0]!r}; it has {', '.join(self._actions)}")
        name, _, spec = str(defaults.get("source", "synthetic")).partition(":")
        defaults["source"] = name
        self.controls = {d: self._control(d, defaults.get(d, self._actions[d].default)) for d in (*self.MENUS, *fields)}
        self._spec = controls.text(
            "source_spec", "file or folder", spec or None, "table: a CSV or parquet file; folder: a folder"
        )
        self._hidden = {k: v for k, v in defaults.items() if k not in self.controls}
        self._message, self._box = w.HTML(), None
        for control in (*self.controls.values(), self._spec):
            control.observe(self.validate)
        self.validate()

    def _control(self, dest: str, value: Any) -> Control:
        action = self._actions[dest]
        label, help = dest.replace("_", " "), action.help or ""
        if dest in self.MENUS:
            return controls.menu(
                dest, label, plugins.names(self.MENUS[dest]), value, help.removeprefix("NAME or NAME:SPEC; ")
            )
        if action.nargs == 0:
            return controls.check(dest, label, bool(value), help)
        return controls.text(dest, label, value, help, typing.cast(type, action.type or str), "default")

    def argv(self) -> list[str]:
        """Arguments for `dfm prepare`; flags at their default are left out."""
        values = {**self._hidden, **{d: c.value for d, c in self.controls.items()}}
        out = ["--output-dir", self.output_dir]
        for dest, value in values.items():
            action = self._actions[dest]
            if dest == "source" and self._spec.value:
                value = f"{value}:{self._spec.value}"
            if value is None or value == action.default:
                continue
            out += [action.option_strings[0]] if action.nargs == 0 else [action.option_strings[0], str(value)]
        return out

    @property
    def valid(self) -> bool:
        return not self.fault

    def validate(self) -> None:
        """Check by the command's own parser; the fault, if any, is shown and kept in `fault`."""
        self.fault = ""
        try:
            for dest, control in self.controls.items():
                kind = typing.cast(type, self._actions[dest].type)
                if kind is not None and control.value is not None:
                    _convert(self._actions[dest].option_strings[0], kind, control.value)
            self._driver.parse(self.argv())
        except ValueError as error:
            self.fault = str(error)
        self._message.value = controls.fault_html(self.fault) if self.fault else ""

    @property
    def widget(self) -> Any:
        if self._box is None:
            first, *others = self.controls.values()
            self._box = w.VBox([first.box, self._spec.box, *(c.box for c in others), self._message])
        return self._box

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        if is_headless():
            return {"text/plain": repr(self)}
        return self.widget._repr_mimebundle_(**kwargs)

    def __repr__(self) -> str:
        return f"PrepareForm: dfm prepare {' '.join(self.argv())}" + (
            f"\nmust be corrected: {self.fault}" if self.fault else ""
        )


def _convert(flag: str, kind: type, value: Any) -> None:
    try:
        kind(str(value))
    except ValueError:
        word = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise ValueError(f"{flag} must be {word}; got {value!r}") from None
