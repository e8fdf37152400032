"""Forms generated from the definitions of options.

`ConfigForm` is for `dfm pretrain`, `PrepareForm` for `dfm prepare`. Every change runs the checks of the command line;
each fault is shown at its control. Later cells of a notebook read `form.values()`.
"""

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
from dfm_nb.base.argv import meant
from dfm_nb.base.machine import GIB
from dfm_nb.base.markup import fill
from dfm_nb.base.options import Field
from dfm_nb.config import notation, sizes
from dfm_nb.planner.ranking import training_cost
from workbench.controls import INDENT, Control, Section, copied, faults_of, on_change
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
        self.known = known
        shown = list(shown)
        for name in (*shown, *given):
            if name not in known:
                groups = [key.partition(".")[0] for key in known]
                fix = meant(name, [*known, *groups], "see dfm prepare --help and dfm pretrain --print-config")
                raise ValueError(f"a form knows no option {name!r}; {fix}")
        self._hidden = {key: value for key, value in given.items() if key not in shown}
        start = self.below(given) | dict(given)
        self.controls = {key: Control(known[key], start[key]) for key in shown}
        for key, control in self.controls.items():
            on_change(functools.partial(self._changed, key), control.widget)
        self._message = w.HTML()
        self._summary = w.HTML()
        self._copy = w.HTML()
        boxes: dict[str, list[Any]] = {}
        for key, control in self.controls.items():
            boxes.setdefault(key.rpartition(".")[0], []).append(control.box)
        widgets = boxes.pop("", [])
        self._sections: dict[str, Section] = {}
        for group, inside in boxes.items():
            below = w.VBox(inside)
            self._sections[group] = Section(below, opened=not self._sections)  # the first one
            widgets += [self._sections[group], below]
        self.widget = w.VBox([*widgets, self._message, self._summary, self._copy])
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
        return {key: value for key, value in values.items() if value != below[key]}

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a control, as a user would."""
        if key not in self.controls:
            raise ValueError(f"the form has no {key!r}; it shows {', '.join(self.controls)}")
        self.controls[key].value = value

    def _changed(self, key: str) -> None:
        self.validate()

    def validate(self) -> dict[str, str]:
        """Run the checks of the command line, and show each fault at its control; returns `faults`."""
        self.error: Exception | None = None
        self.faults: dict[str, str] = {}
        doubt = note = ""
        try:
            doubt, note = self.checked()
        except (ValueError, OSError) as error:
            self.error = error
            self.faults = self.placed(error)
        self._stood = self.below(self.values())
        changed = self.changed()
        for key, control in self.controls.items():
            control.fault.value = fault_html(self.faults.get(key, ""), INDENT)  # sent only if it differs
            control.mark(self._stood[key], key in changed)
            control.box.layout.display = "" if self.applies(key) else "none"
        self._message.value = fault_html(self.faults.get("", ""))
        state = f"✖ {len(self.faults)} to correct" if self.faults else doubt or "✔ all settings are valid"
        self._summary.value = fill('<div role="status" aria-live="polite"><b>{}</b><br>{}</div>', state, note)
        self._copy.value = copied("shell", self.command()) + copied("Python", self.python())
        wrong = Counter(key.rpartition(".")[0] for key in self.faults)
        differ = Counter(key.rpartition(".")[0] for key in changed)
        for group, section in self._sections.items():
            title = group
            if wrong[group]:
                title += f" · ✖ {wrong[group]} to correct"
                section.display = ""
            if differ[group]:
                title += f" · {differ[group]} changed"
            section.title = title
        self.keep()
        return self.faults

    def check(self) -> Self:
        """Raise an error if a value is wrong; call it before a launch."""
        self.validate()
        if self.error:
            raise self.error
        return self

    def __repr__(self) -> str:
        command = f"{type(self).__name__}: {self.command()}"
        return "\nmust be corrected: ".join([command, *self.faults.values()])


def _call(function: str, keywords: Mapping[str, Any]) -> str:
    arguments = [f"{name}={value!r}" for name, value in keywords.items() if value is not None]
    return f"{function}({', '.join(arguments)})"


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
        groups: Sequence[str] = GROUPS,
        defaults: Mapping[str, Any] | None = None,
        recipe: str = "default",
        nproc: int | None = None,
        run_dir: str | None = None,
    ):
        self.recipe = recipe
        self.nproc = nproc
        self.run_dir = run_dir
        self._base = cfg.resolve(recipe)
        listed = replace(cfg.FIELDS["model.size"], limits={"choices": tuple(sizes.SIZES)})
        known = cfg.FIELDS | {"model.size": listed}
        shown: list[str] = []
        for group in groups:
            shown += [key for key in known if group in (key, key.rpartition(".")[0])] or [group]
        super().__init__(known, shown, defaults or {})

    def below(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's settings, with those of the chosen size; null where the resolver derives the value."""
        settings = {}
        for key, origin in self._base.provenance.items():
            settings[key] = None if origin.startswith(cfg.DERIVED) else self._base.get(key)
        size = values.get("model.size")
        if size in sizes.SIZES and size != settings["model.size"]:
            settings |= {f"model.{name}": value for name, value in sizes.SIZES[size].items()}
        return settings

    def _changed(self, key: str) -> None:
        # demo has 4 layers, DiT-B 12: when the size changes from one to the other, the control goes from 4 to 12, but
        # stays at 3 if it was set to 3
        if key == "model.size":
            was = self._stood  # of the former size; a control that is set replaces it
            now = self.below(self.values())
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
        if self.nproc:
            words += ["--nproc-per-node", str(self.nproc)]
        if self.run_dir:
            words += ["--run-dir", self.run_dir]
        return shlex.join(words + self.overrides())

    def python(self) -> str:
        keywords = {"recipe": self.recipe, "run_dir": self.run_dir, "num_processes": self.nproc}
        return _call("train_model", {**keywords, "overrides": self.overrides() or None})

    def checked(self) -> tuple[str, str]:
        """Parameters and memory."""
        resolved = cfg.resolve(self.recipe, overrides=self.overrides(), world_size=self.nproc)
        processes = self.nproc or 1
        memory = psutil.virtual_memory().total
        parameters, bytes_each = training_cost(resolved, processes)
        doubt = ""
        if bytes_each * processes > memory:
            doubt = f"⚠ this needs more memory than this machine has ({_short(memory / GIB)} GiB)"
        return doubt, f"{_short(parameters / 1e6)} M parameters, {_short(bytes_each / GIB)} GiB a process"

    def placed(self, error: cfg.ConfigError) -> dict[str, str]:
        faults: dict[str, str] = {}
        for fault in error.faults:
            keys = (fault.key, *fault.also) if fault.key else ()
            at = next((key for key in keys if key in self.controls), "")
            text = str(replace(fault, key="" if fault.key == at else fault.key, origin=""))
            text = text.partition("; the default is ")[0]  # the button beside the control has the recipe's
            faults[at] = f"{faults[at]}; {text}" if at in faults else text
        return faults


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

        self.output_dir = str(output_dir)
        self._prepare = prepare
        self._opened = ""
        self._menu_of: dict[str, str] = {}
        known = dict(options.fields(prepare.PrepareConfig))
        known[self.SPEC.key] = self.SPEC
        given = dict(defaults or {})
        source, _, spec = given.get("source", "synthetic").partition(":")
        given |= {"source": source, self.SPEC.key: spec or None}
        shown: list[str] = []
        for menu, kind in self.MENUS.items():
            modules = plugins.load_all(kind)
            about = [(inspect.getdoc(module) or "").partition("\n\n")[0] for module in modules.values()]
            help = " ".join(about).replace("`", "")
            plugins.load(kind, given.get(menu) or known[menu].default or "general")  # ValueError with the closest name
            known[menu] = replace(known[menu], help=help, limits={"choices": tuple(modules)}, optional=False)
            flags = plugins.flags(kind)
            known |= flags
            self._menu_of |= dict.fromkeys(flags, menu)
            shown += [menu, self.SPEC.key if menu == "source" else f"{menu}_path", *flags]
        super().__init__(known, [*shown, *self.FIELDS], given)

    def below(self, values: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {key: field.default for key, field in self.known.items()}
        chosen = {"source": values.get("source", "synthetic"), "overwrite": bool(values.get("overwrite"))}
        config = self._prepare.PrepareConfig.model_construct(output_dir=self.output_dir, **chosen)
        return defaults | {"tokenizer": config.tokenizer_name}

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
        settings = {"output_dir": self.output_dir, **self.changed()}
        spec = settings.pop(self.SPEC.key, None)
        if spec:
            settings["source"] = f"{self.controls['source'].value}:{spec}"
        return settings

    def argv(self) -> list[str]:
        """Arguments for `dfm prepare`; flags at their default are left out."""
        settings = self._settings()
        own = {name: settings.pop(name) for name in self._menu_of if name in settings}
        return self._prepare.PrepareConfig.model_construct(options=own, **settings).words()

    def command(self) -> str:
        return shlex.join(["dfm", "prepare", *self.argv()])

    def python(self) -> str:
        return _call("prepare_dataset", self._settings())

    def checked(self) -> tuple[str, str]:
        """Opens the source, as the command does before any work; a source that needs a download is not opened."""
        config = self._prepare.PrepareConfig.parse(self.argv())
        source = repr((config.source, config.options, config.side_px))
        remote = getattr(config.source_module, "FETCHES", False) or "://" in config.source
        if source != self._opened and not remote:
            config.open_source()
            self._opened = source
        return "", ""

    def placed(self, error: Any) -> dict[str, str]:
        faults = faults_of(error, [key for key in self.controls if self.applies(key)], self.SPEC.key)
        if self.controls[self.SPEC.key].value is None and "source" in faults:  # it lacks one
            faults[self.SPEC.key] = faults.pop("source")
        return faults
