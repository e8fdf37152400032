"""Forms generated from the definitions of options.

`ConfigForm` is for `dfm pretrain`, `PrepareForm` for `dfm prepare`. Every change runs the checks of the command line;
each fault is shown at its control. Later cells of a notebook read `form.values()`.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import ipywidgets as w
import psutil

from dfm_nb import config as cfg
from dfm_nb.base import options, plugins
from dfm_nb.base.markup import fill
from dfm_nb.base.memory import GIB
from dfm_nb.base.nearest import nearest
from dfm_nb.base.options import Field
from dfm_nb.config import notation, sizes
from dfm_nb.planner.ranking import training_cost
from workbench.controls import Control, Section, copied, faults_of
from workbench.live import Live, fault_html

GROUPS = ("model", "train", "optimizer", "dataset")


class Form(Live):
    """Controls of options by key, checked at every change.

    A subclass defines the values without the form (`below`), the checks (`checked`), where a fault is shown (`placed`),
    which options apply now (`applies`), and the equivalent command and call.

    Parameters
    ----------
    known : all options by key. shown : keys of the options with a control, in order.
    given : {key: value} filled in at the start; keys without a control are passed on.
    """

    def __init__(self, known: Mapping[str, Field], shown: Iterable[str], given: Mapping[str, Any]):
        self.known, shown = known, list(shown)
        for name in (*shown, *given):
            if name not in known:
                near = nearest(name, [*known, *(key.partition(".")[0] for key in known)])
                raise ValueError(f"a form knows no option {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        self._hidden = {key: value for key, value in given.items() if key not in shown}
        start = self.below(given) | dict(given)
        self.controls = {key: Control(known[key], start[key]) for key in shown}
        for key, control in self.controls.items():
            control.observe(functools.partial(self._changed, key))
        self._message, self._summary, self._copy = w.HTML(), w.HTML(), w.HTML()
        boxes: dict[str, list[Any]] = {}
        for key, control in self.controls.items():
            boxes.setdefault(key.rpartition(".")[0], []).append(control.box)
        alone = boxes.pop("", [])
        parts = {group: w.VBox(inside) for group, inside in boxes.items()}
        self._sections = {group: Section(part, opened=group == next(iter(parts))) for group, part in parts.items()}
        folded = [widget for group in parts for widget in (self._sections[group], parts[group])]
        self.widget = w.VBox([*alone, *folded, self._message, self._summary, self._copy])
        self.widget.add_class("dfm-form")
        self.validate()

    def below(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every option without the form, given these values of the form."""
        raise NotImplementedError

    def checked(self) -> tuple[str, str]:
        """Raises an error for wrong values; else returns a doubt about them, or "", and a summary line."""
        raise NotImplementedError

    def placed(self, error: Any) -> dict[str, str]:
        """An error's messages by the control that shows them; "" for those below the form."""
        raise NotImplementedError

    def command(self) -> str:
        """The command line."""
        raise NotImplementedError

    def python(self) -> str:
        """The equivalent call of the Python API."""
        raise NotImplementedError

    def applies(self, key: str) -> bool:
        """Whether an option applies now; if not, it is neither shown nor passed on."""
        return True

    def values(self) -> dict[str, Any]:
        """The value of every option of the form that applies now, including hidden ones."""
        values = self._hidden | {key: control.value for key, control in self.controls.items()}
        return {key: value for key, value in values.items() if self.applies(key)}

    def changed(self) -> dict[str, Any]:
        """The values that differ from those without the form."""
        values = self.values()
        below = self.below(values)
        return {k: v for k, v in values.items() if v != below[k] or isinstance(v, bool) != isinstance(below[k], bool)}

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a control, as a user would."""
        if key not in self.controls:
            raise ValueError(f"the form has no {key!r}; it shows {', '.join(self.controls)}")
        self.controls[key].value = value

    def _changed(self, key: str) -> None:
        self.validate()

    def validate(self) -> dict[str, str]:
        """Run the checks of the command line, and show each fault at its control; returns `faults`."""
        self.error, self.faults, doubt, note = None, dict[str, str](), "", ""
        try:
            doubt, note = self.checked()
        except (ValueError, OSError) as error:
            self.error, self.faults = error, self.placed(error)
        self._stood, changed = self.below(self.values()), self.changed()
        for key, control in self.controls.items():
            control.set_fault(self.faults.get(key, ""))
            control.mark(self._stood[key], key in changed)
            control.box.layout.display = "" if self.applies(key) else "none"
        self._message.value = fault_html(self.faults.get("", ""))
        state = f"✖ {len(self.faults)} to correct" if self.faults else doubt or "✔ all settings are valid"
        self._summary.value = fill('<div role="status" aria-live="polite"><b>{}</b><br>{}</div>', state, note)
        self._copy.value = copied("shell", self.command()) + copied("Python", self.python())
        self._title_sections()
        self.keep()
        return self.faults

    def check(self) -> Self:
        """Raise an error if a value is wrong; call it before a launch."""
        self.validate()
        if self.error:
            raise self.error
        return self

    def _title_sections(self) -> None:
        """A section's title counts its faults and changes; one with a fault opens."""
        wrong = Counter(key.rpartition(".")[0] for key in self.faults)
        changed = Counter(key.rpartition(".")[0] for key in self.changed())
        for group, section in self._sections.items():
            marks = [f"✖ {wrong[group]} to correct"] * bool(wrong[group])
            marks += [f"{changed[group]} changed"] * bool(changed[group])
            section.title = " · ".join([group, *marks])
            section.display = "" if wrong[group] else section.display

    def __repr__(self) -> str:
        wrong = "".join(f"\nmust be corrected: {said}" for said in self.faults.values())
        return f"{type(self).__name__}: {self.command()}{wrong}"


