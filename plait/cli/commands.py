"""The form of commands: settings behind them, help pages, and answers to unknown options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

EXAMPLES = "Examples:\n"
"""The line of a docstring below which each line is an example."""
JOB_SETTINGS = "SECTION.KEY=VALUE"
"""The placeholder of settings of a job."""

JobOverrides = Annotated[
    list[str] | None, typer.Argument(metavar=JOB_SETTINGS, help="In place of the file's: train.steps=100.")
]
Draw = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Also draw to this file (.svg, .png, .pdf). Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class App(typer.Typer):
    """A group of commands whose help pages have one form."""

    def __init__(self, help: str, cls: type[TyperGroup] | None = None, *, completion: bool = False) -> None:
        super().__init__(
            cls=cls or Group, help=help, no_args_is_help=True, add_completion=completion, rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )  # fmt: skip

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Return a decorator that makes a command of a function, as ``grouped`` does."""
        register = super().command(name, cls=Command, **settings)

        def add(function: Callable[..., None]) -> Callable[..., None]:
            register(grouped(function))
            return function

        return add


# ---- help pages ----


class Command(TyperCommand):
    """A command whose page shows its settings and examples as lists."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        return ["[OPTIONS]", *(_placeholder(one) for one in self.params if one.param_type_name == "argument")]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the docstring up to its examples."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(inspect.cleandoc(self.help or "").partition(EXAMPLES)[0].rstrip())

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, settings, options and examples."""
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Settings": [], "Options": []}
        parameters: list[Any] = [*self.get_params(ctx)]
        for one in parameters:
            record = one.get_help_record(ctx)
            if record and one.param_type_name == "option":
                rows["Options"].append(record)
            elif record:
                help, line, settings = str(one.help).partition("\n")
                rows["Arguments"] += [(_placeholder(one), record[1].replace(line + settings, ""))] if help else []
                rows["Settings"] += _settings_rows(one)
        for title, each in rows.items():
            if each:
                with formatter.section(title):
                    formatter.write_dl(each)
        _write_examples(formatter, _examples(self))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Raises JobError for wrong ones; for an unknown option, with what to write."""
        from plait.core.base.errors import JobError

        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except cast("Any", typer.BadParameter.__base__) as error:  # UsageError of typer's click
            if hasattr(error, "possibilities"):
                raise _unknown_option(self, ctx, error.option_name, words) from None
            said, _, _ = error.format_message().partition(", unable to parse")
            raise JobError(said, key=ctx.command_path, fix=f"{ctx.command_path} --help says more") from None


class Group(TyperGroup):
    """A group whose page lists all commands under headings, the ``rich_help_panel`` of each, with
    the first example of every command below the first heading."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of commands for each heading, and examples."""
        width, headings = max(map(len, self.commands)), dict[str, dict[str, Any]]()
        for name, command in self.commands.items():
            heading = str(getattr(command, "rich_help_panel", None) or "Commands")
            headings.setdefault(heading, {})[name] = command
        for heading, each in headings.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(width), one.get_short_help_str(76 - width)) for name, one in each.items()]
                )
        first = next(iter(headings.values())).values()
        _write_examples(formatter, [example for command in first for example in _examples(command)[:1]])


def _placeholder(argument: Any) -> str:
    name = str(argument.metavar)
    shown = name if argument.required else f"[{name}]"
    return shown if argument.nargs == 1 else f"{shown}..."


def _settings_rows(argument: Any) -> Iterator[tuple[str, str]]:
    """Yield every setting with its default, and its help: the lines below an argument's own help."""
    for line in str(argument.help).split("\n")[1:]:
        name, _, meaning = line.partition(": ")
        yield name, meaning


