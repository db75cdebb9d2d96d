"""Translates PTX to C++ that runs on the SIMT emulator.

`python emulator/ptx_to_cpp.py IN.ptx -o OUT.cpp`: every kernel becomes an
`extern "C" void name(const void* args)`, statement by statement. Whatever is unknown, approximate,
or not the same on every GPU is an error.
"""

import argparse
import sys
from pathlib import Path

from ptx.emit import emit
from ptx.source import PtxError, parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        code = emit(parse(args.input.read_text()), args.input.name)
    except PtxError as error:
        print(f"{args.input}: {error}", file=sys.stderr)
        return 1
    args.output.write_text(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