def _call(function: str, keywords: Mapping[str, Any]) -> str:
    return f"{function}({', '.join(f'{k}={v!r}' for k, v in keywords.items() if v is not None)})"


class ConfigForm(Form):
    """A form over groups of settings, on top of a recipe.

    Parameters
    ----------
    groups : of `model`, `train`, `optimizer`, `scheduler`, `dataset`, `validation`, ..., or single dotted keys
        (`train.train_iters`, `mixed_precision`), in the order to show.
    defaults : {key: value} filled in at the start, on top of the recipe.
    recipe : the layer below; pass the same one to the run (`--recipe`).
    nproc : also check that the parallel layout fits this many processes.
    run_dir : the run folder in the command and the call.

    >>> form = ConfigForm(["train.train_iters"], {"train.train_iters": 20}, recipe="demo")
    >>> form.overrides()
    ['train.train_iters=20']
    """

    def __init__(
        self,
        groups: Sequence[str] | str = GROUPS,
        defaults: Mapping[str, Any] | None = None,
        recipe: str = "default",
        nproc: int | None = None,
        run_dir: str | None = None,
    ):
        self.recipe, self.nproc, self.run_dir = recipe, nproc, run_dir
        self._base = cfg.resolve(recipe)
        listed = replace(cfg.FIELDS["model.size"], limits={"choices": tuple(sizes.SIZES)})
        known = cfg.FIELDS | {"model.size": listed}
        shown: list[str] = []
        for group in [groups] if isinstance(groups, str) else groups:
            shown += [key for key in known if group in (key, key.rpartition(".")[0])] or [group]
        super().__init__(known, shown, defaults or {})

    def below(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's settings, with those of the chosen size; null where the resolver derives the value."""
        own = {k: None if v.startswith(cfg.DERIVED) else self._base.get(k) for k, v in self._base.provenance.items()}
        size = values.get("model.size")
        if size in sizes.SIZES and size != own["model.size"]:
            own |= {f"model.{name}": value for name, value in sizes.SIZES[size].items()}
        return own

    def _changed(self, key: str) -> None:
        # demo has 4 layers, DiT-B 12: when the size changes from one to the other, the control goes from 4 to 12, but
        # stays at 3 if it was set to 3
        if key == "model.size":
            was, now = self._stood, self.below(self.values())
            for other, control in self.controls.items():
                if other != key and was[other] != now[other] and control.value == was[other]:
                    control.value = now[other]
        self.validate()

    def overrides(self) -> list[str]:
        """`group.key=value` for every key that differs from the recipe; `model.size` first, because it sets others."""
        words = [f"{key}={notation.write_value(value)}" for key, value in self.changed().items()]
        return sorted(words, key=lambda word: not word.startswith("model.size="))

    def command(self) -> str:
        words = ["dfm", "pretrain", "--recipe", self.recipe]
        words += ["--nproc-per-node", str(self.nproc)] if self.nproc else []
        words += ["--run-dir", self.run_dir] if self.run_dir else []
        return shlex.join([*words, *self.overrides()])

    def python(self) -> str:
        given = {"recipe": self.recipe, "run_dir": self.run_dir, "num_processes": self.nproc}
        return _call("train_model", {**given, "overrides": self.overrides() or None})

    def checked(self) -> tuple[str, str]:
        """Parameters and memory."""
        resolved = cfg.resolve(self.recipe, overrides=self.overrides(), world_size=self.nproc)
        processes, there = self.nproc or 1, psutil.virtual_memory().total
        parameters, held = training_cost(resolved, processes)
        doubt = f"⚠ this needs more memory than this machine has ({_short(there / GIB)} GiB)"
        note = f"{_short(parameters / 1e6)} M parameters, {_short(held / GIB)} GiB a process"
        return doubt * (held * processes > there), note

    def placed(self, error: cfg.ConfigError) -> dict[str, str]:
        said: dict[str, list[str]] = {}
        for fault in error.faults:
            at = next((key for key in (fault.key, *fault.also) if fault.key and key in self.controls), "")
            said.setdefault(at, []).append(str(replace(fault, key="" if fault.key == at else fault.key, origin="")))
        return {at: "; ".join(texts) for at, texts in said.items()}


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


class PrepareForm(Form):
    """A form for `dfm prepare`: source, tokenizer and text encoder are menus of the plug-ins.

    A plug-in's own flags are shown and passed on while it is chosen.

    Parameters
    ----------
    output_dir : where the shards go. defaults : {flag: value}, for example {"source": "synthetic", "limit": 200}.

    >>> PrepareForm("data/first", {"limit": 20}).argv()
    ['--output-dir=data/first', '--limit=20']
    """

    MENUS = {"source": "sources", "tokenizer": "tokenizers", "text_encoder": "text_encoders"}
    FIELDS = ("limit", "short_side", "val_fraction", "shard_size")  # shown after the menus and the plug-ins' flags
    NEEDLESS = {"tokenizer_path": "CARRIED", "text_encoder_path": "BUNDLED"}
    """Paths, and the marker of plug-ins that need none."""
    SPEC = Field("file_or_folder", str, True, None, "a table or a folder; for synthetic, a kind of pictures", {}, {})

    def __init__(self, output_dir: str, defaults: Mapping[str, Any] | None = None):
        from dfm_nb import prepare  # which imports torch

        self.output_dir, self._prepare, self._opened = str(output_dir), prepare, ""
        known, order, self._menu_of = dict(options.fields(prepare.PrepareConfig)), list[str](), dict[str, str]()
        known[self.SPEC.key] = self.SPEC
        for menu, kind in self.MENUS.items():
            modules = plugins.load_all(kind)
            about = [(inspect.getdoc(m) or "").partition("\n\n")[0].replace("`", "") for m in modules.values()]
            limits = {"choices": tuple(modules)}
            known[menu] = replace(known[menu], help=" ".join(about), limits=limits, optional=False)
            known |= plugins.flags(kind)
            self._menu_of |= dict.fromkeys(plugins.flags(kind), menu)
            order += [menu, self.SPEC.key if menu == "source" else f"{menu}_path", *plugins.flags(kind)]
        given = dict(defaults or {})
        source, _, spec = given.get("source", "synthetic").partition(":")
        given |= {"source": source, self.SPEC.key: spec or None}
        for menu, kind in self.MENUS.items():
            plugins.load(kind, given.get(menu) or known[menu].default or "general")  # ValueError with the closest name
        super().__init__(known, [*order, *self.FIELDS], given)

    def below(self, values: Mapping[str, Any]) -> dict[str, Any]:
        of = {"output_dir": self.output_dir, "source": values.get("source", "synthetic")}
        of["overwrite"] = bool(values.get("overwrite"))
        usual = self._prepare.PrepareConfig.model_construct(**of).tokenizer_name
        return {key: field.default for key, field in self.known.items()} | {"tokenizer": usual}

    def applies(self, key: str) -> bool:
        """Whether a flag applies to the chosen source, tokenizer and text encoder."""
        menu = key.removesuffix("_path") if key in self.NEEDLESS else self._menu_of.get(key)
        if menu is None:
            return True
        plugin = plugins.load(self.MENUS[menu], self.controls[menu].value)
        if key in self.NEEDLESS:
            return not getattr(plugin, self.NEEDLESS[key], False)
        return key in plugins.own_flags(plugin)

    def _changed(self, key: str) -> None:
        if key == "source":  # the default tokenizer, and the file or folder, belonged to the other source
            if self.controls["tokenizer"].value == self._stood["tokenizer"]:
                self["tokenizer"] = self.below(self.values())["tokenizer"]
            self[self.SPEC.key] = None
        self.validate()

    def _settings(self) -> dict[str, Any]:
        """Keywords of `prepare_dataset` that differ from their defaults."""
        given = {"output_dir": self.output_dir, **self.changed()}
        if spec := given.pop(self.SPEC.key, None):
            given["source"] = f"{self.controls['source'].value}:{spec}"
        return given

    def argv(self) -> list[str]:
        """Arguments for `dfm prepare`; flags at their default are left out."""
        given = self._settings()
        own = {name: given.pop(name) for name in self._menu_of if name in given}
        return self._prepare.PrepareConfig.model_construct(options=own, **given).words()

    def command(self) -> str:
        return shlex.join(["dfm", "prepare", *self.argv()])

    def python(self) -> str:
        return _call("prepare_dataset", self._settings())

    def checked(self) -> tuple[str, str]:
        """Opens the source, as the command does before any work; a source that needs a download is not opened."""
        config = self._prepare.PrepareConfig.parse(self.argv())
        asked = repr((config.source, config.options, config.side_px))
        if asked != self._opened and not getattr(config.source_module, "FETCHES", False) and "://" not in config.source:
            config.open_source()
            self._opened = asked
        return "", ""

    def placed(self, error: Any) -> dict[str, str]:
        return faults_of(error, [key for key in self.controls if self.applies(key)], self.SPEC.key)