def _examples(command: Any) -> list[str]:
    text = inspect.cleandoc(command.help or "").partition(EXAMPLES)[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


def _write_examples(formatter: Any, examples: list[str]) -> None:
    """Write examples, each on one line, whatever its length."""
    if examples:
        with formatter.section("Examples"):
            formatter.write("".join(f"{'':{formatter.current_indent}}{example}\n" for example in examples))


# ---- unknown options ----


def _unknown_option(command: Any, ctx: Any, option: str, words: list[str]) -> Exception:
    """Return the error for an unknown option: it names the setting that is meant, or the nearest
    option. words: what the user wrote."""
    from plait.core.base.errors import JobError, nearest

    name = option.lstrip("-").replace("-", "_")
    key = f"{ctx.command_path}: {option}"
    if names := _settings_named(command, name):
        value = _value_of(option, words)
        fix = " or ".join(f"{one}={value}" for one in names)
        return JobError("is a setting, no option", key=key, fix=f"Write {fix}")
    options = [word.lstrip("-") for one in command.params for word in one.opts if one.param_type_name == "option"]
    near = nearest(option.lstrip("-"), options).replace("'", "'--", 1)
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    fix = f"{ctx.command_path} --help lists them. Files stand as they are: {usage}"
    return JobError(f"is no option{near}", key=key, fix=fix)


def _settings_named(command: Any, name: str) -> list[str]:
    """Return the command's settings called ``name``, or the settings of a job that are meant."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    own = [setting.partition("=")[0] for one in arguments for setting, _ in _settings_rows(one)]
    if name in own or not any(one.metavar == JOB_SETTINGS for one in arguments):
        return [name] if name in own else []
    from plait.core.job.framework_names import key_of  # slow to load
    from plait.core.job.tables import settings_named

    other = key_of(name)
    return [other] if other else settings_named(name)


def _value_of(option: str, words: list[str]) -> str:
    """Return the value behind an option; ``VALUE`` if there is none."""
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and following[:1] != "-" and "=" not in following and not Path(following).exists():
            return following
    return "VALUE"


# ---- settings behind a command ----


class Settings:
    """The base of a dataclass whose fields are no options: the user writes them after the command
    as ``KEY=VALUE``. The last text in a field's ``Annotated`` is its help."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command for a function whose parameters may be dataclasses. Their fields
    become options; fields of ``Settings`` become ``KEY=VALUE`` words after the arguments."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = list[Parameter]()
    for name, own in signature(command).parameters.items():
        if name not in groups:
            parameters.append(own.replace(annotation=hints[name]))
        elif not _is_settings(groups[name]):
            parameters += _fields(groups[name])
    parameters += [_words(group) for group in groups.values() if _is_settings(group)]  # after other arguments

    @wraps(command)
    def run(**values: Any) -> None:
        made = {name: _made(group, values) for name, group in groups.items()}
        command(**made, **values)

    parameters = [own.replace(kind=Parameter.KEYWORD_ONLY) for own in parameters]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {own.name: own.annotation for own in parameters}
    return run


def _is_settings(group: Any) -> bool:
    return issubclass(group, Settings)


def settings_help(group: Any, own: str = "") -> str:
    """Return the help of an argument that stands for all settings of a group: ``own``, and below it
    a line for each setting with its default."""
    hints, lines = get_type_hints(group, include_extras=True), [own]
    for field in fields(group):
        needed, default = field.default is MISSING, field.default
        shown = "..." if needed or default in (None, "", ()) else default
        lines.append(f"{field.name}={shown}: {hints[field.name].__metadata__[-1]}{'  [required]' * needed}")
    return "\n".join(lines)


def _words(group: Any) -> Parameter:
    argument = typer.Argument(metavar="KEY=VALUE", help=settings_help(group), show_default=False)
    return Parameter("words", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, argument])


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def _made(group: Any, values: dict[str, Any]) -> Any:
    """Return a group made from its values, and remove them from ``values``."""
    if not _is_settings(group):
        return group(**{field.name: values.pop(field.name) for field in fields(group)})
    from plait.core.base.codec.data import read_settings

    words: list[str] = values.pop("words") or []
    for name, value in values.items():
        if isinstance(value, Path) and "=" in str(value) and not value.exists():  # not a file but the first setting
            words, values[name] = [str(value), *words], None
    return read_settings(group, words)
