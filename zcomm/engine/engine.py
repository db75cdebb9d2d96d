"""Engine: one thread that runs jobs while backward continues. What it does to them, a runner knows.

Engine      submission, the thread, failures
runner      the order of a job's chunks: host.py where ranks share memory, cpu.py where they do
            not, device.py for asynchronous devices
Pipeline    what happens to a chunk
"""

import atexit
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from zcomm import kernels
from zcomm.engine.counters import Counters
from zcomm.engine.cpu import CpuRunner
from zcomm.engine.device import DeviceRunner
from zcomm.engine.host import HostRunner
from zcomm.engine.inbox import Failed, Inbox, Stopped
from zcomm.engine.job import Job, Marker
from zcomm.engine.streams import Streams
from zcomm.sharding.chunks import ChunkSize
from zcomm.sharding.hierarchy import Hosts
from zcomm.transport.channels import Transport
from zcomm.transport.failure_notes import CommunicationError
from zcomm.transport.gloo_threads import let_gloo_finish
from zcomm.transport.handshake import Caller
from zcomm.transport.shared_memory.ring import Ring, hops_chunk_size

# How long stop() waits for the chunk in progress.
_STOP_S = 10.0


class Engine:
    """Runs jobs in the order of their submission, which must be the same on all ranks."""

    def __init__(
        self,
        transport: Transport,
        runner: HostRunner | CpuRunner | DeviceRunner,
        streams: Streams | None = None,
    ) -> None:
        self.transport, self.runner = transport, runner
        self.failure: BaseException | None = None
        self._streams = streams
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="zcomm-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def counters(self) -> Counters:
        return self.runner.pipeline.counters

    def submit(self, job: Job) -> None:
        """Starts a job; one submitted after a failure completes at once, with that failure."""
        if self._streams is not None:
            job.ready, job.streams = self._streams.ready(), self._streams
        self._submit(job)

    def run(self, job: Job) -> None:
        """Submits a job and waits for it."""
        job.awaited = True
        self.submit(job)
        job.wait()

    def _submit(self, job: Job | Marker) -> None:
        with self._lock:
            if self.failure is None:
                left = self._run_here(job)
                if left is not None:
                    self._inbox.put(left)
                return
        job.fail(self.failure)

    def _run_here(self, job: Job | Marker) -> Job | Marker | Failed | None:
        """What is left for the engine's thread to do. A caller that only waits runs a small job
        itself while that thread has nothing else; nobody can submit another one meanwhile."""
        if not isinstance(job, Job) or not job.awaited or isinstance(self.runner, DeviceRunner):
            return job
        if not self._inbox.idle():
            return job
        try:
            if not self.runner.run_here(job):
                return job
        except Exception as error:
            return Failed(job, error)
        except BaseException as error:  # Ctrl-C: nobody knows how far the job has come
            stopped = RuntimeError(f"zcomm: {job.what} was interrupted ({type(error).__name__})")
            self._inbox.put(Failed(job, stopped))
            raise
        job.complete()
        return None

    def synchronize(self) -> None:
        """Until it is known how all completed jobs went. On the CPU it always is."""
        if self._streams is not None:
            marker = Marker()
            self._submit(marker)
            marker.wait()

    def record_stream(self, t: Tensor) -> None:
        """Nobody else gets this memory before the engine is done with it, whoever drops the
        tensor. On the CPU a job's own reference is enough."""
        if self._streams is not None:
            self._streams.record_stream(t)

    def stop(self) -> None:
        """Ends the thread. Jobs in flight complete with an error."""
        self._inbox.put(None)
        self.transport.interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    @contextmanager
    def told(self) -> Iterator[None]:
        """If this rank raises, the others learn it, as if the engine had failed, and it ends."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, CommunicationError):
                with suppress(Exception):
                    self.transport.notes.report(f"{type(error).__name__}: {error}")
            self.stop()
            raise

    def buffer_nbytes(self) -> int:
        """Memory that the engine holds, apart from residuals; its shared segment is part of it."""
        ring = self.transport.ring
        shared = ring.nbytes() if isinstance(ring, Ring) else 0
        return shared + self.runner.pipeline.buffer_nbytes()

    def chunk_size(self, wanted: ChunkSize) -> ChunkSize:
        """How much a chunk may hold: of what is wanted, as much as fits into a slot."""
        ring = self.transport.ring
        if self.transport.across is not None:
            return wanted.within(hops_chunk_size(self.transport.world_size))
        return wanted.within(ring.chunk_size) if isinstance(ring, Ring) else wanted

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self.runner.serve(self._inbox)
        except Stopped as error:
            # A frame in it would keep the engine alive, or a model.
            error.__cause__ = error.__context__ = None
            self._fail(error.with_traceback(None))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Completes everything with the error and ends the groups; then the thread ends."""
        self.transport.give_up()
        if not isinstance(error, Stopped) or self._inbox.unfinished:
            # If the store cannot be reached, the others find out at their deadline.
            with suppress(Exception):
                self.transport.notes.report(f"{type(error).__name__}: {error}")
        with self._lock:
            self.failure = error
            left = self._inbox.drain()
        if left:
            self.transport.abandon()
        for job in left:
            job.fail(error)
        self.transport.release()


def make_engine(
    caller: Caller,
    name: str,
    streams: Streams | None,
    threads: int | None = None,
    hosts: Hosts | None = None,
) -> Engine:
    """An engine over the ranks of a group, all of which call it; without streams, on the CPU."""
    # An unknown kernel set is an error of this call, not of a backward that others wait for.
    kernels.select(streams.device if streams else torch.device("cpu"))
    place = (caller.group, name, caller.timeout_s)
    if streams is None:
        transport = Transport(*place, hosts=hosts, share=caller)
    else:
        transport = Transport(*place, streams.device, in_order=True, hosts=hosts)
    # gloo cannot finish connecting to a rank that is through with it and closes at once.
    caller.gather(b"")
    if streams is None:
        runner = HostRunner if hosts is None and isinstance(transport.ring, Ring) else CpuRunner
        return Engine(transport, runner(transport, threads))
    return Engine(transport, DeviceRunner(transport, streams, threads), streams)


_running: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that returns from native code while the interpreter shuts down would abort."""
    for engine in list(_running):
        engine.stop()
    let_gloo_finish()
