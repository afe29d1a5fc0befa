"""``fastvid COMMAND``: find the command, set up logging, turn errors into messages and exit codes.

A command is a function, see `fastvid.cli.command`; its module is imported only when the command is called. Options may
stand between positional arguments; ``bench`` gets all its arguments unparsed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fastvid.cli.command import call, parser_of
from fastvid.errors import FastvidError, StorageError, UsageError, naming_extras
from fastvid.format.reason import because
from fastvid.runtime.names import meant, parse
from fastvid.runtime.progress import log_to_stderr

COMMANDS: Final = {
    "shard": ("jobs:shard", "encode raw videos into an indexed WebDataset"),
    "tune": ("tune:tune", "measure every profile on a sample of your videos, and recommend one"),
    "add": ("jobs:add", "encode new videos into an existing dataset"),
    "inspect": ("look:inspect", "show what is in a dataset, in the terminal or as an HTML page"),
    "index": ("jobs:index", "make a dataset from video tars of other tools, or rebuild sidecars"),
    "status": ("look:status", "show how far a job is, and what the dataset is"),
    "verify": ("look:verify", "check a dataset: hashes, checksums, index, every frame"),
    "remove": ("change:remove", "remove samples at once, without rewriting shards"),
    "relabel": ("change:relabel", "change labels, splits or captions of samples"),
    "split": ("change:split", "divide samples into splits, keeping the segments of a file together"),
    "subset": ("change:subset", "make a dataset of some of the samples, without encoding"),
    "merge": ("change:merge", "make one dataset of several, without encoding"),
    "transcode": ("jobs:transcode", "encode a dataset again, with its annotations"),
    "compact": ("change:compact", "rewrite shards without their removed samples"),
    "export": ("change:export", "write samples with their current labels for other tools"),
    "log": ("change:log", "list the generations of a dataset: when, what, why"),
    "gc": ("change:gc", "delete old generations and files that only they use"),
    "find": ("access:find", "show where samples are: shard, row, bytes, source, removed"),
    "get": ("access:get", "write a sample, a clip, a frame, a contact sheet or the sound to a file"),
    "bench": ("train:bench", "measure decoding, loading, sharding, training and scaling"),
    "doctor": ("doctor:doctor", "check which decoders and encoders work on this machine, and why others do not"),
    "demo": ("train:demo", "make a motion dataset, shard it, train on it, write a report"),
    "train": ("train:train", "train a recipe; under torchrun for more than one process"),
    "report": ("train:report", "render training runs as an HTML page: curves, speed, scaling"),
    "weights": ("train:weights", "write the weights of a run as a file for plain torch"),
    "predict": ("train:predict", "classify videos that are not in a dataset with a trained model"),
    "eval": ("train:evaluate", "score a checkpoint on a split, each video once"),
}
"""File and function of each command, and what it does."""

_REMOVED: Final = {
    "copy": "copy a dataset with `rclone` or `aws s3 sync`, then run `fastvid verify`",
    "diff": "compare the outputs of `fastvid find --json` of both generations",
    "tag": "keep a generation with `fastvid gc --keep N`; names that 0.2 gave still work",
}
"""For each command of 0.2 that no longer exists, what to use instead."""

_RECORDED: Final = {"shard", "add", "index", "transcode", "relabel", "split", "subset", "merge", "compact"}
"""Commands that change a dataset: ``--reason`` is recorded in the generation that they make."""

_SHOWN: Final = 80  # letters of a text that is no UTF-8

_OF_OUTPUT: Final = (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO)

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
_SIGNALLED: Final = 128  # with the number of the signal, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 an error, 2 wrong usage, 128 + number of a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    said = " ".join(["fastvid", *(name for name in arguments[:1] if name in COMMANDS)])
    try:
        with _streams(), _signals():
            return _run(arguments)
    except FastvidError as error:
        print(f"{said}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR
    except KeyboardInterrupt as error:
        print(f"{said}: interrupted", file=sys.stderr)
        return _SIGNALLED + int(error.args[0] if error.args else signal.SIGINT)
    except UnicodeEncodeError as error:
        print(f"{said}: {error.object[:_SHOWN]!a} is no text in UTF-8", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        what, hint = str(error.strerror or error), "check the disk, your permissions, and the limits of `ulimit -a`"
        hint += "; with FASTVID_LOG=debug the log says which line raised it"
        logging.getLogger(__name__).debug("raised here", exc_info=True)
        if error.filename is None and error.errno in _OF_OUTPUT:
            # The reader of stdout has exited, as in `fastvid inspect DIR | head`, or its disk is full. Redirect stdout,
            # so that the flush when the interpreter exits does not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            what, hint = f"the output cannot be written: {what}", ""
        if not isinstance(error, BrokenPipeError):
            print(f"{said}: {StorageError(what, file=error.filename, hint=hint)}", file=sys.stderr)
        return EXIT_ERROR


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Open standard streams that are closed, and let stdout escape what its encoding lacks, as stderr does."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        sys.stdout.flush()  # when the interpreter exits, an error of it could not be handled


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: it deletes its temporary files and gives up its lease."""
    kinds = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    taken = [kind for kind in kinds if signal.getsignal(kind) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for kind in taken:
        signal.signal(kind, _interrupt)
    try:
        yield
    finally:
        for kind in taken:
            signal.signal(kind, signal.SIG_DFL)


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _parser().print_help()
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("--version", "version"):
        from fastvid import __version__

        print(__version__)
        return 0
    name, words = arguments[0], arguments[1:]
    if name not in COMMANDS:
        hint = _REMOVED.get(name) or meant(name, COMMANDS) or f"use one of {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}", hint=hint)
    log_to_stderr()
    with naming_extras():
        command = find_command(name)
        if name == "bench":
            return command(*words)
        args = parse(command_parser(name, command), words)
        with because(getattr(args, "reason", None) or ""):
            return call(command, args)


def find_command(name: str) -> Callable[..., int]:
    """Return the function of a command."""
    file, _, function = COMMANDS[name][0].partition(":")
    command: Callable[..., int] = getattr(importlib.import_module(f"fastvid.cli.{file}"), function)
    return command


def command_parser(name: str, command: Callable[..., int]) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    parser = parser_of(name, command)
    if name in _RECORDED:
        parser.add_argument("--reason", default="", metavar="TEXT", help="why, for `fastvid log`")
    return parser


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:10} {summary}" for name, (_, summary) in COMMANDS.items())
    return argparse.ArgumentParser(
        prog="fastvid",
        usage="fastvid COMMAND [options]",
        description=f"commands:\n{listing}",
        epilog="`fastvid COMMAND --help` shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
