"""Peak memory of one call, and a limit on it.

On a CPU it is the resident memory of a process of its own, which includes allocations inside C++ kernels; on
CUDA the memory of torch's allocator. The limit holds on Linux and on CUDA.
"""

import ctypes
import gc
import multiprocessing
import re
import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
STATUS = Path("/proc/self/status")
Make = Callable[[], Callable[[], Any]]


class OverLimit(Exception):  # noqa: N818
    """A call asked for more memory than it was allowed."""


@contextmanager
def limited(num_bytes: int, device: str = "cpu") -> Iterator[None]:
    """Limit the block to so many bytes beyond the memory that the process holds.

    Raises:
        OverLimit: it needs more.
    """
    bound = _bound_cuda if device == "cuda" else _bound_process
    with bound(num_bytes):
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            # the error's frames hold the tensors of the call
            error.__traceback__ = None
            raise OverLimit(f"needs more than {num_bytes / 2**30:g} GiB") from None


def peak_mib(
    make: Make, *, limit: int, device: str = "cpu", threads: int = 1, warm_up: Make | None = None
) -> float:
    """The most memory, in MiB, that a call held at one time beyond its inputs; its results count.

    On a CPU the figure is good to about one MiB.

    Args:
        make: makes the inputs and returns the call. On a CPU it is pickled and runs in the new process.
        limit: bytes that the call and its inputs may take.
        warm_up: returns a small call of the same kind, whose code is loaded before the measurement.
    Raises:
        OverLimit: the call needs more than `limit`.
        ChildProcessError: the process ended without an answer. Other errors of the call pass through.
    """
    if device == "cuda":
        return _cuda_peak(make, limit)
    context = multiprocessing.get_context("forkserver")
    # every process would load these anew; torch's operators load the compiler on their first call
    context.set_forkserver_preload(["torch", "torch._dynamo", "relpos"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, make, limit, threads, warm_up), daemon=True)
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = None
    finally:
        child.join()
        receiver.close()
    if answer is None:
        raise ChildProcessError(f"the process that measures memory ended with code {child.exitcode}")
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(sender: Any, make: Make, limit: int, threads: int, warm_up: Make | None) -> None:
    """In the new process: send the peak, or the error."""
    try:
        torch.set_num_threads(threads)
        _c("prctl", 41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: in a huge page a few bytes make 2 MiB resident
        if warm_up is not None:
            # in a thread that ends: a kernel's scratch memory for each thread goes with it, so that the call
            # that is measured allocates its own
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: warm_up()()).result()
        with limited(limit):
            call = make()
            gc.collect()
            _c("malloc_trim", 0)
            before = _reset_peak()
            kept = call()
            peak = _peak()
        del kept
        sender.send(max(0, peak - before) / MIB)
    except Exception as error:
        sender.send(error)


def _cuda_peak(make: Make, limit: int) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    with limited(limit, "cuda"):
        call = make()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    del kept
    return (peak - before) / MIB


@contextmanager
def _bound_process(num_bytes: int) -> Iterator[None]:
    if not STATUS.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # memory that the process holds and does not use would come on top of the bound
    gc.collect()
    _c("malloc_trim", 0)
    bound = _status("VmData") + num_bytes
    bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def _bound_cuda(num_bytes: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties().total_memory
    share = min(1.0, (torch.cuda.memory_reserved() + num_bytes) / total)
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _is_out_of_memory(error: Exception) -> bool:
    words = r"can't allocate memory|not enough memory|could not allocate"
    is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_known or re.search(words, str(error).lower()) is not None


def _reset_peak() -> int:
    """Reset the peak if the system allows it; returns the bytes to subtract from the next peak."""
    try:
        # 5 sets the peak of resident memory back to its present value
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    """The most bytes that were resident at one time."""
    if STATUS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return int(STATUS.read_text().partition(f"{name}:")[2].split()[0]) * 1024


def _c(name: str, *numbers: int) -> None:
    """Call a function of the C library, where it is there."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*map(ctypes.c_ulong, numbers))
