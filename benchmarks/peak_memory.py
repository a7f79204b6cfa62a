"""How much memory one call needs beyond what was there before it, and a limit on it.

On a CPU these are the resident pages of a process of its own, so allocations inside C++ kernels are seen; on
CUDA what torch's allocator handed out. The limit holds on Linux and on CUDA.
"""

import ctypes
import gc
import multiprocessing
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


class OverLimit(Exception):  # noqa: N818
    """A call asked for more memory than it was allowed."""


@contextmanager
def limited(num_bytes: int, device: str = "cpu") -> Iterator[None]:
    """Let what runs inside have so many bytes beyond what the process holds.

    Raises:
        OverLimit: it asked for more.
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
    make: Callable[[], Callable[[], Any]],
    *,
    limit: int,
    device: str = "cpu",
    threads: int = 1,
    warm_up: Callable[[], Callable[[], Any]] | None = None,
) -> float:
    """The most memory, in MiB, that a call held at one time beyond what there was before it.

    What the call returns is held until the end and counts; what it is given, made by `make`, does not. On a
    CPU the figure is good to about one MiB.

    Args:
        make: returns the call. On a CPU it is pickled and runs in the new process.
        limit: bytes that the call and its inputs may have.
        warm_up: returns a small call of the same kind, whose code is loaded before anything is measured.
    Raises:
        OverLimit: the call needs more than `limit`.
        ChildProcessError: the process ended without an answer. Other errors of the call come as they are.
    """
    if device == "cuda":
        return _cuda_peak(make, limit, warm_up)
    context = multiprocessing.get_context("forkserver")
    # what every process would otherwise load anew; torch's operators load the compiler on their first call
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


def _answer(sender: Any, make: Callable, limit: int, threads: int, warm_up: Callable | None) -> None:
    """In the new process: send the peak, or the error in its place."""
    try:
        torch.set_num_threads(threads)
        _use_small_pages()
        sender.send(_process_peak(make, limit, warm_up))
    except Exception as error:
        sender.send(error)


def _process_peak(make: Callable, limit: int, warm_up: Callable | None) -> float:
    if warm_up is not None:
        _in_a_thread(lambda: warm_up()())
    with limited(limit):
        call = make()
        gc.collect()
        _give_back()
        before = _reset_peak()
        kept = call()
        peak = _peak()
    del kept
    return max(0, peak - before) / MIB


def _in_a_thread(call: Callable[[], Any]) -> None:
    """Run it in a thread that ends, with the pool of threads that it started.

    What a kernel keeps for each thread from call to call goes with them, so that the call that is measured
    finds none of it and pays for its own.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def _cuda_peak(make: Callable, limit: int, warm_up: Callable | None) -> float:
    if warm_up is not None:
        warm_up()()
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
    # what the process holds and does not use would come on top of the bound
    gc.collect()
    _give_back()
    bound = _status("VmData") + num_bytes
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
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
    words = ("can't allocate memory", "not enough memory", "could not allocate")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        word in str(error).lower() for word in words
    )


def _reset_peak() -> int:
    """Start the peak anew where the system allows it; the bytes to subtract from the next peak."""
    try:
        # 5 sets the peak of resident pages back to what is resident now
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
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _use_small_pages() -> None:
    """Without huge pages, of which a few bytes make 2 MiB resident."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(41, *(ctypes.c_ulong(x) for x in (1, 0, 0, 0)))  # PR_SET_THP_DISABLE


def _give_back() -> None:
    """Return freed memory to the system, so that the call cannot use it unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
