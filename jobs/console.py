"""What all commands share: the console, and bad input as one line with exit code 2."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.uris import without_passwords

if TYPE_CHECKING:
    from dashboards.sections import Report
    from specdec_core.config import Configuration
    from specdec_core.search.load.workload import Workload

# Names may hold colons; `bundled:x:` is no emoji.
console = Console(highlight=False, emoji=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

_LOOK = 0.1  # seconds
_OUTPUT = 1  # the file that output goes to
_TERMINATED = 128 + signal.SIGTERM


def program(name: str) -> str:
    """How to call one of this environment's programs from the current folder."""
    if shutil.which(name):
        return name
    return os.path.relpath(Path(sys.executable).with_name(name))


def typed(name: str) -> str:
    """The command of this name, as the user gave it: by `specdec` or from its module."""
    words, given = name.split(), sys.argv[1:]
    if given[: len(words)] == words:
        given = given[len(words) :]
    return shlex.join(["specdec", *words, *given])


def run(command: Callable[..., None] | typer.Typer) -> None:
    """Run a typer application, or a function as one. A :class:`UserError`, and a file that the
    system refuses, become one line on standard error and exit code 2; a file that is missing where
    this program expects it is a fault. A broken pipe to another process is reported in one line,
    which typer would not do; a closed standard output is not."""
    if isinstance(command, typer.Typer):
        app = command
    else:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(command)
    try:
        app()
    except UserError as error:
        _refuse(str(error))
    except Exception as error:
        # Each command says itself which file it was given and does not find.
        fault = isinstance(error, FileNotFoundError | FileExistsError)
        if isinstance(error, OSError) and error.filename is not None and not fault:
            _refuse(f"{error.filename}: {os_reason(error)}")
        sys.excepthook = _show  # instead of typer's own
        raise
    except SystemExit as end:
        if isinstance(broken := end.__context__, BrokenPipeError) and _read(_OUTPUT):
            where = traceback.extract_tb(broken.__traceback__)[-1]
            at = f"{broken}, {where.filename}:{where.lineno}"
            errors.print(f"[red]error:[/red] another process is gone ({escape(at)})")
        raise


def _refuse(reason: str) -> NoReturn:
    """Print why a command ends, and exit as for bad input."""
    errors.print(f"[red]error:[/red] {escape(reason)}")
    sys.exit(2)


def _show(*error: Any) -> None:
    """Print the traceback of a fault. A library may have put a URI with its password into it."""
    sys.stderr.write(without_passwords("".join(traceback.format_exception(*error))))


def _read(output: int) -> bool:
    """Whether the reading end of a pipe is still open."""
    poll = select.poll()
    poll.register(output, 0)
    return not poll.poll(0)


@contextmanager
def interruptible() -> Iterator[None]:
    """When interrupted or terminated, print a line and exit with the usual code."""
    terminated = False

    def terminate(*_: object) -> None:
        nonlocal terminated
        terminated = True
        sys.exit(_TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes")
        sys.exit(130)
    except SystemExit:
        if not terminated:
            raise
        errors.print("terminated; the same command resumes")
        sys.exit(_TERMINATED)  # a wait in Ray ends with another code


def on_stop(handler: Callable[[int, FrameType | None], object]) -> None:
    """Call `handler` when the process is to stop: at Ctrl-C, SIGTERM and SIGHUP. An ignored signal
    stays ignored, as SIGHUP under `nohup`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def wait_for_stop(look: Callable[[], None] = lambda: None) -> None:
    """Return when the process is to stop. Further signals are ignored while it stops. `look` is
    called several times a second, and may raise an error."""
    stop = Event()
    on_stop(lambda *_: stop.set())
    while not stop.wait(_LOOK):
        look()


def warn(message: str) -> None:
    console.print(f"[yellow]warning:[/yellow] {escape(message)}", soft_wrap=True)


def point(what: str, where: object) -> None:
    """Print a place or the next command after its name."""
    console.print(f"{what:<9} {where}", markup=False, soft_wrap=True)


def serve_command(workload: Workload | None) -> str:
    """The command that serves the choice for a workload, with a slot for every client."""
    slots = [] if workload is None else ["--slots", str(workload.slots)]
    return shlex.join([program("specdec"), "serve", *slots])


def print_configuration(configuration: Configuration, source: str, before: str = "") -> None:
    """Print a configuration's label, its source and its description."""
    console.print(f"{before}{escape(configuration.label)}  [dim]({escape(source)})[/dim]")
    console.print(f"[dim]{escape(configuration.sentence)}[/dim]", soft_wrap=True)


def print_runs_page(experiment: str, view: str | None = None) -> None:
    """Print the address of an experiment's runs in MLflow, and how to start its server."""
    from dashboards.database import in_shell
    from dashboards.store import connect, experiment_id_of, store_name, tracking_uri
    from dashboards.views import runs_page

    page = runs_page(experiment_id_of(connect(), experiment), view)
    if store_name().startswith("http"):
        lines = [f"{store_name().rstrip('/')}/{page}"]
    else:
        ui = f"{shlex.quote(program('mlflow'))} ui --backend-store-uri {in_shell(tracking_uri())}"
        lines = [ui, f"http://127.0.0.1:5000/{page}"]
    point("compare", "\n          ".join(lines))


def deliver(report: Report, folder: Path, name: str, files: Iterable[Path] = ()) -> None:
    """Show a study's report, write it into `folder` as `<name>.md` and `<name>.html`, and log it
    with all its files and `files`."""
    from dashboards.outputs.console import show
    from dashboards.outputs.files import write
    from dashboards.outputs.mlflow_runs import delivering, log

    show(console, report.sections)
    *written, page = write(report, folder, name)
    point("report", page)
    with delivering("it is no run in MLflow"):
        log(report, [*written, page, *files])
