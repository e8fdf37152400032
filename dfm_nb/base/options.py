"""One declaration for every option: a field `name: type = option(default, help, limits)` of a pydantic model.

The fields define the command line (`parser`, `parse`), a call in Python (the model itself), its inverse (`words`), the
settings of a training run (`dfm_nb.config.schema`), forms and tables (`fields`). An invalid value is a ValueError of
one sentence with the closest valid name.

    class Export(Options):
        "Write consolidated weights."
        prog = "dfm export"
        source: str = option(help="run folder", positional=True)
        dtype: Literal["fp32", "bf16"] | None = option(None, "of the stored weights")

    Export(source="runs/a", dtype="fp16")  # ValueError: --dtype must be 'fp32' or 'bf16'; got 'fp16'
    Export.parse(["runs/a", "--dtype", "bf16"]).words()  # ['runs/a', '--dtype=bf16']
"""

import argparse
import functools
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as PydanticField
from pydantic_core import PydanticUndefined

from dfm_nb.base.argv import ArgumentParser, meant
from dfm_nb.base.files import local

Values = dict[str, Any]
"""By name of the option, its limit or its mark."""
Count = Annotated[int, Ge(1)]
_LIMITS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length")


def option(default: Any = PydanticUndefined, help: str = "", **limits_and_marks: Any) -> Any:
    """A field of a model of options.

    Parameters
    ----------
    default : without one the option is required.
    help : one line for `--help`, `--print-config` and the tooltip of a form.
    **limits_and_marks : limits are pydantic's (`ge`, `gt`, `le`, `lt`, `multiple_of`, `min_length`, `max_length`). All
        others are marks: `positional` (an argument without a flag), `flag` (if it does not follow from the name),
        `flags` (its other names), `metavar`, `action` (argparse's), `python_only` (no flag), `output` (a path that is
        written, so not a URL, with `~` expanded), `plugins` (the kind of those
        that it may name as `module:name`), `unset` (on a command line the default is set later, elsewhere), or
        any mark that a reader of `fields` uses.
    """
    limits = {name: limits_and_marks.pop(name) for name in _LIMITS if name in limits_and_marks}
    return PydanticField(default, description=help, json_schema_extra=limits_and_marks or None, **limits)


def plain(value: Any) -> Any:
    """A NumPy number or array, a tensor or a path as JSON types; anything else unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True)
class Field:
    """The description of one option for command lines, forms, help pages and errors.

    key : its name; in a group of a configuration, `group.name`.
    type : the type without null and without limits.
    default : PydanticUndefined if the option is required.
    limits : pydantic's limits and `choices`, if set.
    marks : the other arguments of `option`.
    """

    key: str
    type: Any
    optional: bool
    default: Any
    help: str
    limits: Values
    marks: Values

    @property
    def type_name(self) -> str:
        name = str(self.type) if typing.get_args(self.type) else self.type.__name__
        return f"{name} | None" if self.optional else name

    @property
    def flag(self) -> str:
        """`--num-steps`."""
        return self.marks.get("flag") or "--" + self.key.replace("_", "-")

    @property
    def several(self) -> bool:
        """Whether its value is a list or a tuple."""
        return typing.get_origin(self.type) in (list, tuple)


@functools.cache
def fields(model: type[BaseModel], prefix: str = "") -> dict[str, Field]:
    """The options of a model by key; options of nested groups have the group's name as a prefix."""
    hints = typing.get_type_hints(model)  # without Annotated's additions
    by_key: dict[str, Field] = {}
    for name, info in model.model_fields.items():
        kind = hints[name]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            by_key |= fields(kind, f"{prefix}{name}.")
            continue
        optional = typing.get_origin(kind) in (typing.Union, UnionType) and type(None) in typing.get_args(kind)
        declared = info.metadata
        if optional:
            kind = typing.get_args(kind)[0]
            declared = [*declared, *getattr(typing.get_args(info.annotation)[0], "__metadata__", ())]
        limits: Values = {}
        for limit in declared:
            limits |= {n: getattr(limit, n) for n in _LIMITS if getattr(limit, n, None) is not None}
        if typing.get_origin(kind) is Literal:
            limits["choices"] = typing.get_args(kind)
            kind = str
        marks = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        key = prefix + name
        by_key[key] = Field(key, kind, optional, info.get_default(), info.description or "", limits, marks)
    return by_key


class OptionError(ValueError):
    """Invalid options: one sentence for each by its name; "" is for their combination."""

    def __init__(self, faults: Mapping[str, str]):
        super().__init__("; ".join(faults.values()))
        self.faults = dict(faults)

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, str]]]:
        return type(self), (self.faults,)


