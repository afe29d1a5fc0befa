"""``fastvid COMMAND``: find the command, set up logging, turn errors into messages and exit codes.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> int``, which is imported when it is called. Its
options may come between its positional arguments; a command with ``RAW_ARGUMENTS = True`` gets its arguments unchanged.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from fastvid.errors import FastvidError, UsageError, naming_extras
from fastvid.format.reason import because
from fastvid.runtime.names import parse
from fastvid.runtime.progress import log_to_stderr

COMMANDS: Final = {
    "shard": ("fastvid.cli.shard", "encode raw videos into an indexed WebDataset"),
    "tune": ("fastvid.cli.tune", "measure every profile on a sample of your videos, and recommend one"),
    "add": ("fastvid.cli.add", "encode new videos into an existing dataset"),
    "inspect": ("fastvid.cli.inspect", "show what is in a dataset, in the terminal or as an HTML page"),
    "index": ("fastvid.cli.index", "make a dataset from video tars of other tools, or rebuild sidecars"),
    "status": ("fastvid.cli.status", "show how far a job is, and what the dataset is"),
    "verify": ("fastvid.cli.verify", "check a dataset: hashes, checksums, index, every frame"),
    "remove": ("fastvid.cli.remove", "remove samples at once, without rewriting shards"),
    "relabel": ("fastvid.cli.relabel", "change labels, splits or captions of samples"),
    "split": ("fastvid.cli.sets.split", "divide samples into splits, keeping the segments of a file together"),
    "subset": ("fastvid.cli.sets.subset", "make a dataset of some of the samples, without encoding"),
    "merge": ("fastvid.cli.sets.merge", "make one dataset of several, without encoding"),
    "transcode": ("fastvid.cli.sets.transcode", "encode a dataset again, with its annotations"),
    "compact": ("fastvid.cli.compact", "rewrite shards without their removed samples"),
    "export": (
        "fastvid.cli.access.export",
        "write samples with their current labels for other tools",
    ),
    "log": ("fastvid.cli.history.log", "list the generations of a dataset: when, what, why"),
    "gc": ("fastvid.cli.history.gc", "delete old generations and files that only they use"),
    "find": ("fastvid.cli.access.find", "show where samples are: shard, row, bytes, source, removed"),
    "get": ("fastvid.cli.access.get", "write a sample, a clip, a frame, a contact sheet or the sound to a file"),
    "bench": ("fastvid.cli.bench", "measure decoding, loading, sharding, training and scaling"),
    "doctor": ("fastvid.cli.doctor", "check which decoders and encoders work on this machine, and why others do not"),
    "demo": ("fastvid.cli.demo", "make a motion dataset, shard it, train on it, write a report"),
    "train": ("fastvid.cli.train", "train a recipe; under torchrun for more than one process"),
    "report": ("fastvid.cli.report", "render training runs as an HTML page: curves, speed, scaling"),
    "predict": ("fastvid.cli.predict", "classify videos that are not in a dataset with a trained model"),
    "eval": ("fastvid.cli.evaluate", "score a checkpoint on a split, each video once"),
}

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 an error, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(_version())
        return 0
    if arguments[0] not in COMMANDS:
        print(f"fastvid: unknown command {arguments[0]!r}; use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    log_to_stderr()
    name, (target, summary) = arguments[0], COMMANDS[arguments[0]]
    try:
        with naming_extras():
            module = importlib.import_module(target)
            command = argparse.ArgumentParser(prog=f"fastvid {name}", description=module.__doc__ or summary)
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(command)
            if getattr(module, "RAW_ARGUMENTS", False):
                return int(module.run(command.parse_args(arguments[1:])))
            args = parse(command, arguments[1:])
            with because(getattr(args, "reason", None) or ""):
                return int(module.run(args))
    except FastvidError as error:
        print(f"fastvid {name}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR
    except KeyboardInterrupt:
        print(f"fastvid {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has exited, as in `fastvid inspect DIR | head`; keep the interpreter from flushing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


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


def _version() -> str:
    from fastvid import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
