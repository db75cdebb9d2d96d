"""Command line: `zcomm demo`, `zcomm bench`, `zcomm plan` and `zcomm doctor`.

Each is a package whose `command` module parses its arguments and runs it. The other modules of
`bench` time collectives, for `benchmarks/` as well.

Imports: everything but selftest and integrations. Start with main() below.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import zcomm
from zcomm.cli.bench import command as bench
from zcomm.cli.demo import command as demo
from zcomm.cli.doctor import command as doctor
from zcomm.cli.plan import command as plan
from zcomm.launch.launchers import NotMet
from zcomm.launch.tasks import leads
from zcomm.report.usage import Paragraphs, UsageError

# Each has HELP, add_arguments(parser) and run(args), which gives the exit code.
COMMANDS: dict[str, ModuleType] = {"demo": demo, "bench": bench, "plan": plan, "doctor": doctor}


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without × and µ
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return int(COMMANDS[args.command].run(args))
    except UsageError as error:
        if leads() or isinstance(error, NotMet):  # a mistake of all ranks is said once
            print(f"zcomm {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `zcomm doctor | head -1`; Python would complain at exit again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"zcomm {args.command}: stopped", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zcomm", description="Compressed gradient communication for PyTorch training."
    )
    parser.add_argument("--version", action="version", version=f"zcomm {zcomm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.formatter_class = Paragraphs
        module.add_arguments(command)
    return parser
