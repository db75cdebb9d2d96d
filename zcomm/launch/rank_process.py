"""The process of one rank, which ranks.py starts: it answers calls until its pipe is closed.

Usage: python -P -m zcomm.launch.rank_process PARENT PIPE RANK WORLD_SIZE FOLDER GROUP_TIMEOUT_S
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType

import torch
import torch.distributed as dist


def end_with_parent(parent: int) -> None:
    """Dies with its parent, even if the parent was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def load_module(file: str, name: str) -> ModuleType:
    """A module by its name, or by its file: in pytest's importlib mode the name does not lead to
    it."""
    # As in multiprocessing: a script's `if __name__ == "__main__"` stays false in its children.
    load_as = "__mp_main__" if name == "__main__" else name
    if getattr(sys.modules.get(load_as), "__file__", None) == file:
        return sys.modules[load_as]
    if _leads_to(name, file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(load_as, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected a Python file, got {file}")
    sys.modules[name] = sys.modules[load_as] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[load_as])
    return sys.modules[load_as]


def _leads_to(name: str, file: str) -> bool:
    """Whether a name is that of this file; a module of a package needs its package first."""
    try:
        spec = importlib.util.find_spec(name) if name != "__main__" else None
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == file


def answer(call: bytes, rank: int, world_size: int) -> bytes:
    """A pickled pair of an error, as text, and a result; one of them is None."""
    try:
        file, module, name, args = pickle.loads(call)
        fn = getattr(load_module(file, module), name)
        return pickle.dumps((None, fn(rank, world_size, *pickle.loads(args))))
    except BaseException:  # SystemExit too: the caller gets any failure as an error
        return pickle.dumps((traceback.format_exc(), None))
    finally:
        # DDP models are reference cycles. They hold groups, whose threads keep polling.
        gc.collect()


def calls(pipe: Connection) -> Iterator[bytes]:
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield pipe.recv_bytes()


def be_a_rank(pipe: Connection, rank: int, world_size: int, folder: str, timeout_s: float) -> None:
    stack_file = open(f"{folder}/stack-{rank}", "w")  # noqa: SIM115 (it stays open)
    faulthandler.register(signal.SIGUSR1, file=stack_file)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    gc.freeze()
    for call in calls(pipe):
        pipe.send_bytes(answer(call, rank, world_size))
    dist.destroy_process_group()


if __name__ == "__main__":
    parent, fd, rank, world_size, folder, timeout_s = sys.argv[1:]
    end_with_parent(int(parent))
    be_a_rank(Connection(int(fd)), int(rank), int(world_size), folder, float(timeout_s))
