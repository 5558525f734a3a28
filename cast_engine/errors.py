"""What goes wrong, in words a user can act on, and the exit codes that scripts can rely on."""

from __future__ import annotations

import errno
import os
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

_STDOUT = 1
"""File descriptor of standard output."""


class ExitCode(IntEnum):
    """Exit status of every command (documented in the README)."""

    OK = 0
    BUG = 1  # ours: a traceback is printed
    USER = 2  # a wrong input: one line says what, where, expected, what to do
    FAILURES = 3  # finished, but more samples failed than allowed
    GUARD = 4  # training was stopped by a guard
    NO_SPACE = 5
    INTERRUPTED = 75  # run the same command again
    READER_GONE = 141  # nobody reads the output any more, as in `cast-engine status RUN | head -1`


EXIT_CODES = (
    "Exit codes: 0 done; 1 a bug (traceback); 2 wrong input (one line says what to do); 3 more failures than allowed, "
    "or damage; 4 stopped by a guard; 5 no space; 75 interrupted, run the same command again; 141 nobody reads the "
    "output any more."
)
"""What every ``--help`` says at its end."""


def help_end(*examples: str) -> str:
    """Return the end of a command's help: examples as they are typed, and the exit codes."""
    head = "Example:" if len(examples) == 1 else "Examples:"
    return "\n".join(["\b", head, *(f"  {e}" for e in examples), "", EXIT_CODES])


class CastError(Exception):
    """Base of every error that ends a command with one line instead of a traceback."""

    exit_code: ExitCode = ExitCode.USER


class UserError(CastError):
    """A wrong input. The message reads: what was found, where, what was expected, what to do."""

    def __init__(self, found: str, *, where: str = "", expected: str = "", do: str = "") -> None:
        self.found, self.where, self.expected, self.do = found, where, expected, do
        parts = [f"{where}: {found}" if where else found]
        if expected:
            parts.append(f"expected {expected}")
        if do:
            parts.append(do)
        super().__init__("; ".join(parts))


class DatasetError(UserError):
    """A dataset on disk is damaged, incomplete or not the one that was asked for."""


class FailuresError(CastError):
    """The stage finished but too many samples failed."""

    exit_code = ExitCode.FAILURES


class GuardError(CastError):
    """Training refused to start or stopped itself; the last good checkpoint is intact."""

    exit_code = ExitCode.GUARD


class NoSpaceError(CastError):
    """The disk is full; everything committed stays valid."""

    exit_code = ExitCode.NO_SPACE


class Interrupted(CastError):
    """Stopped by a signal; run the same command again to go on."""

    exit_code = ExitCode.INTERRUPTED


@contextmanager
def handle_errors() -> Iterator[None]:
    """Turn what a command raises into its exit code: one line for the user's errors, a traceback for ours.

    Works as a ``with`` block and as a decorator (``@handle_errors()`` under the Typer command, so that an interrupt is
    seen here and not by the command-line library).

    Raises:
        SystemExit: With the :class:`ExitCode` that fits.
    """
    try:
        yield
    except CastError as error:
        _leave(str(error), error.exit_code)
    except KeyboardInterrupt:
        _leave("interrupted; run the same command again to go on", ExitCode.INTERRUPTED)
    except BrokenPipeError as error:
        if not _reader_gone():  # a pipe of our own
            traceback.print_exc()
            raise SystemExit(int(ExitCode.BUG)) from error
        _hang_up()
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            traceback.print_exc()
            raise SystemExit(int(ExitCode.BUG)) from error
        _leave(f"no space left for {error.filename or 'the output'}; what is committed stays valid", ExitCode.NO_SPACE)
    except Exception as error:
        if stopped := interrupt_in(error):
            _leave(str(stopped), stopped.exit_code)
        traceback.print_exc()
        raise SystemExit(int(ExitCode.BUG)) from error


def interrupt_in(error: BaseException) -> Interrupted | None:
    """Return the interrupt that a library took for a failure of its own, as lazy imports do."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Interrupted):
        seen = seen.__cause__ or seen.__context__
    return seen


@contextmanager
def quiet_hang_up() -> Iterator[None]:
    """End a command with its own exit code when nobody reads its output any more.

    Goes around the whole program: help and tables are printed by libraries that turn a broken pipe into exit code 1.

    Raises:
        SystemExit: As it came, or with ``ExitCode.READER_GONE``.
    """
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError) and error.__cause__ is None:  # with one it is a bug
            _hang_up()
        raise


def wait_politely() -> None:
    """Let idle OpenMP threads sleep after 10,000 turns instead of the 300,000 of GNU's library.

    Threads that wait by spinning hold up whoever has the work when the cores are shared: beside two busy processes this
    makes the tiny job up to 2.7 times faster, on free cores 3% slower. What the user set stays. Call it before torch
    is imported; child processes inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads from."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    return any(found & select.POLLERR for _, found in poll.poll(0))


def _hang_up() -> None:
    """End without a word; what is left in the buffers of standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    raise SystemExit(int(ExitCode.READER_GONE)) from None


def _leave(message: str, code: ExitCode) -> None:
    sys.stderr.write("error: " + " ".join(message.split()) + "\n")
    raise SystemExit(int(code)) from None
