"""What all Luigi tasks of stages share: complete is what is current, one at a time writes, one alone measures."""

import argparse
from configparser import ConfigParser
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import luigi
from luigi import configuration
from luigi.cmdline_parser import CmdlineParser
from luigi.task_register import Register

from lib.contracts import locks, tables
from lib.contracts.errors import ConfigError, TunerError
from lib.options import Options
from lib.report import console

OWN_SECTIONS = ("tuner", "extract", "plan", "generate", "measure", "train", "memory", "ranges", "compile")
# Of Luigi's, those that are no class of its own; the others are registered like tasks.
_LUIGIS_SECTIONS = ("DEFAULT", "logging", "loggers", "handlers", "formatters", "resources", "task_history", "cors")


def configure(defaults: Path) -> None:
    """Let the keys of a luigi.cfg hold where no configuration has them that Luigi reads itself: that of the folder in
    which the command is typed, and LUIGI_CONFIG_PATH. To be called when tasks are imported: Luigi asks for its own
    sections after that."""
    config = configuration.get_config()
    own = ConfigParser(interpolation=None)
    own.optionxform = str  # type: ignore[assignment,method-assign]  # keys as they are written
    own.read(defaults)
    for name in own.sections():
        for key, value in own.items(name):
            if not config.has_option(name, key):
                config.set(name, key, value)


def section(name: str) -> dict[str, str]:
    """A section of luigi.cfg."""
    config = configuration.get_config()
    return dict(config.items(name)) if config.has_section(name) else {}


@cache
def tell_unread() -> None:
    """Of the configuration: sections, and keys of `[tuner]`.

    The other sections refuse unknown keys, see `settings.configured`. Luigi itself ends with a traceback where a key
    stands twice: it reads the files before it imports any task.
    """
    known = {*OWN_SECTIONS, *_LUIGIS_SECTIONS, *Register.task_names()}
    unread = [f"[{name}]" for name in sorted(set(configuration.get_config().sections()) - known)]
    unread += [f"[tuner] {key}" for key in sorted(set(section("tuner")) - {"artifacts", "linker", "emulator"})]
    if unread:
        console.tell(
            f"warning: nobody reads {', '.join(unread)} of the configuration; this project's sections are "
            f"{', '.join(OWN_SECTIONS)}"
        )


class _Hidden(argparse._StoreAction):
    """An option that works, and that `--help` does not show."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "help": argparse.SUPPRESS})


class _ShownOnce:
    """Luigi has each option twice, with and without the name of the task: `--help` shows the shorter one."""

    def _parser_kwargs(self, param_name: str, task_name: str | None = None) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._parser_kwargs(param_name, task_name)  # type: ignore[misc]
        return {**kwargs, "action": _Hidden} if task_name else kwargs


class _Option(_ShownOnce):
    """What all options share: what cannot be one is told in words."""

    expected = "text"
    name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)  # type: ignore[misc]
        self.name = f"--{name.replace('_', '-')}"

    def parse(self, text: str) -> Any:
        """See `luigi.Parameter.parse`.

        Raises:
            ConfigError: The text is none.
        """
        try:
            return super().parse(text)  # type: ignore[misc]
        except (ValueError, luigi.parameter.ParameterException):
            raise ConfigError(f"{self.name} {text!r}: expected {self.expected}.") from None


class Text(_Option, luigi.Parameter):
    """An option that is a text."""


class Choice(_Option, luigi.ChoiceParameter):
    """An option that is one of several texts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.expected = f"one of {', '.join(kwargs['choices'])}"


class Int(_Option, luigi.IntParameter):
    """An option that is a whole number."""

    expected = "a whole number"


class Float(_Option, luigi.FloatParameter):
    """An option that is a number."""

    expected = "a number"


class StageTask(luigi.Task):
    """A task with one stage and one main output, made from what its inputs were: a digest in the file tells."""

    path: Path  # of the output

    @property
    def given(self) -> Options:
        """What the user asked for."""
        raise NotImplementedError

    def output(self) -> luigi.LocalTarget:
        """See `luigi.Task.output`."""
        return luigi.LocalTarget(self.path)

    def is_current(self) -> bool:
        """Whether the output exists and was made from what the inputs are now.

        Raises:
            ContractError: It is there, but damaged or of another version.
        """
        raise NotImplementedError

    def work(self) -> None:
        """Run the stage."""
        raise NotImplementedError

    def complete(self) -> bool:
        """See `luigi.Task.complete`."""
        try:
            return self.is_current()
        except TunerError:
            return False  # `run` tells what is wrong, as this task's failure

    @property
    def lock(self) -> Path:
        """Held while it runs, so that two runs of one command share the work and do not mix."""
        return self.given.run_files.lock

    @property
    def folders(self) -> list[Path]:
        """That are written under its lock."""
        return [self.lock.parent]

    def run(self) -> None:
        """See `luigi.Task.run`; does nothing if another process did it while this one waited."""
        with locks.exclusive(self.lock, on_wait=lambda: self.status("waiting for another run of this model")):
            if not self.is_current():  # which also refuses to write over what it cannot read
                for folder in self.folders:
                    tables.sweep(folder, keep="runs")
                with self.turn():
                    self.work()

    def turn(self) -> AbstractContextManager[None]:
        """Any number of stages work on this CPU at a time, but none while another run measures on it."""
        return locks.shared(locks.of_this_machine("llvm"), on_wait=self.wait_for_measuring)

    def wait_for_measuring(self) -> None:
        """Say why nothing happens."""
        self.status("waiting for another run to measure")

    def status(self, doing: str) -> None:
        """Tell the terminal and Luigi's scheduler what is going on."""
        line = console.progress().say(doing)
        if self.set_status_message:
            self.set_status_message(line)


class MeasuringTask(StageTask):
    """A stage that times programs."""

    def turn(self) -> AbstractContextManager[None]:
        """Alone on what it times here; a tracker gives a device to one at a time itself."""
        if not self.given.measured_on.is_here:
            return super().turn()
        kind = self.given.compile_target.kind
        return locks.exclusive(locks.of_this_machine(kind), on_wait=self.wait_for_measuring)


def is_asked_for(task: luigi.Task) -> bool:
    """Whether the command line names this task, rather than one that needs it."""
    command = CmdlineParser.get_instance()
    return command is not None and command.get_task_obj() == task


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_MISSING)
def name_what_is_missing(task: Any) -> None:
    """A stage was started alone, and what it reads is not there."""
    options = " ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in task.to_str_params(only_significant=True).items()
        if name == "model" or value != str(dict(task.get_params())[name]._default)
    )
    console.error(
        f"{task.path} is missing, or no longer fits what it was made from.\n"
        f"Run `luigi --module pipeline {task.task_family} {options}` first, or `TuneModel` for all there is."
    )


console.set_up("luigi-interface", "external data dependency", of_the_user=luigi.parameter.ParameterException)