class Options(BaseModel):
    """Options of a verb, a request, a preparation or a plug-in. None means the default.

    Words of a command line become numbers, lists become tuples, and paths and NumPy numbers become JSON types.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, arbitrary_types_allowed=True)
    prog: ClassVar[str] = "this"
    """The command of these options, for errors: `dfm export`."""
    epilog: ClassVar[str | None] = None
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names that a call in Python may use."""

    def __init__(self, /, **values: Any):
        known = fields(type(self))
        given: Values = {}
        for alias, value in values.items():
            name = self.aliases.get(alias, alias)
            if name in given:
                raise ValueError(f"{alias} gives {name} a second time; use one of its names")
            if value is None:
                continue
            field = known.get(name)
            if field and isinstance(value, bool) and field.type is not bool:
                value = str(value)  # true is not a number
            value = plain(value)
            if field and field.marks.get("output") and isinstance(value, str):
                local(value)
                value = os.path.expanduser(value)  # a shell leaves the ~ of --output=~/a.mp4
            given[name] = value
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise OptionError(self._faults(error)) from None

    @classmethod
    def names(cls) -> list[str]:
        """Keywords of a call in Python."""
        return [*cls.model_fields, *cls.aliases]

    @classmethod
    def _faults(cls, error: ValidationError) -> dict[str, str]:
        known = fields(cls)
        faults: dict[str, str] = {}
        for details in error.errors(include_url=False):
            name = str(details["loc"][0]) if details["loc"] else ""
            if details["type"] == "value_error":  # a rule of one field, or of the model
                rule = str(details["ctx"]["error"])
                fault = f"{known[name].flag} {rule}" if name else rule
            elif details["type"] == "extra_forbidden":
                fault = f"{cls.prog} has no setting {name!r}; {meant(name, cls.names(), 'see its --help')}"
            elif details["type"] == "missing":
                fault = f"{cls.prog} needs {known[name].flag} ({known[name].help})"
            else:
                fault = f"{known[name].flag} {must(details['msg'])}; got {details['input']!r:.60}"
            faults.setdefault(name, fault)  # for a union, its first type's message
        return faults

    @classmethod
    def add_flags(cls, parser: Any, names: Iterable[str] | None = None) -> None:
        """Add the flags of these options, by default of all, to a parser or a group of one."""
        for name, field in fields(cls).items():
            if (names is None or name in names) and "python_only" not in field.marks:
                _add(parser, field)

    @classmethod
    def parser(cls) -> ArgumentParser:
        """A command line with a flag for each option; the class's docstring is its description."""
        shown = argparse.ArgumentDefaultsHelpFormatter
        parser = ArgumentParser(cls.prog, None, cls.__doc__, cls.epilog, formatter_class=shown, allow_abbrev=False)
        cls.add_flags(parser)
        return parser

    @classmethod
    def parse(cls, argv: list[str] | None) -> Self:
        """The options of a command line."""
        return cls(**vars(cls.parser().parse_intermixed_args(argv)))

    @property
    def chosen(self) -> Values:
        """The values that were given; all others are defaults."""
        return {name: value for name, value in self if name in self.model_fields_set}

    def replace(self, **values: Any) -> Self:
        """A copy with other values, checked like a new one; what was not given stays so."""
        return type(self)(**{**self.chosen, **values})

    def changed(self, usual: Values | None = None) -> Values:
        """The values that differ from `usual`, or from the default of an option that `usual` lacks."""
        defaults = {name: field.default for name, field in fields(type(self)).items()} | (usual or {})
        return {name: value for name, value in self if value != defaults[name]}

    def words(self, usual: Values | None = None) -> list[str]:
        """The command-line words of these options, without values equal to the defaults or `usual`."""
        words: list[str] = []
        for name, value in self.changed(usual).items():
            field = fields(type(self))[name]
            if "python_only" in field.marks:
                continue
            texts = map(str, value if field.several else [value])
            if field.marks.get("positional"):
                words += texts
            elif value is True:
                words.append(field.flag)
            elif field.several and field.marks.get("action") != "append":
                words += [field.flag, *texts]
            else:  # with =, because a value that begins with a minus would be parsed as a flag
                words += [f"{field.flag}={text}" for text in texts]
        return words


def _add(parser: Any, field: Field) -> None:
    marks = field.marks
    given: Values = {"help": field.help}
    required = field.default is PydanticUndefined
    if field.type is bool:
        given |= {"action": "store_true"}
    else:
        given |= {name: marks[name] for name in ("metavar", "action") if name in marks}
        if "choices" in field.limits:
            given["choices"] = field.limits["choices"]
    entries = typing.get_args(field.type)
    if marks.get("action") == "append" and typing.get_origin(entries[0]) is tuple:  # `-p NAME VALUE -p NAME VALUE`
        given["nargs"] = len(typing.get_args(entries[0]))
    if field.several and "action" not in marks:
        given["nargs"] = "+" if required or not marks.get("positional") else "*"
        if typing.get_origin(field.type) is tuple and Ellipsis not in entries:
            given["nargs"] = len(entries)
    if marks.get("positional"):
        if not required and not field.several:
            given |= {"nargs": "?", "default": field.default}
        parser.add_argument(field.key, **given)
        return
    given["default"] = None if required or "action" in marks or marks.get("unset") else field.default
    parser.add_argument(field.flag, *marks.get("flags", ()), dest=field.key, required=required, **given)


def must(message: str) -> str:
    """pydantic's "Input should be less than 3" as "must be less than 3"."""
    said = message.partition(" should ")[2].partition(", unable to")[0]
    return "must " + (said or f"be valid ({message})")  # a number of too many digits
